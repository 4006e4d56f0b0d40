"""What the configs of several programs say in the same way."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtune.convert.schedules import RATES, schedule_keys
from jaxtune.convert.translation import Translation, short
from jaxtune.train.config import ConfigError, OptimConfig
from jaxtune.train.config.objective import example_of
from jaxtune.train.config.step_unit import StepUnit

ROPES = ("yarn", "linear", "llama3", "longrope")


def batch(recipe: Translation, rows_key: str, method: str) -> None:
    """Sets rows_per_step, of one GPU.

    recipe: gets the key, and a note.
    rows_key: the other program's key for rows on a device.
    method: of objective.name.
    """
    rows, count = (1 if recipe[key] is None else recipe[key] for key in (rows_key, "gradient_accumulation_steps"))
    recipe.set("rows_per_step", rows * count)
    recipe.notes.append(
        f"rows_per_step: {rows} {example_of(method)} x {count} micro-batches of one GPU (of several, multiply by their "
        "number); the planner chooses the micro-batches"
    )


def length_of_run(recipe: Translation, epochs_key: str) -> None:
    """Sets steps or epochs. epochs_key: the other program's key for epochs, read if max_steps is not set."""
    steps = recipe["max_steps"]
    if steps and steps > 0:
        recipe.set("steps", steps)
    else:
        recipe.set("epochs", float(recipe[epochs_key]), epochs_key)


def schedule(recipe: Translation, name_key: str) -> None:
    """Sets the section `schedule`, without warm-up. name_key: the other program's key for the scheduler's name."""
    arguments, name = mapping(recipe, "lr_scheduler_kwargs"), recipe[name_key]
    if name is None:
        return
    types = {key: "float" if key in RATES else "int|float|text" for key in arguments}
    arguments = recipe.fitted(types, arguments, "lr_scheduler_kwargs")
    peak = float(recipe["learning_rate"] or OptimConfig().learning_rate)
    try:
        keys = schedule_keys(recipe.table, str(name), arguments, peak)
    except ValueError as error:
        recipe.lack(name_key, name, str(error))
        return
    for key, value in keys.items():
        recipe.set(f"schedule.{key}", value, *((name_key,) if key == "name" else ()))


def mapping(recipe: Translation, key: str) -> Mapping[str, Any]:
    """A key's mapping, which may be JSON in a text; ConfigError for another text."""
    value = recipe[key] or {}
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} = {short(value)}: {recipe.program} takes a mapping there, or JSON of one in a text")
    return value


def warmup(recipe: Translation, implied_ratio: float | None = None) -> None:
    """Sets the warm-up as in transformers, whose first step has a rate of 0. Steps below 1 are a share of all.

    implied_ratio: the share that the other program takes if the config names none; None: no warm-up.
    """
    steps, ratio = recipe["warmup_steps"], recipe["warmup_ratio"]
    if isinstance(steps, float) and 0 < steps < 1:
        steps, ratio = None, steps
    if steps:
        recipe.set("schedule.warmup_steps", int(steps))
    elif ratio:
        recipe.set("schedule.warmup_ratio", ratio)
    elif implied_ratio and not recipe.sets("warmup_steps", "warmup_ratio"):
        recipe.set("schedule.warmup_ratio", implied_ratio, "warmup_ratio")
    else:
        return
    recipe.set("schedule.zero_start", True)


def precision(recipe: Translation, bf16: bool, fp16: bool, *sources: str) -> None:
    """Sets `precision`.

    recipe: gets the key.
    bf16, fp16: whether the other program computes so; neither: float32.
    sources: the other program's keys that decide it.
    """
    recipe.set("precision", "bf16" if bf16 else "fp16" if fp16 else "fp32", *sources)


def weights(recipe: Translation, bf16: bool, *sources: str) -> None:
    """Sets optim.weights of full fine-tuning, for which the adapter is null already.

    recipe: gets the key, and a note.
    bf16: whether the other program keeps the trained weights in bf16; else in float32.
    sources: its keys that decide it.
    """
    if recipe.get("adapter") is None:
        recipe.set("optim.weights", "bf16" if bf16 else "fp32", *sources)
        if bf16:
            recipe.notes.append("optim.weights: bf16 is rounded stochastically; there to the nearest")


