"""The objectives that a config can name. `objective_of` makes the one that a config asks for. It finds the classes of
objectives over pairs in the dict `PREFERENCES`, and of those over rewards in `SAMPLING`, by objective.name; "sft" and
"distill" are in neither."""

from __future__ import annotations

from typing import Any

from jaxtune.train.config import TrainConfig
from jaxtune.train.objectives.distillation import Distill
from jaxtune.train.objectives.kto import KTO
from jaxtune.train.objectives.objective import Objective
from jaxtune.train.objectives.policy import GRPO, RLOO
from jaxtune.train.objectives.preference import DPO, ORPO, SimPO
from jaxtune.train.objectives.reward import Reward
from jaxtune.train.objectives.sft import SUPERVISED

# The classes of objectives over preference pairs, by objective.name.
PREFERENCES: dict[str, Any] = {kind.name: kind for kind in (DPO, ORPO, KTO, SimPO, Reward)}

# The classes of objectives that sample answers and learn from their rewards, by objective.name.
SAMPLING: dict[str, Any] = {kind.name: kind for kind in (GRPO, RLOO)}


def objective_of(config: TrainConfig) -> Objective:
    """The objective that config.objective.name selects, constructed with the options in the config's section
    `objective`. The options of reward functions, tools and the teacher's format are left out, because the batch source
    and the loading use those; an option that is None has the default of the objective's class. A run makes its
    objective by it unless it is given one; the loading of the model and the plans that are made before a run (--plan)
    ask it too, for its head and for `reference_runs`. Raises ValueError if the objective's class finds an option out of
    its range."""
    wanted = config.objective
    if wanted.name == "sft":
        return SUPERVISED
    if wanted.name == Distill.name:
        return Distill.of(**{name: value for name, value in wanted.options.items() if name != "teacher_load_in"})
    if wanted.name in SAMPLING:
        options = {name: value for name, value in wanted.options.items() if name not in wanted.of_source}
        return SAMPLING[wanted.name].of(**options)
    return PREFERENCES[wanted.name](**wanted.options)
