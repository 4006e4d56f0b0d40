"""What the configs of several programs say in the same way: steps, rates, precision, packing, rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxtune.convert.schedules import schedule_keys
from jaxtune.convert.translation import Translation
from jaxtune.train.config import OptimConfig


def batch(made: Translation, rows_key: str, documents: str) -> None:
    """rows_per_step of one GPU. documents: what a row is there, such as "pairs"."""
    rows, parts = made[rows_key] or 1, made["gradient_accumulation_steps"] or 1
    made.set("rows_per_step", rows * parts)
    made.notes.append(
        f"rows_per_step: {rows} {documents} x {parts} micro-batches of one GPU (of several, multiply by their number); "
        "the planner chooses the micro-batches"
    )


def length_of_run(made: Translation, epochs_key: str) -> None:
    steps = made["max_steps"]
    if steps and steps > 0:
        made.set("steps", steps)
    else:
        made.set("epochs", float(made[epochs_key]), epochs_key)


def schedule(made: Translation, name_key: str) -> None:
    """The section `schedule` but its warm-up."""
    name, arguments = made[name_key], made["lr_scheduler_kwargs"] or {}
    if name is None:
        return
    peak = float(made["learning_rate"] or OptimConfig().learning_rate)
    try:
        keys = schedule_keys(made.table, str(name), arguments, peak)
    except ValueError as error:
        made.lack(name_key, name, str(error))
        return
    for key, value in keys.items():
        made.set(f"schedule.{key}", value, *((name_key,) if key == "name" else ()))


def warmup(made: Translation, implied_ratio: float | None = None) -> None:
    """The warm-up as transformers makes it, whose first step has a rate of 0. Steps below 1 are a share of all."""
    steps, ratio = made["warmup_steps"], made["warmup_ratio"]
    if isinstance(steps, float) and 0 < steps < 1:
        steps, ratio = None, steps
    if steps:
        made.set("schedule.warmup_steps", int(steps))
    elif ratio:
        made.set("schedule.warmup_ratio", ratio)
    elif implied_ratio and not made.says("warmup_steps", "warmup_ratio"):
        made.set("schedule.warmup_ratio", implied_ratio, "warmup_ratio")
    else:
        return
    made.set("schedule.zero_start", True)


def precision(made: Translation, bf16: bool, fp16: bool, *sources: str) -> None:
    made.set("precision", "bf16" if bf16 else "fp16" if fp16 else "fp32", *sources)


def packing(made: Translation, packs: bool, *sources: str) -> None:
    """Without packing, an update has as many documents as there: data.packing=step, or false where rows are not known
    before the run."""
    names = made.get("data.train")
    mixed = isinstance(names, list) and not isinstance(names[0], str)
    alone = bool(made.get("data.streaming")) or mixed
    made.set("data.packing", True if packs else False if alone else "step", *sources)
    if not packs and not alone:
        made.notes.append("data.packing: step: an update has as many documents as there; true makes fewer updates")


def columns(made: Translation, names: Mapping[str, str], of: str) -> None:
    """data.columns, one map for all rows: {our column: its name in the rows}; other maps are lacking."""
    names = {ours: source for ours, source in names.items() if ours != source}
    known = made.get("data.columns")
    if known is not None and known != names:
        made.lack(f"columns of {of}", names, "data.columns is one map for all rows")
    elif names:
        made.set("data.columns", names)


def template(made: Translation, name: str, of: str) -> None:
    """data.template, one for all rows; another one is lacking."""
    known = made.get("data.template")
    if known not in (None, name):
        made.lack(f"template of {of}", name, f"data.template is one for all rows, and {known} already")
    else:
        made.set("data.template", name)


def rows(made: Translation, key: str, names: Sequence[str]) -> None:
    """data.train or data.eval; of several held-out sets the first."""
    if names:
        made.set(key, names[0] if len(names) == 1 else list(names))
    if key == "data.eval" and len(names) > 1:
        made.set(key, names[0])
        made.lack("held-out rows", list(names[1:]), "data.eval is one file or data set")


def held_out(made: Translation, size_key: str) -> None:
    """data.eval_rows without held-out rows of their own, and when they are evaluated."""
    size = made[size_key]
    if size and made.get("data.eval") is None:
        if made.get("data.streaming"):
            made.lack(size_key, size, "data.eval: a stream holds no rows out")
        else:
            made.set("data.eval_rows", size)
    evaluates = made.get("data.eval") is not None or made.get("data.eval_rows")
    strategy, every = made.first("eval_strategy", "evaluation_strategy"), made["eval_steps"]
    if not evaluates:
        return
    if strategy == "no" and made.says("eval_strategy", "evaluation_strategy"):
        made.set("evaluation.at_end", False)
    elif every and strategy in ("steps", None):
        _every(made, "eval_steps", every, "evaluation.every_steps")
    elif strategy == "epoch":
        made.lack("eval_strategy", strategy, "evaluation.every_steps")


def _every(made: Translation, key: str, steps: float, ours: str) -> None:
    """A number of steps; a share of the run is lacking."""
    if steps < 1:
        made.lack(key, steps, f"{ours} is a number of steps")
    else:
        made.set(ours, int(steps))


def trainer_keys(made: Translation) -> None:
    """The keys of transformers' Trainer that have one value in both programs, and its loggers."""
    for prefix in ("optim.", "max_grad_norm", "seed", "neftune", "output", "checkpoint.keep", "metrics.log"):
        made.same(made.table.top, made.config, made.defaults, prefix)
    for prefix in ("data.num_workers", "evaluation.at_start", "deterministic", "router_aux_loss_coef"):
        made.same(made.table.top, made.config, {}, prefix)
    reports = listed(made["report_to"])
    if "wandb" in reports:
        made.set("metrics.wandb_project", made["project"])
    if "tensorboard" in reports:
        made.set("metrics.tensorboard", True)


def saves(made: Translation) -> None:
    strategy, every = made.config.get("save_strategy"), made.config.get("save_steps")
    if strategy == "no":
        made.set("checkpoint.every_minutes", None)
    elif every and strategy in ("steps", None):
        _every(made, "save_steps", every, "checkpoint.every_steps")
    elif strategy == "best":
        made.notes.append("save_strategy: checkpoint.best keeps the best")


def quantised(made: Translation, four: bool, eight: bool) -> None:
    if four or eight:
        made.set("model.load_in", "nf4" if four else "int8")


def listed(value: Any) -> list[str]:
    """Names in a list, or in a text between commas."""
    if value is None:
        return []
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else list(value)


def functions(made: Translation, names: Iterable[str]) -> list[str]:
    """Reward functions as file.py:name, of dotted import paths; a name that is none is lacking."""
    known = []
    for name in names:
        module, _, function = str(name).rpartition(".")
        if module and function:
            known.append(f"{module.replace('.', '/')}.py:{function}")
        else:
            made.lack("reward_funcs", name, "file.py:function, or exact_number, exact_match, tagged_format")
    return known
