"""The objectives that a config can name."""

from __future__ import annotations

from typing import Any

from jaxtune.train.config import TrainConfig
from jaxtune.train.objectives.kto import KTO
from jaxtune.train.objectives.objective import Objective
from jaxtune.train.objectives.policy import GRPO, RLOO
from jaxtune.train.objectives.preference import DPO, ORPO, SimPO
from jaxtune.train.objectives.reward import Reward
from jaxtune.train.objectives.sft import SUPERVISED

PREFERENCES: dict[str, Any] = {kind.name: kind for kind in (DPO, ORPO, KTO, SimPO, Reward)}  # by objective.name

SAMPLING: dict[str, Any] = {kind.name: kind for kind in (GRPO, RLOO)}  # those that learn from rewards


def objective_of(config: TrainConfig) -> Objective:
    """The objective that config.objective names, with its options."""
    wanted = config.objective
    if wanted.name == "sft":
        return SUPERVISED
    if wanted.name in SAMPLING:
        options = {name: value for name, value in wanted.options.items() if not name.startswith("reward_")}
        return SAMPLING[wanted.name].of(**options)
    return PREFERENCES[wanted.name](**wanted.options)
