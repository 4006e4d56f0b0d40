"""The training loss: a sum and a count, divided once by the count of the whole optimizer step. `Forward` runs the model
for an objective's loss, `AuxLosses` are the losses that layers add (`aux_losses` makes those of a run, from the
`declared_losses` of its model), and `loss_sums` is the supervised loss alone.

Mixers and feed-forwards of layers may have losses of their own (AuxLoss in models/layers/segment.py), such as those of
experts' routers. These are means over all layers and over the tokens of a micro-batch on all its devices; padding does
not count. Each micro-batch adds its own times its number of targets, so that after the one division they are the mean
over micro-batches, weighted as the token losses are. The load-balancing loss is a product of two means, so it depends
on how rows are divided into micro-batches, as it does in other trainers: it asks for equally used experts within each
micro-batch. With one micro-batch a step has exactly transformers' loss."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.segment import AuxLoss
from jaxtune.models.placement import partition
from jaxtune.models.residual_plan import ResidualPlan
from jaxtune.pallas.linear_cross_entropy import (
    linear_cross_entropy,
    linear_divergence,
    linear_log_probs,
    linear_token_losses,
    linear_top_k,
    linear_top_k_divergence,
)
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.batches import Batch


@dataclasses.dataclass(frozen=True)
class AuxLosses:
    """The losses that a model's layers declare, such as a router's load-balancing loss, with the coefficients by which
    they are added to the mean loss. A step measures all of them if any coefficient is not zero (`bool`), else none."""

    # (name of the sums that the layers make for it, the loss, its coefficient), in the order of the layers
    losses: tuple[tuple[str, AuxLoss, float], ...] = ()

    def __bool__(self) -> bool:
        """Whether any coefficient is not zero; otherwise a step neither measures nor adds these losses."""
        return any(coefficient != 0 for *_, coefficient in self.losses)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the losses, in the order of `losses` and of a step's sums of them (Sums.aux); their metrics in
        the log have the same names."""
        return tuple(loss.name for _, loss, _ in self.losses)

    @property
    def made_of(self) -> tuple[str, ...]:
        """Names of the sums that the layers have to return for these losses, each once; a forward pass is asked for
        them. A loss is computed from the sums over all layers, rows and devices, because it is not the mean of what
        single layers, rows or devices would give."""
        return tuple(dict.fromkeys(name for name, *_ in self.losses))

    def values(self, sums: Mapping[str, object]) -> jax.Array:
        """float32[n]: the value of each of the n losses, at least one, in the order of `names`, not yet multiplied by
        its coefficient: Forward adds them to its `aux`. sums: {name in `made_of`: the sum over all layers, rows and
        devices}."""
        return jnp.stack([loss.value(sums[name]) for name, loss, _ in self.losses])

    def added(self, values: jax.Array) -> jax.Array:
        """float32[]: the sum of the losses times their coefficients, which the train step adds to the loss of a
        micro-batch, times its number of targets; there must be at least one loss. values: float32[n], what
        `values` returned."""
        terms = [coefficient * values[index] for index, (*_, coefficient) in enumerate(self.losses)]
        return functools.reduce(operator.add, terms)

    def weighted(self, coefficients: Mapping[str, float | None]) -> AuxLosses:
        """Returns the same losses with other coefficients, given as {loss's name: coefficient}, such as those of a
        run's config; a loss that is not named, or whose entry is None, keeps its coefficient. `aux_losses` calls it."""

        def one(loss: AuxLoss, old: float) -> float:
            """The new coefficient of `loss`: the one that is given under its name, or `old` if none is."""
            new = coefficients.get(loss.name)
            return old if new is None else new

        return AuxLosses(tuple((name, loss, one(loss, old)) for name, loss, old in self.losses))

    def __str__(self) -> str:
        """The losses in words, as reports print them: "load-balancing loss times 0.01, z-loss times 0"."""
        return ", ".join(f"{loss.title} times {coefficient:g}" for _, loss, coefficient in self.losses)


NO_AUX_LOSSES = AuxLosses()


def declared_losses(model: Decoder) -> AuxLosses:
    """The losses that the layers of `model` declare, each once, with the coefficients that the model's config.json
    sets; no losses if the layers declare none. `aux_losses` makes those of a run of them."""
    found: dict[str, tuple[str, AuxLoss, float]] = {}
    for layer in model.layers:
        for name, segment in layer.aux.items():
            for loss in segment.aux:
                found.setdefault(loss.name, (name, loss, loss.coefficient))
    return AuxLosses(tuple(found.values()))


