"""The sources of rows that are sampled from the model while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtune.train.data.batches import BatchSource
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.objectives.distillation import Distill
from jaxtune.train.objectives.objective import Objective
from jaxtune.train.objectives.policy import GRPO
from jaxtune.train.sampled.own_samples import own_samples
from jaxtune.train.sampled.prompts import AnswerSteps, UserFunctions, sampled_answers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def sampled_source(
    objective: Objective,
    rows: object,
    tokenizer: PreTrainedTokenizerFast,
    steps: AnswerSteps,
    ends: Sequence[int],
    positions: int,
    user_functions: UserFunctions,
    pictures: PictureOptions | None = None,
) -> BatchSource:
    """The source of an objective that samples. Raises ValueError if it has none of its own, or prompts or functions
    cannot be used.

      ends: token ids that end an answer.
      positions: most tokens of prompt and answer that the model allows.
      user_functions: for rewards.
      pictures: how those of prompts are read; None refuses prompts with pictures.
    """
    if isinstance(objective, GRPO):
        return sampled_answers(objective, rows, tokenizer, steps, ends, positions, user_functions, pictures)
    if isinstance(objective, Distill):
        return own_samples(objective, rows, tokenizer, steps, ends, positions)
    return objective.source(rows, tokenizer, steps.data, rows_per_step=steps.answers, ends=ends, seed=steps.seed)
