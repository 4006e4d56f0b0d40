"""Names of TRL's own scripts, and whose defaults a run has."""

from __future__ import annotations

import dataclasses
import json
import pickle
import runpy
import sys
from pathlib import Path

import jax
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_config

from jaxtune import compat, save_pretrained
from jaxtune.compat import AutoModelForCausalLM, FastLanguageModel, SFTTrainer, TrainingArguments, rewards
from jaxtune.compat.defaults import defaults, version
from jaxtune.compat.settings import SFTConfig, resolved_config, schedule_config
from jaxtune.models.decoder import Decoder
from jaxtune.train.optimizer.schedule import learning_rate_schedule
from tests.train.data.conftest import make_tokenizer

CONFIGS = [
    getattr(compat, f"{name}Config")
    for name in ("SFT", "DPO", "ORPO", "KTO", "Reward", "GRPO", "RLOO", "Distillation", "GKD")
]
CHATS = [
    {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": str(n)}]}
    for n in range(12)
]
SCRIPT = """
import logging

from datasets import load_dataset

from jaxtune.compat import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)


def main(script_args, training_args, model_args, dataset_args):
    model_kwargs = dict(
        revision=model_args.model_revision,
        trust_remote_code=training_args.trust_remote_code,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.dtype,
    )
    model_kwargs.update(training_args.model_init_kwargs or {})
    training_args.model_init_kwargs = model_kwargs
    if dataset_args.datasets:
        dataset = get_dataset(dataset_args)
    else:
        dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    evaluates = training_args.eval_strategy != "no"
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if evaluates else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.accelerator.print("done")
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.end()
    return trainer


parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
trainer = main(*parser.parse_args_and_config(fail_with_unknown_args=False))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = make_tokenizer()
    config = tiny_config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, head_dim=8, max_position_embeddings=256
    )
    path = tmp_path_factory.mktemp("names") / "model"
    save_pretrained(Decoder(config, jax.random.key(0), "bfloat16"), path, tokenizer=tokenizer)
    return str(path)


# ---- defaults


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_has_trls_defaults_until_a_fast_model_is_seen(kind):
    plain, table = kind(), defaults("TRL", kind.section)
    fast = type("Fast", (), {"fast": True})()
    for model, library in ((fast, "Unsloth"), ("a name", "TRL")):
        made, own = resolved_config(plain, kind, model), defaults(library, kind.section)
        assert made.library == library
        for field in dataclasses.fields(kind):
            if own.get(field.name) is not None:
                assert getattr(made, field.name) == own[field.name], field.name
    assert {name for name in table if table[name] is not None and getattr(plain, name) != table[name]} == set()
    unsloth = resolved_config(plain, kind, fast)
    assert (unsloth.learning_rate, unsloth.optim, unsloth.warmup_steps, unsloth.seed) == (5e-5, "adamw_8bit", 0.1, 3407)
    assert (plain.optim, plain.warmup_steps, plain.seed, plain.bf16) == ("adamw_torch_fused", 0, 42, True)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_what_a_script_gives_stays_and_the_rest_is_the_librarys(data):
    kind, fast = data.draw(st.sampled_from(CONFIGS)), data.draw(st.booleans())
    drawn = {
        "learning_rate": st.floats(1e-7, 1.0),
        "per_device_train_batch_size": st.integers(1, 64),
        "weight_decay": st.sampled_from([0.0, 0.001, 0.3]),
        "seed": st.sampled_from([3407, 42, 7]),
        "warmup_steps": st.sampled_from([0, 0.1, 5]),
        "max_length": st.sampled_from([None, 77, 1024]),
    }
    names = data.draw(st.sets(st.sampled_from(sorted(drawn))))
    values = {name: data.draw(drawn[name]) for name in sorted(names)}
    later = data.draw(st.sets(st.sampled_from(sorted(values)))) if values else set()
    config = kind(**{name: value for name, value in values.items() if name not in later})
    for name in later:
        setattr(config, name, values[name])
    assert config.given == names
    model = type("Model", (), {"fast": fast})()
    for _ in range(2):  # some trainers settle twice
        config = resolved_config(config, kind, model)
        own = defaults("Unsloth" if fast else "TRL", kind.section)
        for name in drawn:
            assert getattr(config, name) == values.get(name, own.get(name)), name
        assert config.given == names


def test_training_arguments_keep_transformers_defaults():
    args = TrainingArguments(learning_rate=3e-4)
    made = resolved_config(args, SFTConfig, type("Fast", (), {"fast": True})())
    assert (made.library, made.seed, made.weight_decay, made.logging_steps) == ("transformers", 42, 0.0, 500)
    assert (made.learning_rate, made.max_length, made.bf16) == (3e-4, None, False)
    assert resolved_config(args, SFTConfig, "a name").max_length == 1024
    with_both = resolved_config(TrainingArguments(fp16=True), SFTConfig, "a name")
    assert (with_both.fp16, with_both.bf16) == (True, False)
    assert SFTConfig(fp16=True).bf16 is False


@pytest.mark.parametrize(
    ("given", "fast", "expected"),
    [
        ({}, False, 0),
        ({}, True, 2),
        ({"warmup_ratio": 0.3}, True, 6),
        ({"warmup_ratio": 0.0}, True, 0),
        ({"warmup_ratio": 0.3, "warmup_steps": 4}, False, 4),
        ({"warmup_ratio": 0.3, "warmup_steps": 0}, False, 6),
        ({"warmup_steps": 0.25}, False, 5),
    ],
)
def test_warm_ups(given, fast, expected):
    args = resolved_config(SFTConfig(**given), SFTConfig, type("Model", (), {"fast": fast})())
    assert schedule_config(args, 20).warmup_steps == expected


def test_arguments_without_a_field_are_read_and_copied():
    config = SFTConfig(run_name="mine", hub_model_id="me/mine")
    assert (config.run_name, config.hub_model_id, config.trust_remote_code) == ("mine", "me/mine", False)
    assert pickle.loads(pickle.dumps(config)).given == config.given
    with pytest.raises(AttributeError, match="SFTConfig has no argument 'lerning_rate'"):
        config.lerning_rate  # noqa: B018


@pytest.mark.parametrize("fast", [True, False])
def test_a_run_says_whose_defaults_it_has(folder, tmp_path, capsys, monkeypatch, fast):
    if fast:
        model, _ = FastLanguageModel.from_pretrained(folder, max_seq_length=64, load_in_4bit=False)
        model = FastLanguageModel.get_peft_model(model, r=2)
    else:
        model = compat.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), compat.LoraConfig(r=2))
    args = SFTConfig(str(tmp_path), max_steps=1, save_strategy="no")
    trainer = SFTTrainer(model, args, train_dataset=CHATS)
    config = trainer.config()
    capsys.readouterr()
    monkeypatch.setattr(trainer, "_trainer", lambda *_: pytest.fail("here the run would begin"))
    with pytest.raises(pytest.fail.Exception, match="here the run would begin"):
        trainer.train()
    library = "Unsloth" if fast else "TRL"
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0] == f"SFTTrainer: defaults: {version(library)}'s"
    assert config.data.length == (64 if fast else 1024) and config.rows_per_step == 8
    assert (config.optim.name, config.optim.learning_rate) == (("adamw_8bit", 5e-5) if fast else ("adamw", 2e-5))


# ---- TrlParser


def text_of(value) -> list[str]:
    if isinstance(value, list):
        return [str(one) for one in value]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


VALUES = {
    "learning_rate": st.floats(1e-8, 1.0),
    "num_train_epochs": st.integers(1, 9).map(float),
    "max_steps": st.integers(1, 99),
    "packing": st.booleans(),
    "eval_strategy": st.sampled_from(["no", "steps", "epoch"]),
    "lr_scheduler_kwargs": st.fixed_dictionaries({"num_cycles": st.integers(1, 3)}),
    "report_to": st.sampled_from(["none", "wandb", ["wandb", "tensorboard"]]),
    "bf16": st.booleans(),
    "lora_r": st.integers(1, 64),
    "lora_target_modules": st.sampled_from(["all-linear", ["q_proj", "v_proj"]]),
    "use_peft": st.booleans(),
    "dataset_name": st.sampled_from(["a/b", "7", "true"]),
    "test_split_size": st.sampled_from([0.25, 0.5]),
    "run_name": st.sampled_from(["a-run", "run_2"]),
}


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_the_command_line_and_yaml_mean_the_same(data):
    types = (compat.ScriptArguments, SFTConfig, compat.ModelConfig, compat.DatasetMixtureConfig)
    parser = compat.TrlParser(types)
    values = {name: data.draw(VALUES[name]) for name in sorted(data.draw(st.sets(st.sampled_from(sorted(VALUES)))))}
    dashes = data.draw(st.booleans())
    words = []
    for name, value in values.items():
        words += [f"--{name.replace('_', '-') if dashes else name}", *text_of(value)]
    line = parser.parse_args_and_config(words)
    file = Path(data.draw(st.just("config.yaml")))
    loaded = yaml.safe_load(yaml.safe_dump(values))
    file_objects = parser.parse_dict(loaded)
    assert len(line) == len(file_objects) == len(types) and file.suffix == ".yaml"
    for one, other, kind in zip(line, file_objects, types, strict=True):
        assert one == other and type(one) is kind
    merged = {name: value for one in line for name, value in vars(one).items()}
    for name, value in values.items():
        assert merged[name] == value and type(merged[name]) is type(value), name
    assert line[1].given == {name for name in values if name in vars(line[1]) and hasattr(SFTConfig(), name)} & (
        {field.name for field in dataclasses.fields(SFTConfig)} | {"run_name"}
    )


def test_the_command_line_comes_before_the_file_and_env_is_set(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("A_NAME", raising=False)
    path = tmp_path / "c.yaml"
    path.write_text("learning_rate: 1e-3\nseed: 5\neval_strategy: no\nenv: {A_NAME: 3}\nlora_rr: 3\n")
    parser = compat.TrlParser((SFTConfig, compat.ModelConfig))
    arguments, model = parser.parse_args_and_config(
        ["--config", str(path), "--seed", "6", "--use_peft"], fail_with_unknown_args=False
    )
    assert (arguments.learning_rate, arguments.seed, arguments.eval_strategy, model.use_peft) == (1e-3, 6, "no", True)
    assert "not read: lora_rr (did you mean --lora_r?)" in capsys.readouterr().out
    import os

    assert os.environ["A_NAME"] == "3"
    with pytest.raises(ValueError, match=r"keys that no dataclass has: lora_rr \(did you mean --lora_r\?\)"):
        parser.parse_args_and_config(["--config", str(path)])
    assert parser.parse_args_and_config(["--config", str(path)], return_remaining_strings=True)[-1] == [
        "--lora_rr",
        "3",
    ]


@dataclasses.dataclass
class Own:
    name: str
    count: int = 3
    sizes: list[int] = dataclasses.field(default_factory=list)
    max_seq_length: int = 99


def test_own_dataclasses(capsys):
    parser = compat.HfArgumentParser((Own, SFTConfig))
    own, arguments = parser.parse_args_into_dataclasses(["--name", "a", "--sizes", "1", "2", "--max_seq_length", "7"])
    assert own == Own("a", 3, [1, 2], 7) and arguments.max_seq_length == 7
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--count", "2"])
    assert "Own needs --name" in capsys.readouterr().err
    for words, message in (
        (["--name", "a", "--count", "many"], "count = 'many': must be int"),
        (["--name", "a", "--lerning_rate", "1"], "--lerning_rate (did you mean --learning_rate?)"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args_into_dataclasses(words)
        assert message in capsys.readouterr().err


# ---- a script in TRL's form


@pytest.mark.full
def test_a_script_in_trls_form_runs_from_yaml_and_from_the_command_line(folder, tmp_path, monkeypatch, capsys):
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    script = tmp_path / "sft.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf" / "datasets"))
    values = {
        "model_name_or_path": folder,
        "dtype": "float32",
        "use_peft": True,
        "lora_r": 2,
        "lora_target_modules": ["q_proj", "v_proj"],
        "max_steps": 2,
        "max_length": 64,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "load_in_4bit": True,
    }
    file = tmp_path / "config.yaml"
    mixture = [{"path": "json", "data_files": str(rows / "train.jsonl")}]
    file.write_text(yaml.safe_dump({**values, "datasets": mixture, "output_dir": str(tmp_path / "one")}))
    words = ["--dataset_name", str(rows), "--output_dir", str(tmp_path / "two")]
    for name, value in values.items():
        words += [f"--{name}", *([] if value is True else text_of(value))]
    losses = []
    for arguments in (["--config", str(file)], words):
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        trainer = runpy.run_path(str(script), run_name="__main__")["trainer"]
        config = trainer.config()
        assert (config.model.load_in, config.adapter.r, config.steps, config.rows_per_step) == ("nf4", 2, 2, 8)
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
        assert (Path(config.output) / "adapter_config.json").exists()
    assert losses[0] == losses[1] and len(losses[0]) == 2
    assert "done" in capsys.readouterr().out


def test_a_mixture_has_the_shares_that_it_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf" / "datasets"))
    for name, count in (("a", 30), ("b", 10)):
        lines = (json.dumps({"text": f"{name}{n}", "other": n}) + "\n" for n in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))

    def mixture(shares, **options):
        sets = [
            {"path": "json", "data_files": str(tmp_path / f"{name}.jsonl"), "columns": ["text"], "fraction": share}
            for name, share in zip("ab", shares, strict=True)
        ]
        return compat.get_dataset(compat.DatasetMixtureConfig(datasets=sets, **options))

    rows = mixture((None, None))["train"]
    assert len(rows) == 40 and rows.column_names == ["text"]
    rows = mixture((1, 1))["train"]
    assert [text[0] for text in rows["text"]] == ["a"] * 10 + ["b"] * 10
    split = mixture((3.0, 1.0), test_split_size=0.25)
    assert (len(split["train"]), len(split["test"])) == (30, 10)
    with pytest.raises(ValueError, match="give every data set one that is greater than 0"):
        mixture((1, None))


def test_the_template_of_another_tokenizer(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    other = make_tokenizer()
    other.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    other.save_pretrained(tmp_path / "other")
    tokenizer = model.tokenizer
    same, changed, added = compat.clone_chat_template(model, tokenizer, str(tmp_path / "other"))
    assert (same, changed, added) == (model, tokenizer, []) and tokenizer.chat_template == other.chat_template
    other.add_tokens(["<new>"])
    other.save_pretrained(tmp_path / "more")
    with pytest.raises(ValueError, match="1 tokens of .* are new, such as '<new>', and the model's embeddings have 0"):
        compat.clone_chat_template(model, tokenizer, str(tmp_path / "more"))


def test_a_reward_model_by_transformers_name(folder):
    model = compat.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    assert not model.module.config.head.is_text
    assert compat.AutoModelForSequenceClassification.from_pretrained(folder).module.config.head.outputs == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("AutoModelForCausalLMs", "perhaps AutoModelForCausalLM is meant"),
        ("SftConfig", "perhaps SFTConfig is meant"),
        ("GenerationConfig", "give its settings to model.generate"),
        ("AutoConfig", "import it from transformers"),
        ("PRMTrainer", "RewardTrainer scores whole answers"),
        ("XYZTrainer", "it is not here; those that are: DPOTrainer, "),
        ("to_sharegpt", "give a column `messages`"),
        ("apply_chat_template", "give a column `messages`"),
        ("FlowerTrainer42", "docs/compat.md lists what is here"),
        ("get_logger", "use logging.getLogger"),
    ],
)
def test_a_missing_name_is_told_by_the_nearest(name, message):
    with pytest.raises(ImportError, match=message) as error:
        getattr(compat, name)
    assert len(str(error.value)) < 200


# ---- rewards


def test_rewards_by_their_formulas():
    chat = [
        [{"role": "assistant", "content": text}] for text in ("<think>a</think> b", "a <think>b</think>", "<think>")
    ]
    assert rewards.think_format_reward(chat) == [1.0, 0.0, 0.0]
    assert rewards.think_format_reward(["<think>\na\n</think>\n", "<think>a<think></think>"]) == [1.0, 0.0]
    overlong = rewards.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    assert overlong(completion_ids=[[1] * n for n in (80, 90, 100, 101)]) == [0.0, -0.5, -1.0, -1.0]
    assert rewards.get_soft_overlong_punishment(10, 0)(completion_ids=[[1] * 10, [1] * 11]) == [0.0, -1.0]
    repetition = rewards.get_repetition_penalty_reward(ngram_size=2, max_penalty=-2.0)
    assert repetition(completion_ids=[[1, 2, 3, 4], [5] * 5, [1]]) == [0.0, -1.5, 0.0]
    assert pickle.loads(pickle.dumps(repetition)).__name__ == "repetition_penalty_reward"
    with pytest.raises(ValueError, match="max_penalty = 1: must be 0 or less"):
        rewards.get_repetition_penalty_reward(max_penalty=1)


@pytest.mark.skipif("math_verify" in sys.modules, reason="it is there")
def test_accuracy_names_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match="pip install math-verify"):
        rewards.accuracy_reward(["4"], ["4"])


@given(st.integers(1, 50), st.integers(0, 30), st.lists(st.integers(0, 99), max_size=8))
@settings(max_examples=30, deadline=None)
def test_an_overlong_answer_is_never_rewarded(most, cache, lengths):
    found = rewards.get_soft_overlong_punishment(most, min(cache, most))(completion_ids=[[0] * n for n in lengths])
    assert all(-1.0 <= reward <= 0.0 for reward in found)
    assert [reward for _, reward in sorted(zip(lengths, found, strict=True))] == sorted(found, reverse=True)


def test_a_schedule_of_the_command_line(folder):
    parser = compat.TrlParser(SFTConfig)
    (args,) = parser.parse_args_and_config(
        ["--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs", '{"min_lr_rate": 0.25}']
    )
    rates = learning_rate_schedule(schedule_config(args, 10), 1.0, 10)
    assert float(rates(10)) == pytest.approx(0.25)
