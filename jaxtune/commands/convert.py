"""The command `jaxtune convert`: a recipe from a config of axolotl or LLaMA-Factory.

`run` takes the words of the command line after `convert`; its docstring is the text that --help prints. The output, on
stdout, is a recipe as YAML, below comments that say what differs in it and what has no counterpart.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from jaxtune.commands import common
from jaxtune.system.invocation import spelled
from jaxtune.system.terminal import say


# arguments: the words after `jaxtune convert`: the path of the config. The recipe is checked before it is printed.
# ConfigError: the file cannot be read, is of neither program, or gives a recipe with faults.
def run(arguments: Sequence[str]) -> None:
    """Print the recipe that a config of axolotl or LLaMA-Factory means, and what of it has no counterpart."""
    parser = common.parser("convert", run.__doc__)
    parser.add_argument("config", help="a YAML or JSON file of axolotl or LLaMA-Factory")
    path = Path(parser.parse_args(arguments).config)
    from jaxtune.train.config import ConfigError
    from jaxtune.train.config.elsewhere import recipe_of
    from jaxtune.train.config.file import config_from_dict, config_to_yaml, read_values

    values = read_values(path)
    try:
        made = recipe_of(values, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if "train" not in made.values.get("data", {}):
        made.set("data.train", "rows.jsonl")
        made.notes.append("data.train: the config names no rows: put a file or data set there")
    config_from_dict(made.values)  # a recipe that is printed can be run
    say(f"# What {path} means, which is a config of {made.program}.\n#\n#   {spelled('train RECIPE.yaml')}")
    for title, lines in (("It differs in", made.notes), ("It has no counterpart for", made.lacking)):
        if lines:
            say(f"#\n# {title}:")
        for line in lines:
            say(textwrap.fill(line, 116, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False))
    say(config_to_yaml(made.values).rstrip())
