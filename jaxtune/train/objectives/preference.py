"""Preference objectives over pairs of a chosen and a rejected answer: DPO, ORPO, SimPO, and bases of reward models and
KTO.

A step's loss is the mean over pairs. A pair's documents are neighbours in a packed row, so one forward pass computes
both. An answer's log-probability is summed over the tokens that fine-tuning would train on. Names are TRL's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
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
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.dataset import prepare
from jaxtune.train.data.packing.pairs import PAIRS, REFERENCE, PairDataset
from jaxtune.train.data.rendering.formats import PREFERENCE
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.objective import Declared, ReferenceColumn

# The metrics of preference objectives, means over pairs, in the order of the values in `Preference.loss`.
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
    """Log-probabilities of a batch's answers: float32[rows, most pairs, 2], the chosen one first."""

    logps: jax.Array
    """Sums over the answer's tokens in nats; 0 without a pair."""
    tokens: jax.Array
    """Their number, at least 1 (0 in `documents` without a pair)."""
    documents: Answers | None = None
    """The same over whole documents but their first token; None if not asked for."""

    @property
    def means(self) -> jax.Array:
        """float32[rows, most pairs, 2]: mean log-probability of an answer's tokens, in nats."""
        return self.logps / self.tokens


def sum_log_probs(
    model: Decoder, hidden: jax.Array, batch: Batch, forward: Forward, documents: bool = False
) -> Answers:
    """The log-probabilities of a batch's answers.

    hidden: [rows, length, hidden size], after the final norm.
    documents: whether sums over whole documents are needed too.
    """
    weighed = batch
    if documents:  # weight 1 at every token that is followed by another one of its document, which shows no picture
        follows = batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]
        if batch.pictures:
            follows &= jax.tree.map(jnp.asarray, batch.pictures)["picture_features"][:, 1:] < 0
        follows = jnp.pad(follows, ((0, 0), (0, 1)))
        weighed = dataclasses.replace(batch, weights=(follows & (batch.segment_ids > 0)).astype(jnp.float32))
    losses = forward.token_losses(model, hidden, weighed)
    with jax.named_scope("loss"):
        rows, most = batch.extra[PAIRS].shape
        # Summed by comparing segment ids, because a scatter-add would not be deterministic.
        is_document = batch.segment_ids[..., None] == jnp.arange(1, 2 * most + 1, dtype=batch.segment_ids.dtype)

        def sums(values):
            """float32[rows, most pairs, 2]: sums of [rows, length] over each document."""
            return jnp.where(is_document, values[..., None], 0.0).sum(1).reshape(rows, most, 2)

        document_sums = Answers(-sums(losses), sums(weighed.weights)) if documents else None
        return Answers(-sums(losses * batch.weights), jnp.maximum(sums(batch.weights), 1.0), document_sums)


