"""The training loss: a sum and a count, divided once by the count of the whole step.

Layers may add losses (AuxLoss), such as routers': means over all layers and all tokens of a micro-batch on all devices,
times its number of targets. A load-balancing loss is a product of two means, so it depends on how rows are divided into
micro-batches, as in other trainers. With one micro-batch it is transformers'.
"""

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
from jaxtune.models.stack.residual_plan import ResidualPlan
from jaxtune.models.vision.pictures import Pictures
from jaxtune.pallas.linear_cross_entropy import (
    linear_cross_entropy,
    linear_divergence,
    linear_log_probs,
    linear_token_losses,
    linear_top_k,
    linear_top_k_divergence,
)
from jaxtune.train.data.batches import Batch


@dataclasses.dataclass(frozen=True)
class AuxLosses:
    """The losses that layers declare, with their coefficients. Measured only if any coefficient is not 0 (`bool`)."""

    # (name of the sums that the layers make for it, the loss, its coefficient), in the order of the layers
    losses: tuple[tuple[str, AuxLoss, float], ...] = ()

    def __bool__(self) -> bool:
        return any(coefficient != 0 for *_, coefficient in self.losses)

    @property
    def names(self) -> tuple[str, ...]:
        """Also the names of their metrics, in the order of Sums.aux."""
        return tuple(loss.name for _, loss, _ in self.losses)

    @property
    def made_of(self) -> tuple[str, ...]:
        """Names of the sums that layers return for these losses. A loss is computed from sums over all layers, rows and
        devices, as it is no mean of theirs.
        """
        return tuple(dict.fromkeys(name for name, *_ in self.losses))

    def values(self, sums: Mapping[str, object]) -> jax.Array:
        """float32[n]: the losses before their coefficients. sums: {name in `made_of`: over all layers, rows and
        devices}.
        """
        return jnp.stack([loss.value(sums[name]) for name, loss, _ in self.losses])

    def added(self, values: jax.Array) -> jax.Array:
        """float32[]: the sum of coefficient * value. values: float32[n]."""
        terms = [coefficient * values[index] for index, (*_, coefficient) in enumerate(self.losses)]
        return functools.reduce(operator.add, terms)

    def weighted(self, coefficients: Mapping[str, float | None]) -> AuxLosses:
        """The same losses with other coefficients; None or a missing name keeps the old one."""

        def one(loss: AuxLoss, old: float) -> float:
            new = coefficients.get(loss.name)
            return old if new is None else new

        return AuxLosses(tuple((name, loss, one(loss, old)) for name, loss, old in self.losses))

    def __str__(self) -> str:
        return ", ".join(f"{loss.title} times {coefficient:g}" for _, loss, coefficient in self.losses)


NO_AUX_LOSSES = AuxLosses()


def declared_losses(model: Decoder) -> AuxLosses:
    """The losses that the layers declare, each once, with the coefficients of the model's config.json."""
    losses: dict[str, tuple[str, AuxLoss, float]] = {}
    for layer in model.layers:
        for name, segment in layer.aux.items():
            for loss in segment.aux:
                losses.setdefault(loss.name, (name, loss, loss.coefficient))
    return AuxLosses(tuple(losses.values()))


def aux_losses(coefficients: Mapping[str, float | None], model: Decoder) -> AuxLosses:
    """The layers' losses with other coefficients, by name; None keeps the model's. ValueError for a coefficient of a
    loss that no layer declares.
    """
    declared = declared_losses(model)
    for name, coefficient in coefficients.items():
        if coefficient and name not in declared.names:
            family = model.config.family
            raise ValueError(f"{name}_coef = {coefficient}: a {family} model has no experts; unset it")
    return declared.weighted(coefficients)


