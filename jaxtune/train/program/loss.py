"""The training loss: a sum and a count, divided once by the count of the whole optimizer step.

Routers of experts may have losses of their own (RouterLosses), which are means: over all layers and over the tokens of
a micro-batch, of all its devices; padding does not count. Each micro-batch adds its own, times its number of targets,
so that after the one division a step's is the mean of its micro-batches', weighted as their token losses are. The
load-balancing loss is a product of two means, so it depends on how rows are split, as it does everywhere: within a
micro-batch its experts are to be met equally often. A step of one micro-batch has exactly transformers' loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import partition
from jaxtune.models.residual_plan import ResidualPlan
from jaxtune.pallas.linear_cross_entropy import linear_cross_entropy, linear_token_losses
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.batches import Batch


@dataclasses.dataclass(frozen=True)
class RouterLosses:
    """How many times the load-balancing loss and the router z-loss are added to the mean loss."""

    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0

    def __bool__(self) -> bool:
        return self.aux_loss_coef != 0 or self.z_loss_coef != 0

    def added(self, values: jax.Array) -> jax.Array:
        """What is added for values float32[2], a load-balancing loss and a z-loss."""
        return self.aux_loss_coef * values[0] + self.z_loss_coef * values[1]


NO_ROUTER_LOSSES = RouterLosses()


def router_losses(config: TrainConfig, model: Decoder) -> RouterLosses:
    """Those that a run adds: the config's, and where it names no router_aux_loss_coef the model's, as in transformers.

    Raises:
      ValueError: a model without experts.
    """
    moe = model.config.moe
    if moe is None:
        for key in ("router_aux_loss_coef", "router_z_loss_coef"):
            if getattr(config, key):
                raise ValueError(
                    f"{key} = {getattr(config, key)}: a {model.config.family} model has no experts; unset it"
                )
        return NO_ROUTER_LOSSES
    aux = config.router_aux_loss_coef
    if aux is None:
        aux = moe.router_aux_loss_coef if moe.output_router_logits else 0.0
    return RouterLosses(aux, config.router_z_loss_coef)


class Forward:
    """How an objective runs the model over a micro-batch: by the plan of the step, with its dropout, and with what the
    step adds up beside the objective's own sums (layers' gradients, routers' losses).

    One is made for each micro-batch as the step is traced.

    Args:
      max_documents: a promise about the rows that lets faster attention be chosen (see PackedLayout).
      plan: what happens to residuals. chunk_tokens: tokens whose logits exist at a time.
      dropout_key: adapters' dropout; None for none. noise: (key, alpha) of noise on the embeddings, or None.
      gradient_sums: sums that the layers' gradients are added to; see run_stack.
      routers: whether the losses on routers are wanted, of a model with experts.

    Attributes:
      runs: of the model that trains, so far; gradient_sums go into the first.
      routers: float32[2], the load-balancing loss and the router z-loss of the batch, summed over the runs; None where
        they are not wanted.
    """

    def __init__(
        self,
        *,
        max_documents: int | None = None,
        plan: ResidualPlan | None = None,
        chunk_tokens: int | None = None,
        dropout_key: jax.Array | None = None,
        gradient_sums: Any = None,
        routers: bool = False,
        noise: tuple[jax.Array, float] | None = None,
    ):
        self._max_documents, self._chunk_tokens = max_documents, chunk_tokens
        self._plan, self._dropout_key, self._gradient_sums, self._noise = plan, dropout_key, gradient_sums, noise
        self._aux: tuple[str, ...] = ("router_sums",) if routers else ()
        self.runs = 0
        self.routers: jax.Array | None = None

    def __call__(self, model: Decoder, batch: Batch) -> jax.Array:
        """[rows, length, hidden] of the model that trains, after its final norm, in the compute dtype."""
        key, sums, noise = self._dropout_key, self._gradient_sums, self._noise
        if self.runs:  # another run has other masks, and gradients of its own: sums would be counted twice
            key, sums = None if key is None else jax.random.fold_in(key, self.runs), None
            noise = None if noise is None else (jax.random.fold_in(noise[0], self.runs), noise[1])
        self.runs += 1
        options: dict[str, Any] = dict(plan=self._plan, dropout_key=key, gradient_sums=sums, noise=noise)
        hidden, values = self._run(model, batch, **options, aux=self._aux)
        if self._aux:
            sums = partition.total(values["router_sums"])  # their losses are products of sums over all rows
            found = jnp.stack([sums.load_balancing_loss(), sums.z_loss()])
            self.routers = found if self.routers is None else self.routers + found
        return hidden

    def frozen(self, model: Decoder, batch: Batch) -> jax.Array:
        """As a call, of a model that does not train, such as without_adapter(model): without dropout or gradient."""
        with jax.named_scope("reference"):
            hidden, _ = self._run(model, batch)
            return jax.lax.stop_gradient(hidden)

    def _run(self, model: Decoder, batch: Batch, **options: Any) -> tuple[jax.Array, dict[str, Any]]:
        arrays = (batch.tokens, batch.segment_ids, batch.positions)
        return model.run(*arrays, max_documents=self._max_documents, **options)

    def cross_entropy(self, model: Decoder, hidden: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """(sum of weighted next-token losses, sum of weights), float32 scalars, of hidden as a call gives it; the
        logits never exist whole."""
        return self._of_head(linear_cross_entropy, model, hidden, batch)

    def token_losses(self, model: Decoder, hidden: jax.Array, batch: Batch) -> jax.Array:
        """float32[rows, length]: as cross_entropy, but the weighted loss of each token."""
        return self._of_head(linear_token_losses, model, hidden, batch)

    def _of_head(self, function: Callable[..., Any], model: Decoder, hidden: jax.Array, batch: Batch) -> Any:
        head = model.head_variable
        with jax.named_scope("loss"):
            weight, hidden = partition.whole_beside(head, hidden)
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
    """(sum of weighted next-token losses, sum of weights, the losses on routers or None): differentiable.

    The sums are float32 scalars. A step over several batches adds both and divides once: the same gradient however the
    rows are split. The losses on routers are Forward.routers.

    Args:
      batch: fields [rows, length]. options: as Forward's.
    """
    forward = Forward(**options)
    loss, count = forward.cross_entropy(model, forward(model, batch), batch)
    return loss, count, forward.routers
