"""The options of commands that generate: settings of jaxtune.generate, and the dtype."""

from __future__ import annotations

import argparse
from typing import Any


def add_options(parser: argparse.ArgumentParser, temperature: float) -> None:
    """The options that are settings of jaxtune.generate, and the dtype."""
    parser.add_argument(
        "--temperature", type=float, default=temperature, help=f"0 takes the likeliest token (default: {temperature:g})"
    )
    parser.add_argument("--top-k", type=int, default=0, help="only so many likeliest tokens; 0 (the default): all")
    parser.add_argument("--top-p", type=float, default=1.0, help="only the likeliest with this probability together")
    parser.add_argument("--min-p", type=float, default=0.0, help="only those with this part of the likeliest one's")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: less of what was said")
    parser.add_argument("--stop", action="append", default=[], help="text that ends an answer; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of sampling: the same seed, the same answers (default: 0)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the weights (default: bfloat16)")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return {name: getattr(options, name) for name in names} | {"stop_strings": options.stop}