def packing(recipe: Translation, method: str, packs: bool, *sources: str) -> bool:
    """Sets data.packing, so that a step has as many examples as there; returns whether rows are packed.

    recipe: has data.train already.
    method: of objective.name.
    packs: whether the other program packs.
    sources: its keys that decide it.
    """
    names = recipe.get("data.train")
    mixed = isinstance(names, list) and not isinstance(names[0], str)
    unit = StepUnit.of_trainers(example_of(method), packs, known=not (recipe.get("data.streaming") or mixed))
    recipe.set("data.packing", unit.packing, *sources)
    if unit.counts_examples:
        recipe.notes.append("data.packing: step: an update has as many documents as there; true makes fewer updates")
    return unit.shares_rows


FIRST_ROWS = re.compile(r"\[:\d+\]$")
_FIRST = re.compile(r"train\[:(\d+)\]")


def of_split(recipe: Translation, names: Sequence[str], split: object, label: str) -> list[str]:
    """The names of local files or a folder, of whose rows the other program reads a split; what `[:N]` cannot say is
    lacking.
    """
    if split in (None, "", "train"):
        return list(names)
    first = _FIRST.fullmatch(str(split).replace(" ", ""))
    if first is not None and len(names) == 1:
        return [f"{names[0]}[:{first[1]}]"]
    recipe.lack(
        f"split of {label}", split, "[:N] behind one file reads its first N rows; other parts: a file of their own"
    )
    return list(names)


READERS = ("json", "csv", "parquet", "text", "arrow")


def files_of(recipe: Translation, path: str, files: str | list[str] | Mapping[str, object]) -> list[str]:
    """The files that a reader such as "json", or a folder, gets; `path` if they are elsewhere, which is lacking."""
    names = [files] if isinstance(files, str) else files
    if isinstance(names, list) and (path in READERS or Path(path).expanduser().is_dir()):
        return [name if path in READERS else str(Path(path) / name) for name in names]
    recipe.lack(f"data_files of {path}", files, "local files: data.train names each of them")
    return [path]


def is_local(path: str) -> bool:
    """Whether a data set's name is that of a file or folder here, as far as it can be seen."""
    return bool(_IS_FILE.search(path)) or path.startswith(("/", "./", "../", "~")) or Path(path).is_dir()


_IS_FILE = re.compile(r"\.(jsonl?|csv|parquet|txt|arrow)(\.\w+)?$")


def columns(recipe: Translation, names: Mapping[str, str], source_name: str) -> None:
    """Sets data.columns, one map for all rows; other maps are lacking.

    recipe: gets the key.
    names: {our column: its name in the rows}.
    source_name: where they come from, for messages.
    """
    names = {ours: source for ours, source in names.items() if ours != source}
    recipe.renames.append(names)
    if names != recipe.renames[0]:
        recipe.lack(f"columns of {source_name}", names, "data.columns is one map for all rows: rename them in its rows")
    elif names:
        recipe.set("data.columns", names)


def template(recipe: Translation, name: str, source_name: str) -> None:
    """Sets data.template, one for all rows; another one is lacking.

    recipe: gets the key.
    name: of the template in this program.
    source_name: where it comes from, for messages.
    """
    current = recipe.get("data.template")
    if current not in (None, name):
        recipe.lack(f"template of {source_name}", name, f"data.template is one for all rows, and {current} already")
    else:
        recipe.set("data.template", name)


def plain_prompts(recipe: Translation, plain: Sequence[str], sets: int) -> None:
    """Removes data.template for rows whose prompts are plain text whatever template the config names.

    recipe: loses the key.
    plain: names of these rows.
    sets: the number of all sets of rows.
    """
    current = recipe.get("data.template")
    if plain and current is not None:
        if len(plain) == sets or current == "tokenizer":
            del recipe.values["data"]["template"]
        else:
            recipe.lack(f"prompts of {', '.join(plain)}", "alpaca", f"data.template is one for all rows, and {current}")


