"""Scripts as users of Unsloth, TRL and PEFT have them run to their last line as they are, from their folder `scripts`,
and once more in the same folder, where they do the same again.

Only import lines, the name of the model and small sizes differ from what people run. Where a script asks for processes,
there are rows enough to start them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_models import tiny_config

from jaxtune.compat import SFTTrainer, arguments
from jaxtune.models.config import LayerSpec
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import stored_in
from jaxtune.models.hf import save_pretrained
from jaxtune.train.data.tokens.workers import ROWS_PER_CHUNK
from tests.train.data.conftest import make_tokenizer

SCRIPTS = Path(__file__).parent / "scripts"
NAME = "tests/tiny-chatml"
PAIRS = [("Who are you?", "I am a bot."), ("Name a colour.", "It is blue."), ("The sum of two and two?", "It is four.")]
MANY = 2 * ROWS_PER_CHUNK + 100  # three chunks for two processes


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def whole(question: str, answer: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def shared(question: str, answer: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def rated(question: str, answer: str) -> dict:
    return {"prompt": question, "chosen": answer, "rejected": "No."}


# The rows of each data set of the hub: (how many, how one is made of a question and its answer).
DATA: dict[str, tuple[int, Callable[[str, str], dict]]] = {
    "yahma/alpaca-cleaned": (MANY, lambda q, a: {"instruction": q, "input": "", "output": a}),
    "mlabonne/FineTome-100k": (MANY, lambda q, a: {"conversations": shared(q, a), "source": "here", "score": 5.0}),
    "HuggingFaceH4/ultrafeedback_binarized": (
        MANY,
        lambda q, a: {"prompt": q, "chosen": chat(q, a), "rejected": chat(q, "No."), "score_chosen": 8.0},
    ),
    "trl-lib/kto-mix-14k": (MANY, lambda q, a: {"prompt": chat(q, a)[:1], "completion": chat(q, a)[1:], "label": True}),
    "reciperesearch/dolphin-sft-v0.1-preference": (24, rated),
    "roneneldan/TinyStories": (24, lambda q, a: {"text": f"{q} {a} " * 3}),
    "philschmid/dolly-15k-oai-style": (24, lambda q, a: {"messages": chat(q, a)}),
    "trl-lib/Capybara": (24, lambda q, a: {"source": "here", "messages": chat(q, a), "num_turns": 1}),
    "trl-lib/ultrafeedback-prompt": (12, lambda q, a: {"prompt": chat(q, a)[:1]}),
    "trl-lib/small-kto": (
        24,
        lambda q, a: {"prompt": chat(q, a)[:1], "completion": chat(q, a)[1:], "label": len(a) < 12},
    ),
    "openai/gsm8k": (12, lambda q, a: {"question": q, "answer": f"{a}\n#### 4"}),
    "ag_news": (24, lambda q, a: {"text": f"{q} {a}"}),
    "trl-lib/ultrafeedback_binarized": (24, lambda q, a: {"chosen": chat(q, a), "rejected": chat(q, "No.")}),
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    tokenizer = make_tokenizer()
    sizes = dict(
        layers=(LayerSpec(),),
        hidden_size=32,
        intermediate_size=48,
        head_dim=16,
        num_kv_heads=2,
        max_position_embeddings=2048,
    )
    model = Decoder(tiny_config(vocab_size=len(tokenizer), **sizes), jax.random.key(0), "bfloat16")
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    save_pretrained(model, folder, tokenizer=tokenizer)
    return folder


@pytest.fixture
def place(model_folder, tmp_path, monkeypatch) -> Path:
    """An empty folder, and a hub that has the model and the data sets."""
    import datasets
    from huggingface_hub import constants

    repository = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(model_folder)
    work = tmp_path / "work"
    work.mkdir()

    def load_dataset(name, config=None, split=None, **_):
        count, row = DATA[name]
        made = datasets.Dataset.from_list([row(*PAIRS[index % len(PAIRS)]) for index in range(count)])
        return made if split else datasets.DatasetDict({"train": made, "test": made.select(range(6))})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(arguments, "_printed", set())
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "tokens"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.chdir(work)
    return work


def has(folder: Path, *names: str) -> bool:
    return all((folder / name).is_file() for name in names)


def alpaca(made: dict, place: Path, told: str) -> None:
    assert stored_in(made["model"].module) == "nf4"
    assert made["outputs"].shape[1] > made["inputs"]["input_ids"].shape[1]
    assert len(made["trainer"].train_dataset) == MANY
    assert has(place / "lora_model", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json")


def conversations(made: dict, place: Path, told: str) -> None:
    assert made["shown"] == "It is four.<|im_end|>\n" and len(made["answers"]) == 1
    assert made["trainer"].config().data.train_on == "turns"
    assert "without packing" not in told and "columns that are not read: conversations" in told
    assert re.search(r"^SFTTrainer: [1-4]\d\.\d% of the tokens are trained on$", told, re.M)


def older_dpo(made: dict, place: Path, told: str) -> None:
    config = made["dpo_trainer"].config()
    assert (config.objective.beta, config.data.length, config.data.num_workers) == (0.3, 128, 2)
    assert "DPOTrainer: beta, max_length, max_prompt_length: taken as arguments of DPOConfig" in told


def orpo(made: dict, place: Path, told: str) -> None:
    assert made["orpo_trainer"].config().objective.name == "orpo"
    assert has(place / "model", "model.safetensors", "tokenizer.json")


def kto(made: dict, place: Path, told: str) -> None:
    assert made["kto_trainer"].config().objective.undesirable_weight == 1.2
    assert re.search(r"^KTOTrainer: \d+\.\d% of the tokens are trained on$", told, re.M)


def continued(made: dict, place: Path, told: str) -> None:
    config = made["trainer"].config()
    assert (config.optim.learning_rate, config.optim.embedding_learning_rate) == (5e-5, 5e-6)
    assert config.adapter.modules_to_save == ("embed_tokens", "lm_head") and config.data.packing is True
    steps = made["trainer_stats"].global_step
    assert f"an epoch has {steps} updates; without packing it has 24" in told and steps < 24
    assert "UnslothTrainer" not in told and "SFTTrainer: 9" in told  # of each document, all tokens but the first


def resumed(made: dict, place: Path, told: str) -> None:
    assert [made[f"{name}_stats"].global_step for name in ("first", "longer", "again")] == [2, 4, 3]
    assert "resuming from step 2 of 4" in told and "resuming from step 2 of 3" in told
    assert "from here the learning rate follows the linear schedule of 4 steps, and is 0.000" in told
    rates = [
        [line["learning_rate"] for line in made[name].state.log_history[:-1]] for name in ("first", "longer", "again")
    ]
    assert list(map(len, rates)) == [2, 2, 1]
    np.testing.assert_allclose(rates[1], [1e-3 * 2 / 3, 1e-3 / 3], rtol=1e-3)
    lines = [json.loads(line) for line in (place / "outputs/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]


def saving(made: dict, place: Path, told: str) -> None:
    assert has(place / "merged_16", "model.safetensors") and has(place / "adapter", "adapter_model.safetensors")
    stored = json.loads((place / "merged_4/config.json").read_text())["quantization_config"]
    assert stored["bnb_4bit_quant_type"] == "nf4" and "trust_remote_code does nothing here" in told
    np.testing.assert_array_equal(made["outputs"][:, :3], made["inputs"]["input_ids"][:, :3])


def sft(made: dict, place: Path, told: str) -> None:
    known = json.loads((place / "sft/all_results.json").read_text())
    assert {"train_loss", "train_samples", "eval_loss", "eval_samples"} <= known.keys()
    assert has(place / "sft", "trainer_state.json", "train_results.json", "eval_results.json", "model.safetensors")
    assert "***** eval metrics *****" in told


def qlora(made: dict, place: Path, told: str) -> None:
    config = made["trainer"].config()
    assert stored_in(made["trainer"].model.module) == "nf4" and config.model.load_in == "nf4"
    assert (config.data.length, config.adapter.r, config.adapter.target_modules) == (64, 8, "all-linear")
    assert has(place / "qlora_adapter", "adapter_model.safetensors")
    assert "bnb_4bit" not in told and "attn_implementation does nothing here" in told


def dpo(made: dict, place: Path, told: str) -> None:
    assert made["trainer"].config().objective.loss_type == "ipo" and math.isfinite(made["metrics"]["eval_loss"])
    assert has(place / "dpo_model", "adapter_model.safetensors", "tokenizer.json")


def reward(made: dict, place: Path, told: str) -> None:
    assert made["trainer"].config().objective.center_rewards_coefficient == 0.01
    assert has(place / "reward_model", "adapter_model.safetensors")


def older_sft(made: dict, place: Path, told: str) -> None:
    config = made["trainer"].config()
    assert (config.data.length, config.data.packing, config.neftune_noise_alpha) == (128, True, 5)
    assert made["tokenizer"].bos_token == "<|im_start|>" and made["tokenizer"].pad_token == "<|im_end|>"


def lora(made: dict, place: Path, told: str) -> None:
    assert "trainable params:" in told and made["trainer"].config().data.length == 64
    assert made["outputs"].shape == (1, made["inputs"]["input_ids"].shape[1] + 4) or made["outputs"].size
    assert not made["merged"].has_adapter and has(place / "peft_merged", "model.safetensors", "tokenizer.json")
    assert made["tuned"].device in jax.devices() and made["tuned"].num_parameters() > 0


def auto(made: dict, place: Path, told: str) -> None:
    metrics, found = made["metrics"], made["result"]
    assert {"held_out_loss", "held_out_targets", "held_out_accuracy"} <= metrics.keys()
    assert found.metrics["test_accuracy"] == metrics["held_out_accuracy"] and len(found.predictions) == 6
    assert found.predictions.shape == found.label_ids.shape and (found.label_ids != -100).any()
    assert has(place / "auto_merged", "model.safetensors")


def quick(made: dict, place: Path, told: str) -> None:
    [trainer] = [one for one in made.values() if isinstance(one, SFTTrainer)]
    steps = trainer.state.global_step
    assert steps and has(place / trainer.args.output_dir / f"checkpoint-{steps}", "trainer_state.json")


def sampled(made: dict, place: Path, told: str) -> None:
    quick(made, place, told)
    line = made["trainer"].state.log_history[0]
    assert math.isfinite(line["reward"]) and "completions/mean_length" in line
    answers = [json.loads(one) for one in (place / made["trainer"].args.output_dir / "rollouts.jsonl").open()]
    prompts = {str(one["prompt"]) for one in answers}
    assert prompts <= {str(chat(q, "")[:1]) for q, _ in PAIRS} | {f"Question: {q}" for q, _ in PAIRS}


def gsm8k(made: dict, place: Path, told: str) -> None:
    objective = made["trainer"].config().objective
    assert (objective.num_generations, objective.max_completion_length) == (4, 16)
    assert "prompts have more than 24 tokens: they lose their first ones" in told
    assert made["base"] != "" and made["tuned"] != "" and has(place / "grpo_saved_lora", "adapter_config.json")
    assert max(len(prompt.ids) for prompt in made["trainer"]._prepared.batches.prompts) == 24


def quicktour(made: dict, place: Path, told: str) -> None:
    assert "trainable params:" in told and has(place / "tuned", "adapter_config.json", "adapter_model.safetensors")
    assert made["text"].startswith("Who are you?")


CHECKS = {
    "unsloth_grpo": gsm8k,
    "trl_quick_sft": quick,
    "trl_quick_dpo": quick,
    "trl_quick_grpo": sampled,
    "trl_quick_rloo": sampled,
    "trl_quick_kto": quick,
    "trl_quick_reward": quick,
    "trl_quick_orpo": quick,
    "peft_quicktour": quicktour,
    "unsloth_alpaca": alpaca,
    "unsloth_chat": conversations,
    "unsloth_dpo": older_dpo,
    "unsloth_orpo": orpo,
    "unsloth_kto": kto,
    "unsloth_continued": continued,
    "unsloth_resume": resumed,
    "unsloth_saving": saving,
    "trl_sft": sft,
    "trl_qlora": qlora,
    "trl_dpo": dpo,
    "trl_reward": reward,
    "trl_older_sft": older_sft,
    "peft_lora": lora,
    "peft_auto": auto,
}


def test_every_script_has_a_check():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == CHECKS.keys() and len(CHECKS) == 24


# {script: (rows of an update, what is trained of a row, or of the chosen answers)}.
MEANS: dict[str, tuple[int, set[str]]] = {
    "unsloth_alpaca": (4, {f"### Instruction:\n{q}\n\n### Input:\n\n\n### Response:\n{a}<|im_end|>" for q, a in PAIRS}),
    "unsloth_chat": (8, {f"{a}<|im_end|>\n" for _, a in PAIRS}),
    "unsloth_dpo": (4, {f"{a}<|im_end|>\n" for _, a in PAIRS} | {"No.<|im_end|>\n"}),
    "unsloth_orpo": (2, {a + "<|im_end|>" for _, a in PAIRS} | {"No.<|im_end|>"}),
    "unsloth_kto": (4, {f"{a}<|im_end|>\n" for _, a in PAIRS}),
    "trl_quick_sft": (8, {whole(q, a) for q, a in PAIRS}),
    "trl_quick_dpo": (8, {f"{a}<|im_end|>\n" for _, a in PAIRS} | {"No.<|im_end|>\n"}),
    "trl_quick_kto": (8, {f"{a}<|im_end|>\n" for _, a in PAIRS}),
    "trl_quick_reward": (8, {f"{a}<|im_end|>\n" for _, a in PAIRS} | {"No.<|im_end|>\n"}),
    "trl_quick_orpo": (8, {f"{a}<|im_end|>\n" for _, a in PAIRS} | {"No.<|im_end|>\n"}),
}


def run(name: str, place: Path, capsys) -> tuple[list[float], str]:
    """Runs a script, and returns all losses, and what it printed."""
    namespace = {"__name__": "__main__"}
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    exec(compile(text, name, "exec", dont_inherit=True), namespace)
    told = capsys.readouterr().out
    CHECKS[name](namespace, place, told)
    assert "tokenised in one process" not in told  # where processes are asked for, they take part
    trainers = [one for one in namespace.values() if isinstance(one, SFTTrainer)]
    if name in MEANS:
        [trainer] = trainers
        size, trained = MEANS[name]
        shown = [[x for x in row["labels"] if x != -100] for row in list(trainer.train_dataset)[:6]]
        assert trainer.config().rows_per_step == size
        assert {trainer.tokenizer.decode(ids) for ids in shown if ids} <= trained
    losses = [line["loss"] for one in trainers for line in one.state.log_history if "loss" in line]
    assert losses and np.isfinite(losses).all()
    return losses, told


@pytest.mark.full
@pytest.mark.parametrize("name", CHECKS)
def test_a_script_runs_to_its_last_line_twice(name, place, capsys):
    """The second time it makes the same steps, from the same weights, and says that it replaces what is there."""
    first, told = run(name, place, capsys)
    assert "replaces" not in told or name == "unsloth_resume"
    arguments._printed.clear()  # as in a process of its own
    second, told = run(name, place, capsys)
    assert told.count("which this one replaces") >= 1
    np.testing.assert_allclose(second, first, rtol=1e-3)
