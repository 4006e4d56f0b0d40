"""Preference objectives: `DPO`, `ORPO` and `SimPO`, over pairs of a chosen and a rejected answer to one prompt.
`Pairs`, `Preference` and `Referenced` (with a reference model) are base classes, also of reward models and KTO.
`sum_log_probs` computes the log-probabilities of a pair's `Answers`, and `require_fixed_base` checks that a model can
be its own reference.

The loss of a step is the mean over its pairs. The two documents of a pair are next to each other in a packed row
(data/pairs.py), and one forward pass computes the whole row. The log-probability of an answer is the sum over those of
its tokens that supervised fine-tuning would train on. Options and metrics have TRL's names."""

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
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.dataset import prepare
from jaxtune.train.data.formats import PREFERENCE
from jaxtune.train.data.pairs import PAIRS, REFERENCE, PairDataset
from jaxtune.train.program.loss import Forward

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
    """The log-probabilities of each answer of a batch of packed pairs. Arrays are float32[rows, most pairs of a row,
    2], with the chosen answer at index 0 of the last axis and the rejected one at 1."""

    logps: jax.Array
    """The sum of the log-probabilities of the answer's tokens, in nats; 0 where there is no pair."""
    tokens: jax.Array
    """The number of tokens that `logps` sums up; at least 1, so that it can divide (but 0 in `documents` where there is
    no pair)."""
    documents: Answers | None = None
    """The same sums and numbers over all tokens of each document, prompt and answer, but its first, which nothing
    predicts; None if they were not asked for."""

    @property
    def means(self) -> jax.Array:
        """float32[rows, most pairs of a row, 2]: the mean log-probability of each answer's tokens, in nats. Where
        `Preference.by_mean` is set (ORPO, SimPO), metrics and rewards have it in place of `logps`."""
        return self.logps / self.tokens


