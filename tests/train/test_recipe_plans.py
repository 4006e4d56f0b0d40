"""jaxtune info --device: the stored plans are the planner's, and what is proposed follows from them."""

import random
import re

import pytest

from jaxtune import cli
from jaxtune.profile.data_sheets import data_sheet, known_devices
from jaxtune.train.config.file import load_config, packaged_recipes
from jaxtune.train.planning import recipe_plans

RECIPES = sorted(name for name in packaged_recipes() if not name.startswith("quickstart"))


def test_every_recipe_is_planned_for_every_card():
    assert not recipe_plans.unplanned() and sorted(recipe_plans.stored()) == RECIPES
    for recipe, facts in recipe_plans.stored().items():
        assert tuple(facts["cards"]) == recipe_plans.CARDS
        config = load_config(recipe, [], rows_needed=False)
        assert facts["model"] == config.model.path
        assert facts["trains"] == ("all" if config.adapter is None else "adapter")


def drawn():
    """Pairs of which one fits; others each time that a recipe or a card comes."""
    slow = "qwen3.5-35b-a3b"  # a plan takes a minute
    pairs = [(recipe, card) for recipe in RECIPES if recipe != slow for card in recipe_plans.CARDS]
    chosen = random.Random(len(pairs)).sample(pairs, 3) + [("lora-0.5b", "H200")]
    return [*chosen, pytest.param(slow, "A100", marks=pytest.mark.full)]


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "card"), drawn())
def test_a_stored_plan_is_what_the_planner_says_today(recipe, card):
    recorded, found = recipe_plans.stored()[recipe]["cards"][card], recipe_plans.forecast(recipe, card)
    again = "python -m scripts.recipe_plans writes them anew"
    assert (recorded is None) == (found is None), again
    if found is not None:
        assert recorded == pytest.approx(found, rel=1e-2), again


def test_a_larger_card_of_a_kind_fits_what_a_smaller_one_does():
    pairs = (("RTX 4060", "RTX 3060"), ("RTX 3060", "RTX 3090"), ("RTX 4090", "RTX 5090"), ("A100", "H200"))
    for smaller, larger in pairs:
        names = [{plan.recipe for plan in recipe_plans.on_card(card)[0]} for card in (smaller, larger)]
        assert names[0] <= names[1], (smaller, larger)


def test_every_known_card_has_an_answer():
    for card in known_devices():
        like, sheet = recipe_plans.nearest(card), data_sheet(card)
        assert data_sheet(like).memory_gib <= sheet.memory_gib, card
        assert card not in recipe_plans.CARDS or like == card
        fitting, others = recipe_plans.on_card(like)
        assert sorted([plan.recipe for plan in fitting] + others) == RECIPES, card
        sizes = [plan.parameters for plan in fitting]
        assert sizes == sorted(sizes, reverse=True), card
        assert sum(plan.best for plan in fitting) == len({(plan.model, plan.trains) for plan in fitting}), card
        assert not fitting or recipe_plans.choice(fitting).best, card


def test_the_command_prints_the_table_and_one_choice(capsys):
    assert cli.main(["info", "--device", "RTX 4090"]) == 0
    text = capsys.readouterr().out
    fitting, others = recipe_plans.on_card("RTX 4090")
    rows = re.findall(r"^  (\*?) *([\w.-]+) +([\d.]+) GB +([\d,]+) tokens/s", text, re.M)
    assert [name for _, name, *_ in rows] == [plan.recipe for plan in fitting]
    assert all(float(gb) <= 24.7 for _, _, gb, _ in rows)
    assert "too large: " + ", ".join(others) in text
    [taken] = re.findall(r"^take ([\w.-]+)", text, re.M)
    assert f"train {taken} --plan plan.device='RTX 4090' data.length=N" in text
    assert cli.main(["info", "--device", "RTX 3090 Ti"]) == 0
    assert "recipes on RTX 3090 Ti, as planned for RTX " in capsys.readouterr().out
    assert cli.main(["info", "--device", "RTX 4091"]) == cli.USER_ERROR
    assert "did you mean RTX 4090" in capsys.readouterr().err
