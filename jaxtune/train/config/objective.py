"""The section `objective` of a configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict

from jaxtune.train.config.checks import fraction, not_negative, positive, require

# The options that an objective has; the others must not be set beside it.
_OPTIONS = {
    "sft": (),
    "dpo": ("beta", "loss_type", "label_smoothing", "precompute_ref_log_probs"),
    "orpo": ("beta",),
    "kto": ("beta", "desirable_weight", "undesirable_weight", "precompute_ref_log_probs"),
    "simpo": ("beta", "simpo_gamma", "label_smoothing"),
    "reward": ("center_rewards_coefficient",),
}


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is trained for; the names and meanings of the options are TRL's."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Annotated[
        Literal["sft", "dpo", "orpo", "kto", "simpo", "reward"],
        "sft, a preference objective over pairs of answers, or reward: a model that scores texts.",
    ] = "sft"
    beta: Annotated[float | None, "Scale of the rewards (dpo, orpo, kto: 0.1; simpo: 2.0)."] = None
    loss_type: Annotated[Literal["sigmoid", "ipo", "hinge"], "Loss of a pair (dpo)."] = "sigmoid"
    label_smoothing: Annotated[float, "Probability that a preference is the wrong way around (dpo, simpo)."] = 0.0
    precompute_ref_log_probs: Annotated[
        bool, "Compute the reference's log-probabilities once, before training (dpo, kto)."
    ] = False
    desirable_weight: Annotated[float, "Weight of the losses of desirable answers (kto)."] = 1.0
    undesirable_weight: Annotated[float, "Weight of the losses of other answers (kto)."] = 1.0
    simpo_gamma: Annotated[float, "Margin by which rewards are to differ (simpo)."] = 0.5
    center_rewards_coefficient: Annotated[
        float | None, "Weight of the square of a pair's summed scores, which centres them (reward); 0.01 is usual."
    ] = None

    def __post_init__(self) -> None:
        positive("objective.beta", self.beta)
        fraction("objective.label_smoothing", self.label_smoothing, below_one=True)
        not_negative("objective.simpo_gamma", self.simpo_gamma)
        if self.center_rewards_coefficient is not None:
            not_negative("objective.center_rewards_coefficient", self.center_rewards_coefficient)
        positive("objective.desirable_weight", self.desirable_weight)
        positive("objective.undesirable_weight", self.undesirable_weight)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            unset = field.name == "name" or value == field.default
            require(
                unset or field.name in _OPTIONS[self.name],
                f"objective.{field.name}",
                value,
                f"{self.name} has no such option; leave it out",
            )
        require(
            self.loss_type == "sigmoid" or not self.label_smoothing,
            "objective.label_smoothing",
            self.label_smoothing,
            f"objective.loss_type = {self.loss_type} has no label smoothing; leave it out",
        )

    @property
    def options(self) -> dict[str, Any]:
        """What is given of the objective's options, by name."""
        named = {name: getattr(self, name) for name in _OPTIONS[self.name]}
        return {name: value for name, value in named.items() if value is not None}


DEFAULT_OBJECTIVE = ObjectiveConfig()
