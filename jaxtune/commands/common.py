"""What commands share: parsers, options, and loading a model."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtune.pallas.format_names import LOAD_IN
from jaxtune.system import early_devices, early_import, invocation, sources, terminal, timing
from jaxtune.system.terminal import say

if TYPE_CHECKING:
    from jaxtune.models.hf import Beside, Pretrained


def wide_console() -> Any:
    """A Console for help texts: as wide as the terminal, else 140 columns; silent in all processes but the first."""
    return terminal.console(width=None if sys.stdout.isatty() else 140)


def print_columns(rows: Sequence[tuple[str, str]]) -> None:
    """Prints (name, meaning) pairs, at least one, in two columns wrapped at the terminal's width."""
    names, width = max(len(name) for name, _ in rows), wide_console().width
    for name, meaning in rows:
        begin = f"  {name:<{names}}  "
        say(textwrap.fill(meaning, width, initial_indent=begin, subsequent_indent=" " * len(begin)) or begin.rstrip())


def parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `jaxtune COMMAND`. Abbreviations are refused, so that a new option changes no old command line.

    description: of the command, for its --help; None: none.
    """
    description = " ".join((description or "").split())
    return argparse.ArgumentParser(prog=f"jaxtune {command}", description=description, allow_abbrev=False)


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Adds --coordinator, --processes and --process: all three or none, but Open MPI 5 needs --coordinator alone."""
    several = "one of several processes that SLURM and Open MPI did not start: all three"
    parser.add_argument("--coordinator", metavar="HOST:PORT", help=several)
    parser.add_argument("--processes", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, metavar="I", help=argparse.SUPPRESS)


def add_timing(parser: argparse.ArgumentParser) -> None:
    """Adds --timing, for progress.show_timing at the end."""
    words = "at the end print where the seconds went: imports, rows, files, compiling by program, and so on"
    parser.add_argument("--timing", action="store_true", help=words)


def add_numbers(parser: argparse.ArgumentParser) -> None:
    """Adds --dtype and --load-in, None if not given."""
    parser.add_argument(
        "--dtype", help="dtype of the weights: bfloat16, float16 or float32 (default: that of the run; else bfloat16)"
    )
    add_load_in(parser)


def add_load_in(parser: argparse.ArgumentParser, otherwise: str = "stored") -> None:
    """Adds --load-in, None if not given. otherwise: words of the help for the default of a model without adapter."""
    parser.add_argument(
        "--load-in",
        choices=(*LOAD_IN, "stored"),
        help="the format of the layers' weights, such as nf4 (four bits) or fp8 (eight), mxfp4 (gpt-oss's experts as "
        "published, the rest in 16 bits), or as their files store them, but with MXFP4 decoded "
        f"(default: for an adapter, as it was trained over them; else {otherwise})",
    )


def begin_import(runs_code: bool = False) -> None:
    """Imports what a tokenizer needs in a thread, beside JAX. runs_code: whether the user's code runs here, too."""
    from jaxtune.models.files import transformers_import

    transformers_import.begin(runs_code or not invocation.is_command())


def begin(model: str) -> None:
    """Begins, beside the command's imports, what a command needs that loads a model on this machine alone."""
    begin_devices(model)
    begin_import()


def begin_devices(*about: str) -> None:
    """Begins to start the devices in a thread, and then to load the programs that the command needed the last time with
    the same `about`: its model or recipe.
    """

    early_import.begin(sources.digest)

    def programs() -> None:
        from jaxtune.models.programs import ahead
        from jaxtune.system.program_cache import use_program_cache

        use_program_cache()
        ahead.begin(*about)

    early_devices.begin(programs)


def streamed_to_export(pretrained: Pretrained) -> int:
    """Layers whose weights are in host memory while a model is exported."""
    from jaxtune.train.config import MemoryConfig
    from jaxtune.train.spec import loading

    if level := loading.streamed_level(MemoryConfig(), pretrained, ()):
        _say_streamed(level)
    return level


def streamed_to_answer(pretrained: Pretrained) -> int:
    """Layers whose weights stream while a model answers: as few as leave room for rows."""
    from jaxtune.models.files import load_memory

    if load_memory.has_room_to_answer(pretrained.device_bytes()):
        return 0
    from jaxtune.train.spec import loading

    level, seconds = loading.least_streamed_level(pretrained)
    if level:
        _say_streamed(level, f", and cross the link for each token of all rows: {seconds:.2g} s or more")
    return level


def _say_streamed(level: int, more: str = "") -> None:
    note = f"note: the device has no room for all weights: those of {level} layers are in host memory{more}"
    say(note, file=sys.stderr)


def load(
    options: argparse.Namespace,
    pictures: bool = False,
    beside: Beside | None = None,
    streamed: Callable[[Pretrained], int] | None = None,
):
    """(model, tokenizer or None) of `options.model`: a folder, a hub name, or an adapter's folder. Programs compiled
    from then on are kept.

    pictures: load the tower, which an adapter that adapts it has anyway.
    beside: as for from_pretrained.
    streamed: as for from_pretrained.

    dtype None is the one that jaxtune recorded when it trained, else bfloat16, never config.json's. load_in None is an
    adapter's base as in its training, else as the files store it. With an adapter, the tokenizer's EOS and the token
    that ends a turn are among the model's end tokens. ValueError: there is no such model.
    """
    import jaxtune
    from jaxtune.models.adapters import trained_over
    from jaxtune.models.adapters.adapter_config import base_of
    from jaxtune.models.adapters.adapter_files import adapts_tower
    from jaxtune.models.ends import with_end_tokens

    jaxtune.use_program_cache()
    dtype, folder = options.dtype, Path(options.model).expanduser()
    base = base_of(folder)
    adapter, pictures = base is not None, pictures or (base is not None and adapts_tower(folder, base))
    if dtype is None and not adapter:  # a model that a run wrote records its dtype
        dtype = (trained_over.of_run(folder) or trained_over.TrainedOver()).dtype
    with timing.phase("prepare"):
        model, tokenizer = jaxtune.from_pretrained(
            options.model,
            dtype=dtype,
            load_in=options.load_in,
            pictures=pictures,
            beside=beside,
            streamed=streamed,
        )
    return with_end_tokens(model, tokenizer) if adapter else model, tokenizer
