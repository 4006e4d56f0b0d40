"""Scripts for other libraries run with their import changed; every argument of those libraries has its place."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import jaxtune
from jaxtune import compat
from jaxtune.compat import arguments
from jaxtune.compat.adapters import LoraConfig
from jaxtune.models.lora import linears
from jaxtune.train.data.rendering.packaged import PACKAGED
from scripts.docs_hooks import compat_tables, with_tables
from tests.docs.pages import ROOT
from tests.train.data.conftest import make_tokenizer

SIGNATURES = json.loads((ROOT / "tests/docs/signatures.json").read_text(encoding="utf-8"))["signatures"]
TEXTS = ["The cat sat on the mat and looked at the moon.", "A short one."] * 8
CHATS = [
    [{"role": "user", "content": "Which number is next: 1, 2, 3?"}, {"role": "assistant", "content": "4"}],
    [{"role": "user", "content": "Double each letter of AB."}, {"role": "assistant", "content": "AABB"}],
]


@pytest.fixture
def from_the_hub(workplace, monkeypatch):
    """Data sets of the hub, as the scripts name them, and a fresh memory of what was told."""
    import datasets

    def load_dataset(name, split=None, **_):
        shared = [[{"from": m["role"], "value": m["content"]} for m in chat] for chat in CHATS * 4]
        rows = {
            "json": [{"text": text} for text in TEXTS],
            "mlabonne/FineTome-100k": [{"conversations": chat, "source": "here"} for chat in shared],
        }.get(name, [{"messages": chat} for chat in CHATS * 4])
        made = datasets.Dataset.from_list(rows)
        return made if split else datasets.DatasetDict(train=made, test=made.select(range(4)))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(arguments, "_printed", set())
    return workplace


def run_script(name: str, **numbers: str) -> dict:
    """Runs an example with some of its numbers replaced; each must be there."""
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    if name.endswith(".ipynb"):
        text = "\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code")
    for key, value in numbers.items():
        text, count = re.subn(rf"\b{key}( ?= ?)\d+", rf"{key}\g<1>{value}", text)
        assert count, key
    namespace = {"__name__": "__main__"}
    exec(compile(text, name, "exec", dont_inherit=True), namespace)
    return namespace


def test_unsloths_quick_start(from_the_hub):
    made = run_script("unsloth_quickstart.py", max_seq_length="64", max_steps="2", gradient_accumulation_steps="1")
    config = made["trainer"].config()
    assert (config.model.load_in, config.data.packing, config.optim.name) == ("nf4", "step", "adamw_8bit")
    assert len(made["trainer"].state.log_history) == 3


@pytest.mark.full
def test_an_unsloth_notebook(from_the_hub, capsys):
    numbers = dict(max_seq_length="64", max_steps="2", max_new_tokens="4")
    made = run_script("unsloth_notebook.ipynb", **numbers)
    told = capsys.readouterr().out
    assert told.count("data_collator does nothing here") == 1
    trainer, tokenizer = made["trainer"], made["tokenizer"]
    trained = {tokenizer.decode([x for x in row["labels"] if x != -100]) for row in trainer.train_dataset}
    assert trained == {f"{said}<|end|>\n<|end|>" for said in ("4", "AABB")}  # up to the EOS that the template writes
    assert trainer.state.global_step == 2
    assert made["outputs"].shape == (1, made["inputs"]["input_ids"].shape[1] + 4)
    assert {path.name for path in from_the_hub.glob("*_model/*.safetensors")} == {
        "adapter_model.safetensors",
        "model.safetensors",
    }


def test_trls_quick_start(from_the_hub, monkeypatch):
    whole = compat.SFTTrainer.__init__

    def short(self, model, *arguments, **others):  # the script has no numbers to replace
        args = compat.SFTConfig(max_steps=2, max_length=64, per_device_train_batch_size=2)
        whole(self, model, args, *arguments, **others)

    monkeypatch.setattr(compat.SFTTrainer, "__init__", short)
    trainer = run_script("trl_quickstart.py")["trainer"]
    assert trainer.config().adapter is None and trainer.config().data.format == "messages"
    assert np.isfinite([line["loss"] for line in trainer.state.log_history if "loss" in line]).all()
    left = from_the_hub / "trainer_output/checkpoint-2"
    again, tokenizer = jaxtune.from_pretrained(left, dtype="float32")
    assert tokenizer is not None and json.loads((left / "trainer_state.json").read_text())["global_step"] == 2
    np.testing.assert_array_equal(again.norm.weight[...], trainer.model.module.norm.weight[...])


@pytest.mark.full
def test_a_script_with_training_arguments(from_the_hub, capsys):
    made = run_script("peft_training_arguments.py", per_device_train_batch_size="1", num_train_epochs="1")
    trainer = made["trainer"]
    config, told = trainer.config(), capsys.readouterr().out
    steps = trainer._epoch_steps
    assert (config.checkpoint.every_steps, config.evaluation.every_steps, config.steps) == (steps, steps, steps)
    assert (config.optim.name, config.optim.weight_decay, config.schedule.warmup_steps) == ("adamw_8bit", 0.0, 1)
    assert (config.adapter.r, config.adapter.lora_dropout, config.seed) == (16, 0.05, 42)
    assert [line["step"] for line in trainer.state.log_history if "eval_loss" in line] == [trainer.state.global_step]
    assert config.metrics.run_name is not None
    for name in ("dataloader_num_workers", "group_by_length", "per_device_eval_batch_size"):
        assert told.count(f"SFTConfig: {name} does nothing here: ") == 1
    assert "bf16 does nothing" not in told and "dataloader_pin_memory" not in told  # at its default, nothing is told
    assert (from_the_hub / "peft_model/adapter_config.json").is_file()


def load(**settings):
    return compat.FastLanguageModel.from_pretrained("base", 64, load_in_4bit=False, dtype="float32", **settings)


def test_layers_to_transform_and_the_gaussian_start(workplace):
    plain, _ = load()
    peft = compat.FastLanguageModel.get_peft_model
    chosen = peft(plain, r=4, target_modules=["q_proj"], layers_to_transform=[0], init_lora_weights="gaussian")
    adapted = {name: linear.lora for name, linear in linears(chosen.module) if linear.lora is not None}
    assert list(adapted) == ["model.layers.0.self_attn.q_proj"]
    a = np.asarray(adapted["model.layers.0.self_attn.q_proj"].a[...])
    assert abs(a.std() * 4 - 1) < 0.1  # of 768 numbers
    assert len([1 for _, linear in linears(peft(plain, finetune_last_n_layers=1).module) if linear.lora]) == 7
    # A name is a whole part of a module's name: "proj" is the end of all of them and the name of none.
    both = peft(plain, target_modules=["proj", "self_attn.q_proj"], layers_to_transform=[0])
    assert [name for name, linear in linears(both.module) if linear.lora] == ["model.layers.0.self_attn.q_proj"]
    with pytest.raises(ValueError, match="the model has layers 0 to 0"):
        peft(plain, layers_to_transform=1)
    with pytest.raises(ValueError, match="init_lora_weights = 'pissa' is not supported"):
        peft(plain, init_lora_weights="pissa")


@pytest.mark.full
def test_generation_and_tokenizers_without_torch(workplace, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    from transformers import TextStreamer

    model, tokenizer = load()
    assert model.config.hidden_size == 192 and model.config.to_dict()["model_type"] == "llama"
    inputs = tokenizer(["Once upon a time"], return_tensors="pt").to("cuda")
    tokenizer(["again"], return_tensors="pt")
    assert capsys.readouterr().out.count("is answered with NumPy arrays") == 1

    class Counted(TextStreamer):
        parts = 0

        def put(self, value):
            self.parts += 1
            super().put(value)

    streamer = Counted(tokenizer, skip_prompt=True)
    out = model.generate(**inputs, streamer=streamer, max_new_tokens=6, use_cache=True, eos_token_id=[])
    start = inputs["input_ids"].shape[1]
    assert capsys.readouterr().out == tokenizer.decode(out[0, start:]) + "\n" and streamer.parts == 1 + 6
    chat = tokenizer.apply_chat_template(
        CHATS[0][:1], add_generation_prompt=True, return_tensors="pt", return_dict=False, tokenize=True
    ).to("cuda")
    start = [[5, 6, 7]]
    plain, punished = (
        model.generate(start, max_new_tokens=12, repetition_penalty=penalty, eos_token_id=[])[0, 3:].tolist()
        for penalty in (1.0, 50.0)
    )
    assert len(set(punished)) > len(set(plain))
    sampled = model.generate(input_ids=chat, max_new_tokens=6, temperature=1.5, min_p=0.1, top_p=0.9, eos_token_id=[])
    assert sampled.shape == (1, chat.shape[-1] + 6)
    with pytest.raises(ValueError, match="top_p = 0.5 has no effect with do_sample=False"):
        model.generate(chat, do_sample=False, top_p=0.5)


def test_templates_and_conversations(workplace):
    _, tokenizer = load()
    assert "<|assistant|>\n4<|end|>" in compat.get_chat_template(tokenizer, "phi-3").apply_chat_template(
        CHATS[0], tokenize=False
    )
    tokenizer.chat_template = own = "{{ '[INST]' }}"
    assert compat.get_chat_template(tokenizer, "llama").chat_template == own
    with pytest.raises(
        ValueError, match=r"'llama-3.1' is not the template of this tokenizer.*Use its own, 'alpaca', 'phi-3', or"
    ):
        compat.get_chat_template(tokenizer, chat_template="llama-3.1")
    chatml = make_tokenizer(None)
    for name, system in (("qwen-2.5", "You are Qwen"), ("qwen3", "")):
        text = compat.get_chat_template(chatml, name).apply_chat_template(CHATS[0], tokenize=False)
        assert ("<|im_start|>system" in text) == bool(system) and system in text
    shared = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    [row] = compat.standardize_sharegpt(shared)
    assert row["conversations"] == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match="standardize_sharegpt: conversations.0..from: 'nobody' is no known role"):
        compat.standardize_sharegpt([{"conversations": [{"from": "nobody", "value": "a"}]}])


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt-oss", "gptoss"])
def test_gpt_osss_template_stays_where_there_is_one(test_data, name):
    """Its own writes tools, which the packaged one does not."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(test_data / "tokenizers/gpt-oss")
    own = (test_data / "chat_templates/gptoss.jinja").read_text(encoding="utf-8")
    for before, after in ((None, PACKAGED["gpt-oss"].text), ("{{ 'x' }}", PACKAGED["gpt-oss"].text), (own, own)):
        tokenizer.chat_template = before
        assert compat.get_chat_template(tokenizer, name).chat_template == after
    with pytest.raises(ValueError, match=f"'{name}' is not the template of this tokenizer, which has no .*channel"):
        compat.get_chat_template(make_tokenizer(), name)


