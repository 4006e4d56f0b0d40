"""Configs of other programs, as the recipes that they mean."""

from jaxtune.convert.programs import recipe_of
from jaxtune.convert.translation import Translation

__all__ = ["Translation", "recipe_of"]
