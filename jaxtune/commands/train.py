"""`jaxtune train`, which is `python -m jaxtune.train` too."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from jaxtune.commands import common


def run(arguments: Sequence[str]) -> int | None:
    """Fine-tune a model, or train one from scratch, as a recipe says."""
    parser = argparse.ArgumentParser(prog="python -m jaxtune.train", allow_abbrev=False, add_help=False)
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    if options.help:
        _print_help()
        return 0
    if options.recipe is None or "=" in options.recipe:
        from jaxtune.train.config_file import packaged_recipes

        raise ValueError(f"the first argument is a recipe: a YAML file or one of {', '.join(packaged_recipes())}")
    from jaxtune.train.config_file import load_config

    config = load_config(options.recipe, options.overrides, rows_needed=not options.plan)
    # JAX's own default is three quarters of the device; the planner counts on all that the context leaves.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    from jaxtune.train.planning.devices import allow_pinned_memory

    allow_pinned_memory()
    from jaxtune.train.app import run as train

    return train(config, check=options.check, plan=options.plan)


def _print_help() -> None:
    from rich.table import Table

    from jaxtune.train.config_file import config_keys, packaged_recipes, recipe_summary

    console = common.wide_console()
    console.print(
        "usage: python -m jaxtune.train RECIPE [key.sub=value ...] [--check | --plan]\n\n"
        "RECIPE is a YAML file or the name of a packaged recipe. Overrides win over it; their values are YAML.\n\n"
        "  --check   read config, tokenizer and data, show what would be trained and one packed row, then stop\n"
        "  --plan    show the plan: memory and speed, here or on the device plan.device names, then stop\n"
        "  --help    show this\n"
    )
    recipes = Table(title="Packaged recipes", title_justify="left", box=None, show_header=False)
    for name, path in packaged_recipes().items():
        recipes.add_row(name, recipe_summary(path))
    console.print(recipes)
    keys = Table("key", "type", "default", "meaning", title="\nKeys", title_justify="left", box=None)
    for key in config_keys():
        keys.add_row(key.name, key.type, key.default, key.help)
    console.print(keys)