@dataclasses.dataclass(frozen=True)
class Pairs(Declared):
    """Base of objectives over pairs. A subclass defines `name`, `check`, `loss` and `sums`."""

    name: ClassVar[str]
    row_format: ClassVar[str | None] = PREFERENCE
    no_right_answer: ClassVar[str | None] = "its rows have no right answer"
    unit: ClassVar[str] = "pairs"  # what the count of `loss` counts
    head: ClassVar[Head] = TEXT  # the kind of head that the model must have
    sums: ClassVar[tuple[str, ...]]  # the names of the sums of `loss` for metrics
    reads_pictures: ClassVar[bool] = True

    def prepare(
        self,
        rows: Any,
        tokenizer: Any,
        data: DataConfig,
        *,
        vocab_size: int,
        max_rows: int | None,
        pictures: PictureOptions | None = None,
    ) -> PairDataset:
        """Rows as pairs of documents, the prompt with each answer; only a conversation's last response is an answer. A
        PairDataset is checked and returned.

        Raises ValueError for unusable rows, ConfigError for another format, train_on="all" or overflow="split".

          max_rows: read at most this many; None: all. vocab_size: token ids must be below it.
        """
        if not isinstance(rows, PairDataset):
            options = {key: getattr(data, key) for key in (*ROW_OPTIONS, "today", "cache_dir", "num_workers")}
            if data.format not in ("auto", self.row_format):
                raise ConfigError(
                    f"data.format = {data.format!r}: {self.name} takes {self.row_format} rows; leave it out"
                )
            options |= {"format": self.row_format, "last_response_only": True, "pictures": pictures}
            if data.train_on == "all":
                raise ConfigError(f"data.train_on = {data.train_on!r}: preferences compare responses; leave it out")
            if data.overflow == "split":
                raise ConfigError(
                    "data.overflow = 'split': a pair cannot be laid out in pieces; set truncate, drop or error"
                )
            data_set = prepare(rows, tokenizer, vocab_size=vocab_size, max_rows=max_rows, pairs=True, **options)
            fields = {field.name: getattr(data_set, field.name) for field in dataclasses.fields(data_set)}
            rows = PairDataset(**fields)
        rows.require_vocabulary(vocab_size)
        return rows

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Means over pairs of the names in `sums`; 0 without a pair."""
        return {name: sums[name] / (sums["count"] + (sums["count"] == 0)) for name in self.sums}


@dataclasses.dataclass(frozen=True)
class Preference(Pairs):
    """Base of objectives that compare rewards: beta times a log-probability or a log-ratio. A subclass defines
    `pair_losses` (KTO overrides `loss`), and maybe `unscaled_rewards`.
    """

    beta: float = 0.1
    """Scale of the rewards."""

    sums: ClassVar[tuple[str, ...]] = METRICS  # the names of the sums of `loss` for metrics
    by_mean: ClassVar[bool] = False
    """Whether an answer's log-probability is the mean over tokens, in metrics and rewards (`Referenced` uses sums for
    rewards).
    """
    documents: ClassVar[bool] = False
    """Whether `pair_losses` needs `Answers.documents`."""

    def check(self, model: Decoder) -> None:
        """Accepts every model."""

    def unscaled_rewards(self, model: Decoder, batch: Batch, forward: Forward, answers: Answers) -> jax.Array:
        """float32[rows, most pairs, 2]: rewards divided by beta, here the log-probabilities. answers: under `model`.
        forward: runs the model over the batch.
        """
        return answers.means if self.by_mean else answers.logps

    def pair_losses(self, unscaled: jax.Array, answers: Answers) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(Losses of pairs, {further metric: values}), float32[rows, most pairs]; entries without a pair are ignored.
        unscaled: [rows, most pairs, 2], of `unscaled_rewards`.
        """
        raise NotImplementedError

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """As Objective.loss: (sum over the pairs, their number, sums for METRICS)."""
        answers = sum_log_probs(model, forward(model, batch), batch, forward, self.documents)
        unscaled = self.unscaled_rewards(model, batch, forward, answers)
        has_pair = batch.extra[PAIRS]
        with jax.named_scope("loss"):
            losses, further_metrics = self.pair_losses(unscaled, answers)
            values = [*jnp.moveaxis(self.beta * unscaled, -1, 0)]
            logps = answers.means if self.by_mean else answers.logps
            values += [values[0] > values[1], values[0] - values[1], *jnp.moveaxis(logps, -1, 0)]
            named = dict(zip(METRICS, values, strict=True)) | further_metrics
            sums = {name: jnp.where(has_pair > 0, value, 0.0).sum() for name, value in named.items()}
            return jnp.where(has_pair > 0, losses, 0.0).sum(), has_pair.sum(), jax.lax.stop_gradient(sums)


def require_fixed_base(name: str, model: Decoder) -> None:
    """Raises ValueError unless the model with its adapter off can be a reference or teacher: it has an adapter, and
    nothing else trains without a copy of its original. The arrays may be jax.ShapeDtypeStruct. name: the objective's.
    """
    if not has_adapter(model):
        raise ValueError(
            f"objective = {name}: the reference is the model with its adapter off, and this one has no adapter: set "
            "adapter: {}, or objective.precompute_ref_log_probs=true (dpo, kto: the model before its first step is the "
            "reference), or take an objective without a reference (orpo, simpo, grpo with beta = 0)"
        )
    trains = nnx.state(model, nnx.Param)
    adapters = sum(len(jax.tree.leaves(nnx.state(m.lora, nnx.Param))) for _, m in matrices(model) if m.lora)
    whole_count = sum(holder is not None and holder.original is not None for holder in (model.embedding, model.head))
    if len(jax.tree.leaves(trains)) != adapters + whole_count:
        raise ValueError(
            f"objective = {name}: weights beside the adapter train, so that the model with its adapter off would not "
            "stay what it was: freeze them (get_peft_model), or take an objective without a reference"
        )


