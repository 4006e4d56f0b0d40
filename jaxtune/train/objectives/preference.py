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
from jaxtune.models.heads import TEXT, Head
from jaxtune.models.lora import has_adapter, matrices, without_adapter
from jaxtune.models.placement import partition
from jaxtune.train.config import ROW_OPTIONS, ConfigError, DataConfig
from jaxtune.train.data import Batch, prepare
from jaxtune.train.data.formats import PREFERENCE
from jaxtune.train.data.pairs import PAIRS, REFERENCE, PairDataset
from jaxtune.train.program.loss import Forward

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

    logps: of log-probabilities. tokens: their number, at least 1. documents: as logps and tokens, of prompt and answer;
    None where they were not asked for.
    """

    logps: jax.Array
    tokens: jax.Array
    documents: Answers | None = None

    @property
    def means(self) -> jax.Array:
        return self.logps / self.tokens


def answers(model: Decoder, hidden: jax.Array, batch: Batch, forward: Forward, documents: bool = False) -> Answers:
    """The answers of the model whose hidden states these are."""
    weighed = batch
    if documents:  # every token has a loss that the one before it predicts
        follows = jnp.pad(batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1], ((0, 0), (0, 1)))
        weighed = dataclasses.replace(batch, weights=(follows & (batch.segment_ids > 0)).astype(jnp.float32))
    losses = forward.token_losses(model, hidden, weighed)
    with jax.named_scope("loss"):
        rows, most = batch.extra[PAIRS].shape
        # Compared and added, not scattered: the same bits each time, and one pass over the tokens.
        within = batch.segment_ids[..., None] == jnp.arange(1, 2 * most + 1, dtype=batch.segment_ids.dtype)

        def sums(values):
            return jnp.where(within, values[..., None], 0.0).sum(1).reshape(rows, most, 2)

        whole = Answers(-sums(losses), sums(weighed.weights)) if documents else None
        return Answers(-sums(losses * batch.weights), jnp.maximum(sums(batch.weights), 1.0), whole)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """What objectives over pairs of documents share. form: of the rows."""

    name: ClassVar[str]
    form: ClassVar[str] = PREFERENCE
    unit: ClassVar[str] = "pairs"
    head: ClassVar[Head] = TEXT
    sums: ClassVar[tuple[str, ...]]

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> PairDataset:
        if not isinstance(rows, PairDataset):
            options = {key: getattr(data, key) for key in (*ROW_OPTIONS, "cache_dir", "num_workers")}
            if data.format not in ("auto", self.form):
                raise ConfigError(f"data.format = {data.format!r}: {self.name} takes {self.form} rows; leave it out")
            options |= {"format": self.form, "last_response_only": True}
            if data.train_on != "responses":
                raise ConfigError("data.train_on = 'all': preferences compare responses; leave it out")
            if data.overflow == "split":
                raise ConfigError("data.overflow = 'split': a pair cannot be laid out in pieces; set truncate or error")
            made = prepare(rows, tokenizer, vocab_size=vocab_size, max_rows=max_rows, pairs=True, **options)
            fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
            rows = PairDataset(**fields)
        rows.require_vocabulary(vocab_size)
        return rows

    @property
    def reference_runs(self) -> int:
        return 0

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Means over the pairs."""
        return {name: sums[name] / (sums["count"] + (sums["count"] == 0)) for name in self.sums}