def test_every_kind_of_data_set_is_standardised(workplace):
    import datasets

    shared = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "source": "here"}]
    expected = compat.standardize_sharegpt(shared)
    stored = datasets.Dataset.from_list(shared)
    stream = stored.to_iterable_dataset()
    for one in (stored, stream, datasets.DatasetDict(train=stored), datasets.IterableDatasetDict(train=stream)):
        made = compat.standardize_sharegpt(one)
        assert type(made) is type(one)
        assert list(made["train"] if isinstance(made, dict) else made) == expected


def test_a_formatting_function_of_batches(workplace):
    model, tokenizer = load()
    model = compat.FastLanguageModel.get_peft_model(model, r=2)

    def of_batch(examples):
        return [f"{q} {a}" for q, a in zip(examples["q"], examples["a"])]

    rows = [{"q": "one", "a": "two"}, {"q": "three", "a": "four"}]
    trainer = compat.SFTTrainer(
        model, compat.SFTConfig(packing=False), train_dataset=rows, formatting_func=of_batch, dataset_num_proc=1
    )
    texts = {tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in trainer.train_dataset}
    assert texts == {"one two", "three four"}


@pytest.mark.parametrize("kind", [str, Path])
def test_a_formatting_function_needs_rows_and_no_path(workplace, kind):
    (workplace / "rows.jsonl").write_text('{"q": "one", "a": "two"}\n')
    model = compat.FastLanguageModel.get_peft_model(load()[0], r=2)
    with pytest.raises(ValueError, match="'rows.jsonl' is a path, .* with a formatting_func.* datasets.load_dataset"):
        compat.SFTTrainer(model, train_dataset=kind("rows.jsonl"), formatting_func=lambda row: row["q"])