@dataclasses.dataclass(frozen=True)
class Referenced(Preference):
    """Base of objectives with a reference, the model with its adapter off or, trained whole, before its first step
    (precompute_ref_log_probs). Rewards are beta times log p(answer) - log p_ref(answer).

    The data set's `reference` is used if there is one; else each loss computes it.
    """

    precompute_ref_log_probs: bool = dataclasses.field(default=False, kw_only=True)
    """Compute the reference once before training, not in every step."""

    @property
    def reference_runs(self) -> int:
        return 0 if self.precompute_ref_log_probs else 1

    @property
    def reference_is_base(self) -> bool:
        return True

    @property
    def needs_rows_before(self) -> ReferenceColumn | None:
        return ReferenceColumn("objective.precompute_ref_log_probs") if self.precompute_ref_log_probs else None

    def prepare(
        self,
        rows: Any,
        tokenizer: Any,
        data: DataConfig,
        *,
        vocab_size: int,
        max_rows: int | None,
        pictures: PictureOptions | None = None,
    ) -> PairDataset:
        """As Pairs; with precompute_ref_log_probs `reference` is NaN until filled (`references.fill_reference`)."""
        data_set = super().prepare(rows, tokenizer, data, vocab_size=vocab_size, max_rows=max_rows, pictures=pictures)
        if self.precompute_ref_log_probs and data_set.reference is None:
            data_set = dataclasses.replace(data_set, reference=np.full(len(data_set.documents), np.nan, np.float32))
        return data_set

    def check(self, model: Decoder) -> None:
        """Raises ValueError without a reference that stays as it is."""
        if has_adapter(model) or not self.precompute_ref_log_probs:
            require_fixed_base(self.name, model)

    def wrong_start(self, line: Mapping[str, float]) -> str | None:
        """Programs in 16 bits differ by about a hundredth of a nat a token, other weights or rows by several hundredths
        of the log-probability: allowed are 0.25 nats plus a hundredth of the mean.
        """
        for side, slack in self._slack(line).items():
            moved = line[f"rewards/{side}"] / self.beta
            if abs(moved) > slack:
                return (
                    f"rewards/{side} is {line[f'rewards/{side}']:.4g} and not 0: answers are {abs(moved):.4g} nats "
                    f"{'more' if moved > 0 else 'less'} likely than the reference says (logps/{side} "
                    f"{line[f'logps/{side}']:.4g})"
                )
        return None

    def _slack(self, line: Mapping[str, float]) -> dict[str, float]:
        """{side: nats by which its log-ratio may differ from 0}"""
        return {side: 0.25 + 0.01 * abs(line[f"logps/{side}"]) for side in ("chosen", "rejected")}

    def reference(self, model: Decoder, batch: Batch, forward: Forward) -> jax.Array:
        """float32[rows, most pairs, 2]: sums of answers' log-probabilities in nats under `model` with its adapter off,
        or itself without one; no gradient. batch: pairs as PackedPairs fills them.
        """
        base = without_adapter(model) if has_adapter(model) else model
        return sum_log_probs(base, forward.frozen(base, batch), batch, forward).logps

    def unscaled_rewards(self, model: Decoder, batch: Batch, forward: Forward, answers: Answers) -> jax.Array:
        """float32[rows, most pairs, 2]: log-ratios. The reference runs unless the batch has its values."""
        reference = batch.extra[REFERENCE] if REFERENCE in batch.extra else self.reference(model, batch, forward)
        return answers.logps - reference