@dataclasses.dataclass(frozen=True)
class Preference(Pairs):
    """What preference objectives share; see objective.Objective. beta: of the rewards, which are beta times what the
    objective compares (of DPO, the log-ratios whatever its loss).

    by_mean: log p of an answer is a mean over its tokens, in what is compared and in metrics. documents: see Answers.
    """

    beta: float = 0.1

    sums: ClassVar[tuple[str, ...]] = METRICS
    by_mean: ClassVar[bool] = False
    documents: ClassVar[bool] = False

    def check(self, model: Decoder) -> None:
        """Refuses a model that the objective cannot train."""

    def compared(self, model: Decoder, batch: Batch, forward: Forward, ours: Answers) -> jax.Array:
        """What is compared, times beta the rewards: float32[rows, most pairs, 2]."""
        return ours.means if self.by_mean else ours.logps

    def pair_losses(self, compared: jax.Array, ours: Answers) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(the losses of pairs, {a metric of its own: values}): float32[rows, most pairs] each."""
        raise NotImplementedError

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        ours = answers(model, forward(model, batch), batch, forward, self.documents)
        compared = self.compared(model, batch, forward, ours)
        there = batch.extra[PAIRS]
        with jax.named_scope("loss"):
            losses, own = self.pair_losses(compared, ours)
            values = [*jnp.moveaxis(self.beta * compared, -1, 0)]
            logps = ours.means if self.by_mean else ours.logps
            values += [values[0] > values[1], values[0] - values[1], *jnp.moveaxis(logps, -1, 0)]
            named = dict(zip(METRICS, values, strict=True)) | own
            sums = {name: jnp.where(there > 0, value, 0.0).sum() for name, value in named.items()}
            return jnp.where(there > 0, losses, 0.0).sum(), there.sum(), jax.lax.stop_gradient(sums)


def require_fixed_base(name: str, model: Decoder) -> None:
    """Refuses a model that has no reference: without an adapter, or whose base trains too.

    Raises:
      ValueError: names the objective `name`, and what to change.
    """
    if not has_adapter(model):
        raise ValueError(
            f"objective = {name}: the reference is the model with its adapter off, and this one has no adapter: set "
            "adapter: {}, or take an objective without a reference (orpo, simpo, grpo with beta = 0)"
        )
    trains = nnx.state(model, nnx.Param)
    adapters = sum(len(jax.tree.leaves(nnx.state(m.lora, nnx.Param))) for _, m in matrices(model) if m.lora)
    whole = sum(holder is not None and holder.original is not None for holder in (model.embedding, model.head))
    if len(jax.tree.leaves(trains)) != adapters + whole:
        raise ValueError(
            f"objective = {name}: weights beside the adapter train, so that the model with its adapter off would not "
            "stay what it was: freeze them (get_peft_model), or take an objective without a reference"
        )


@dataclasses.dataclass(frozen=True)
class Referenced(Preference):
    """What is compared to a reference: the model with its adapter off, or what a data set's `reference` says it gave.

    precompute_ref_log_probs: the reference's numbers are computed once, before training.
    """

    precompute_ref_log_probs: bool = dataclasses.field(default=False, kw_only=True)

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
        require_fixed_base(self.name, model)

    def reference(self, model: Decoder, batch: Batch, forward: Forward) -> jax.Array:
        """float32[rows, most pairs, 2]: log p of the answers under the reference."""
        base = without_adapter(model)
        return answers(base, forward.frozen(base, batch), batch, forward).logps

    def compared(self, model: Decoder, batch: Batch, forward: Forward, ours: Answers) -> jax.Array:
        theirs = batch.extra[REFERENCE] if REFERENCE in batch.extra else self.reference(model, batch, forward)
        return ours.logps - theirs


@dataclasses.dataclass(frozen=True)
class DPO(Referenced):
    """Direct preference optimisation (arXiv 2305.18290): the log-ratio of each answer to a reference model, compared.

    Args:
      beta: how strongly the model is held to the reference.
      loss_type: "sigmoid"; "ipo" (arXiv 2310.12036), over means of a response's tokens; "hinge" (arXiv 2305.10425).
      label_smoothing: probability that a preference is the wrong way around (sigmoid).
    """

    name: ClassVar[str] = "dpo"

    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    label_smoothing: float = 0.0

    def pair_losses(self, compared: jax.Array, ours: Answers) -> tuple[jax.Array, dict[str, jax.Array]]:
        if self.loss_type == "ipo":
            compared = compared / ours.tokens
        logits = compared[..., 0] - compared[..., 1]
        if self.loss_type == "ipo":
            return (logits - 1.0 / (2.0 * self.beta)) ** 2, {}
        if self.loss_type == "hinge":
            return jax.nn.relu(1.0 - self.beta * logits), {}
        return _smoothed(self.beta * logits, self.label_smoothing), {}


@dataclasses.dataclass(frozen=True)
class ORPO(Preference):
    """Odds-ratio preference optimisation (arXiv 2403.07691): a negative log-likelihood of the chosen answers, and beta
    times the odds ratio's loss. Without a reference. Rewards are beta times mean log-probabilities.

    The likelihood is TRL's, not the paper's: a mean over all tokens of all chosen documents of a micro-batch, those of
    their prompts too.
    """

    name: ClassVar[str] = "orpo"
    sums: ClassVar[tuple[str, ...]] = (*METRICS, "nll_loss", "log_odds_ratio", "log_odds_chosen")
    by_mean: ClassVar[bool] = True
    documents: ClassVar[bool] = True

    def pair_losses(self, compared: jax.Array, ours: Answers) -> tuple[jax.Array, dict[str, jax.Array]]:
        assert ours.documents is not None
        # A mean of 0 is a certain answer, or no pair, whose odds have no logarithm.
        means = jnp.minimum(compared, -1e-7)
        odds = means - jnp.log(-jnp.expm1(means))
        log_odds = odds[..., 0] - odds[..., 1]
        ratio = jax.nn.log_sigmoid(log_odds)
        # Of a pair, its share of the batch's mean, times the number of pairs: their mean is the mean of the tokens.
        tokens = ours.documents.tokens[..., 0]
        pairs = partition.total((tokens > 0).sum().astype(jnp.float32))
        nll = -ours.documents.logps[..., 0] * pairs / jnp.maximum(partition.total(tokens.sum()), 1.0)
        return nll - self.beta * ratio, {"nll_loss": nll, "log_odds_ratio": ratio, "log_odds_chosen": log_odds}


@dataclasses.dataclass(frozen=True)
class SimPO(Preference):
    """Simple preference optimisation (arXiv 2405.14734): mean log-probabilities, which are to differ by simpo_gamma /
    beta. Without a reference."""

    beta: float = 2.0
    simpo_gamma: float = 0.5
    label_smoothing: float = 0.0

    name: ClassVar[str] = "simpo"
    by_mean: ClassVar[bool] = True

    def pair_losses(self, compared: jax.Array, ours: Answers) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = compared[..., 0] - compared[..., 1] - self.simpo_gamma / self.beta
        return _smoothed(self.beta * logits, self.label_smoothing), {}


def _smoothed(logits: jax.Array, label_smoothing: float) -> jax.Array:
    """The logistic loss of logits whose label is the other one with probability label_smoothing."""
    right, wrong = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return -(1.0 - label_smoothing) * right - label_smoothing * wrong
