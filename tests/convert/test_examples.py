"""A config of each kind that the three programs' example folders have: what its recipe says, or why there is none."""

from __future__ import annotations

import json

import pytest

from jaxtune.commands.proof import prove
from jaxtune.convert import recipe_of
from jaxtune.train.config import ConfigError

TALKS = [{"path": "org/talks", "type": "chat_template"}]
ALPACA = [{"path": "org/alpaca", "type": "alpaca"}]
LORA = {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True}
QLORA = LORA | {"adapter": "qlora", "load_in_4bit": True}
SIZES = {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "num_epochs": 1, "learning_rate": 2e-4}
FACTORY = {"stage": "sft", "do_train": True, "dataset": "mine", "template": "llama3", "cutoff_len": 2048}
FACTORY |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1e-4, "bf16": True}
TRL = {"dataset_name": "org/rows", "learning_rate": 1e-5, "max_length": 512}
PEFT = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear", "lora_dropout": 0.05}

# {name: (program, config, {dotted key of the recipe: value; None: it is not set}, what is lacking)}
FOLLOWED = {
    "qlora": (
        "axolotl",
        {**QLORA, "datasets": ALPACA, "sample_packing": True, "lr_scheduler": "cosine", "optimizer": "adamw_bnb_8bit"},
        {"model.load_in": "nf4", "data.packing": True, "rows_per_step": 8, "optim.name": "adamw_8bit"},
        [],
    ),
    "lora in 8 bits": ("axolotl", {**LORA, "load_in_8bit": True, "datasets": ALPACA}, {"model.load_in": "int8"}, []),
    "full": ("axolotl", {"datasets": ALPACA}, {"adapter": None, "optim.weights": "bf16"}, []),
    "full in ZeRO": ("axolotl", {"datasets": ALPACA, "deepspeed": "zero3.json"}, {"optim.weights": "fp32"}, []),
    "talks": ("axolotl", {**LORA, "datasets": TALKS}, {"data.template": "tokenizer", "data.train_on": None}, []),
    "pictures": ("axolotl", {**LORA, "processor_type": "AutoProcessor", "datasets": TALKS}, {}, ["processor_type"]),
    "pretraining": (
        "axolotl",
        {"pretraining_dataset": [{"path": "org/text", "type": "pretrain"}], "streaming": True, "max_steps": 9},
        {"data.train_on": "all", "data.streaming": True, "steps": 9},
        [],
    ),
    "pairs": (
        "axolotl",
        {**LORA, "lora_dropout": 0.1, "rl": "dpo", "chat_template": "qwen_25", "datasets": [{"path": "org/pairs"}]},
        {"objective.name": "dpo", "adapter.lora_dropout": None, "data.packing": "step"},
        [],
    ),
    "labels": (
        "axolotl",
        {
            **LORA,
            "lora_dropout": 0.1,
            "rl": "kto",
            "rl_beta": 0.5,
            "datasets": [{"path": "a/b", "type": "llama3.ultra"}],
        },
        {"objective.beta": 0.5, "adapter.lora_dropout": None},
        [],
    ),
    "rewards": (
        "axolotl",
        {
            **LORA,
            "lora_dropout": 0.1,
            "rl": "grpo",
            "datasets": [{"path": "a/b"}],
            "trl": {"reward_funcs": ["my.score"]},
        },
        {"objective.reward_funcs": ["my.py:score"], "adapter.lora_dropout": 0.1},
        [],
    ),
    "a loss of its own": ("axolotl", {**LORA, "datasets": ALPACA, "use_dft": True}, {}, ["use_dft"]),
    "turns' ends": ("axolotl", {**LORA, "datasets": TALKS, "eot_tokens": ["<|end|>"]}, {}, ["eot_tokens"]),
    "another template": ("axolotl", {**LORA, "datasets": TALKS, "chat_template": "jamba"}, {}, ["chat_template"]),
    "modules by pattern": (
        "axolotl",
        {**LORA, "lora_target_linear": False, "datasets": TALKS, "lora_target_modules": r"layers.[\d]+.(q|k)_proj"},
        {},
        ["lora_target_modules"],
    ),
    "nothing to adapt": ("axolotl", {"adapter": "lora", "datasets": ALPACA}, {}, ["lora_target_modules"]),
    "prediction": ("LLaMA-Factory", {**FACTORY, "do_train": False, "do_predict": True}, {}, ["do_train"]),
    "shards": ("axolotl", {"datasets": ALPACA, "dataset_shard_num": 4, "dataset_shard_idx": 0}, {}, ["dataset_shard"]),
    "factory's lora": (
        "LLaMA-Factory",
        {**FACTORY, "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all", "lora_dropout": 0.1},
        {"adapter.lora_alpha": 16, "adapter.lora_dropout": 0.1, "data.train_on": "turns", "rows_per_step": 8},
        [],
    ),
    "factory's full": ("LLaMA-Factory", {**FACTORY, "finetuning_type": "full"}, {"optim.weights": "fp32"}, []),
    "factory's bf16": (
        "LLaMA-Factory",
        {**FACTORY, "finetuning_type": "full", "pure_bf16": True, "bf16": False},
        {"optim.weights": "bf16", "precision": "bf16"},
        [],
    ),
    "factory's qlora": ("LLaMA-Factory", {**FACTORY, "quantization_bit": 4}, {"model.load_in": "nf4"}, []),
    "fp4": ("LLaMA-Factory", {**FACTORY, "quantization_bit": 4, "quantization_type": "fp4"}, {}, ["quantization_type"]),
    "factory's pairs": (
        "LLaMA-Factory",
        {**FACTORY, "stage": "dpo", "dataset": "pairs", "pref_loss": "simpo", "lora_dropout": 0.1},
        {"objective.name": "simpo", "adapter.lora_dropout": None, "data.packing": "step"},
        [],
    ),
    "factory's scores": (
        "LLaMA-Factory",
        {**FACTORY, "stage": "rm", "dataset": "pairs", "lora_dropout": 0.1},
        {"objective.name": "reward", "adapter.lora_dropout": 0.1},
        [],
    ),
    "words that join": ("LLaMA-Factory", {**FACTORY, "template": "vicuna"}, {}, ["template"]),
    "galore": ("LLaMA-Factory", {**FACTORY, "finetuning_type": "full", "use_galore": True}, {}, ["use_galore"]),
    "sft": ("sft", {**TRL, **PEFT, "completion_only_loss": True}, {"adapter.lora_dropout": 0.05}, []),
    "dpo": ("dpo", {**TRL, **PEFT}, {"adapter.lora_dropout": None, "objective.name": "dpo"}, []),
    "dropout": ("kto", {**TRL, **PEFT, "disable_dropout": False}, {"adapter.lora_dropout": 0.05}, []),
    "trl's full": ("kto", TRL, {"optim.weights": "fp32", "adapter": None}, []),
    "trl's bf16": ("reward", {**TRL, "dtype": "bfloat16"}, {"optim.weights": "bf16"}, []),
    "trl's dtype": ("reward", {**TRL, "dtype": "auto"}, {}, ["dtype"]),
    "scales": (
        "grpo",
        {"dataset_name": "org/rows", **PEFT, "reward_funcs": ["my.score"], "scale_rewards": False},
        {"objective.scale_rewards": "none"},
        [],
    ),
    "files by split": (
        "dpo",
        {"datasets": [{"path": "json", "data_files": {"train": "a.jsonl"}}], **PEFT, "max_length": 512},
        {},
        ["data_files of json"],
    ),
    "order": (
        "grpo",
        {"dataset_name": "org/rows", **PEFT, "reward_funcs": "my.score", "shuffle_dataset": False},
        {"adapter.lora_dropout": 0.05},
        ["shuffle_dataset"],
    ),
}
# {what is said: (program, config)}
REFUSED = {
    "finetuning_type = 'freeze'": ("LLaMA-Factory", {**FACTORY, "finetuning_type": "freeze"}),
    "finetuning_type = 'oft'": ("LLaMA-Factory", {**FACTORY, "finetuning_type": "oft"}),
    "mixture_of_depths": ("LLaMA-Factory", {**FACTORY, "mixture_of_depths": "convert"}),
    "stage = 'ppo'": ("LLaMA-Factory", {**FACTORY, "stage": "ppo"}),
    "rl = 'ebft'": ("axolotl", {"datasets": ALPACA, "rl": "ebft"}),
    "relora": ("axolotl", {**LORA, "datasets": ALPACA, "relora": True}),
    "process_reward_model": ("axolotl", {"datasets": ALPACA, "process_reward_model": True}),
    "diffusion_lm": ("axolotl", {"datasets": ALPACA, "diffusion_lm": {"generate_samples": False}}),
    "name it with --trainer": (None, TRL),
    "loss_type = ['robust']": ("dpo", {**TRL, "loss_type": "robust"}),
}