def rows(recipe: Translation, key: str, names: Sequence[str]) -> None:
    """Sets data.train or data.eval; of several held-out sets the first.

    recipe: gets the key.
    key: "data.train" or "data.eval".
    names: files or data sets; none: nothing is set.
    """
    if names:
        recipe.set(key, names[0] if len(names) == 1 else list(names))
    if key == "data.eval" and len(names) > 1:
        recipe.set(key, names[0])
        recipe.lack("held-out rows", list(names[1:]), "data.eval is one file or data set")


def held_out(recipe: Translation, size_key: str) -> None:
    """Sets data.eval_rows without held-out rows, and when they are evaluated. size_key: the other program's key for
    their number or share.
    """
    size = recipe[size_key]
    if size and recipe.get("data.eval") is None:
        if recipe.get("data.streaming"):
            recipe.lack(size_key, size, "data.eval: a stream holds no rows out")
        else:
            recipe.set("data.eval_rows", size)
    evaluates = recipe.get("data.eval") is not None or recipe.get("data.eval_rows")
    strategy, every = recipe.first("eval_strategy", "evaluation_strategy"), recipe["eval_steps"]
    if not evaluates:
        return
    if recipe.config.get("evals_per_epoch"):
        recipe.set("evaluation.every_epochs", 1 / recipe["evals_per_epoch"])
    elif strategy == "epoch":
        recipe.set("evaluation.every_epochs", 1.0)
    elif strategy == "no" and recipe.sets("eval_strategy", "evaluation_strategy"):
        recipe.set("evaluation.at_end", False)
    elif every and strategy in ("steps", None):
        recipe.set("evaluation.every_steps", int(every) if every >= 1 else every)


def early_stop(recipe: Translation, patience_key: str) -> None:
    """Sets guards.patience with its metric, which also chooses the best checkpoint. patience_key: the other program's
    key; "": it has none.
    """
    patience, metric = recipe[patience_key], str(recipe["metric_for_best_model"] or "loss")
    metric = metric if metric.startswith("eval_") else f"eval_{metric}"
    greatest = recipe["greater_is_better"]
    often = recipe.get("evaluation.every_steps") or recipe.get("evaluation.every_epochs")
    if patience and not often:
        recipe.lack(patience_key, patience, "guards.patience needs evaluations: evaluation.every_steps, and rows")
    elif patience:
        recipe.set("guards.patience", patience)
        if metric != "eval_loss":
            recipe.set("guards.metric", metric)
        if (greatest is not None and metric == "eval_loss") or greatest is False:
            recipe.set("guards.metric_is", "greatest" if greatest else "least")
    if recipe["load_best_model_at_end"] and often:
        recipe.set("checkpoint.best", metric)
        if greatest is not None:
            recipe.set("checkpoint.best_is", "greatest" if greatest else "least")


def saves(recipe: Translation) -> None:
    strategy, every = (recipe[key] if recipe.sets(key) else None for key in ("save_strategy", "save_steps"))
    if recipe.config.get("saves_per_epoch"):
        recipe.set("checkpoint.every_epochs", 1 / recipe["saves_per_epoch"])
    elif strategy == "no":
        recipe.set("checkpoint.every_minutes", None)
    elif strategy == "epoch":
        recipe.set("checkpoint.every_epochs", 1.0)
    elif every and strategy in ("steps", None):
        recipe.set("checkpoint.every_steps", int(every) if every >= 1 else every)
    elif strategy == "best":
        recipe.set("checkpoint.best", "eval_loss")


def trainer_keys(recipe: Translation) -> None:
    """The keys of transformers' Trainer that have one value in both programs, and its loggers."""
    for prefix in (
        "optim.",
        "max_grad_norm",
        "seed",
        "neftune",
        "output",
        "checkpoint.keep",
        "metrics.log",
        "metrics.run",
    ):
        recipe.set_same(recipe.table.top, recipe.config, recipe.defaults, prefix)
    for prefix in ("data.num_workers", "evaluation.at_start", "deterministic", "router_aux_loss_coef"):
        recipe.set_same(recipe.table.top, recipe.config, {}, prefix)
    reports = listed(recipe["report_to"])
    if "wandb" in reports:
        recipe.set("metrics.wandb_project", recipe["project"])
    if "tensorboard" in reports:
        recipe.set("metrics.tensorboard", True)


