"""A script of TRL beside the same script of jaxtune.compat: as many updates, of the same rows, cut at the same places,
at the same learning rates, and the same losses."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import reference
import torch
import transformers
import trl
import trl.experimental.orpo
from random_weights import random_tensor
from tiny import CONFIGS

from jaxtune import compat
from jaxtune.train.data.batches import torch_order
from tests.train.data.conftest import make_tokenizer

WORDS = ["I", "am", "a", "bot", "that", "adds", "two", "and", "names", "colour", ":", "blue", "red", "or", "green"]


def text(draw: np.random.Generator, most: int) -> str:
    return " ".join(draw.choice(WORDS, draw.integers(1, most)))


# The trainer of each kind of rows: GSM8K-like questions and answers as prompt and completion are SFT's, too.
TRAINERS = {"completion": "SFT", "text": "SFT", "unpadded": "Reward"}


def rows_of(kind: str, count: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(1)
    if kind == "completion":
        return [
            {
                "prompt": [{"role": "user", "content": text(draw, 6)}],
                "completion": [{"role": "assistant", "content": text(draw, 30)}],
            }
            for _ in range(count)
        ]
    if kind == "text":
        return [{"text": text(draw, 40)} for _ in range(count)]
    if kind == "SFT":
        return [
            {
                "messages": [
                    {"role": "user", "content": text(draw, 6)},
                    {"role": "assistant", "content": text(draw, 30)},
                ]
            }
            for _ in range(count)
        ]
    if kind == "KTO":
        return [
            {"prompt": text(draw, 6), "completion": " " + text(draw, 30), "label": bool(draw.integers(2))}
            for _ in range(count)
        ]
    # Answers of very different lengths, of which some, and some prompts too, are cut.
    return [
        {"prompt": text(draw, 12), "chosen": " " + text(draw, 30), "rejected": " " + text(draw, 5)}
        for _ in range(count)
    ]


def documents(tokens: np.ndarray, segments: np.ndarray) -> list[list[int]]:
    """The texts of a batch, by their segments in each row, sorted."""
    return sorted(
        row[of_row == number].tolist()
        for row, of_row in zip(tokens, segments, strict=True)
        for number in np.unique(of_row[of_row > 0])
    )


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def theirs(
    kind: str, base: Path, folder: Path, settings: dict[str, Any], rows: list, trained: bool = False
) -> dict[str, Any]:
    """What TRL does: {"losses", "rates", "updates": [sorted texts of each]}. trained: the adapter was trained before,
    and the model has it."""
    rooms: dict[str, Any] = {"ORPO": trl.experimental.orpo}
    name = TRAINERS.get(kind, kind)
    trainer_type, config = (getattr(rooms.get(name, trl), name + what) for what in ("Trainer", "Config"))
    found: dict[str, Any] = {"rates": [], "updates": [[]]}

    class Noting(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer, **more):
            found["rates"].append(optimizer.param_groups[0]["lr"])
            found["updates"].append([])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = config(use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", **settings)
        task = "SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
        lora: Any = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type=task)
        model: Any = reference.load(base)
        if name == "Reward":
            kind_of_model = transformers.AutoModelForSequenceClassification
            model = kind_of_model.from_pretrained(base, num_labels=1, dtype="float32")
        if trained:
            model, lora = shaken(peft.get_peft_model(model, lora)), None
        trainer = trainer_type(
            model=model,
            args=args,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer_of(kind, settings),
            callbacks=[Noting],
            peft_config=lora,
        )
        trainer.model.peft_config["default"].base_model_name_or_path = str(base)
        trainer.model.save_pretrained(folder / "adapter", selected_adapters=["default"])
        step = trainer.training_step

        def noting(model, inputs, *more):
            for prefix in ("", "KL_"):
                if f"{prefix}attention_mask" in inputs:
                    mask = inputs[f"{prefix}attention_mask"].numpy()
                    found["updates"][-1] += documents(inputs[f"{prefix}input_ids"].numpy(), mask)
            return step(model, inputs, *more)

        trainer.training_step = noting
        trainer.train()
    found["updates"] = [sorted(update) for update in found["updates"][:-1]]
    found["losses"] = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return found


def shaken(model: Any) -> Any:
    """The model with an adapter that does something."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.2 * torch.from_numpy(random_tensor(name, tuple(parameter.shape)))
    return model


def tokenizer_of(kind: str, settings: dict[str, Any]) -> Any:
    """ORPO's writes its BOS, which TRL's writes in any case; where a reward is read, padding is not a text's end."""
    options: dict[str, Any] = {"pad_token": "<|eos|>"} if kind in ("ORPO", "Reward") else {}
    if kind == "ORPO":
        options["adds_bos"] = True
    return make_tokenizer(MARKED, **options) if settings.get("assistant_only_loss") else make_tokenizer(**options)


