"""Recognises whose config it is, and makes the recipe that it means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtune.convert import axolotl, llama_factory, trl
from jaxtune.convert.tables import table
from jaxtune.convert.translation import Translation
from jaxtune.train.config import ConfigError
from jaxtune.train.config.elsewhere import AXOLOTL, LLAMA_FACTORY, TRL, program_of

_ROOMS = {AXOLOTL: (axolotl, "axolotl"), LLAMA_FACTORY: (llama_factory, "llama_factory"), TRL: (trl, "trl")}


def recipe_of(values: Mapping[str, Any], folder: Path, trainer: str | None = None) -> Translation:
    """The recipe that a config of axolotl, LLaMA-Factory or TRL means. ConfigError: no known program, model or method.

    folder: the config's; LLaMA-Factory's dataset_info.json is looked for below it and below the current folder.
    trainer: TRL's command, such as "sft"; None: the one trainer that has all of its keys.
    values: the config's content.
    """
    program = program_of(values)
    if program is None:
        raise ConfigError(
            "the config has neither base_model (axolotl) nor model_name_or_path (LLaMA-Factory, TRL): it is of no "
            "program that convert knows; for torchtune, docs/moving.md has a table"
        )
    room, name = _ROOMS[program]
    recipe = Translation(program, table(name), values)
    mark = recipe.table.marks[0]
    if not isinstance(recipe[mark], str):
        raise ConfigError(f"{mark} = null: the config names no model; set it to a model's folder or hub name")
    if program == TRL:
        trl.translate(recipe, trainer)
    elif trainer is not None:
        raise ConfigError(f"--trainer {trainer}: the config is of {program}, and names its method itself")
    else:
        room.translate(recipe, folder)
    return recipe
