"""An objective with rows of its own that nothing else knows: the model answers prompts, answers that have more of the
wanted tokens than the others of their step are trained on, and a frozen model is run beside, near which it stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune import generate
from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import without_adapter
from jaxtune.train.config import DataConfig
from jaxtune.train.data.batches import Batch, BatchSource, Json
from jaxtune.train.objectives.sft import SFT
from jaxtune.train.sampled.prompts import read_prompts


@dataclasses.dataclass(frozen=True)
class BetterAnswers(SFT):
    answer_tokens: int = 6
    wanted: int = 24  # ids below it
    pull: float = 0.1  # of the divergence from the base
    sums = ("kl",)
    samples = True
    reference_runs = 1

    def source(
        self, rows: object, tokenizer: Any, data: DataConfig, *, rows_per_step: int, ends: Sequence[int], seed: int
    ) -> BatchSource:
        prompts = read_prompts(rows, tokenizer, data, data.length - self.answer_tokens)
        return Answers(self, [prompt.ids for prompt in prompts], data, rows_per_step, ends, seed)

    def loss(self, model, batch, forward):
        hidden, base = forward(model, batch), without_adapter(model)
        loss, count = forward.cross_entropy(model, hidden, batch)
        ours = jax.nn.log_softmax(model.logits(hidden))
        theirs = jax.nn.log_softmax(base.logits(forward.frozen(base, batch)))
        kl = ((jnp.exp(ours) * (ours - theirs)).sum(-1) * batch.weights).sum()
        return loss + self.pull * kl, count, {"kl": kl}

    def metrics(self, sums):
        return {"kl": sums["kl"] / (sums["count"] + 1e-9)}


class Answers(BatchSource):
    """Answers that depend on the seed, the step and the weights alone."""

    needs_model = True

    def __init__(
        self,
        objective: BetterAnswers,
        prompts: Sequence[tuple[int, ...]],
        data: DataConfig,
        rows_per_step: int,
        ends: Sequence[int],
        seed: int,
    ):
        self.objective, self.prompts, self.data, self.ends, self.seed = objective, prompts, data, ends, seed
        self.rows_per_step = rows_per_step
        self.rewards: dict[int, float] = {}  # the mean of each step's answers

    @property
    def length(self) -> int:
        return self.data.length

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        assert model is not None
        first = step * self.rows_per_step
        prompts = [self.prompts[(first + row) % len(self.prompts)] for row in range(self.rows_per_step)]
        answers = generate(
            model(), prompts, self.objective.answer_tokens, 1.0, seed=self.seed + step, eos_token_ids=self.ends
        )
        rewards = np.array([np.mean([token < self.objective.wanted for token in answer] or 0) for answer in answers])
        self.rewards[step] = float(rewards.mean())
        batch = Batch.empty(self.rows_per_step, self.length)
        better = np.maximum(rewards - rewards.mean(), 1e-3)
        for row, (prompt, answer, weight) in enumerate(zip(prompts, answers, better, strict=True)):
            text = [*prompt, *answer]
            batch.tokens[row, : len(text)], batch.segment_ids[row, : len(text)] = text, 1
            batch.targets[row, : len(text) - 1], batch.positions[row, : len(text)] = text[1:], np.arange(len(text))
            batch.weights[row, len(prompt) - 1 : len(text) - 1] = weight
        return batch

    def identity(self) -> dict[str, Json]:
        return {"prompts": [list(prompt) for prompt in self.prompts]}
