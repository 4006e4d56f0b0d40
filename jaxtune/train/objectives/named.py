"""The objectives that a config can name."""

from __future__ import annotations

from typing import Any

from jaxtune.train.config import TrainConfig
from jaxtune.train.objectives.kto import KTO
from jaxtune.train.objectives.objective import Objective
from jaxtune.train.objectives.preference import DPO, ORPO, SimPO
from jaxtune.train.objectives.reward import Reward
from jaxtune.train.objectives.sft import SUPERVISED

PREFERENCES: dict[str, Any] = {kind.name: kind for kind in (DPO, ORPO, KTO, SimPO, Reward)}  # by objective.name


def objective_of(config: TrainConfig) -> Objective:
    """The objective that config.objective names, with its options."""
    wanted = config.objective
    return SUPERVISED if wanted.name == "sft" else PREFERENCES[wanted.name](**wanted.options)