def aux_losses(config: TrainConfig, model: Decoder) -> AuxLosses:
    """The layers' losses of a run, each with the coefficient `{name}_coef` of the run's config, or that of the model if
    the key is unset, as in transformers. The setup of a run gives them to its StepProgram, and its first screen names
    them.

    Raises:
      ValueError: the config has a coefficient other than 0 for a loss that no layer of the model declares.
    """
    declared = declared_losses(model)
    keys = [field.name for field in dataclasses.fields(config) if field.name.endswith("_loss_coef")]
    for key in keys:
        if getattr(config, key) and key.removesuffix("_coef") not in declared.names:
            family = model.config.family
            raise ValueError(f"{key} = {getattr(config, key)}: a {family} model has no experts; unset it")
    return declared.weighted({name: getattr(config, f"{name}_coef", None) for name in declared.names})


class Forward:
    """Runs the model over a micro-batch for an objective: a call with (model, batch) returns the hidden states [rows,
    length, hidden], and the methods compute losses from them.

    It applies the step's plan and dropout, and collects what the step sums in addition to the objective's sums: the
    layers' gradients and the layers' own losses. StepProgram makes a new one whenever it traces the loss of a batch,
    and gives it to the objective; programs without a backward make one without plan, dropout, noise and such sums.

    Args:
      max_documents: the largest number of documents in a row, which allows faster attention (see PackedLayout); None:
        it is not known.
      plan: what becomes of the values that the backward reads (residuals); None: all are kept.
      chunk_tokens: the number of tokens whose logits exist at a time; None: chosen by the loss.
      dropout_key: key for the adapters' dropout; None: no dropout.
      noise: (key, alpha) of the noise on the embeddings, whose size alpha sets (NEFTune); None: no noise.
      gradient_sums: sums to which the layers' gradients are added layer by layer in the backward (run_stack), so that
        they exist for one layer at a time; None: gradients are returned as usual.
      aux_losses: the layers' own losses to collect.

    Attributes:
      runs: how often the trained model was run so far; the first run adds to gradient_sums.
      aux: float32[n], the values of aux_losses for the batch, over the rows of all devices, summed over the runs so
        far and not multiplied by their coefficients; None before the first run, or if there are no such losses.
    """

    def __init__(
        self,
        *,
        max_documents: int | None = None,
        plan: ResidualPlan | None = None,
        chunk_tokens: int | None = None,
        dropout_key: jax.Array | None = None,
        gradient_sums: Any = None,
        aux_losses: AuxLosses = NO_AUX_LOSSES,
        noise: tuple[jax.Array, float] | None = None,
    ):
        self._max_documents, self._chunk_tokens = max_documents, chunk_tokens
        self._plan, self._dropout_key, self._gradient_sums, self._noise = plan, dropout_key, gradient_sums, noise
        self._aux_losses = aux_losses
        self.runs = 0
        self.aux: jax.Array | None = None

    def __call__(self, model: Decoder, batch: Batch) -> jax.Array:
        """[rows, length, hidden]: the hidden states of `batch` after the final norm of `model`, the trained one, in the
        compute dtype. It counts the run in `runs` and adds the layers' own losses to `aux`. Further runs of a
        micro-batch get other dropout masks and noise."""
        key, sums, noise = self._dropout_key, self._gradient_sums, self._noise
        if self.runs:  # a further run gets other dropout masks, and does not add to the sums, which would count twice
            key, sums = None if key is None else jax.random.fold_in(key, self.runs), None
            noise = None if noise is None else (jax.random.fold_in(noise[0], self.runs), noise[1])
        self.runs += 1
        options: dict[str, Any] = dict(plan=self._plan, dropout_key=key, gradient_sums=sums, noise=noise)
        hidden, values = self._run(model, batch, **options, aux=self._aux_losses.made_of)
        if self._aux_losses.losses:
            # A loss may be a product of sums over the rows of all devices.
            sums = {name: partition.total(values[name]) for name in self._aux_losses.made_of}
            found = self._aux_losses.values(sums)
            self.aux = found if self.aux is None else self.aux + found
        return hidden

    def frozen(self, model: Decoder, batch: Batch) -> jax.Array:
        """[rows, length, hidden]: the hidden states of `batch` after the final norm of `model`, without dropout, noise
        and gradient; `runs` and `aux` do not count it. model: one that gets no gradient, such as the reference of a
        preference loss, without_adapter(model), or a teacher."""
        with jax.named_scope("reference"):
            hidden, _ = self._run(model, batch)
            return jax.lax.stop_gradient(hidden)

    def _run(self, model: Decoder, batch: Batch, **options: Any) -> tuple[jax.Array, dict[str, Any]]:
        """Runs `model` over `batch`: (hidden states [rows, length, hidden], {name: value} of what the layers return for
        their own losses). A call and `frozen` share it. options: further arguments of Decoder.run, such as the plan,
        the dropout key and the noise: a call gives them, and `frozen` gives none."""
        arrays = (batch.tokens, batch.segment_ids, batch.positions)
        # The batch's rows are those of the run's model; a teacher has tables of its own on the device.
        rows = {name: rows for name, rows in batch.table_rows.items() if isinstance(rows, jax.Array)}
        rows = rows if model.needs_rows else None
        return model.run(*arrays, max_documents=self._max_documents, table_rows=rows, **options)

    def cross_entropy(self, model: Decoder, hidden: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The cross-entropy of the batch's targets under the head of `model`, without logits that exist as a whole:
        (sum of weighted next-token losses in nats, sum of weights), float32 scalars. Supervised fine-tuning has its
        loss from it. hidden: [rows, length, hidden], what a call of this object returned for `batch`."""
        return self._of_head(linear_cross_entropy, model, hidden, batch)

    def token_losses(self, model: Decoder, hidden: jax.Array, batch: Batch) -> jax.Array:
        """float32[rows, length]: the next-token loss of each target of `batch` in nats, times its weight, under the
        head of `model`. The logits never exist as a whole. The losses of preferences sum them to the log-probabilities
        of answers. hidden: [rows, length, hidden], what a call of this object or `frozen` returned for `batch`."""
        return self._of_head(linear_token_losses, model, hidden, batch)

    def log_probs(
        self, model: Decoder, hidden: jax.Array, batch: Batch, *, temperature: float, entropy_gradient: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """The log-probabilities of the targets and the entropies of the predicted distributions, without logits that
        exist as a whole. Reinforcement learning (GRPO, RLOO) compares the policy with its
        reference and with the earlier policy by them.

        Args:
          model: whose head is used.
          hidden: [rows, length, hidden], hidden states as a call or `frozen` returns them.
          batch: whose targets are scored.
          temperature: divides the logits.
          entropy_gradient: whether gradients flow through the entropies (True), or they are only measured (False).
        Returns:
          (log-probabilities, entropies), float32[rows, length] each, in nats.
        """
        head = model.head_variable
        with jax.named_scope("loss"):
            weight, hidden = model.head_operands(hidden)
            return linear_log_probs(
                hidden,
                weight,
                batch.targets,
                temperature=temperature,
                entropy_gradient=entropy_gradient,
                soft_cap=model.config.final_soft_cap,
                logit_scale=model.config.logit_scale,
                head_gradient=isinstance(head, nnx.Param),
                chunk_tokens=self._chunk_tokens,
            )

    def divergence(
        self,
        model: Decoder,
        hidden: jax.Array,
        teacher: Decoder,
        teacher_hidden: jax.Array,
        weights: jax.Array,
        *,
        beta: float,
        temperature: float,
    ) -> tuple[jax.Array, jax.Array]:
        """The loss of distillation: the divergence between the next-token distributions of the model and of a teacher.
        It is computed for a few tokens at a time, so that logits [rows, length, vocabulary] are never stored. Gradients
        go to `hidden`, and to the model's head if that trains; the teacher gets none.

        Args:
          model, teacher: whose heads are used.
          hidden: [rows, length, hidden], the model's hidden states, as a call returns them.
          teacher_hidden: [rows, length, teacher's hidden], as `frozen` returns them.
          weights: float32[rows, length], the factors of the tokens.
          beta: 0 for the forward KL divergence, 1 for the reverse one, between them for a mixture; see
            linear_divergence.
          temperature: divides the logits of both, for the divergence and for the entropy.
        Returns:
          (sum of weights * divergence, sum of weights * entropy of the model's distribution), float32 scalars in nats.
            Only the first is differentiable.
        """
        own, others = model.config, teacher.config
        with jax.named_scope("loss"):
            weight, hidden = model.head_operands(hidden)
            teacher_weight, teacher_hidden = teacher.head_operands(teacher_hidden)
            loss, _, entropies = linear_divergence(
                hidden,
                weight,
                teacher_hidden,
                teacher_weight,
                weights,
                beta=beta,
                temperature=temperature,
                soft_cap=own.final_soft_cap,
                logit_scale=own.logit_scale,
                teacher_soft_cap=others.final_soft_cap,
                teacher_logit_scale=others.logit_scale,
                head_gradient=isinstance(model.head_variable, nnx.Param),
                # The logits of two models exist for a token.
                chunk_tokens=None if self._chunk_tokens is None else max(1, self._chunk_tokens // 2),
            )
            return loss, (entropies * weights).sum()

    def top_k_divergence(
        self,
        model: Decoder,
        hidden: jax.Array,
        teacher_ids: jax.Array,
        teacher_log_probs: jax.Array,
        weights: jax.Array,
        *,
        beta: float,
        temperature: float,
    ) -> tuple[jax.Array, jax.Array]:
        """The loss of distillation from stored values: the divergence between the model's next-token distributions and
        those of a teacher, of which the log-probabilities of k tokens each are stored. All other tokens count as one.
        Logits [rows, length, vocabulary] are never stored.

        Args:
          model: the model; its head is used, and gets a gradient if it trains.
          hidden: [rows, length, hidden], the model's hidden states.
          teacher_ids: int32[rows, length, k], the stored tokens of each distribution; -1 in places that are not used.
          teacher_log_probs: float32[rows, length, k], their log-probabilities, in nats, at the temperature.
          weights: float32[rows, length], the factors of the tokens.
          beta: 0 for the forward KL divergence, 1 for the reverse one, between them for a mixture.
          temperature: divides the model's logits.
        Returns:
          (sum of weights * divergence, sum of weights * entropy of the model's distribution), float32 scalars in nats.
            Only the first is differentiable.
        """
        with jax.named_scope("loss"):
            weight, hidden = model.head_operands(hidden)
            loss, _, entropies = linear_top_k_divergence(
                hidden,
                weight,
                teacher_ids,
                teacher_log_probs,
                weights,
                beta=beta,
                temperature=temperature,
                soft_cap=model.config.final_soft_cap,
                logit_scale=model.config.logit_scale,
                head_gradient=isinstance(model.head_variable, nnx.Param),
                # The bucket's logits exist beside the model's.
                chunk_tokens=None if self._chunk_tokens is None else max(1, self._chunk_tokens // 2),
            )
            return loss, (entropies * weights).sum()

    def top_k(self, model: Decoder, hidden: jax.Array, k: int, temperature: float) -> tuple[jax.Array, jax.Array]:
        """(token ids, log-probabilities in nats), int32 and float32[rows, length, k]: the k most probable next tokens
        under the head of `model`, the most probable first, without gradient. The pass of a teacher stores them before a
        run, for `top_k_divergence`.
        hidden: [rows, length, hidden], as `frozen` returns them. temperature: divides the logits."""
        with jax.named_scope("loss"):
            weight, hidden = model.head_operands(hidden)
            return linear_top_k(
                hidden,
                weight,
                k=k,
                temperature=temperature,
                soft_cap=model.config.final_soft_cap,
                logit_scale=model.config.logit_scale,
                chunk_tokens=self._chunk_tokens,
            )

    def _of_head(self, function: Callable[..., Any], model: Decoder, hidden: jax.Array, batch: Batch) -> Any:
        """Returns what `function`, a loss of pallas/linear_cross_entropy, returns for hidden states, the weight of the
        head of `model`, and the targets and weights of `batch`, with the model's scale and cap of logits. The head's
        gradient is computed only if the head trains. `cross_entropy` and `token_losses` share it."""
        head = model.head_variable
        with jax.named_scope("loss"):
            weight, hidden = model.head_operands(hidden)
            return function(
                hidden,
                weight,
                batch.targets,
                batch.weights,
                soft_cap=model.config.final_soft_cap,
                logit_scale=model.config.logit_scale,
                head_gradient=isinstance(head, nnx.Param),
                chunk_tokens=self._chunk_tokens,
            )


def loss_sums(model: Decoder, batch: Batch, **options: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Differentiable sums of the supervised loss of a batch, for code that computes gradients without a train step, as
    tests do.

    A step over several batches adds the sums and divides once, which gives the same gradient however the rows are
    divided.

    Args:
      model: the model.
      batch: its fields are [rows, length].
      options: the arguments of Forward, such as the plan and chunk_tokens.
    Returns:
      (sum of weighted next-token losses, sum of weights, Forward.aux: the values of the layers' own losses, which are
        not in the first sum, or None); float32 scalars and float32[n].
    """
    forward = Forward(**options)
    loss, count = forward.cross_entropy(model, forward(model, batch), batch)
    return loss, count, forward.aux