def ours(kind: str, folder: Path, settings: dict[str, Any], rows: list) -> dict[str, Any]:
    model, _ = compat.FastLanguageModel.from_pretrained(
        str(folder / "adapter"), 64, dtype="float32", load_in_4bit=False
    )
    name = TRAINERS.get(kind, kind)
    args = getattr(compat, f"{name}Config")(**settings | {"output_dir": str(folder / "ours")})
    trainer = getattr(compat, f"{name}Trainer")(
        model, args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer_of(kind, settings)
    )
    trainer.train()
    history = [line for line in trainer.state.log_history if "loss" in line]
    batches = trainer._trainer("auto").batches
    updates = [batches.batch_at(step) for step in range(len(history))]
    return {
        "losses": [line["loss"] for line in history],
        "rates": [line["learning_rate"] for line in history],
        "updates": [documents(batch.tokens, batch.segment_ids) for batch in updates],
    }


@pytest.fixture
def base(tmp_path) -> Path:
    config = CONFIGS["qwen2"] | {"vocab_size": 416}
    folder = reference.make_checkpoint(tmp_path / "base", config)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("SFT", "random"), ("SFT", "sequential"), ("completion", "random"), ("DPO", "random"), ("KTO", "sequential")],
)
def test_the_same_script_gives_the_same_run(base, tmp_path, monkeypatch, kind, strategy):
    """11 rows, two a micro-batch, three of these an update: an epoch has two updates, of which the last has a row less.
    1.2 epochs are 2.4 updates, so three; 0.4 of them are 1.2, so two that warm up. Of preferences 10 rows, without that
    last one: TRL's trainers of these weigh micro-batches alike, also one of a single row. A pair whose prompt leaves
    nothing of its answers is left out by both."""
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))
    settings = dict(
        output_dir=str(tmp_path / "theirs"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        num_train_epochs=1.2,
        warmup_steps=0.4,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        weight_decay=0.01,
        optim="adamw_torch",
        adam_epsilon=1e-4,  # beside which rounding is nothing
        logging_steps=1,
        max_length=24,
        seed=11,
        report_to="none",
        dataset_num_proc=1,
        train_sampling_strategy=strategy,
    )
    rows = rows_of(kind, 10 if kind == "KTO" else 11)
    wanted = theirs(kind, base, tmp_path, settings, rows)
    found = ours(kind, tmp_path, settings, rows)
    (tmp_path / "runs.json").write_text(json.dumps([wanted, found]))
    assert len(found["updates"]) == len(wanted["updates"]) == 3
    assert any(len(one) == 24 for update in wanted["updates"] for one in update)  # some are cut
    assert found["updates"] == wanted["updates"]
    texts = [len(update) for update in found["updates"]]  # a pair has two, and so has an answer with a stranger's
    assert texts == ([6, 5, 6] if kind in ("SFT", "completion") else [12, 8, 12])
    np.testing.assert_allclose(found["rates"], wanted["rates"], rtol=1e-6)
    assert wanted["rates"][0] == 0.0
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=2e-4)


SCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "continued pretraining": ("text", {}),
    "packing": ("text", dict(packing=True)),
    "assistant_only_loss": ("SFT", dict(assistant_only_loss=True)),
    "ORPO": ("ORPO", dict(beta=0.2)),
    "Reward": ("Reward", dict(center_rewards_coefficient=0.1)),
    "Reward without a padding token": ("unpadded", {}),
    "DPO of an adapter that was trained": ("DPO", dict(beta=0.3)),
    "KTO of an adapter that was trained": ("KTO", dict(train_sampling_strategy="sequential")),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_first_steps_have_trls_losses(base, tmp_path, monkeypatch, name):
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))
    kind, more = SCRIPTS[name]
    settings = more | dict(
        output_dir=str(tmp_path / "theirs"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        warmup_steps=0,
        learning_rate=1e-2,
        optim="adamw_torch",
        adam_epsilon=1e-4,
        logging_steps=1,
        max_length=40,
        seed=11,
        report_to="none",
        dataset_num_proc=1,
    )
    rows = rows_of(kind, 12)
    wanted = theirs(kind, base, tmp_path, settings, rows, trained="trained" in name)
    found = ours(kind, tmp_path, settings, rows)
    assert len(found["losses"]) == 2 and wanted["losses"][0] != pytest.approx(wanted["losses"][1], rel=1e-3)
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=2e-4)