@pytest.mark.full
def test_saving_in_four_bits_and_to_the_hub(workplace, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalTokenNotFoundError

    calls = []

    class Hub:
        def __init__(self, token):
            calls.append(("token", token))

        def whoami(self):
            if not self.known:
                raise LocalTokenNotFoundError("no token")

        known = True

        def create_repo(self, name, **options):
            calls.append(("create", name, options))

        def upload_folder(self, repo_id, folder_path, commit_message):
            calls.append(("upload", repo_id, sorted(path.name for path in workplace.__class__(folder_path).iterdir())))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    model, tokenizer = load()
    model = compat.FastLanguageModel.get_peft_model(model, r=2)
    model.push_to_hub("me/adapter", token="hf_x", private=True)
    assert calls[:2] == [("token", "hf_x"), ("create", "me/adapter", dict(private=True, exist_ok=True))]
    assert "adapter_model.safetensors" in calls[2][2]
    model.push_to_hub_merged("me/model", tokenizer, save_method="merged_4bit")
    assert {"model.safetensors", "tokenizer.json"} <= set(calls[-1][2])
    monkeypatch.setattr(Hub, "known", False)
    with pytest.raises(ValueError, match="this machine is not logged in to the hub"):
        model.push_to_hub("me/adapter")
    model.save_pretrained_merged("four_bits", tokenizer, save_method="merged_4bit")
    stored = json.loads((workplace / "four_bits/config.json").read_text())["quantization_config"]
    assert stored["bnb_4bit_quant_type"] == "nf4"
    for method, theirs in (("q5_k_m", "Q5_K_M"), ("iq2_xxs", "IQ2_XXS")):
        with pytest.raises(
            ValueError, match=rf"{method}.*llama.cpp's to make(.|\n)*llama-quantize gguf/f16.*{theirs};"
        ):
            model.save_pretrained_gguf("gguf", tokenizer, quantization_method=method)
    with pytest.raises(ValueError, match="quantization_method = 'q7' is not supported; supported: 'fast_quan"):
        model.save_pretrained_gguf("gguf", tokenizer, quantization_method="q7")


def test_gguf_is_written_by_unsloths_names(workplace, monkeypatch):
    calls = []

    def export(module, path, **options):
        calls.append(options)
        path.mkdir(exist_ok=True)
        (path / f"{options['outtype']}.gguf").write_text("")

    monkeypatch.setattr("jaxtune.compat.model.export_model", export)
    model, tokenizer = load()
    model.save_pretrained_gguf("gguf", tokenizer, quantization_method=["fast_quantized", "quantized", "q8_0", "f16"])
    types = ("q8_0", "q4_k_m", "f16")
    assert calls == [dict(to="gguf", tokenizer=tokenizer, outtype=t) for t in types]
    assert all((workplace / "gguf" / t / f"{t}.gguf").is_file() for t in types)


def test_objects_of_peft_and_transformers_are_taken(workplace):
    """By their classes' names and fields: neither library is needed."""

    class Kind(enum.Enum):
        COSINE = "cosine"

    @dataclasses.dataclass
    class TrainingArguments:
        output_dir: str = "theirs"
        learning_rate: float = 1e-6
        lr_scheduler_type: Kind = Kind.COSINE
        max_steps: int = 3
        packing: bool = False
        max_length: int | None = 1024
        gradient_checkpointing: bool | None = None
        some_new_field: int = 0
        deepspeed: str | None = None

    Theirs = type("LoraConfig", (), {})
    config = Theirs()
    vars(config).update(
        r=3,
        target_modules={"v_proj", "q_proj"},
        lora_alpha=6,
        init_lora_weights=True,
        bias="none",
        fan_in_fan_out=False,
        layers_pattern=None,
        task_type="CAUSAL_LM",
        loftq_config={},
    )

    def trainer(args, peft_config=config):
        return compat.SFTTrainer("base", args, train_dataset=[{"text": "x"}], peft_config=peft_config)

    made = trainer(TrainingArguments(max_steps=9)).config()
    # Also what its class has by default, where that is not ours.
    assert (made.steps, made.optim.learning_rate, made.schedule.name, made.seed) == (9, 1e-6, "cosine", 42)
    assert (made.output, made.data.packing, made.memory.plan) == ("theirs", "step", None)
    assert (made.adapter.r, made.adapter.target_modules) == (3, ("q_proj", "v_proj"))
    with pytest.raises(ValueError, match="deepspeed = 'z3' is not supported"):
        trainer(TrainingArguments(deepspeed="z3"))
    with pytest.raises(ValueError, match="peft_config is a dict; only LoraConfig"):
        trainer(None, {"r": 3})
    assert LoraConfig().settings["r"] == 8


def _arguments(section: str) -> list[str]:
    """The names that a section of the page follows, and those in the first cells of its table."""
    cells = re.findall(r"^(?:Followed: (.+)\.$|\| (`.+?`) \|)", section, re.M)
    return [name for followed, cell in cells for name in re.findall(r"`(\w+)`", followed or cell)]


def test_every_argument_of_the_libraries_has_its_place():
    """Followed, nothing to do, or refused: each name of their signatures is in the table of its callable."""
    text = compat_tables()
    sections = {part.split("\n", 1)[0]: part for part in re.split(r"^## ", text, flags=re.M)[1:]}
    for name, theirs in SIGNATURES.items():
        title = next(title for title in sections if re.search(rf"\b{re.escape(name)}\b", title.split(", beside")[0]))
        ours = _arguments(sections[title])
        assert len(set(ours)) == len(ours), name
        if others := re.search(r", beside (?:those of|what) (\S+)", title):
            ours += _arguments(sections[others.group(1)])
        missing = [argument for argument in theirs if argument not in ours]
        assert not missing, f"{name}: {missing}"


def test_the_page_of_arguments_is_the_code():
    text = (ROOT / "docs/compat.md").read_text(encoding="utf-8")
    assert text == with_tables(text), "write it again: python scripts/docs_hooks.py"


def test_a_missing_name_says_what_to_do():
    with pytest.raises(ImportError, match="jaxtune.compat has no CPOTrainer: .*cpo_alpha=0 is .*objective=simpo"):
        from jaxtune.compat import CPOTrainer  # noqa: F401
    with pytest.raises(ImportError, match="docs/compat.md lists what is here"):
        compat.Nonsense  # noqa: B018
    assert not hasattr(compat, "__wrapped__")
