"""Configs of other programs become recipes that mean the same; what cannot is told, or refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

from jaxtune.cli import main
from jaxtune.train.config.file import config_from_dict, load_config
from jaxtune.train.data.rendering.templates import trained_tokenizer
from jaxtune.train.objectives.named import objective_of
from tests.train.data.conftest import make_tokenizer

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
model_type: AutoModelForCausalLM
load_in_4bit: true
strict: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
  - path: openai/gsm8k
    name: main
    split: test
    type: alpaca
val_set_size: 0.1
output_dir: ./outputs/qlora-out
adapter: qlora
sequence_len: 1024
sample_packing: true
pad_to_sequence_len: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
deepspeed: deepspeed_configs/zero2.json
special_tokens:
  pad_token: "<|end_of_text|>"
"""
OWN_FORMAT = """
base_model: Qwen/Qwen2.5-0.5B
datasets:
  - path: json
    data_files: rows.jsonl
    ds_type: json
    type:
      field_prompt: question
      field_chosen: answer
      prompt_format: "[INST] {prompt} [/INST]"
rl: dpo
dpo_beta: 0.2
micro_batch_size: 4
gradient_accumulation_steps: 1
max_steps: 10
learning_rate: 1e-5
optimizer: lion_8bit
lr_scheduler: constant_with_warmup
warmup_steps: 5
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
quantization_bit: 4
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
use_galore: true
"""


def converted(text: str, tmp_path, capsys, *options: str) -> tuple[dict, str, str]:
    """(the recipe, its comments, the file that was converted); the recipe loads. What is lacking is on stderr too, and
    the exit code says so."""
    config = tmp_path / "theirs.yaml"
    config.write_text(text)
    code = main(["convert", str(config), *options])
    shown = capsys.readouterr()
    assert code == (3 if "no counterpart for" in shown.out else 0) and bool(code) == bool(shown.err)
    (tmp_path / "recipe.yaml").write_text(shown.out)
    load_config(str(tmp_path / "recipe.yaml"))
    comments = " ".join(line.lstrip("# ") for line in shown.out.splitlines() if line.startswith("#"))
    lacking = comments.partition("no counterpart for")[2]
    for line in shown.err.splitlines():
        assert line.removeprefix("no counterpart for ") in lacking
    return yaml.safe_load(shown.out), comments, str(config)


def test_axolotls_qlora(tmp_path, capsys):
    recipe, comments, config = converted(AXOLOTL, tmp_path, capsys)
    assert recipe["model"] == {"path": "NousResearch/Llama-3.2-1B", "load_in": "nf4"}
    assert recipe["data"] == {
        "train": ["teknium/GPT4-LLM-Cleaned", "openai/gsm8k:main:test"],
        "length": 1024,
        "overflow": "drop",
        "packing": True,
        "eval_rows": 0.1,
    }
    assert recipe["adapter"] == {"r": 32, "target_modules": "all-linear", "lora_alpha": 16, "lora_dropout": 0.05}
    assert (recipe["rows_per_step"], recipe["epochs"], recipe["precision"]) == (8, 4.0, "bf16")
    assert recipe["optim"] == {"learning_rate": 2e-4, "weight_decay": 0.0, "name": "adamw"}
    assert recipe["schedule"] == {"warmup_ratio": 0.1, "zero_start": True, "name": "cosine"}
    assert recipe["output"] == "./outputs/qlora-out"
    lacking = comments.partition("no counterpart for")[2]
    assert not lacking
    assert recipe["evaluation"] == {"every_epochs": 0.25} and recipe["checkpoint"] == {"every_epochs": 1.0}
    assert "deepspeed: several GPUs" in comments and "flash_attention" not in comments
    assert main(["train", config]) == 2
    told = capsys.readouterr().err
    assert "is a config of axolotl: " in told and f"convert {config}' prints the recipe" in told


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt", "rex"])
def test_axolotls_last_rate_is_that_of_a_cosine(name, tmp_path, capsys):
    text = OWN_FORMAT.replace("constant_with_warmup", name) + "cosine_min_lr_ratio: 0.2\n"
    recipe, comments, _ = converted(text, tmp_path, capsys)
    assert recipe["schedule"].get("min_ratio") == (0.2 if name == "cosine" else None)
    assert ("cosine_min_lr_ratio: axolotl reads it with" in comments) == (name != "cosine")