def quantised(recipe: Translation, four: bool, eight: bool) -> None:
    """Sets model.load_in.

    recipe: gets the key.
    four, eight: whether the other program loads the base in 4 or 8 bits; neither: nothing is set.
    """
    if four or eight:
        recipe.set("model.load_in", "nf4" if four else "int8")


def refuse_quantised(recipe: Translation, adapter_key: str) -> None:
    """ConfigError for quantised weights without an adapter. adapter_key: the other program's key that makes one."""
    for key in ("load_in_4bit", "load_in_8bit"):
        if recipe[key]:
            raise ConfigError(f"{key} = true: quantised weights train through an adapter alone; set {adapter_key}")


_NO_NUMBER = ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage", "trust_remote_code")
_ROPE = ("rope_scaling", "rope_parameters")


def model_options(recipe: Translation, key: str) -> None:
    """Sets what replaces keys of the model's config.json, and arguments of from_pretrained: positions are translated.
    key: the other program's, of a mapping.
    """
    for name, value in mapping(recipe, key).items():
        if name in _ROPE and isinstance(value, Mapping):
            rope_scaling(recipe, f"{name} of {key}", value)
        elif name == "max_position_embeddings":
            recipe.set("model.max_position_embeddings", value, key)
        elif name not in _NO_NUMBER and value is not None:
            recipe.lack(f"{name} of {key}", value, "config.json of the model's folder")


def rope_scaling(recipe: Translation, source_name: str, scaling: Mapping[str, object]) -> None:
    """Sets model.rope_scaling with transformers' names; a kind that is not here is lacking.

    recipe: gets the key.
    source_name: what messages call it, such as "rope_scaling of model_kwargs".
    scaling: the other program's mapping, "rope_type" or "type" among it.
    """
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind not in ROPES or ("factor" not in scaling and kind != "longrope"):
        recipe.lack(source_name, dict(scaling), f"model.rope_scaling has {', '.join(ROPES)}, with a factor")
        return
    scaling_arguments = {name: value for name, value in scaling.items() if name not in ("type", "rope_type")}
    recipe.set("model.rope_scaling", {"rope_type": kind, **scaling_arguments})


def listed(value: Any) -> list[str]:
    """Names in a list, or in a text between commas."""
    if value is None:
        return []
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else list(value)


def dropout(recipe: Translation, is_off: bool) -> None:
    """Sets adapter.lora_dropout. is_off: whether the other program's trainer turns dropout off."""
    if not (rate := recipe["lora_dropout"]):
        return
    if is_off:
        method = recipe.get("objective.name")
        recipe.notes.append(f"adapter.lora_dropout: none; {recipe.program} turns its {rate} off for {method}")
    else:
        recipe.set("adapter.lora_dropout", rate)


def set_kind(recipe: Translation, saved_modules_key: str) -> None:
    """Sets what kind of adapter it is: rsLoRA, DoRA, and modules that are trained whole."""
    if modules_to_save := listed(recipe[saved_modules_key]):
        recipe.set("adapter.modules_to_save", modules_to_save)
    for key in ("use_rslora", "use_dora"):
        if recipe[key]:
            recipe.set(f"adapter.{key}", True)


_OF_COMPAT = "from jaxtune.compat.rewards import"
_LENGTH = "get_soft_overlong_punishment"
# What a file has to say for TRL's own rewards, by the names that its command knows.
_TRL_REWARDS = {
    name: f"{_OF_COMPAT} {name}" for name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
} | {_LENGTH: f"{_OF_COMPAT} {_LENGTH} as made; {_LENGTH} = made(1280, 256)"}


def functions(recipe: Translation, names: Iterable[str], key: str = "reward_funcs") -> list[str]:
    """Reward functions as file.py:name, of dotted import paths; other names are lacking."""
    paths = []
    for name in names:
        module, _, function = str(name).rpartition(".")
        if function in _TRL_REWARDS and module in ("", "trl.rewards"):
            paths.append(f"trl_rewards.py:{function}")
            recipe.lack("reward_funcs", name, f"a file trl_rewards.py with: {_TRL_REWARDS[function]}")
        elif module and function:
            paths.append(f"{module.replace('.', '/')}.py:{function}")
        else:
            recipe.lack(key, name, "file.py:function, or exact_number, exact_match, tagged_format")
    return paths