@dataclasses.dataclass(frozen=True)
class DPO(Referenced):
    """Direct preference optimisation (arXiv 2305.18290). A larger beta stays closer to the reference. Values are not
    checked here.
    """

    name: ClassVar[str] = "dpo"  # by which objective.name selects it

    loss_type: Literal[
        "sigmoid",
        "ipo",
        "hinge",
        "exo_pair",
        "nca_pair",
        "robust",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "discopop",
        "sigmoid_norm",
    ] = "sigmoid"
    """With r the log-ratios and d the difference of the scores (f_divergence_type), chosen minus rejected: "sigmoid"
    -log sigmoid(beta d); "hinge" (2305.10425) max(0, 1 - beta d); "ipo" (2310.12036) (d - 1 / (2 beta))^2 and
    "sigmoid_norm" -log sigmoid(beta d), both with scores per token (not in metrics); `_PAIR_LOSSES` has the others.
    """
    label_smoothing: float = 0.0
    """Probability, 0 to below 1, of a wrong label; for "sigmoid", "robust" and "exo_pair"."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """How a log-ratio becomes a score (2309.16240): by the derivative of the divergence's f."""
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = 0.05

    def wrong_start(self, line: Mapping[str, float]) -> str | None:
        if (reason := super().wrong_start(line)) is not None or self.loss_type != "sigmoid":
            return reason
        if abs(line["loss"] - math.log(2.0)) > self.beta * sum(self._slack(line).values()) / 2:
            return f"the loss is {line['loss']:.4f} and not ln 2 = {math.log(2.0):.4f}"
        return None

    def pair_losses(self, unscaled: jax.Array, answers: Answers) -> tuple[jax.Array, dict[str, jax.Array]]:
        if self.loss_type == "sppo_hard":  # arXiv 2405.00675
            half = 0.5 / self.beta
            return (unscaled[..., 0] - half) ** 2 + (unscaled[..., 1] + half) ** 2, {}
        if (loss := _PAIR_LOSSES.get(self.loss_type)) is not None:
            return loss(self.beta * unscaled[..., 0], self.beta * unscaled[..., 1]), {}
        scores = self._scores(unscaled)
        if self.loss_type in ("ipo", "sigmoid_norm"):
            scores = scores / answers.tokens
        logits = scores[..., 0] - scores[..., 1]
        if self.loss_type == "ipo":
            return (logits - 1.0 / (2.0 * self.beta)) ** 2, {}
        logits = self.beta * logits
        if self.loss_type == "hinge":
            return jax.nn.relu(1.0 - logits), {}
        if self.loss_type == "discopop":  # arXiv 2406.08414
            mixed = jax.nn.sigmoid(logits / self.discopop_tau)
            return -jax.nn.log_sigmoid(logits) * (1.0 - mixed) + jnp.exp(-logits) * mixed, {}
        smoothing = self.label_smoothing
        if self.loss_type == "robust":  # arXiv 2403.00409
            right, wrong = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
            return (-(1.0 - smoothing) * right + smoothing * wrong) / (1.0 - 2.0 * smoothing), {}
        if self.loss_type == "exo_pair":  # arXiv 2402.00856: the divergence from the labels' distribution
            right = jax.nn.sigmoid(logits) * (jax.nn.log_sigmoid(logits) - math.log1p(-smoothing))
            return right + jax.nn.sigmoid(-logits) * (jax.nn.log_sigmoid(-logits) - math.log(smoothing)), {}
        return _smoothed(logits, smoothing), {}

    def _scores(self, ratios: jax.Array) -> jax.Array:
        slope = self.f_alpha_divergence_coef - 1.0
        if self.f_divergence_type == "forward_kl":
            return 1.0 - jnp.exp(-ratios)
        if self.f_divergence_type == "js_divergence":
            return math.log(2.0) + jax.nn.log_sigmoid(ratios)
        if self.f_divergence_type == "alpha_divergence" and abs(slope) >= 1e-6:
            return (jnp.exp(jnp.minimum(slope * ratios, 80.0)) - 1.0) / slope
        return ratios


