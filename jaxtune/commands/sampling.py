"""Options of commands that sample, as settings of jaxtune.generate."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from jaxtune.commands.common import add_numbers


def _arguments(text: str) -> Mapping[str, object] | None:
    """The value of --template-arguments."""
    from jaxtune.conversations.templates import checked_arguments

    try:
        return checked_arguments(json.loads(text), "--template-arguments")
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_options(parser: argparse.ArgumentParser, temperature: float, max_new_tokens: int) -> None:
    """Adds the options of sampling with these defaults, and those of common.add_numbers."""
    words = f"most tokens of an answer (default: {max_new_tokens})"
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=words)
    default = f"0 takes the likeliest token (default: {temperature:g})"
    parser.add_argument("--temperature", type=float, default=temperature, metavar="X", help=default)
    for flag, kind, value, words in (
        ("top-k", int, 0, "draw from this many of the likeliest tokens; 0 (the default): all"),
        (
            "top-p",
            float,
            1.0,
            "draw from the likeliest tokens whose probabilities sum to this; 1 (the default): all",
        ),
        (
            "min-p",
            float,
            0.0,
            "leave out tokens below this share of the likeliest one; 0 (the default): none",
        ),
        ("repetition-penalty", float, 1.0, "above 1: tokens that were said become less likely (default: 1)"),
        ("seed", int, 0, "of the drawing: the same seed, the same answers (default: 0)"),
    ):
        parser.add_argument(f"--{flag}", type=kind, default=value, metavar="N" if kind is int else "X", help=words)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be repeated")
    parser.add_argument(
        "--template-arguments",
        type=_arguments,
        metavar="JSON",
        help="variables of the chat template, such as '{\"enable_thinking\": false}'",
    )
    add_numbers(parser)


def add_cache(parser: argparse.ArgumentParser, of: str = "") -> None:
    """Adds --cache, as Sampler's `cache`. of: words before its help."""
    words = f"{of}how keys and values are stored: fp8 takes half the memory, and rounds (default: the model's dtype)"
    parser.add_argument("--cache", choices=("fp8",), help=words)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of jaxtune.generate, Sampler.submit and Conversation, without the number of tokens."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return {name: getattr(options, name) for name in names} | {"stop_strings": options.stop}
