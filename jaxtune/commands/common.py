"""What commands share: their parsers, output in columns, and loading a model."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtune.pallas.format_names import LOADED
from jaxtune.system import terminal
from jaxtune.system.terminal import say


def wide_console() -> Any:
    """A console as wide as the terminal; for a pipe or a file, with a width that reads well."""
    return terminal.console(width=None if sys.stdout.isatty() else 140)


def print_columns(rows: Sequence[tuple[str, str]]) -> None:
    """Prints two columns, the first as wide as its longest entry; no line ends with spaces."""
    names, width = max(len(name) for name, _ in rows), wide_console().width
    for name, meaning in rows:
        begin = f"  {name:<{names}}  "
        say(textwrap.fill(meaning, width, initial_indent=begin, subsequent_indent=" " * len(begin)) or begin.rstrip())


def parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """The argument parser of `jaxtune COMMAND`."""
    description = " ".join((description or "").split())
    return argparse.ArgumentParser(prog=f"jaxtune {command}", description=description, allow_abbrev=False)


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Adds the options that make a command one of several processes (processes.join)."""
    several = "one of several processes that SLURM and Open MPI did not start: all three"
    parser.add_argument("--coordinator", metavar="HOST:PORT", help=several)
    parser.add_argument("--processes", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, metavar="I", help=argparse.SUPPRESS)


def add_numbers(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the dtype and format in which a model is loaded; see load."""
    parser.add_argument(
        "--dtype", help="dtype of the weights: bfloat16, float16 or float32 (default: that of the run; else bfloat16)"
    )
    add_load_in(parser)


def add_load_in(parser: argparse.ArgumentParser) -> None:
    """Adds --load-in."""
    parser.add_argument(
        "--load-in",
        choices=(*LOADED, "stored"),
        help="the format of the layers' weights, such as nf4 (four bits) or fp8 (eight), or as their files store them "
        "(default: for an adapter, as it was trained over them; else stored)",
    )


def load(options: argparse.Namespace):
    """(model, tokenizer) of a model folder, a hub name or an adapter folder, as the options of add_numbers say."""
    import jaxtune
    from jaxtune.models.adapters import trained_over
    from jaxtune.models.adapters.adapter_config import base_of
    from jaxtune.train.end_tokens import with_end_tokens

    dtype, folder = options.dtype, Path(options.model).expanduser()
    adapter = base_of(folder) is not None
    if dtype is None and not adapter:  # a model that a run wrote records its dtype
        dtype = (trained_over.of_run(folder) or trained_over.TrainedOver()).dtype
    model, tokenizer = jaxtune.from_pretrained(options.model, dtype=dtype, load_in=options.load_in)
    return with_end_tokens(model, tokenizer) if adapter else model, tokenizer