def prompts_of(kind: str, count: int) -> list[dict[str, Any]]:
    """Texts, of which some have a completion too; or messages."""
    draw = np.random.default_rng(2)
    rows: list[dict[str, Any]] = []
    for index in range(count):
        words = f"{text(draw, 8)} {index}"
        prompt = [{"role": "user", "content": words}] if kind == "messages" else words
        rows.append({"prompt": prompt, "level": index % 3})
        if kind == "completion":
            rows[-1]["completion"] = " " + text(draw, 5)
    return rows


def fixed_answers(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Other answers of 1 to 12 tokens to each occurrence of a prompt, some of them ended."""
    answers = []
    for index, prompt in enumerate(texts):
        draw = np.random.default_rng([*prompt.encode(), texts[:index].count(prompt)])
        ids = tokenizer(" " + text(draw, 8), add_special_tokens=False)["input_ids"][:11]
        answers.append(ids + [tokenizer.eos_token_id] * int(draw.integers(2)))
    return answers


def counts_letters(seen: list[dict[str, Any]]):
    """A reward function that notes what it gets."""

    def letters(prompts, completions, completion_ids, level, **columns):
        shown = zip(prompts, completions, completion_ids, level, strict=True)
        names = ("prompt", "completion", "completion_ids", "level")
        seen.extend(dict(zip(names, one, strict=True)) for one in shown)
        texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
        return [len(set(one.lower())) / 4 + number for one, number in zip(texts, level, strict=True)]

    return letters


REWARDED: dict[str, dict[str, Any]] = {
    "completion": dict(beta=0.1),
    "text": dict(loss_type="dr_grpo", scale_rewards="none"),
    "messages": dict(beta=0.1, loss_type="grpo", scale_rewards="batch"),
}


@pytest.mark.parametrize(
    "kind", ["completion", *(pytest.param(k, marks=pytest.mark.full) for k in ("text", "messages"))]
)
def test_fixed_answers_have_trls_rewards_and_losses(base, tmp_path, monkeypatch, kind):
    """Both get the same answers to each prompt in place of sampled ones; their reward functions the same arguments."""
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))
    tokenizer, rows = make_tokenizer(pad_token="<|eos|>"), prompts_of(kind, 2)
    settings = REWARDED[kind] | dict(
        output_dir=str(tmp_path / "theirs"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=12,
        max_steps=2,
        warmup_steps=0,
        learning_rate=1e-2,
        optim="adamw_torch",
        adam_epsilon=1e-4,
        logging_steps=1,
        seed=11,
        report_to="none",
    )
    seen: dict[str, list[dict[str, Any]]] = {"theirs": [], "ours": []}
    lora: Any = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    args = trl.GRPOConfig(use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trl.GRPOTrainer(
            model=reference.load(base),
            reward_funcs=counts_letters(seen["theirs"]),
            args=args,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora,
        )
        trainer.model.peft_config["default"].base_model_name_or_path = str(base)
        trainer.model.save_pretrained(tmp_path / "adapter", selected_adapters=["default"])

        def injected(prompt_ids, *others):
            return fixed_answers(tokenizer.batch_decode(prompt_ids), tokenizer), None

        trainer._generate_single_turn = injected
        trainer.train()

    def rollout(prompts, trainer):
        ids = [trainer.rollout_model.encode(prompt) for prompt in prompts]
        answers = fixed_answers(tokenizer.batch_decode(ids), tokenizer)
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": [[0.0] * len(answer) for answer in answers]}

    model, _ = compat.FastLanguageModel.from_pretrained(
        str(tmp_path / "adapter"), 64, dtype="float32", load_in_4bit=False
    )
    settings["vllm_importance_sampling_correction"] = False  # TRL has none without vLLM
    ours_trainer = compat.GRPOTrainer(
        model,
        reward_funcs=counts_letters(seen["ours"]),
        args=compat.GRPOConfig(**settings | {"output_dir": str(tmp_path / "ours")}),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    ours_trainer.train()
    for arguments in seen.values():  # a generation has all prompts, in any order
        arguments.sort(key=lambda one: (one["level"], one["completion_ids"]))
    assert len(seen["theirs"]) == 16 and seen["ours"] == seen["theirs"]
    runs = [[line for line in one.state.log_history if "loss" in line] for one in (ours_trainer, trainer)]
    assert len(runs[0]) == 2
    for key in ("loss", "grad_norm"):
        losses, wanted = ([line[key] for line in run] for run in runs)
        np.testing.assert_allclose(losses, wanted, rtol=5e-4, atol=1e-6)


def test_the_order_is_torchs():
    for rows in (1, 2, 7, 1000):
        for seed, epoch in ((0, 0), (3407, 2), (2**32 - 1, 1)):
            drawn = torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
            assert torch_order(rows, seed, epoch).tolist() == drawn
