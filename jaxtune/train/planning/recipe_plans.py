"""Stored plans of the packaged recipes on usual cards, as planning takes minutes; `python -m scripts.recipe_plans`
writes them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.model_folder import find_config
from jaxtune.models.files.quant import parameters
from jaxtune.models.registry import config_from_hf, weights_stored_in
from jaxtune.pallas.fitted import planned_for
from jaxtune.profile.data_sheets import data_sheet
from jaxtune.train.config import TrainConfig
from jaxtune.train.config.file import load_config, packaged_recipes
from jaxtune.train.planning import devices, search
from jaxtune.train.planning.choice import PlanError
from jaxtune.train.planning.cost import StepCost, abstract_model, step_cost
from jaxtune.train.planning.step_spec import StepSpec

FAST = 1_000  # tokens/s from which a recipe is proposed
FILE = Path(__file__).with_name("recipe_plans.json")
CARDS = (
    *("RTX 4060", "RTX 3060", "RTX 4060 Ti 16GB", "RTX 4080", "L4", "RTX 3090", "RTX 4090", "RTX 5090", "A40"),
    *("A100", "H100", "RTX PRO 6000 Blackwell", "H200"),
)


@functools.cache
def costs(recipe: str, like: str) -> tuple[TrainConfig, StepCost, DecoderConfig]:
    """(config, costs of a step, the model's config). like: a card whose fitted numbers count."""
    config = load_config(recipe, [], rows_needed=False)
    with planned_for(like):
        hf = find_config(config.model.path or "")
        shape = config_from_hf(hf)
        model = dataclasses.replace(config.model, load_in=config.model.load_in or weights_stored_in(hf))
        config = dataclasses.replace(config, model=model)
        spec = StepSpec.of(config)
        return config, step_cost(abstract_model(shape, spec.model), spec), shape


def parameters_of(shape: DecoderConfig) -> int:
    return parameters(nnx.state(nnx.eval_shape(lambda: Decoder(shape, jax.random.key(0), "bfloat16"))))


def forecast(recipe: str, card: str) -> dict[str, float] | None:
    """{"gb": peak, "tokens_per_second"} of the best plan with all weights on the card; None: none fits."""
    # Costs have fitted numbers of the cards that were measured: H100, and H200 for all others.
    config, step_costs, _ = costs(recipe, "H100" if card == "H100" else "")
    device = devices.find_device(card)
    budget = devices.budget(config.memory, device)
    assert budget is not None
    with planned_for(card):
        try:
            room = search.Room(budget, devices.limit(config.memory, device))
            best, _ = search.next_plan(step_costs.without_last_resorts(), StepSpec.of(config), device, room)
        except PlanError:
            return None
    return {"gb": round(best.peak_bytes / 1e9, 2), "tokens_per_second": float(f"{best.tokens_per_second:.3g}")}


@dataclasses.dataclass(frozen=True)
class RecipePlan:
    recipe: str
    model: str
    trains: str  # "adapter" or "all" parameters
    parameters: int
    gb: float  # peak of device memory
    tokens_per_second: float
    best: bool = False  # the fastest recipe of its model that trains the same


@functools.cache
def stored() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def unplanned() -> list[str]:
    """The recipes for a GPU that have no stored plans."""
    return [name for name in packaged_recipes() if name not in stored() and not name.startswith("quickstart")]


def on_card(card: str) -> tuple[list[RecipePlan], list[str]]:
    """(recipes that fit one of CARDS, largest model first; names of the others)."""
    fitting, too_large = [], []
    for recipe, facts in stored().items():
        plan = facts["cards"][card]
        if plan is None:
            too_large.append(recipe)
        else:
            fitting.append(RecipePlan(recipe, facts["model"], facts["trains"], facts["parameters"], **plan))
    fastest = {
        (plan.model, plan.trains): plan.recipe for plan in sorted(fitting, key=lambda plan: plan.tokens_per_second)
    }
    marked = [dataclasses.replace(plan, best=fastest[plan.model, plan.trains] == plan.recipe) for plan in fitting]
    return sorted(marked, key=lambda plan: (-plan.parameters, plan.model, -plan.tokens_per_second)), too_large


def choice(fitting: Sequence[RecipePlan]) -> RecipePlan:
    """The recipe to take: the largest adapter model at FAST tokens/s or more, else the fastest of all."""
    fast = [plan for plan in fitting if plan.tokens_per_second >= FAST and plan.trains == "adapter"]
    if fast:
        return max(fast, key=lambda plan: (plan.parameters, plan.tokens_per_second))
    return max(fitting, key=lambda plan: plan.tokens_per_second)


def nearest(card: str) -> str:
    """The card with stored plans most like `card`: the largest with no more memory, then by speed. ValueError if
    unknown or smaller than all.
    """
    devices.find_device(card)
    sheet = data_sheet(card)
    assert sheet is not None
    sheets = [(name, card_sheet) for name in CARDS if (card_sheet := data_sheet(name)) is not None]
    fitting = [(name, card_sheet) for name, card_sheet in sheets if card_sheet.memory_gib <= sheet.memory_gib]
    if not fitting:
        raise ValueError(f"{card}: its {sheet.memory_gib:g} GB are less than any packaged recipe was planned for")
    return min(
        fitting, key=lambda entry: (-entry[1].memory_gib, abs(entry[1].bf16_tflops - sheet.bf16_tflops), entry[0])
    )[0]
