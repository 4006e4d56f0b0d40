"""The configs of TRL's own commands, `trl TRAINER --config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtune.convert import common
from jaxtune.convert.translation import Translation
from jaxtune.train.config import ConfigError

TRAINERS = ("sft", "dpo", "kto", "reward", "grpo", "rloo")
_LOSSES = {
    "dpo": ("sigmoid", "ipo", "hinge"),
    "grpo": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo"),
    "kto": ("kto",),
    "sft": ("nll",),
}
_DOCUMENTS = {"sft": "rows", "dpo": "pairs", "reward": "pairs"}


def translate(made: Translation, trainer: str | None) -> None:
    trainer = trainer or _only_trainer(made)
    if trainer not in TRAINERS:
        raise ConfigError(f"--trainer {trainer}: one of {', '.join(TRAINERS)}")
    own = made.table.sections[trainer]
    made.defaults.update(own.defaults)
    made.defaults.update({"optim": "adamw_torch_fused"})
    made.set("model.path", made["model_name_or_path"])
    if trainer != "sft":
        made.set("objective.name", trainer)
    _loss(made, trainer)
    _data(made, trainer)
    _adapter(made)
    common.batch(made, "per_device_train_batch_size", _DOCUMENTS.get(trainer, "answers"))
    common.length_of_run(made, "num_train_epochs")
    common.warmup(made)
    made.choose(("optim",), "optim.name", made.table.optimizers)
    common.schedule(made, "lr_scheduler_type")
    fp16 = bool(made["fp16"])
    common.precision(made, (not fp16) if made["bf16"] is None else bool(made["bf16"]), fp16, "bf16", "fp16")
    common.held_out(made, "test_split_size")
    common.saves(made)
    common.trainer_keys(made)
    _objective(made, trainer)
    known = made.table.top.defaults.keys() | own.defaults.keys() | {"reward_funcs", "reward_model_name_or_path"}
    for key in [key for key in made.config if key not in known and key in made.table.top.known]:
        made.lack(key, made.config[key], f"trl {trainer} has no such key")
    made.leftovers(made.table.top, made.config)


def _only_trainer(made: Translation) -> str:
    """The one trainer that has all keys of the config; ConfigError if several have them."""
    shared = made.table.top.defaults.keys()
    keys = [key for key in made.config if key not in shared]
    if "reward_funcs" in keys:
        fits = [name for name in ("grpo", "rloo") if all(_has(made, name, key) for key in keys)]
    else:
        fits = [name for name in TRAINERS if all(_has(made, name, key) for key in keys)]
    if len(fits) == 1:
        return fits[0]
    raise ConfigError(
        "the config is of one of TRL's commands and does not say of which: name it with --trainer "
        + ", ".join(fits or TRAINERS)
    )


def _has(made: Translation, trainer: str, key: str) -> bool:
    return key in made.table.sections[trainer].defaults or key not in made.table.top.known or key == "reward_funcs"


def _loss(made: Translation, trainer: str) -> None:
    losses = common.listed(made["loss_type"])
    if not losses or trainer not in _LOSSES:
        return
    if len(losses) > 1 or losses[0] not in _LOSSES[trainer]:
        raise ConfigError(
            f"loss_type = {losses}: jaxtune has {', '.join(_LOSSES[trainer])} for {trainer}, one at a time"
        )
    if trainer in ("dpo", "grpo") and losses[0] not in ("sigmoid", "dapo"):
        made.set("objective.loss_type", losses[0])


def _objective(made: Translation, trainer: str) -> None:
    own = made.table.sections[trainer].defaults
    for key, ours in made.table.top.same.items():
        if ours.startswith("objective.") and key in own and key in made.config:
            made.set(ours, made.config[key])
    if trainer in ("grpo", "rloo"):
        functions = common.functions(made, common.listed(made["reward_funcs"]))
        if made["reward_model_name_or_path"]:
            made.lack("reward_model_name_or_path", made["reward_model_name_or_path"], "a function that scores by it")
        if not functions:
            raise ConfigError(f"reward_funcs: {trainer} needs reward functions of your own, as module.function")
        made.set("objective.reward_funcs", functions)
        rows = made["per_device_train_batch_size"] * made["gradient_accumulation_steps"]
        size, parts = made["generation_batch_size"], made.config.get("steps_per_generation")
        steps = size // rows if size else (parts / made["gradient_accumulation_steps"] if parts else 1)
        if (size and size % rows) or steps != int(steps) or steps < 1:
            made.lack("generation_batch_size", size or parts, "objective.steps_per_generation counts whole steps")
        made.set("objective.steps_per_generation", max(int(steps), 1))
    if trainer == "grpo" and made.says("scale_rewards"):
        scale = made["scale_rewards"]
        made.set("objective.scale_rewards", {True: "group", False: "none", "True": "group"}.get(scale, scale))


def _data(made: Translation, trainer: str) -> None:
    section = made.table.sections["datasets"]
    entries: list[Mapping[str, Any]] = made["datasets"] or []
    names = []
    for entry in entries:
        files = entry.get("data_files")
        plain = [str(name) for name in common.listed(files)] if not isinstance(files, Mapping) else []
        names += plain or [_name(entry.get("path"), entry.get("name"), entry.get("split") or "train")]
        made.leftovers(section, entry, str(entry.get("path")))
    if not entries and made["dataset_name"]:
        name, config = made["dataset_name"], made["dataset_config"]
        names = [_name(name, config, made["dataset_train_split"])]
        if made["eval_strategy"] not in (None, "no"):
            made.set("data.eval", _name(name, config, made["dataset_test_split"]))
    common.rows(made, "data.train", names)
    if made["streaming"] or made["dataset_streaming"]:
        if made["max_steps"] > 0:
            made.set("data.streaming", True)
        else:
            made.notes.append("data.streaming is off, as epochs of a stream cannot be counted")
    if made["chat_template_path"]:
        path = str(made["chat_template_path"])
        made.set("data.template", path)
        if not path.endswith(".jinja"):
            made.lack(
                "chat_template_path", path, "data.template: a .jinja file; a model's folder has chat_template.jinja"
            )
    if trainer in ("grpo", "rloo"):
        return
    if made["max_length"] is None:
        made.lack("max_length", None, "data.length is a number; longer rows are cut")
    else:
        made.set("data.length", made["max_length"], "max_length")
    packs = trainer == "sft" and bool(made["packing"])
    common.packing(made, packs, *(("packing",) if made.says("packing") else ()))
    if packs and made["packing_strategy"] in ("wrapped", "bfd_split"):
        made.set("data.overflow", "split")
    if trainer == "sft":
        _trained(made)


def _trained(made: Translation) -> None:
    if (field := made["dataset_text_field"]) != "text":
        common.columns(made, {"text": field}, "all rows")
    if made["assistant_only_loss"] or made["completion_only_loss"]:
        return
    made.set("data.train_on", "all")
    if made["completion_only_loss"] is None:
        made.lack(
            "completion_only_loss",
            None,
            "TRL trains on all of a conversation, and on the completion alone of rows with prompt and completion: "
            "for these, data.train_on=responses",
        )


def _name(path: Any, config: Any, split: Any) -> str:
    return f"{path}:{config or ''}:{split}" if config or split not in (None, "train") else str(path)


def _adapter(made: Translation) -> None:
    common.quantised(made, bool(made["load_in_4bit"]), bool(made["load_in_8bit"]))
    if not made["use_peft"]:
        if made.get("model.load_in"):
            raise ConfigError("load_in_4bit without use_peft: quantised weights train through an adapter alone")
        made.set("adapter", None)
        return
    for key, ours in (("lora_r", "r"), ("lora_alpha", "lora_alpha"), ("lora_dropout", "lora_dropout")):
        made.set(f"adapter.{ours}", made[key])
    modules, parameters = common.listed(made["lora_target_modules"]), common.listed(made["lora_target_parameters"])
    if not modules and not parameters:
        made.lack(
            "lora_target_modules", None, "PEFT's choice by family is often q_proj and v_proj: adapter.target_modules"
        )
    made.set("adapter.target_modules", "all-linear" if modules in ([], ["all-linear"]) else modules)
    if parameters:
        made.set("adapter.target_parameters", parameters)
    if more := common.listed(made["lora_modules_to_save"]):
        made.set("adapter.modules_to_save", more)
    for key in ("use_rslora", "use_dora"):
        if made[key]:
            made.set(f"adapter.{key}", True)