def translated(program, config, folder):
    (folder / "data").mkdir()
    info = {"mine": {"file_name": "mine.json"}}
    columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    info["pairs"] = {"file_name": "pairs.json", "ranking": True, "columns": columns}
    (folder / "data/dataset_info.json").write_text(json.dumps(info))
    sizes, key = (SIZES, "base_model") if program == "axolotl" else ({}, "model_name_or_path")
    trainer = program if program in ("sft", "dpo", "kto", "reward", "grpo") else None
    recipe = recipe_of({key: "org/model", **sizes, **config}, folder, trainer)
    prove(recipe)
    return recipe


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_an_example_says_is_followed_or_named(name, tmp_path):
    program, config, said, lacking = FOLLOWED[name]
    recipe = translated(program, config, tmp_path)
    assert {key: recipe.get(key) for key in said} == said
    named = [line.partition(":")[0] for line in recipe.lacking]
    assert all(any(line.startswith(key) for line in named) for key in lacking), named
    assert all(any(line.startswith(key) for key in lacking) for line in named), named


@pytest.mark.parametrize("said", REFUSED)
def test_a_method_that_no_recipe_can_mean_is_refused_by_name(said, tmp_path):
    program, config = REFUSED[said]
    with pytest.raises(ConfigError) as refused:
        translated(program, config, tmp_path)
    assert said in str(refused.value)
