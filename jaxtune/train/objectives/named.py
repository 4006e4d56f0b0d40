"""The objectives that a config can name."""

from __future__ import annotations

from typing import Any

from jaxtune.train.config import ObjectiveConfig
from jaxtune.train.objectives.distillation import Distill
from jaxtune.train.objectives.kto import KTO
from jaxtune.train.objectives.objective import Declared, Objective
from jaxtune.train.objectives.policy import GRPO, RLOO
from jaxtune.train.objectives.preference import DPO, ORPO, SimPO
from jaxtune.train.objectives.reward import Reward
from jaxtune.train.objectives.sft import SUPERVISED

# The classes of objectives over preference pairs, by objective.name.
PREFERENCES: dict[str, Any] = {kind.name: kind for kind in (DPO, ORPO, KTO, SimPO, Reward)}

# The classes of objectives that sample answers and learn from their rewards, by objective.name.
SAMPLING: dict[str, Any] = {kind.name: kind for kind in (GRPO, RLOO)}


DEFAULT: Objective = SUPERVISED


def objective_of(section: ObjectiveConfig, user_objective: Objective | None = None) -> Objective:
    """`user_objective`, or that of a section `objective`, whose options of reward functions, tools and the teacher's
    format are left out; those that are None have the class's defaults. Raises ValueError for one out of range, or a
    user's objective that declares nothing.
    """
    if user_objective is not None:
        if Declared not in type(user_objective).__mro__:
            raise ValueError(
                f"objective = {type(user_objective).__name__}: it declares nothing to the run: derive it from SFT, or "
                "from Declared (jaxtune.train.objectives.objective), which has the defaults"
            )
        return user_objective
    if section.name == SUPERVISED.name:
        return SUPERVISED
    if section.name == Distill.name:
        return Distill.of(**{name: value for name, value in section.options.items() if name != "teacher_load_in"})
    if section.name in SAMPLING:
        options = {name: value for name, value in section.options.items() if name not in section.of_source}
        return SAMPLING[section.name].of(**options)
    return PREFERENCES[section.name](**section.options)