def test_axolotls_own_format_and_preferences(tmp_path, capsys):
    recipe, comments, _ = converted(OWN_FORMAT, tmp_path, capsys)
    assert recipe["data"]["train"] == "rows.jsonl" and recipe["data"]["packing"] == "step"
    assert recipe["data"]["columns"] == {"prompt": "question", "chosen": "answer"}
    assert recipe["objective"] == {"name": "dpo", "beta": 0.2} and recipe["adapter"] is None
    assert recipe["schedule"] == {"warmup_steps": 5, "zero_start": True, "name": "constant"} and recipe["steps"] == 10
    assert recipe["optim"]["name"] == "lion_8bit" and "prompt_format of rows.jsonl" in comments


def test_llama_factorys_lora(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    info = {
        "identity": {"file_name": "identity.json"},
        "alpaca_en_demo": {"hf_hub_url": "llamafactory/alpaca_en", "split": "train"},
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    recipe, comments, _ = converted(LLAMA_FACTORY, tmp_path, capsys)
    rows = [str(tmp_path / "data/identity.json[:1000]"), "llamafactory/alpaca_en::train[:1000]"]
    assert recipe["data"]["train"] == rows
    assert recipe["data"]["eval_rows"] == 0.1 and "<|start_header_id|>" in recipe["data"]["template"]
    assert recipe["data"]["train_on"] == "turns"
    assert recipe["adapter"] == {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    assert recipe["model"]["load_in"] == "nf4" and recipe["rows_per_step"] == 8
    assert recipe["checkpoint"] == {"every_steps": 500} and recipe["evaluation"] == {"every_steps": 500}
    assert "use_galore: true" in comments and "ddp_timeout" not in comments
    recipe, comments, _ = converted(LLAMA_FACTORY.replace("identity,", "mine,"), tmp_path, capsys)
    assert "data set mine" in comments and "not in dataset_info.json" in comments


def test_axolotls_data_files_are_all_read(tmp_path, capsys):
    """One or several, of a reader or in a folder; those of the hub or by split are named."""
    (tmp_path / "mine").mkdir()
    entries = [
        {"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "split": "train"},
        {"path": str(tmp_path / "mine"), "data_files": "c.jsonl", "type": "alpaca"},
        {"path": "someone/rows", "data_files": ["d.jsonl"]},
        {"path": "csv", "data_files": ["e.csv"]},
    ]
    recipe, comments, _ = converted(yaml.safe_dump({"base_model": "x", "datasets": entries}), tmp_path, capsys)
    assert recipe["data"]["train"] == ["a.jsonl", "b.jsonl", str(tmp_path / "mine/c.jsonl"), "someone/rows", "e.csv"]
    lacking = comments.partition("no counterpart for")[2]
    assert 'data_files of someone/rows: ["d.jsonl"] (local files: ' in lacking


def test_what_an_entry_of_dataset_info_says_is_followed_or_named(tmp_path, capsys):
    """Rows that are on another hub than Hugging Face's, made by a script, or only some of them."""
    (tmp_path / "data").mkdir()
    info = {
        "identity": {"ms_hub_url": "LLM-Research/identity"},
        "alpaca_en_demo": {"hf_hub_url": "llamafactory/alpaca_en", "ms_hub_url": "llamafactory/alpaca_en"},
        "made": {"script_url": "makes_rows"},
        "some": {"file_name": "some.json", "num_samples": 100, "ranking": True},
        "inner": {"hf_hub_url": "a/b", "folder": "inner"},
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    text = LLAMA_FACTORY.replace("identity,alpaca_en_demo", "identity,alpaca_en_demo,made,some,inner")
    recipe, comments, _ = converted(text, tmp_path, capsys)
    names = [name.removesuffix("[:1000]") for name in recipe["data"]["train"]]
    assert names == ["identity", "llamafactory/alpaca_en", "made", str(tmp_path / "data/some.json"), "a/b"]
    lacking = comments.partition("no counterpart for")[2]
    assert 'ms_hub_url of identity: "LLM-Research/identity" (a file, or a data set of huggingface.co)' in lacking
    assert "script_url of made: " in lacking and "num_samples of some: 100" in lacking
    assert "folder of inner: " in lacking and "alpaca_en_demo" not in lacking and "ranking" not in lacking


@pytest.mark.parametrize("key", ["base_model", "model_name_or_path"])
def test_a_model_that_is_null_is_refused(key, tmp_path, capsys):
    (tmp_path / "one.yaml").write_text(f"{key}: null\n")
    assert main(["convert", str(tmp_path / "one.yaml")]) == 3
    assert f"{key} = null: the config names no model" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["model: {path: base}\n", "a: 1\n"])
def test_what_is_of_no_program_is_refused(text, tmp_path, capsys):
    (tmp_path / "one.yaml").write_text(text)
    assert main(["convert", str(tmp_path / "one.yaml")]) == 3
    assert "neither base_model (axolotl) nor model_name_or_path (LLaMA-Factory, TRL)" in capsys.readouterr().err


def test_an_adapters_keys_that_full_fine_tuning_left_behind_are_dropped(tmp_path, capsys):
    for text in ("base_model: org/model\n", "model_name_or_path: org/model\nstage: sft\nfinetuning_type: full\n"):
        recipe, _, _ = converted(text + "lora_alpha: 16\nlora_dropout: 0.1\n", tmp_path, capsys)
        assert recipe["adapter"] is None


@pytest.mark.parametrize("text", ["[1]", '{"identity": "identity.json"}'])
def test_a_dataset_info_that_is_no_object_of_objects_is_refused(text, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(text)
    (tmp_path / "one.yaml").write_text(LLAMA_FACTORY)
    assert main(["convert", str(tmp_path / "one.yaml")]) == 3
    assert "dataset_info.json is no object of data sets" in capsys.readouterr().err


def test_a_name_that_looks_like_a_number_stays_a_name(tmp_path, capsys):
    """load_config reads numbers by YAML 1.2, of which PyYAML quotes fewer."""
    converted("base_model: org/model\noutput_dir: '1e5'\n", tmp_path, capsys)
    assert load_config(str(tmp_path / "recipe.yaml")).output == "1e5"


def test_both_ways_to_pack(tmp_path, capsys):
    text = "model_name_or_path: org/model\nstage: sft\ndataset: org/rows\npacking: true\nneat_packing: true\n"
    recipe, comments, _ = converted(text, tmp_path, capsys)
    assert recipe["data"]["packing"] is True and "neat_packing" not in comments


# ---- other methods are not plain fine-tuning


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("base_model: m\nrl: ebft\n", "rl = 'ebft'"),
        ("base_model: m\nprocess_reward_model: true\n", "process_reward_model"),
        ("base_model: m\nrelora: true\n", "relora"),
        ("base_model: m\nadapter: llama-adapter\n", "adapter = 'llama-adapter'"),
        ("base_model: m\nrl: dpo\ndpo_loss_type: [robust]\n", "dpo_loss_type"),
        ("base_model: m\nrl: grpo\ntrl: {beta: 0.1}\n", "reward_funcs"),
        ("model_name_or_path: m\nstage: ppo\ndataset: a\n", "stage = 'ppo'"),
        ("model_name_or_path: m\nstage: dpo\npref_loss: kto_pair\ndataset: a\n", "pref_loss = 'kto_pair'"),
        ("model_name_or_path: m\nstage: sft\nfinetuning_type: freeze\ndataset: a\n", "finetuning_type = 'freeze'"),
        ("model_name_or_path: m\nstage: sft\nuse_llama_pro: true\ndataset: a\n", "use_llama_pro"),
        ("model_name_or_path: m\ndataset_name: a\nloss_type: [apo_zero]\nbeta: 0.2\nld_alpha: 0.1\n", "loss_type"),
        ("model_name_or_path: m\ndataset_name: a\nlearning_rate: 1e-5\n", "--trainer sft, dpo, kto"),
    ],
)
def test_a_method_that_jaxtune_lacks_is_an_error(text, told, tmp_path, capsys):
    (tmp_path / "one.yaml").write_text(text)
    assert main(["convert", str(tmp_path / "one.yaml")]) == 3
    shown = capsys.readouterr()
    assert told in shown.err and not shown.out


GRPO = """
base_model: Qwen/Qwen2.5-0.5B
datasets: [{path: openai/gsm8k, name: main}]
rl: grpo
trl:
  num_generations: 4
  beta: 0.001
  max_completion_length: 256
  reward_funcs: [rewards.accuracy, my.pkg.format]
  reward_weights: [1.0, 0.5]
  use_vllm: true
  scale_rewards: false
  temperature: 0.7
micro_batch_size: 4
gradient_accumulation_steps: 2
max_steps: 100
"""


def test_axolotls_grpo(tmp_path, capsys):
    recipe, _, _ = converted(GRPO, tmp_path, capsys)
    assert recipe["objective"] == {
        "name": "grpo",
        "num_generations": 4,
        "beta": 0.001,
        "max_completion_length": 256,
        "reward_funcs": ["rewards.py:accuracy", "my/pkg.py:format"],
        "reward_weights": [1.0, 0.5],
        "scale_rewards": "none",
        "temperature": 0.7,
    }
    assert recipe["rows_per_step"] == 8 and recipe["steps"] == 100


def test_axolotls_reward_model_and_pairs(tmp_path, capsys):
    recipe, _, _ = converted("base_model: m\nreward_model: true\ndatasets: [{path: a.jsonl}]\n", tmp_path, capsys)
    assert recipe["objective"] == {"name": "reward"} and recipe["data"]["packing"] == "step"
    text = "base_model: m\nrl: dpo\ndatasets: [{path: a.jsonl, type: chat_template.default, field_messages: %s}]\n"
    recipe, _, _ = converted(text % "conversation", tmp_path, capsys)
    assert recipe["data"]["columns"] == {"prompt": "conversation"} and recipe["data"]["template"] == "tokenizer"
    recipe, _, _ = converted(text % "messages", tmp_path, capsys)
    assert "columns" not in recipe["data"]


@pytest.mark.parametrize(
    ("kind", "template", "columns"),
    [
        ("chatml.intel", "chatml", {"prompt": "question"}),
        ("chatml.icr", "chatml", {"prompt": "input"}),
        ("llama3.ultra", "llama-3", None),
        ("llama3.argilla_chat", "llama-3", None),
    ],
)
def test_a_type_of_pairs_is_its_template(kind, template, columns, tmp_path, capsys):
    text = f"base_model: m\nrl: dpo\ndatasets: [{{path: a.jsonl, type: {kind}}}]\n"
    recipe, _, _ = converted(text, tmp_path, capsys)
    begins = {"chatml": "<|im_start|>", "llama-3": "<|start_header_id|>"}[template]
    assert begins in recipe["data"]["template"] and recipe["data"].get("columns") == columns


def test_a_type_that_writes_another_prompt_is_told(tmp_path, capsys):
    text = "base_model: m\ndatasets: [{path: a.jsonl, type: alpaca_chat.load_qa}]\n"
    _, comments, _ = converted(text, tmp_path, capsys)
    assert 'type of a.jsonl: "alpaca_chat.load_qa"' in comments
    text = "base_model: m\nchat_template: chatml\ndatasets: [{path: a.jsonl, type: alpaca}]\n"
    recipe, comments, _ = converted(text, tmp_path, capsys)
    assert "template" not in recipe["data"] and "no counterpart" not in comments
    text = text.replace("]\n", ", {path: b.jsonl, type: chat_template}]\n")
    recipe, comments, _ = converted(text, tmp_path, capsys)
    assert recipe["data"]["template"] == "chatml" and 'prompts of a.jsonl: "alpaca"' in comments


# ---- what a config leaves out


def test_what_is_left_out_is_as_the_program_has_it(tmp_path, capsys):
    recipe, comments, _ = converted(
        "base_model: m\ndatasets: [{path: a.jsonl}]\nlearning_rate: 1e-5\n", tmp_path, capsys
    )
    assert recipe["schedule"] == {"warmup_ratio": 0.03, "zero_start": True, "name": "cosine"}
    assert recipe["data"] == {"train": "a.jsonl", "length": 512, "overflow": "drop", "packing": "step"}
    assert recipe["rows_per_step"] == 1 and recipe["seed"] == 42 and "optim.name" not in comments
    assert "The config does not say, and axolotl has:" in comments and "schedule.name: cosine" in comments
    factory = "model_name_or_path: m\nstage: sft\ndataset: a\ntemplate: qwen\n"
    recipe, comments, _ = converted(factory, tmp_path, capsys)
    assert recipe["optim"] == {"learning_rate": 5e-5} and recipe["epochs"] == 3.0 and recipe["rows_per_step"] == 8
    assert recipe["precision"] == "fp32" and "created by Alibaba Cloud" in recipe["data"]["template"]
    for trainer, rate in (("sft", 2e-5), ("dpo", 1e-6), ("kto", 1e-6), ("reward", 1e-4)):
        text = "model_name_or_path: m\ndataset_name: a\n"
        recipe, _, _ = converted(text, tmp_path, capsys, "--trainer", trainer)
        assert recipe["optim"] == {"learning_rate": rate, "weights": "fp32"} and recipe["data"]["length"] == 1024
        assert recipe["rows_per_step"] == 8 and recipe["epochs"] == 3.0 and recipe["adapter"] is None


def test_nothing_that_changes_the_training_is_dropped_in_silence(tmp_path, capsys):
    keys = {
        "special_tokens": {"eos_token": "<|im_end|>"},
        "dataset_exact_deduplication": True,
        "shuffle_merged_datasets": False,
        "eot_tokens": ["<|end|>"],
        "a_new_key": 0.5,
        "lr_scheduler": "rex",
        "optimizer": "adopt_adamw",
    }
    entry = {
        "path": "a.jsonl",
        "type": "chat_template",
        "roles": {"user": ["asker"]},
        "train_on_eot": "last",
        "message_field_training": "learn",
        "conversation": "chatml",
    }
    text = yaml.safe_dump({"base_model": "m", "datasets": [entry], **keys})
    _, comments, _ = converted(text, tmp_path, capsys)
    lacking = comments.partition("no counterpart for")[2]
    for key in keys:
        assert f"{key}: " in lacking
    for key in entry.keys() - {"path", "type"}:
        assert f"{key} of a.jsonl: " in lacking


@pytest.mark.parametrize("stage", ["dpo", "kto", "rm"])
def test_an_update_of_pairs_has_as_many_pairs(stage, tmp_path, capsys):
    text = f"model_name_or_path: m\nstage: {stage}\ndataset: a\nper_device_train_batch_size: 2\n"
    recipe, _, _ = converted(text + "gradient_accumulation_steps: 4\ntemplate: qwen\n", tmp_path, capsys)
    assert recipe["data"]["packing"] == "step" and recipe["rows_per_step"] == 8


def test_most_samples_are_of_each_data_set(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    info = {name: {"file_name": f"{name}.json"} for name in ("a", "b")}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    text = "model_name_or_path: m\nstage: sft\ndataset: a,b\nmax_samples: 10\ntemplate: qwen\n"
    recipe, _, _ = converted(text, tmp_path, capsys)
    assert recipe["data"]["train"] == [str(tmp_path / f"data/{name}.json[:10]") for name in ("a", "b")]


def test_columns_of_registered_pairs(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    columns = {"prompt": "ask", "chosen": "good", "rejected": "bad", "system": "sys"}
    labels = {"messages": "talk", "kto_tag": "liked"}
    info = {
        "pairs": {"file_name": "a.json", "ranking": True, "columns": columns},
        "liked": {"file_name": "b.json", "formatting": "sharegpt", "columns": labels},
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    text = "model_name_or_path: m\nstage: %s\ndataset: %s\ntemplate: qwen\n"
    recipe, _, _ = converted(text % ("dpo", "pairs"), tmp_path, capsys)
    assert recipe["data"]["columns"] == columns
    recipe, _, _ = converted(text % ("kto", "liked"), tmp_path, capsys)
    assert recipe["data"]["columns"] == {"messages": "talk", "label": "liked"}


def test_keys_that_were_called_without_counterpart_and_have_one(tmp_path, capsys):
    text = "base_model: m\nrl: simpo\nsimpo_gamma: 0.7\ndatasets: [{path: a.jsonl}]\nadapter: lora\n"
    recipe, _, _ = converted(text + "lora_target_parameters: [mlp.experts.gate_up_proj]\n", tmp_path, capsys)
    assert recipe["objective"]["simpo_gamma"] == 0.7
    assert recipe["adapter"]["target_parameters"] == ["mlp.experts.gate_up_proj"]
    text = "base_model: m\nrl: kto\nkto_desirable_weight: 0.2\ndatasets: [{path: a.jsonl}]\nstreaming: true\n"
    recipe, _, _ = converted(text + "max_steps: 7\n", tmp_path, capsys)
    assert recipe["objective"]["desirable_weight"] == 0.2 and recipe["steps"] == 7


def test_trls_own_yaml(tmp_path, capsys):
    text = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-4
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
packing: true
assistant_only_loss: true
use_peft: true
lora_r: 32
lora_target_modules: all-linear
eval_strategy: steps
eval_steps: 100
report_to: [wandb]
"""
    recipe, _, _ = converted(text, tmp_path, capsys)
    assert recipe["data"] == {
        "train": "trl-lib/Capybara",
        "eval": "trl-lib/Capybara::test",
        "length": 1024,
        "packing": True,
    }
    assert recipe["adapter"] == {"r": 32, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}
    assert recipe["rows_per_step"] == 16 and recipe["evaluation"] == {"every_steps": 100}
    assert (
        recipe["metrics"] == {"log_every": 10, "wandb_project": "huggingface"} or "wandb_project" in recipe["metrics"]
    )


@pytest.mark.parametrize(
    ("text", "model", "told"),
    [
        (
            "overrides_of_model_config: {rope_scaling: {type: linear, factor: 2.0}, max_position_embeddings: 8192}",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 8192},
            [],
        ),
        (
            "model_config: {rope_scaling: {rope_type: yarn, factor: 4.0}, attention_dropout: 0.1, use_cache: false}",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            ["attention_dropout of model_config: 0.1"],
        ),
        ("rope_scaling: {type: dynamic, factor: 2.0}", {}, ['rope_scaling: {"type": "dynamic"']),
        ("rope_scaling: linear", {}, ["rope_scaling: "]),
    ],
)
def test_positions_of_axolotl_are_followed_or_told(text, model, told, tmp_path, capsys):
    whole = f"base_model: m\ndatasets: [{{path: a.jsonl, type: alpaca}}]\nadapter: lora\n{text}\n"
    recipe, told_there, _ = converted(whole, tmp_path, capsys)
    assert {key: value for key, value in recipe["model"].items() if key != "path"} == model
    assert all(line in told_there for line in told)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_llama_factorys_rope_scaling_is_told(kind, tmp_path, capsys):
    text = f"model_name_or_path: m\nstage: sft\ndataset: x\ntemplate: qwen\nrope_scaling: {kind}\n"
    _, told_there, _ = converted(text, tmp_path, capsys)
    assert f'rope_scaling: "{kind}"' in told_there and "model.rope_scaling={rope_type: " in told_there


def test_trls_model_init_kwargs(tmp_path, capsys):
    text = (
        "model_name_or_path: m\ndataset_name: a\npacking: true\nassistant_only_loss: true\n"
        "model_init_kwargs: {attn_implementation: sdpa, torchscript: true, rope_scaling: {type: yarn, factor: 2.0}}\n"
    )
    recipe, told_there, _ = converted(text, tmp_path, capsys)
    assert recipe["model"]["rope_scaling"] == {"rope_type": "yarn", "factor": 2.0}
    assert "torchscript of model_init_kwargs: true" in told_there and "attn_implementation" not in told_there


def test_turns_before_a_question_are_read(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.json").write_text(
        json.dumps([{"ask": "Third?", "said": "3", "past": [["First?", "1"], ["Second?", "2"]]}])
    )
    columns = {"prompt": "ask", "response": "said", "history": "past"}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"a": {"file_name": "a.json", "columns": columns}}))
    text = "model_name_or_path: m\nstage: sft\ndataset: a\ntemplate: qwen\nfinetuning_type: lora\n"
    recipe, told_there, _ = converted(text, tmp_path, capsys)
    assert recipe["data"]["columns"] == {"instruction": "ask", "output": "said", "history": "past"}
    assert "history" not in told_there
    config, tokenizer = config_from_dict(recipe), make_tokenizer()
    tokenizer = trained_tokenizer(tokenizer, config.data.template, config.data.template_arguments)
    made = objective_of(config.objective).prepare(
        config.data.train, tokenizer, config.data, vocab_size=10**6, max_rows=None
    )
    document = made.documents[0]
    said = tokenizer.decode(document.tokens)
    places = [said.index(words) for words in ("First?", "1", "Second?", "2", "Third?", "3")]
    assert len(made.documents) == 1 and places == sorted(places)
    trained = tokenizer.decode(document.tokens[np.asarray(document.mask)])
    assert [part.strip() for part in trained.split("<|im_end|>")][:3] == ["1", "2", "3"]
