"""The training loss: a sum and a count, divided once by the count of the whole optimizer step.

Routers of experts may have losses of their own (RouterLosses). These are means over all layers and over the tokens of a
micro-batch on all its devices; padding does not count. Each micro-batch adds its router losses times its number of
targets, so that after the one division they are the mean over micro-batches, weighted as the token losses are. The
load-balancing loss is a product of two means, so it depends on how rows are divided into micro-batches, as it does in
other trainers: it asks for equally used experts within each micro-batch. With one micro-batch a step has exactly
transformers' loss.
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
    """Coefficients with which the load-balancing loss and the router z-loss are added to the mean loss."""

    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0

    def __bool__(self) -> bool:
        """Whether any coefficient is not zero."""
        return self.aux_loss_coef != 0 or self.z_loss_coef != 0

    def added(self, values: jax.Array) -> jax.Array:
        """The loss to add, from the values float32[2] of the load-balancing loss and the z-loss."""
        return self.aux_loss_coef * values[0] + self.z_loss_coef * values[1]


NO_ROUTER_LOSSES = RouterLosses()


def router_losses(config: TrainConfig, model: Decoder) -> RouterLosses:
    """The router losses of a run: the config's coefficients, or the model's if the config has no router_aux_loss_coef,
    as in transformers.

    Raises:
      ValueError: the config has one, and the model has no experts.
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
    """Runs the model over a micro-batch for an objective.

    It applies the step's plan and dropout, and collects what the step sums in addition to the objective's sums: the
    layers' gradients and the routers' losses. One Forward is made for each micro-batch while the step is traced.

    Args:
      max_documents: the largest number of documents in a row, which allows faster attention (see PackedLayout).
      plan: the placement of residuals.
      chunk_tokens: tokens whose logits exist at a time.
      dropout_key: key for the adapters' dropout; None: no dropout.
      noise: (key, alpha) of the noise on the embeddings; None: no noise.
      gradient_sums: sums to which the layers' gradients are added; see run_stack.
      routers: whether to collect the routers' losses, for a model with experts.

    Attributes:
      runs: how often the trained model was run so far; the first run adds to gradient_sums.
      routers: float32[2], the load-balancing loss and the router z-loss of the batch, summed over the runs; None if
        they are not collected.
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
        """[rows, length, hidden]: the trained model's hidden states after its final norm, in the compute dtype."""
        key, sums, noise = self._dropout_key, self._gradient_sums, self._noise
        if self.runs:  # a further run gets other dropout masks, and does not add to the sums, which would count twice
            key, sums = None if key is None else jax.random.fold_in(key, self.runs), None
            noise = None if noise is None else (jax.random.fold_in(noise[0], self.runs), noise[1])
        self.runs += 1
        options: dict[str, Any] = dict(plan=self._plan, dropout_key=key, gradient_sums=sums, noise=noise)
        hidden, values = self._run(model, batch, **options, aux=self._aux)
        if self._aux:
            sums = partition.total(
                values["router_sums"]
            )  # the losses are products of sums over the rows of all devices
            found = jnp.stack([sums.load_balancing_loss(), sums.z_loss()])
            self.routers = found if self.routers is None else self.routers + found
        return hidden

    def frozen(self, model: Decoder, batch: Batch) -> jax.Array:
        """The hidden states of a model that does not train, such as without_adapter(model), without dropout and
        gradient."""
        with jax.named_scope("reference"):
            hidden, _ = self._run(model, batch)
            return jax.lax.stop_gradient(hidden)

    def _run(self, model: Decoder, batch: Batch, **options: Any) -> tuple[jax.Array, dict[str, Any]]:
        """(hidden states, values that the layers return beside them) of a run of the model."""
        arrays = (batch.tokens, batch.segment_ids, batch.positions)
        return model.run(*arrays, max_documents=self._max_documents, **options)

    def cross_entropy(self, model: Decoder, hidden: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """(sum of weighted next-token losses, sum of weights), float32 scalars, of hidden states as a call returns
        them. The logits never exist as a whole."""
        return self._of_head(linear_cross_entropy, model, hidden, batch)

    def token_losses(self, model: Decoder, hidden: jax.Array, batch: Batch) -> jax.Array:
        """float32[rows, length]: the weighted next-token loss of each token; see cross_entropy."""
        return self._of_head(linear_token_losses, model, hidden, batch)

    def _of_head(self, function: Callable[..., Any], model: Decoder, hidden: jax.Array, batch: Batch) -> Any:
        """Calls a loss function with the hidden states, the model's head and the batch's targets and weights."""
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
    """Differentiable sums of the supervised loss of a batch.

    A step over several batches adds the sums and divides once, which gives the same gradient however the rows are
    divided.

    Args:
      model: the model.
      batch: its fields are [rows, length].
      options: those of Forward.
    Returns:
      (sum of weighted next-token losses, sum of weights, Forward.routers); float32 scalars.
    """
    forward = Forward(**options)
    loss, count = forward.cross_entropy(model, forward(model, batch), batch)
    return loss, count, forward.routers