def sum_log_probs(
    model: Decoder, hidden: jax.Array, batch: Batch, forward: Forward, documents: bool = False
) -> Answers:
    """Computes the log-probabilities of a batch's answers under a model, from which the losses of DPO, ORPO, SimPO and
    KTO are made; returns them as `Answers`. `Referenced.reference` calls it too, with the adapter off. Reward models do
    not use it.

    Args:
      model: the model.
      hidden: [rows, length, hidden size], its hidden states for the batch after the final norm.
      batch: packed pairs.
      forward: computes the losses of tokens from hidden states.
      documents: True: the sums over whole documents, prompt and answer, are computed too (`Answers.documents`, for
        ORPO). False: that is None.
    """
    weighed = batch
    if documents:  # weight 1 at every token that is followed by another one of its document
        follows = jnp.pad(batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1], ((0, 0), (0, 1)))
        weighed = dataclasses.replace(batch, weights=(follows & (batch.segment_ids > 0)).astype(jnp.float32))
    losses = forward.token_losses(model, hidden, weighed)
    with jax.named_scope("loss"):
        rows, most = batch.extra[PAIRS].shape
        # Summed by comparing segment ids, because a scatter-add would not be deterministic.
        within = batch.segment_ids[..., None] == jnp.arange(1, 2 * most + 1, dtype=batch.segment_ids.dtype)

        def sums(values):
            """The sum of `values`, float32[rows, length], over the tokens of each document: float32[rows, most pairs of
            a row, 2], 0 where there is no pair."""
            return jnp.where(within, values[..., None], 0.0).sum(1).reshape(rows, most, 2)

        whole = Answers(-sums(losses), sums(weighed.weights)) if documents else None
        return Answers(-sums(losses * batch.weights), jnp.maximum(sums(batch.weights), 1.0), whole)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The base class of objectives (`objective.Objective`) over pairs of documents, such as DPO and reward models. A
    pair is one prompt with a chosen and with a rejected answer (in KTO, with the row's own and a mismatched one). This
    class defines `prepare`, `metrics` and `reference_runs`; a subclass defines `name`, `check`, `loss` and the names in
    `sums`."""

    name: ClassVar[str]
    """The name by which objective.name selects it."""
    row_format: ClassVar[str] = PREFERENCE
    """The format of data rows that it reads, one of those in `data.formats`: rows with two answers, unless a subclass
    says otherwise."""
    unit: ClassVar[str] = "pairs"  # what the count of `loss` counts
    head: ClassVar[Head] = TEXT  # the kind of head that the model must have
    sums: ClassVar[tuple[str, ...]]  # the names of the sums of `loss` for metrics

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> PairDataset:
        """Reads and tokenises rows into pairs of documents, the prompt with each of its two answers; only the last
        response of a conversation is an answer. A run calls it for its rows of training and of evaluation. Raises
        ValueError if the rows cannot be trained on, and ConfigError for options of `data` that pairs cannot have: a
        format other than "auto" and `row_format`, train_on="all" or overflow="split".

        Args:
          rows: a path, a data set's name or a list of dicts; a PairDataset is checked and returned.
          tokenizer: a fast Hugging Face tokenizer.
          data: the options of reading, templates and packing.
          vocab_size: the size of the model's vocabulary; token ids that are not below it are refused.
          max_rows: the most rows to read; None reads all.
        """
        if not isinstance(rows, PairDataset):
            options = {key: getattr(data, key) for key in (*ROW_OPTIONS, "today", "cache_dir", "num_workers")}
            if data.format not in ("auto", self.row_format):
                raise ConfigError(
                    f"data.format = {data.format!r}: {self.name} takes {self.row_format} rows; leave it out"
                )
            options |= {"format": self.row_format, "last_response_only": True}
            if data.train_on == "all":
                raise ConfigError(f"data.train_on = {data.train_on!r}: preferences compare responses; leave it out")
            if data.overflow == "split":
                raise ConfigError(
                    "data.overflow = 'split': a pair cannot be laid out in pieces; set truncate, drop or error"
                )
            made = prepare(rows, tokenizer, vocab_size=vocab_size, max_rows=max_rows, pairs=True, **options)
            fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
            rows = PairDataset(**fields)
        rows.require_vocabulary(vocab_size)
        return rows

    @property
    def reference_runs(self) -> int:
        """The number of forward passes of a frozen model in the computation of each loss, whose time the planner adds
        to its forecast: 0, as there is no reference."""
        return 0

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """{name: mean over the pairs} for each name in `self.sums`, 0 if there is no pair. sums: the totals of what
        `loss` returns, by name, with "count", the number of pairs. The train step calls it for the run's log, and
        evaluation for its results."""
        return {name: sums[name] / (sums["count"] + (sums["count"] == 0)) for name in self.sums}


@dataclasses.dataclass(frozen=True)
class Preference(Pairs):
    """The base class of objectives that compare the implicit rewards of a pair's answers, beta times a log-probability
    or a log-ratio to a reference. A subclass defines `pair_losses` (KTO overrides `loss` instead), and overrides
    `unscaled_rewards` if its rewards are not from log-probabilities alone."""

    beta: float = 0.1
    """The scale of the rewards: the reward of an answer is beta times its `unscaled_rewards`."""

    sums: ClassVar[tuple[str, ...]] = METRICS  # the names of the sums of `loss` for metrics
    by_mean: ClassVar[bool] = False
    """True: the log-probability of an answer is the mean over its tokens, in metrics and in rewards (but `Referenced`
    makes rewards of sums). False: it is the sum."""
    documents: ClassVar[bool] = False
    """Whether `pair_losses` needs the log-probabilities of whole documents (`Answers.documents`), which `loss` then
    computes."""

    def check(self, model: Decoder) -> None:
        """Accepts every model: nothing is checked, because there is no reference that must stay fixed. The Trainer
        calls the method of every objective before anything is compiled. model: not used here."""

    def unscaled_rewards(self, model: Decoder, batch: Batch, forward: Forward, answers: Answers) -> jax.Array:
        """The implicit reward of each answer of a batch divided by beta: float32[rows, most pairs, 2], chosen answers
        at index 0. Here it is the answer's log-probability (its mean over tokens if `by_mean`). `Referenced` overrides
        it with the log-ratio to the reference. `loss` calls it, multiplies it by beta for the metrics of rewards, and
        gives it to `pair_losses`.

        Args:
          model, batch, forward: the model, the packed pairs, and what runs a model; for subclasses, not used here.
          answers: the log-probabilities of the answers under `model`.
        """
        return answers.means if self.by_mean else answers.logps

    def pair_losses(self, unscaled: jax.Array, answers: Answers) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Abstract: each subclass but KTO, which overrides `loss`, defines its loss here, and `loss` sums it up.
        Returns (the losses of pairs, {name: a further metric of each pair}), float32[rows, most pairs] each. Entries
        without a pair may have any value; `loss` ignores them.

        Args:
          unscaled: float32[rows, most pairs, 2], the rewards before they are multiplied by beta, first those of the
            chosen answers, then those of the rejected ones.
          answers: the log-probabilities under the model; with `documents` if the class asks for them.
        """
        raise NotImplementedError

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """The loss of a micro-batch of pairs, `batch`: (the sum of the losses, the number of pairs, {name: sum} for
        each name in `sums`). All are float32 scalars, which the caller adds up over micro-batches and devices. The
        train step differentiates the first, and evaluations call it too. forward: runs `model`, and its reference if
        there is one."""
        answers = sum_log_probs(model, forward(model, batch), batch, forward, self.documents)
        unscaled = self.unscaled_rewards(model, batch, forward, answers)
        there = batch.extra[PAIRS]
        with jax.named_scope("loss"):
            losses, own = self.pair_losses(unscaled, answers)
            values = [*jnp.moveaxis(self.beta * unscaled, -1, 0)]
            logps = answers.means if self.by_mean else answers.logps
            values += [values[0] > values[1], values[0] - values[1], *jnp.moveaxis(logps, -1, 0)]
            named = dict(zip(METRICS, values, strict=True)) | own
            sums = {name: jnp.where(there > 0, value, 0.0).sum() for name, value in named.items()}
            return jnp.where(there > 0, losses, 0.0).sum(), there.sum(), jax.lax.stop_gradient(sums)


def require_fixed_base(name: str, model: Decoder) -> None:
    """Checks that the model with its adapter off can be the reference of an objective, or the teacher of a
    distillation: it has an adapter, and nothing else trains that has no copy of its original values. The method `check`
    calls it in DPO and KTO, in GRPO and RLOO if beta is not 0, and in a distillation by the model's own base, unless
    the teacher's log-probabilities are stored before the run.

    Args:
      name: the objective's name, for the message.
      model: the model; its arrays may be jax.ShapeDtypeStruct.
    Raises:
      ValueError: the model has no adapter, or its base trains too; the message says what to change. An embedding or a
        head that trains whole beside the adapter is accepted if its original is kept, which the reference then uses.
    """
    if not has_adapter(model):
        raise ValueError(
            f"objective = {name}: the reference is the model with its adapter off, and this one has no adapter: set "
            "adapter: {}, or objective.precompute_ref_log_probs=true (dpo, kto: the model before its first step is the "
            "reference), or take an objective without a reference (orpo, simpo, grpo with beta = 0)"
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
    """The base class of preference objectives with a reference model, DPO and KTO: the reference is the model with its
    adapter off, or of a model that trains whole, before its first step (precompute_ref_log_probs). Rewards are beta
    times log-ratios, log p(answer) - log p_ref(answer).

    The reference's log-probabilities are taken from the data set (`PairDataset.reference`) if that has them; otherwise
    each loss computes them. `references.first_check` compares model and reference after the first step only for
    objectives of this class.
    """

    precompute_ref_log_probs: bool = dataclasses.field(default=False, kw_only=True)
    """True: the reference's log-probabilities are computed once before training. False: they are computed in every
    step. Neither is done if the data set brought them."""

    @property
    def reference_runs(self) -> int:
        """The number of forward passes of the reference in the computation of each loss, whose time the planner adds to
        its forecast: 0 with precompute_ref_log_probs, else 1 (also if the data set brought the reference's
        log-probabilities, and it does not run)."""
        return 0 if self.precompute_ref_log_probs else 1

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> PairDataset:
        """Reads and tokenises rows into pairs of documents, the prompt with each of its two answers, for a run's
        training and evaluation. With precompute_ref_log_probs the data set has an array for the reference's
        log-probabilities, NaN until the Trainer fills it (`references.fill_reference`), unless the given PairDataset
        has them already. Raises ValueError if the rows cannot be trained on, and ConfigError for options of `data` that
        pairs cannot have (`Pairs.prepare`).

        Args:
          rows: a path, a data set's name or a list of dicts; a PairDataset is checked and returned.
          tokenizer: a fast Hugging Face tokenizer.
          data: the options of reading, templates and packing.
          vocab_size: the size of the model's vocabulary; token ids that are not below it are refused.
          max_rows: the most rows to read; None reads all.
        """
        made = super().prepare(rows, tokenizer, data, vocab_size=vocab_size, max_rows=max_rows)
        if self.precompute_ref_log_probs and made.reference is None:
            made = dataclasses.replace(made, reference=np.full(len(made.documents), np.nan, np.float32))
        return made

    def check(self, model: Decoder) -> None:
        """Raises ValueError if there is no reference that stays as it is (`require_fixed_base`)."""
        if has_adapter(model) or not self.precompute_ref_log_probs:
            require_fixed_base(self.name, model)

    def reference(self, model: Decoder, batch: Batch, forward: Forward) -> jax.Array:
        """float32[rows, most pairs, 2], chosen answers at index 0: the log-probabilities of the answers under the
        reference, each the sum over the answer's tokens in nats: under `model` with its adapter off, or itself without
        one. forward: runs the reference, without gradient."""
        base = without_adapter(model) if has_adapter(model) else model
        return sum_log_probs(base, forward.frozen(base, batch), batch, forward).logps

    def unscaled_rewards(self, model: Decoder, batch: Batch, forward: Forward, answers: Answers) -> jax.Array:
        """The log-ratio of each answer, log p - log p_ref: float32[rows, most pairs, 2], chosen answers at index 0. The
        losses of DPO and KTO are made of it. The reference runs here, by `forward`, unless `batch` has its
        log-probabilities.

        Args:
          model: the model that is trained; with its adapter off it is the reference.
          batch: the packed pairs.
          forward: runs a model.
          answers: the log-probabilities of the answers under `model`.
        """
        reference = batch.extra[REFERENCE] if REFERENCE in batch.extra else self.reference(model, batch, forward)
        return answers.logps - reference


@dataclasses.dataclass(frozen=True)
class DPO(Referenced):
    """Direct preference optimisation (arXiv 2305.18290): the loss compares the log-ratios, log p - log p_ref under a
    reference model, of a pair's chosen and rejected answer. beta: the larger it is, the less the model moves away from
    the reference. Values are not checked here; the config's section `objective` checks its own."""

    name: ClassVar[str] = "dpo"  # by which objective.name selects it

    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """The loss of d, the log-ratio of the chosen answer minus that of the rejected one: "sigmoid" is -log sigmoid(beta
    d); "hinge" (arXiv 2305.10425) is max(0, 1 - beta d); "ipo" (arXiv 2310.12036) is (d - 1 / (2 beta)) squared, with
    log-ratios divided by the number of the answer's tokens (in the loss; the rewards in metrics have the sums)."""
    label_smoothing: float = 0.0
    """The probability, from 0 to below 1, that a preference is labelled wrongly; only loss_type="sigmoid" uses it."""

    def pair_losses(self, unscaled: jax.Array, answers: Answers) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(the losses of pairs by `loss_type`, float32[rows, most pairs]; {}, no further metrics), which `loss` sums
        up.

        Args:
          unscaled: float32[rows, most pairs, 2], the log-ratio of each answer to the reference, first of the chosen,
            then of the rejected one.
          answers: only the numbers of their tokens are used, for "ipo".
        """
        if self.loss_type == "ipo":
            unscaled = unscaled / answers.tokens
        logits = unscaled[..., 0] - unscaled[..., 1]
        if self.loss_type == "ipo":
            return (logits - 1.0 / (2.0 * self.beta)) ** 2, {}
        if self.loss_type == "hinge":
            return jax.nn.relu(1.0 - self.beta * logits), {}
        return _smoothed(self.beta * logits, self.label_smoothing), {}


@dataclasses.dataclass(frozen=True)
class ORPO(Preference):
    """Odds-ratio preference optimisation (arXiv 2403.07691), which needs no reference. The loss of a pair is the
    negative log-likelihood of the chosen answer plus beta times -log sigmoid(log odds of chosen - log odds of
    rejected). The odds are p / (1 - p), where log p is the mean log-probability of the answer's tokens; rewards are
    beta times that mean.

    The negative log-likelihood is TRL's and not the paper's: the mean over all tokens of all chosen documents of a
    micro-batch (of all devices), their prompts included, except the first token of each.
    """

    name: ClassVar[str] = "orpo"  # by which objective.name selects it
    # the names of the sums of `loss` for metrics
    sums: ClassVar[tuple[str, ...]] = (*METRICS, "nll_loss", "log_odds_ratio", "log_odds_chosen")
    by_mean: ClassVar[bool] = True  # log-probabilities are means over the tokens of an answer
    documents: ClassVar[bool] = True  # `pair_losses` needs the log-probabilities of whole documents

    def pair_losses(self, unscaled: jax.Array, answers: Answers) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(the losses of pairs; three metrics with TRL's names), float32[rows, most pairs] each, which `loss` sums up.
        The metrics are "nll_loss", the pair's part of the negative log-likelihood, such that the mean over the pairs of
        a micro-batch is the mean over tokens; "log_odds_chosen", the log odds of the chosen answer minus those of the
        rejected one; and "log_odds_ratio", log sigmoid of that difference.

        Args:
          unscaled: float32[rows, most pairs, 2], the rewards before they are multiplied by beta: here the mean
            log-probability of the tokens of each answer, first the chosen, then the rejected one.
          answers: the log-probabilities under the model. Its `documents` must be set, because the negative
            log-likelihood is that of the whole chosen document, prompt and answer.
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
    """Simple preference optimisation (arXiv 2405.14734), which needs no reference: the loss of a pair is -log
    sigmoid(beta d - simpo_gamma), where d is the mean log-probability of the chosen answer's tokens minus that of the
    rejected one's (with label_smoothing: `_smoothed`)."""

    beta: float = 2.0
    """The scale of the rewards: the reward of an answer is beta times the mean log-probability of its tokens."""
    simpo_gamma: float = 0.5
    """The margin by which the reward of the chosen answer, beta times the mean log-probability, should exceed the
    rejected one's."""
    label_smoothing: float = 0.0
    """The probability, from 0 to below 1, that a preference is labelled wrongly."""

    name: ClassVar[str] = "simpo"  # by which objective.name selects it
    by_mean: ClassVar[bool] = True  # log-probabilities are means over the tokens of an answer

    def pair_losses(self, unscaled: jax.Array, answers: Answers) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(the losses of pairs, float32[rows, most pairs]; {}, no further metrics), which `loss` sums up.

        Args:
          unscaled: float32[rows, most pairs, 2], the mean log-probability of each answer's tokens, first of the chosen,
            then of the rejected one.
          answers: not used.
        """
        logits = unscaled[..., 0] - unscaled[..., 1] - self.simpo_gamma / self.beta
        return _smoothed(self.beta * logits, self.label_smoothing), {}


def _smoothed(logits: jax.Array, label_smoothing: float) -> jax.Array:
    """The logistic loss of each of `logits` (float32, of any shape), with label smoothing: (1 - s) times -log
    sigmoid(logit) plus s times -log sigmoid(-logit). DPO and SimPO call it with a logit for each pair. label_smoothing:
    s, the probability that a pair's answers are labelled the wrong way."""
    right, wrong = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return -(1.0 - label_smoothing) * right - label_smoothing * wrong
