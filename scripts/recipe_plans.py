"""Writes stored plans of packaged recipes, all or those that are named: python -m scripts.recipe_plans [RECIPE ...].

A recipe takes about half a minute of processor time.
"""

from __future__ import annotations

import json
import sys

from jaxtune.train.config.file import packaged_recipes
from jaxtune.train.planning import recipe_plans


def facts(recipe: str) -> dict[str, object]:
    """What is stored of a recipe."""
    config, _, shape = recipe_plans.costs(recipe, "")
    found = {
        "model": config.model.path,
        "trains": "all" if config.adapter is None else "adapter",
        "parameters": recipe_plans.parameters_of(shape),
        "cards": {card: recipe_plans.forecast(recipe, card) for card in recipe_plans.CARDS},
    }
    recipe_plans.costs.cache_clear()
    return found


def main(names: list[str]) -> None:
    recipes = [recipe for recipe in packaged_recipes() if not recipe.startswith("quickstart")]
    for recipe in names or recipes:
        made = facts(recipe)
        known = json.loads(recipe_plans.FILE.read_text(encoding="utf-8")) if recipe_plans.FILE.exists() else {}
        known[recipe] = made
        lines = (f" {json.dumps(name)}: {json.dumps(known[name])}" for name in recipes if name in known)
        recipe_plans.FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        print(recipe, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
