"""Writes the stored plans of the packaged recipes (jaxtune/train/planning/recipe_plans.json): python -m
scripts.recipe_plans. It takes about ten minutes of processor time."""

from __future__ import annotations

import json

from jaxtune.train.config.file import packaged_recipes
from jaxtune.train.planning import recipe_plans


def main() -> None:
    found = {}
    for recipe in packaged_recipes():
        if recipe.startswith("quickstart"):
            continue
        config, _, shape = recipe_plans.costs(recipe, "")
        found[recipe] = {
            "model": config.model.path,
            "trains": "all" if config.adapter is None else "adapter",
            "parameters": recipe_plans.parameters_of(shape),
            "cards": {card: recipe_plans.forecast(recipe, card) for card in recipe_plans.CARDS},
        }
        recipe_plans.costs.cache_clear()
        print(recipe, flush=True)
        lines = (f" {json.dumps(name)}: {json.dumps(plans)}" for name, plans in found.items())
        recipe_plans.FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