# DPO's losses of the rewards, beta times the log-ratios, of a pair's chosen and rejected answer.
_PAIR_LOSSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    # arXiv 2402.05369
    "nca_pair": lambda chosen, rejected: (
        -jax.nn.log_sigmoid(chosen) - 0.5 * (jax.nn.log_sigmoid(-chosen) + jax.nn.log_sigmoid(-rejected))
    ),
    # arXiv 2404.04656
    "bco_pair": lambda chosen, rejected: -jax.nn.log_sigmoid(chosen) - jax.nn.log_sigmoid(-rejected),
    # arXiv 2408.06266
    "apo_zero": lambda chosen, rejected: jax.nn.sigmoid(-chosen) + jax.nn.sigmoid(rejected),
    "apo_down": lambda chosen, rejected: jax.nn.sigmoid(chosen) + jax.nn.sigmoid(rejected - chosen),
}


@dataclasses.dataclass(frozen=True)
class ORPO(Preference):
    """Odds-ratio preference optimisation (arXiv 2403.07691), without a reference: negative log-likelihood of the chosen
    answer, plus beta times -log sigmoid(log odds of chosen - of rejected). Odds are p / (1 - p), with log p the mean
    over tokens.

    The likelihood is TRL's, not the paper's: the mean over all tokens but the first of a micro-batch's chosen
    documents, prompts included, on all devices.
    """

    name: ClassVar[str] = "orpo"  # by which objective.name selects it
    # the names of the sums of `loss` for metrics
    sums: ClassVar[tuple[str, ...]] = (*METRICS, "nll_loss", "log_odds_ratio", "log_odds_chosen")
    by_mean: ClassVar[bool] = True  # log-probabilities are means over the tokens of an answer
    documents: ClassVar[bool] = True  # `pair_losses` needs the log-probabilities of whole documents

    @property
    def by_micro_batch(self) -> bool:
        return True  # its likelihood is a mean over tokens

    def pair_losses(self, unscaled: jax.Array, answers: Answers) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Metrics: "nll_loss", a pair's part, whose mean over pairs is the mean over tokens; "log_odds_chosen", the
        difference of log odds; "log_odds_ratio", its log sigmoid.
        """
        assert answers.documents is not None
        # An answer of probability 1 (or an entry without a pair) has a mean of 0 and infinite odds, so means are
        # capped.
        means = jnp.minimum(unscaled, -1e-7)
        odds = means - jnp.log(-jnp.expm1(means))
        log_odds = odds[..., 0] - odds[..., 1]
        ratio = jax.nn.log_sigmoid(log_odds)
        # A pair's value is its share of the mean over tokens times the number of pairs, so that the mean over pairs,
        # which the step takes, is the mean over tokens.
        tokens = answers.documents.tokens[..., 0]
        pairs = partition.total((tokens > 0).sum().astype(jnp.float32))
        nll = -answers.documents.logps[..., 0] * pairs / jnp.maximum(partition.total(tokens.sum()), 1.0)
        return nll - self.beta * ratio, {"nll_loss": nll, "log_odds_ratio": ratio, "log_odds_chosen": log_odds}


@dataclasses.dataclass(frozen=True)
class SimPO(Preference):
    """Simple preference optimisation (arXiv 2405.14734), without a reference: -log sigmoid(beta d - simpo_gamma), d the
    difference of the answers' mean log-probabilities (with label_smoothing: `_smoothed`).
    """

    beta: float = 2.0
    simpo_gamma: float = 0.5
    """Margin by which the chosen reward should exceed the rejected."""
    label_smoothing: float = 0.0
    """Probability, 0 to below 1, of a wrong label."""

    name: ClassVar[str] = "simpo"  # by which objective.name selects it
    by_mean: ClassVar[bool] = True  # log-probabilities are means over the tokens of an answer

    def pair_losses(self, unscaled: jax.Array, answers: Answers) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = unscaled[..., 0] - unscaled[..., 1] - self.simpo_gamma / self.beta
        return _smoothed(self.beta * logits, self.label_smoothing), {}


def _smoothed(logits: jax.Array, label_smoothing: float) -> jax.Array:
    """(1 - s) times -log sigmoid(logit) plus s times -log sigmoid(-logit), s = label_smoothing."""
    right, wrong = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return -(1.0 - label_smoothing) * right - label_smoothing * wrong
