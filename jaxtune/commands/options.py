"""Other programs' options, which are keys of a recipe here: what an error proposes for them."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence

from jaxtune.system.invocation import spelled

# Names whose last word is no key's.
_NAMES = {
    "lr": "optim.learning_rate",
    "model": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "train_file": "data.train",
    "data": "data.train",
    "eval_dataset": "data.eval",
    "output_dir": "output",
    "out": "output",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "max_steps": "steps",
    "batch_size": "rows_per_step",
    "per_device_train_batch_size": "rows_per_step",
    "train_batch_size": "rows_per_step",
    "gradient_accumulation_steps": "micro_batches",
    "max_length": "data.length",
    "max_seq_length": "data.length",
    "seq_len": "data.length",
    "cutoff_len": "data.length",
    "lora_r": "adapter.r",
    "lora_rank": "adapter.r",
    "rank": "adapter.r",
    "warmup": "schedule.warmup_ratio",
    "lr_scheduler_type": "schedule.name",
    "lr_scheduler": "schedule.name",
    "optimizer": "optim.name",
    "load_in_4bit": "model.load_in=nf4",
    "load_in_8bit": "model.load_in=int8",
    "device": "plan.device",
    "resume": "",
    "resume_from_checkpoint": "",
}


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command whose settings are words key=value; ValueError proposes a key for an unknown one."""
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if not unknown:
        return options
    option = unknown[0]
    words = [*arguments[list(arguments).index(option) + 1 :], "-"] if option in arguments else ["-"]
    value = "..." if words[0].startswith("-") or "=" in words[0] else words[0]
    hint = as_override(option, value) or f"'{spelled(parser.prog.partition(' ')[2] + ' --help')}' lists them"
    raise ValueError(f"unknown option {option}: settings are words such as optim.learning_rate=1e-4; {hint}")


def as_override(option: str, value: str = "...") -> str:
    """What to write in place of an option such as --lr, as key=value; "" if no key is near.

    option: with its dashes.
    value: to the right of the "=".
    """
    from jaxtune.train.config.file import config_keys

    name, equals, given_value = option.lstrip("-").partition("=")
    name, value = name.replace("-", "_"), given_value if equals else value
    keys = [key.name for key in config_keys()]
    last = {key.rpartition(".")[2]: key for key in reversed(keys)}
    names = {**last, **{key: key for key in keys}, **_NAMES}
    near = [name] if name in names else difflib.get_close_matches(name, names, 1, 0.75)
    if not near:
        return ""
    key = names[near[0]]
    if not key:
        return "the same command continues a run that was stopped"
    return f"write {key}" if "=" in key else f"write {key}={value}"
