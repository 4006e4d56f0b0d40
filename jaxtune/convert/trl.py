"""The configs of TRL's own commands, `trl TRAINER --config`."""

from __future__ import annotations

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


def translate(recipe: Translation, trainer: str | None) -> None:
    """Fills the recipe from TRL's config, in an order in which later keys read what earlier ones set. ConfigError for
    an unknown trainer or a method that no recipe can mean. trainer: TRL's command, such as "sft"; None: the one that
    has all keys.
    """
    trainer = trainer or _only_trainer(recipe)
    if trainer not in TRAINERS:
        raise ConfigError(f"--trainer {trainer}: one of {', '.join(TRAINERS)}")
    section = recipe.table.sections[trainer]
    recipe.config = recipe.fitted(section.types, recipe.config)
    recipe.defaults.update(section.defaults)
    recipe.defaults.update({"optim": "adamw_torch_fused"})
    recipe.set("model.path", recipe["model_name_or_path"])
    common.model_options(recipe, "model_init_kwargs")
    if trainer != "sft":
        recipe.set("objective.name", trainer)
    _loss(recipe, trainer)
    _data(recipe, trainer)
    _adapter(recipe)
    common.batch(recipe, "per_device_train_batch_size", trainer)
    common.length_of_run(recipe, "num_train_epochs")
    common.warmup(recipe)
    recipe.choose(("optim",), "optim.name", recipe.table.optimizers)
    common.schedule(recipe, "lr_scheduler_type")
    fp16 = bool(recipe["fp16"])
    common.precision(recipe, (not fp16) if recipe["bf16"] is None else bool(recipe["bf16"]), fp16, "bf16", "fp16")
    _weights(recipe)
    common.held_out(recipe, "test_split_size")
    common.saves(recipe)
    common.early_stop(recipe, "")
    common.trainer_keys(recipe)
    _objective(recipe, trainer)
    known_keys = recipe.table.top.defaults.keys() | section.defaults.keys()
    if trainer in ("grpo", "rloo"):
        known_keys |= {"reward_funcs", "reward_model_name_or_path"}
    for key in [key for key in recipe.config if key not in known_keys and key in recipe.table.top.known_keys]:
        recipe.lack(key, recipe.config[key], f"trl {trainer} has no such key")
    recipe.leftovers(recipe.table.top, recipe.config)


def _only_trainer(recipe: Translation) -> str:
    """The only trainer that has all keys of the config; ConfigError if there is not one."""
    shared = recipe.table.top.defaults.keys()
    keys = [key for key in recipe.config if key not in shared]
    if "reward_funcs" in keys:
        matching = [name for name in ("grpo", "rloo") if all(_has(recipe, name, key) for key in keys)]
    else:
        matching = [name for name in TRAINERS if all(_has(recipe, name, key) for key in keys)]
    if len(matching) == 1:
        return matching[0]
    raise ConfigError(
        "the config is of one of TRL's commands and does not say of which: name it with --trainer "
        + ", ".join(matching or TRAINERS)
    )


def _has(recipe: Translation, trainer: str, key: str) -> bool:
    return (
        key in recipe.table.sections[trainer].defaults
        or key not in recipe.table.top.known_keys
        or key == "reward_funcs"
    )


def _loss(recipe: Translation, trainer: str) -> None:
    """Sets objective.loss_type; ConfigError for a loss that is not here, or several."""
    losses = common.listed(recipe["loss_type"])
    if not losses or trainer not in _LOSSES:
        return
    if len(losses) > 1 or losses[0] not in _LOSSES[trainer]:
        raise ConfigError(
            f"loss_type = {losses}: jaxtune has {', '.join(_LOSSES[trainer])} for {trainer}, one at a time"
        )
    if trainer in ("dpo", "grpo") and losses[0] not in ("sigmoid", "dapo"):
        recipe.set("objective.loss_type", losses[0])


def _objective(recipe: Translation, trainer: str) -> None:
    """Sets the keys of `objective` for a TRL command, such as "sft"."""
    trainer_defaults = recipe.table.sections[trainer].defaults
    for key, ours in recipe.table.top.same_value.items():
        if ours.startswith("objective.") and key in trainer_defaults and key in recipe.config:
            recipe.set(ours, recipe[key])
        elif ours.startswith("objective."):
            recipe.set_null(key, ours)
    if trainer in ("grpo", "rloo"):
        functions = common.functions(recipe, common.listed(recipe["reward_funcs"]))
        if recipe["reward_model_name_or_path"]:
            recipe.lack(
                "reward_model_name_or_path", recipe["reward_model_name_or_path"], "a function that scores by it"
            )
        if not functions:
            raise ConfigError(f"reward_funcs: {trainer} needs reward functions of your own, as module.function")
        recipe.set("objective.reward_funcs", functions)
        rows = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
        size, micro_batches = recipe["generation_batch_size"], recipe.config.get("steps_per_generation")
        steps = (
            size // rows if size else (micro_batches / recipe["gradient_accumulation_steps"] if micro_batches else 1)
        )
        if (size and size % rows) or steps != int(steps) or steps < 1:
            recipe.lack(
                "generation_batch_size", size or micro_batches, "objective.steps_per_generation counts whole steps"
            )
        recipe.set("objective.steps_per_generation", max(int(steps), 1))
    if trainer == "grpo" and recipe.sets("scale_rewards"):
        scale = recipe["scale_rewards"]
        recipe.set("objective.scale_rewards", {True: "group", False: "none", "True": "group"}.get(scale, scale))