class Forward:
    """Runs the model over a micro-batch: a call returns hidden states [rows, length, hidden], methods compute losses
    from them. It collects the layers' gradients and losses.

      max_documents, max_pictures: most in a row, for faster attention; None: unknown.
      plan: what becomes of residuals; None: all are kept.
      chunk_tokens: tokens whose logits exist at a time; None: the loss decides.
      noise: (key, alpha) of NEFTune's noise on the embeddings.
      gradient_sums: the backward adds the layers' gradients to these layer by layer (run_stack), so that they exist for
      one at a time.

    `runs` counts runs of the trained model. `aux`: float32[n], the layers' losses over all devices' rows, summed over
    runs, before coefficients.
    """

    def __init__(
        self,
        *,
        max_documents: int | None = None,
        max_pictures: int | None = None,
        plan: ResidualPlan | None = None,
        chunk_tokens: int | None = None,
        dropout_key: jax.Array | None = None,
        gradient_sums: Any = None,
        aux_losses: AuxLosses = NO_AUX_LOSSES,
        noise: tuple[jax.Array, float] | None = None,
    ):
        self._max_documents, self._max_pictures, self._chunk_tokens = max_documents, max_pictures, chunk_tokens
        self._plan, self._dropout_key, self._gradient_sums, self._noise = plan, dropout_key, gradient_sums, noise
        self._aux_losses = aux_losses
        self.runs = 0
        self.aux: jax.Array | None = None
        self._features: tuple[list[jax.Array], tuple[jax.Array, ...]] | None = None

    def __call__(self, model: Decoder, batch: Batch) -> jax.Array:
        """Hidden states after the final norm, in the compute dtype. Further runs get other dropout masks and noise."""
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
            losses = self._aux_losses.values(sums)
            self.aux = losses if self.aux is None else self.aux + losses
        return hidden

    def frozen(self, model: Decoder, batch: Batch) -> jax.Array:
        """Hidden states of a model that gets no gradient, such as a reference or teacher, without dropout and noise."""
        with jax.named_scope("reference"):
            hidden, _ = self._run(model, batch)
            return jax.lax.stop_gradient(hidden)

    def _run(self, model: Decoder, batch: Batch, **options: Any) -> tuple[jax.Array, dict[str, Any]]:
        arrays = (batch.tokens, batch.segment_ids, batch.positions)
        # The batch's rows are those of the run's model; a teacher has tables of its own on the device.
        rows = {name: rows for name, rows in batch.table_rows.items() if isinstance(rows, jax.Array)}
        rows = rows if model.needs_rows else None
        if batch.pictures:
            pictures = Pictures(**jax.tree.map(jnp.asarray, batch.pictures), max_pictures=self._max_pictures)
            options |= {"pictures": pictures, "features": self._frozen_features(model, batch, pictures)}
        return model.run(*arrays, max_documents=self._max_documents, table_rows=rows, **options)

    def _frozen_features(self, model: Decoder, batch: Batch, pictures: Pictures) -> tuple[jax.Array, ...] | None:
        """Of a frozen tower, made once for all runs with the same weights and pictures; None: the run makes them."""
        if model.vision is None or model.vision.trains:
            return None
        of = [*jax.tree.leaves(nnx.state(model.vision)), *jax.tree.leaves(batch.pictures)]
        known = self._features
        if known is None or len(known[0]) != len(of) or any(a is not b for a, b in zip(known[0], of, strict=True)):
            known = self._features = of, model.picture_features(pictures)
        return known[1]

    def cross_entropy(self, model: Decoder, hidden: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """(sum of weighted next-token losses in nats, sum of weights), float32. Logits never exist as a whole, here and
        in the other methods. hidden: [rows, length, hidden size], after the final norm.
        """
        return self._of_head(linear_cross_entropy, model, hidden, batch.targets, batch.weights)

    def token_losses(self, model: Decoder, hidden: jax.Array, batch: Batch) -> jax.Array:
        """float32[rows, length]: each target's loss in nats times its weight. hidden: [rows, length, hidden size],
        after the final norm.
        """
        return self._of_head(linear_token_losses, model, hidden, batch.targets, batch.weights)

    def log_probs(
        self, model: Decoder, hidden: jax.Array, batch: Batch, *, temperature: float, entropy_gradient: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """(log-probabilities of the targets, entropies), float32[rows, length], in nats. temperature: divides the
        logits. entropy_gradient: whether gradients flow through the entropies. hidden: [rows, length, hidden size],
        after the final norm.
        """
        options = {"temperature": temperature, "entropy_gradient": entropy_gradient}
        return self._of_head(linear_log_probs, model, hidden, batch.targets, **options)

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
        """(sum of weights * divergence from the teacher, sum of weights * the model's entropy), float32, in nats; only
        the first is differentiable, and the teacher gets no gradient.

          hidden: [rows, length, hidden]; teacher_hidden: [rows, length, teacher's hidden].
          weights: float32[rows, length].
          beta: 0: forward KL, 1: reverse KL, between: a mixture (linear_divergence).
          temperature: divides both models' logits.
        """
        with jax.named_scope("loss"):
            teacher_weight, teacher_hidden = teacher.head_operands(teacher_hidden)
        operands, options = (teacher_hidden, teacher_weight, weights), {"beta": beta, "temperature": temperature}
        options |= {
            "teacher_soft_cap": teacher.config.final_soft_cap,
            "teacher_logit_scale": teacher.config.logit_scale,
            **self._of_two,
        }
        loss, _, entropies = self._of_head(linear_divergence, model, hidden, *operands, **options)
        with jax.named_scope("loss"):
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
        """As `divergence`, from k stored log-probabilities of a teacher; all other tokens count as one.

        teacher_ids: int32[rows, length, k]; -1: unused.
        teacher_log_probs: float32[rows, length, k], in nats, at the temperature.
        weights: float32[rows, length]. beta, temperature: as in `divergence`.
        """
        operands, options = (teacher_ids, teacher_log_probs, weights), {"beta": beta, "temperature": temperature}
        options |= self._of_two  # the bucket's logits exist beside the model's
        loss, _, entropies = self._of_head(linear_top_k_divergence, model, hidden, *operands, **options)
        with jax.named_scope("loss"):
            return loss, (entropies * weights).sum()

    def top_k(self, model: Decoder, hidden: jax.Array, k: int, temperature: float) -> tuple[jax.Array, jax.Array]:
        """(token ids, log-probabilities in nats), [rows, length, k]: the most probable next tokens, first the best,
        without gradient. hidden: [rows, length, hidden size], after the final norm. temperature: divides the logits.
        """
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

    @property
    def _of_two(self) -> dict[str, object]:
        """The option by which twice the logits exist for a token."""
        return {"chunk_tokens": None if self._chunk_tokens is None else max(1, self._chunk_tokens // 2)}

    def _of_head[T](
        self, function: Callable[..., T], model: Decoder, hidden: jax.Array, *operands: jax.Array, **options: object
    ) -> T:
        """function(hidden, head, *operands, ...) of the model's head; logits exist chunk by chunk in it."""
        of_head = {
            "soft_cap": model.config.final_soft_cap,
            "logit_scale": model.config.logit_scale,
            "head_gradient": isinstance(model.head_variable, nnx.Param),
            "chunk_tokens": self._chunk_tokens,
        }
        with jax.named_scope("loss"):
            weight, hidden = model.head_operands(hidden)
            return function(hidden, weight, *operands, **of_head | options)


def loss_sums(model: Decoder, batch: Batch, **options: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Differentiable sums of the supervised loss for code without a train step: (loss sum, sum of weights,
    Forward.aux). Sums of several batches, divided once, give the gradient of one batch of all rows. options: of
    Forward.
    """
    forward = Forward(**options)
    loss, count = forward.cross_entropy(model, forward(model, batch), batch)
    return loss, count, forward.aux
