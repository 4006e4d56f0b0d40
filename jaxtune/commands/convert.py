"""The command `jaxtune convert`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from jaxtune.commands import common
from jaxtune.system.invocation import spelled
from jaxtune.system.terminal import say

_EXIT_LACKING = 3


def run(arguments: Sequence[str]) -> int:
    """Print the recipe that a config of axolotl, LLaMA-Factory or TRL means.

    What of it has no counterpart stands on stderr and in the recipe's comments; the exit code is then 3, also of a
    config that no recipe can mean. The first rows of local files are read and rendered before."""
    parser = common.parser("convert", run.__doc__)
    parser.add_argument("config", help="a YAML or JSON file of axolotl, LLaMA-Factory, or one of TRL's commands")
    parser.add_argument("--trainer", help="TRL's command: sft, dpo, kto, reward, grpo or rloo")
    options = parser.parse_args(arguments)
    path = Path(options.config)
    from jaxtune.commands import proof
    from jaxtune.convert import recipe_of
    from jaxtune.train.config import ConfigError
    from jaxtune.train.config.file import config_to_yaml, read_values

    values = read_values(path)
    try:
        recipe = recipe_of(values, path.parent, options.trainer)
        proof.prove(recipe)
    except ConfigError as error:
        say(f"jaxtune: error: {path}: {error}", file=sys.stderr)
        return _EXIT_LACKING
    say(f"# What {path} means, which is a config of {recipe.program}.\n#\n#   {spelled('train RECIPE.yaml')}")
    titles = {
        "It differs in": recipe.notes,
        f"The config does not say, and {recipe.program} has": recipe.implied,
        "Rows that were rendered": recipe.proved,
        "It has no counterpart for": recipe.lacking,
    }
    for title, lines in titles.items():
        if lines:
            say(f"#\n# {title}:")
        for line in lines:
            say(textwrap.fill(line, 116, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False))
    say(config_to_yaml(recipe.values).rstrip())
    for line in recipe.lacking:
        say(f"no counterpart for {line}", file=sys.stderr)
    return _EXIT_LACKING if recipe.lacking else 0
