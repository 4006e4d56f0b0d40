"""What commands share: the argument parser (`parser`); options that several commands have, which are --coordinator,
--processes and --process for runs of several processes (`add_processes`), and --dtype and --load-in for the dtype and
the quantised format of the weights (`add_numbers`; `add_load_in` adds the second alone); help texts in two columns as
wide as the terminal (`print_columns`, on a `wide_console`); and loading the model that --dtype and --load-in describe
(`load`)."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtune.pallas.format_names import LOAD_IN
from jaxtune.system import terminal
from jaxtune.system.terminal import say


def wide_console() -> Any:
    """Returns a rich Console for help texts: as wide as the terminal, or 140 columns if stdout is a pipe or a file. It
    is terminal.console's, so it prints [brackets] as they are, without markup, and nothing in a silent process
    (each but the first of a run of several)."""
    return terminal.console(width=None if sys.stdout.isatty() else 140)


def print_columns(rows: Sequence[tuple[str, str]]) -> None:
    """Prints `rows`, (name, meaning) pairs, in two columns on stdout, for help texts and for `jaxtune info`. The first
    column is as wide as the longest name; the second is wrapped at the width of `wide_console`. No line ends with
    spaces. There must be at least one pair."""
    names, width = max(len(name) for name, _ in rows), wide_console().width
    for name, meaning in rows:
        begin = f"  {name:<{names}}  "
        say(textwrap.fill(meaning, width, initial_indent=begin, subsequent_indent=" " * len(begin)) or begin.rstrip())


def parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """Makes the argument parser of `jaxtune COMMAND`, to which the command adds its options; `train` alone makes its
    own. Abbreviated options are refused, so that a new option never changes what an old command line means.

    Args:
      command: the command's name, such as "chat".
      description: the docstring of the command's `run`, which --help prints as one paragraph; None: --help prints none.
    """
    description = " ".join((description or "").split())
    return argparse.ArgumentParser(prog=f"jaxtune {command}", description=description, allow_abbrev=False)


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Adds to `parser`, that of `jaxtune evaluate`, the options --coordinator, --processes and --process, which make a
    command one of several processes of one run; processes.join gets their values. (`jaxtune train` adds them itself,
    because it prints its own help.) They are the address of the first process (HOST:PORT), the number of processes and
    this one's index, None where not given. A command line has all three, or none where SLURM or Open MPI started the
    processes or there is one process; Open MPI 5 and later need --coordinator alone, because they do not tell the
    address."""
    several = "one of several processes that SLURM and Open MPI did not start: all three"
    parser.add_argument("--coordinator", metavar="HOST:PORT", help=several)
    parser.add_argument("--processes", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, metavar="I", help=argparse.SUPPRESS)


def add_numbers(parser: argparse.ArgumentParser) -> None:
    """Adds --dtype and --load-in to `parser`, that of a command that loads a model (chat, generate, export, serve): the
    dtype of its weights, such as "bfloat16", and the quantised format in which its layers' weights are loaded, such as
    "nf4". `load` reads both. Each is None if it is not given: `load` then takes the dtype that the run recorded, else
    bfloat16, never a checkpoint's own; and loads an adapter's base as it was in training, and any other model as its
    files store it, which may be quantised."""
    parser.add_argument(
        "--dtype", help="dtype of the weights: bfloat16, float16 or float32 (default: that of the run; else bfloat16)"
    )
    add_load_in(parser)


def add_load_in(parser: argparse.ArgumentParser, otherwise: str = "stored") -> None:
    """Adds --load-in to `parser`, the format in which the layers' weights are loaded, such as "nf4" or "stored" (as the
    files have them). It is None if it is not given; then the command loads an adapter's base as in its training, and
    any other model as `otherwise` says. These words are only for the help: "stored" is what `load` does, and `jaxtune
    evaluate`, which loads models by itself, gives "as the recipe says"."""
    parser.add_argument(
        "--load-in",
        choices=(*LOAD_IN, "stored"),
        help="the format of the layers' weights, such as nf4 (four bits) or fp8 (eight), mxfp4 (gpt-oss's experts as "
        "published, the rest in 16 bits), or as their files store them, but with MXFP4 decoded "
        f"(default: for an adapter, as it was trained over them; else {otherwise})",
    )


def load(options: argparse.Namespace):
    """Loads the model that `options.model` names, for the commands chat, generate, export and serve: a model folder, a
    hub name, or an adapter folder, which is loaded over its base.

    Args:
      options: parsed options. `model`, `dtype` and `load_in` are read; the last two are the options --dtype and
        --load-in. If `dtype` is None, the dtype is the one that jaxtune recorded in the folder when it trained the
        adapter or the model, else bfloat16; the dtype in a checkpoint's config.json is not used. If `load_in` is None,
        an adapter's base is loaded as in its training, and any other model as its files store it.

    Returns:
      (the model, a Decoder; its tokenizer, one of transformers), where the tokenizer is None if the folder has none.
        For an adapter, the tokenizer's EOS and the token that ends a turn in its chat template are added to the model's
        own end tokens, so that an export names them too; nothing is added without a tokenizer, or to a model that
        scores texts (with_end_tokens). Any other model keeps its own: a whole model that a run wrote names these
        tokens, and commands that generate add them.

    Raises:
      ValueError: there is no such model, or it cannot be loaded so (jaxtune.from_pretrained).
    """
    import jaxtune
    from jaxtune.models.adapters import trained_over
    from jaxtune.models.adapters.adapter_config import base_of
    from jaxtune.models.generation.ends import with_end_tokens

    dtype, folder = options.dtype, Path(options.model).expanduser()
    adapter = base_of(folder) is not None
    if dtype is None and not adapter:  # a model that a run wrote records its dtype
        dtype = (trained_over.of_run(folder) or trained_over.TrainedOver()).dtype
    model, tokenizer = jaxtune.from_pretrained(options.model, dtype=dtype, load_in=options.load_in)
    return with_end_tokens(model, tokenizer) if adapter else model, tokenizer
