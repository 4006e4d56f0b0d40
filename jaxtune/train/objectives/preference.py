"""Preference objectives: DPO, ORPO and SimPO, over pairs of a chosen and a rejected answer to one prompt.

A step's loss is the mean over its pairs. The documents of a pair are neighbours in one packed row (data/pairs.py), and
the whole row goes through the model once. log p is the sum of the log-probabilities of an answer's tokens, those that
would be trained on in supervised fine-tuning. Names of options and metrics are TRL's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import has_adapter, matrices, without_adapter
from jaxtune.train.config import ROW_OPTIONS, ConfigError, DataConfig
from jaxtune.train.data import Batch, prepare
from jaxtune.train.data.formats import PREFERENCE
from jaxtune.train.data.pairs import PAIRS, REFERENCE, PairDataset
from jaxtune.train.loss import Forward

METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


@dataclasses.dataclass(frozen=True)
class Answers:
    """Sums over the tokens of each answer of a batch: float32[rows, most pairs, 2], the chosen ones first.

    logps: of log-probabilities. tokens: their number, at least 1.
    """

    logps: jax.Array
    tokens: jax.Array

    @property
    def means(self) -> jax.Array:
        return self.logps / self.tokens


def answers(model: Decoder, hidden: jax.Array, batch: Batch, forward: Forward) -> Answers:
    """The answers of the model whose hidden states these are."""
    losses = forward.token_losses(model, hidden, batch)
    with jax.named_scope("loss"):
        rows, most = batch.extra[PAIRS].shape
        # Compared and added, not scattered: the same bits each time, and one pass over the tokens.
        within = batch.segment_ids[..., None] == jnp.arange(1, 2 * most + 1, dtype=batch.segment_ids.dtype)

        def sums(values):
            return jnp.where(within, values[..., None], 0.0).sum(1).reshape(rows, most, 2)

        return Answers(-sums(losses), jnp.maximum(sums(batch.weights), 1.0))


@dataclasses.dataclass(frozen=True)
class Preference:
    """What preference objectives share; see objective.Objective. beta: of the rewards, which are beta times what the
    objective compares."""

    beta: float = 0.1

    unit: ClassVar[str] = "pairs"
    sums: ClassVar[tuple[str, ...]] = METRICS

    @property
    def reference_runs(self) -> int:
        return 0

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> PairDataset:
        if not isinstance(rows, PairDataset):
            options = {key: getattr(data, key) for key in (*ROW_OPTIONS, "cache_dir", "num_workers")}
            options |= {"format": PREFERENCE if data.format == "auto" else data.format, "last_response_only": True}
            if data.train_on != "responses":
                raise ConfigError("data.train_on = 'all': preferences compare responses; leave it out")
            if data.overflow == "split":
                raise ConfigError("data.overflow = 'split': a pair cannot be laid out in pieces; set truncate or error")
            made = prepare(rows, tokenizer, vocab_size=vocab_size, max_rows=max_rows, pairs=True, **options)
            fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
            rows = PairDataset(**fields)
        if rows.summary.max_token >= vocab_size:
            raise ValueError(
                f"token id {rows.summary.max_token} is beyond the model's vocabulary of {vocab_size}: these rows were "
                "prepared with the tokenizer of another model"
            )
        return rows

    def check(self, model: Decoder) -> None:
        """Refuses a model that the objective cannot train."""

    def compared(self, model: Decoder, batch: Batch, forward: Forward, ours: Answers) -> jax.Array:
        """What is compared, times beta the rewards: float32[rows, most pairs, 2]."""
        raise NotImplementedError

    def pair_losses(self, compared: jax.Array, ours: Answers) -> jax.Array:
        """The losses of pairs, float32[rows, most pairs]."""
        raise NotImplementedError

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        ours = answers(model, forward(model, batch), batch, forward)
        compared = self.compared(model, batch, forward, ours)
        there = batch.extra[PAIRS]
        with jax.named_scope("loss"):
            losses = jnp.where(there > 0, self.pair_losses(compared, ours), 0.0)
            values = [*jnp.moveaxis(self.beta * compared, -1, 0)]
            values += [values[0] > values[1], values[0] - values[1], *jnp.moveaxis(ours.logps, -1, 0)]
            sums = {name: (value * there).sum() for name, value in zip(METRICS, values, strict=True)}
            return losses.sum(), there.sum(), jax.lax.stop_gradient(sums)

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        return {name: sums[name] / (sums["count"] + (sums["count"] == 0)) for name in METRICS}


@dataclasses.dataclass(frozen=True)
class DPO(Preference):
    """Direct preference optimisation (arXiv 2305.18290): the log-ratio of each answer to a reference model, compared.

    Args:
      beta: how strongly the model is held to the reference.
      loss_type: "sigmoid"; "ipo" (arXiv 2310.12036), over means of a response's tokens; "hinge" (arXiv 2305.10425).
      label_smoothing: probability that a preference is the wrong way around (sigmoid).
      precompute_ref_log_probs: the reference's numbers are computed once, before training.
    The reference is the model with its adapter off, or what a data set's `reference` says that it gave.
    """

    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    label_smoothing: float = 0.0
    precompute_ref_log_probs: bool = False

    @property
    def reference_runs(self) -> int:
        return 0 if self.precompute_ref_log_probs else 1

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> PairDataset:
        made = super().prepare(rows, tokenizer, data, vocab_size=vocab_size, max_rows=max_rows)
        if self.precompute_ref_log_probs and made.reference is None:
            made = dataclasses.replace(made, reference=np.full(len(made.documents), np.nan, np.float32))
        return made

    def check(self, model: Decoder) -> None:
        if not has_adapter(model):
            raise ValueError(
                "objective = dpo: the reference is the model with its adapter off, and this one has no adapter: set "
                "adapter: {}, or take an objective without a reference (orpo, simpo)"
            )
        trains = nnx.state(model, nnx.Param)
        adapters = sum(len(jax.tree.leaves(nnx.state(m.lora, nnx.Param))) for _, m in matrices(model) if m.lora)
        whole = sum(holder is not None and holder.original is not None for holder in (model.embedding, model.head))
        if len(jax.tree.leaves(trains)) != adapters + whole:
            raise ValueError(
                "objective = dpo: weights beside the adapter train, so that the model with its adapter off would not "
                "stay what it was: freeze them (get_peft_model), or take an objective without a reference"
            )

    def reference(self, model: Decoder, batch: Batch, forward: Forward) -> jax.Array:
        """float32[rows, most pairs, 2]: log p of the answers under the reference."""
        base = without_adapter(model)
        return answers(base, forward.frozen(base, batch), batch, forward).logps

    def compared(self, model: Decoder, batch: Batch, forward: Forward, ours: Answers) -> jax.Array:
        if REFERENCE in batch.extra:
            theirs = Answers(batch.extra[REFERENCE], ours.tokens)
        else:
            theirs = Answers(self.reference(model, batch, forward), ours.tokens)
        if self.loss_type == "ipo":
            return ours.means - theirs.means
        return ours.logps - theirs.logps

    def pair_losses(self, compared: jax.Array, ours: Answers) -> jax.Array:
        logits = compared[..., 0] - compared[..., 1]
        if self.loss_type == "ipo":
            return (logits - 1.0 / (2.0 * self.beta)) ** 2
        if self.loss_type == "hinge":
            return jax.nn.relu(1.0 - self.beta * logits)
        return _smoothed(self.beta * logits, self.label_smoothing)


@dataclasses.dataclass(frozen=True)
class ORPO(Preference):
    """Odds-ratio preference optimisation (arXiv 2403.07691): the mean negative log-likelihood of the chosen answer's
    tokens, and beta times the odds ratio's loss. Without a reference. Rewards are beta times mean log-probabilities."""

    def compared(self, model: Decoder, batch: Batch, forward: Forward, ours: Answers) -> jax.Array:
        return ours.means

    def pair_losses(self, compared: jax.Array, ours: Answers) -> jax.Array:
        # A mean of 0 is a certain answer, or no pair, whose odds have no logarithm.
        means = jnp.minimum(compared, -1e-7)
        odds = means - jnp.log(-jnp.expm1(means))
        return -compared[..., 0] - self.beta * jax.nn.log_sigmoid(odds[..., 0] - odds[..., 1])


@dataclasses.dataclass(frozen=True)
class SimPO(Preference):
    """Simple preference optimisation (arXiv 2405.14734): mean log-probabilities, which are to differ by simpo_gamma /
    beta. Without a reference."""

    beta: float = 2.0
    simpo_gamma: float = 0.5
    label_smoothing: float = 0.0

    def compared(self, model: Decoder, batch: Batch, forward: Forward, ours: Answers) -> jax.Array:
        return ours.means

    def pair_losses(self, compared: jax.Array, ours: Answers) -> jax.Array:
        logits = compared[..., 0] - compared[..., 1] - self.simpo_gamma / self.beta
        return _smoothed(self.beta * logits, self.label_smoothing)


def _smoothed(logits: jax.Array, label_smoothing: float) -> jax.Array:
    """The logistic loss of logits whose label is the other one with probability label_smoothing."""
    right, wrong = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return -(1.0 - label_smoothing) * right - label_smoothing * wrong


PREFERENCES: dict[str, type[Preference]] = {"dpo": DPO, "orpo": ORPO, "simpo": SimPO}