def _data(recipe: Translation, trainer: str) -> None:
    """Sets data.train and data.eval. trainer: TRL's command, such as "sft"."""
    section = recipe.table.sections["datasets"]
    entries = [recipe.fitted(section.types, entry, "datasets") for entry in recipe["datasets"] or []]
    names = []
    for entry in entries:
        path, files, split = str(entry.get("path")), entry.get("data_files"), entry.get("split") or "train"
        if files or common.is_local(path):
            plain = common.files_of(recipe, path, files) if files else [path]
            names += common.of_split(recipe, plain, split, ", ".join(plain))
        else:
            names.append(_name(path, entry.get("name"), split))
        recipe.leftovers(section, entry, str(entry.get("path")))
    if not entries and recipe["dataset_name"]:
        name, config = recipe["dataset_name"], recipe["dataset_config"]
        names = [_name(name, config, recipe["dataset_train_split"])]
        if common.is_local(str(name)):
            names = common.of_split(recipe, [str(name)], recipe["dataset_train_split"], str(name))
        if recipe["eval_strategy"] not in (None, "no"):
            recipe.set("data.eval", _name(name, config, recipe["dataset_test_split"]))
    common.rows(recipe, "data.train", names)
    if recipe["streaming"] or recipe["dataset_streaming"]:
        if recipe["max_steps"] > 0:
            recipe.set("data.streaming", True)
        else:
            recipe.notes.append("data.streaming is off, as epochs of a stream cannot be counted")
    if recipe["chat_template_path"]:
        path = str(recipe["chat_template_path"])
        recipe.set("data.template", path)
        if not path.endswith(".jinja"):
            recipe.lack(
                "chat_template_path", path, "data.template: a .jinja file; a model's folder has chat_template.jinja"
            )
    if trainer in ("grpo", "rloo"):
        return
    if recipe["max_length"] is None:
        recipe.lack("max_length", None, "data.length is a number; longer rows are cut")
    else:
        recipe.set("data.length", recipe["max_length"], "max_length")
    packs = common.packing(recipe, trainer, bool(recipe["packing"]), *(("packing",) if recipe.sets("packing") else ()))
    if packs and recipe["packing_strategy"] in ("wrapped", "bfd_split"):
        recipe.set("data.overflow", "split")
    elif packs and recipe["packing_strategy"] != "bfd":
        recipe.lack("packing_strategy", recipe["packing_strategy"], "bfd, bfd_split or wrapped")
    if trainer == "sft":
        _trained(recipe)


def _trained(recipe: Translation) -> None:
    if (field := recipe["dataset_text_field"]) != "text":
        common.columns(recipe, {"text": field}, "all rows")
    if recipe["assistant_only_loss"] or recipe["completion_only_loss"]:
        return
    recipe.set("data.train_on", "all")
    if recipe["completion_only_loss"] is None:
        recipe.lack(
            "completion_only_loss",
            None,
            "TRL trains on all of a conversation, and on the completion alone of rows with prompt and completion: "
            "for these, data.train_on=responses",
        )


def _name(path: Any, config: Any, split: Any) -> str:
    return f"{path}:{config or ''}:{split}" if config or split not in (None, "train") else str(path)


def _weights(recipe: Translation) -> None:
    """How trained weights are kept, which there is how the model was loaded."""
    kind = recipe["dtype"]
    if recipe.get("adapter") is None and kind not in ("float32", "bfloat16"):
        recipe.lack("dtype", kind, "optim.weights: fp32, or bf16 for weights that are loaded so")
    else:
        common.weights(recipe, kind == "bfloat16", "dtype")


def _adapter(recipe: Translation) -> None:
    """Sets `adapter`, and the format of the frozen weights. ConfigError for quantised weights without an adapter."""
    common.quantised(recipe, bool(recipe["load_in_4bit"]), bool(recipe["load_in_8bit"]))
    if not recipe["use_peft"]:
        common.refuse_quantised(recipe, "use_peft")
        recipe.set("adapter", None)
        return
    for key, ours in (("lora_r", "r"), ("lora_alpha", "lora_alpha")):
        recipe.set(f"adapter.{ours}", recipe[key])
    common.dropout(recipe, is_off=bool(recipe["disable_dropout"]))
    modules, parameters = common.listed(recipe["lora_target_modules"]), common.listed(recipe["lora_target_parameters"])
    if not modules and not parameters:
        recipe.lack(
            "lora_target_modules", None, "PEFT's choice by family is often q_proj and v_proj: adapter.target_modules"
        )
    recipe.set("adapter.target_modules", "all-linear" if modules in ([], ["all-linear"]) else modules)
    if parameters:
        recipe.set("adapter.target_parameters", parameters)
    common.set_kind(recipe, "lora_modules_to_save")
