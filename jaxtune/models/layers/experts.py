"""A mixture of experts, a feed-forward: a router chooses experts for each token, and tokens' rows are sorted by expert,
so that each expert's matrix multiplies consecutive rows. A token's weight for an expert is applied before the down
projection, where rows are narrow; the router's gradient then does not need the experts' outputs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import optimization_barrier

from jaxtune.models import initial
from jaxtune.models.config import DecoderConfig, MoEConfig
from jaxtune.models.fitted import EXPERTS_BYTES
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.layers.routers import Router, ScaledRouter, SigmoidRouter
from jaxtune.models.layers.segment import (
    INPUT,
    OUTPUT,
    STREAM,
    AuxLoss,
    BackwardOrder,
    Context,
    Residual,
    Scratch,
    Segment,
    Sizes,
)
from jaxtune.models.linear import Linear, NeverTrained
from jaxtune.pallas import one_order
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.gated import RowGate, gated_rows, gated_rows_backward, in_place
from jaxtune.pallas.quant_matmul import low_rank
from jaxtune.pallas.routing import (
    RouterSums,
    Routing,
    choose_experts,
    gated_to_tokens,
    route,
    router_sums,
    row_weights,
    token_bias,
)


class Experts(nnx.Module):
    """The matrices of all experts of a layer, gate_up_proj (gate and up in one) and down_proj."""

    def __init__(self, config: DecoderConfig, moe: MoEConfig, key, dtype):
        keys = initial.split(key)
        options: dict[str, Any] = dict(
            transposed=moe.transposed, bias=moe.expert_bias, std=config.initializer_range, dtype=dtype
        )
        hidden, inner = config.hidden_size, moe.expert_size
        self.gate_up_proj = ExpertLinear(moe.num_experts, hidden, 2 * inner, key=keys[0], **options)
        self.down_proj = ExpertLinear(moe.num_experts, inner, hidden, key=keys[1], **options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _down(
    gate: RowGate, graph, trainable, frozen, gate_up, by_row, by_token, routing: Routing, choice, earlier_low_rank
):
    """The experts' output from gate and up: ([T, hidden], the adapters' low-rank inputs).

    graph, trainable, frozen: of the down projection.
    gate_up: [rows, 2 * expert_size], sorted by expert.
    by_row, by_token: the router's weights, float32[rows] and float32[T, k]; the latter multiply biases.
    choice: int32[T, k], each token's experts; E for none.
    """
    rows = gated_rows(gate_up, by_row, gate)
    with low_rank.collected(earlier_low_rank) as low_rank_values:
        out = nnx.merge(graph, trainable, frozen).to_tokens(rows, routing, choice, by_token)
    return out, tuple(low_rank_values)


def _down_fwd(gate, graph, trainable, frozen, gate_up, by_row, by_token, routing, choice, earlier_low_rank):
    arrays = trainable, frozen, gate_up, by_row, by_token, routing, choice
    results: tuple[jax.Array, tuple] = _down(gate, graph, *arrays, earlier_low_rank)
    return results, (*arrays, results[1])


def _down_bwd(gate, graph, residuals, gradients):
    """What reads the gradient of gate_up waits for those of the adapters, whose large operands can be freed then."""
    (trainable, frozen, gate_up, by_row, by_token, routing, choice, low_rank_values), (dout, _) = residuals, gradients

    def product(trainable, by_token, rows):
        with low_rank.collected(low_rank_values):
            return nnx.merge(graph, trainable, frozen).to_tokens(rows, routing, choice, by_token)

    # A linear map's gradient to its input doesn't depend on the input, so gate can stand for the inner rows, which
    # aren't computed until the next lines.
    _, to_rows = jax.vjp(functools.partial(product, trainable, by_token), gate_up[:, : gate_up.shape[1] // 2])
    [drows] = to_rows(dout)
    rows, dgate_up, dby_row = gated_rows_backward(gate_up, by_row, drows, gate)
    _, to_weights = jax.vjp(lambda trainable, by_token: product(trainable, by_token, rows), trainable, by_token)
    dtrainable, dby_token = to_weights(dout)
    if nnx.merge(graph, trainable, frozen).lora is not None:
        dgate_up, dtrainable = optimization_barrier((dgate_up, dtrainable))
    return dtrainable, None, dgate_up, dby_row, dby_token, None, None, None


_down.defvjp(_down_fwd, _down_bwd)


@dataclasses.dataclass(frozen=True)
class ExpertsShape:
    """The settings of experts beside a layer's MLP (Gemma 4). Where experts replace the MLP, DecoderConfig.moe is
    enough.
    """

    moe: MoEConfig  # number and size of the experts, and how tokens are routed to them
    hf_name: str = "mlp"  # the part's name in Hugging Face's tensor names

    def make(self, config: DecoderConfig, key: jax.Array, dtype) -> MoE:
        """Builds the experts with random weights. config: the decoder's. key: draws the weights. dtype: of the weights
        as stored.
        """
        return MoE(dataclasses.replace(config, moe=self.moe), key, dtype)


class MoE(nnx.Module):
    """A mixture of experts, perhaps with a shared expert: an MLP that every token passes, times a learned gate.

    x is [B, T, hidden], E the number of experts, and choice int32[B * T, k], each token's experts (E for none). Norm
    and router run in each segment that reads them, because they are cheap; `choice` is computed once, because it must
    be the same everywhere. A scaled router, whose adapter may have dropout, is a segment of its own; where methods read
    x for the router's sake, x is then its logits [B, T, E].
    """

    # Shared: the sort by `choice`, and the norm of the input, which has a tenth of the bytes of the gradient of the
    # experts' rows. Free: the sort's results, a five-hundredth of a layer's residuals that take a dozen kernels.
    order = BackwardOrder(derivatives_at_once=True, shared=("choice", INPUT), weights_first=False, free=("choice",))

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        assert config.moe is not None
        self.config = config
        self.moe = config.moe
        keys = initial.split(key)
        kind = ScaledRouter if self.moe.scaled_router else SigmoidRouter if self.moe.sigmoid else Router
        self.router = kind(config, self.moe, keys[0], dtype)
        zeros = initial.full((self.moe.num_experts,), 0, jnp.float32)
        self.selection_bias = NeverTrained(zeros) if self.moe.selection_bias else None
        self.experts = Experts(config, self.moe, keys[1], dtype)
        if self.moe.shared_size is not None:
            keys = initial.split(initial.folded(key, 0))
            wide = dataclasses.replace(config, intermediate_size=self.moe.shared_size)
            self.shared_expert = MLP(wide, keys[0], dtype)
            std = config.initializer_range
            gate = Linear(config.hidden_size, 1, bias=False, std=std, key=keys[1], dtype=dtype)
            self.shared_expert_gate = gate if self.moe.shared_gate else None

    def _logits(self, x: jax.Array) -> jax.Array:
        """The router's logits [B * T, E]."""
        x = x.reshape(-1, x.shape[-1])
        return self.router(x) if isinstance(self.router, Router) else x

    @jax.named_scope("router")
    def choose(self, x: jax.Array, real: jax.Array | None = None) -> jax.Array:
        """Each token's k experts with the largest logits, the largest first: int32[B * T, k], without a gradient.

        real: bool[B, T], False for padding, whose choices are E; None: all tokens are real.
        """
        scores = self._logits(x)
        if isinstance(self.router, SigmoidRouter):
            scores = self.router.ranked(scores, None if self.selection_bias is None else self.selection_bias[...])
        return choose_experts(scores, self.moe.experts_per_token, None if real is None else real.reshape(-1))

    def weights(self, x: jax.Array, choice: jax.Array) -> jax.Array:
        """The router's weights of each token's experts, float32[B * T, k]."""
        return self.router.weights(self._logits(x), choice)

    @jax.named_scope("router")
    def router_sums(self, x: jax.Array, choice: jax.Array) -> RouterSums:
        """Sums over tokens for the router's losses, which can be added over layers and devices; padding is left out."""
        return router_sums(self._logits(x), choice)

    @jax.named_scope("experts")
    def gate_up(self, x: jax.Array, choice: jax.Array) -> jax.Array:
        """Gate and up of each token's experts, [rows, 2 * expert_size], sorted by expert; empty rows pad to whole
        tiles.
        """
        routing = route(choice, self.moe.num_experts)
        return self.experts.gate_up_proj.of_tokens(x.reshape(-1, x.shape[-1]), routing)

    @jax.named_scope("experts")
    def down(self, gate_up: jax.Array, choice: jax.Array, x: jax.Array) -> jax.Array:
        """The experts' output [B, T, hidden] with the router's weights, which are computed again from x. Products are
        in x's dtype unless down_proj has its own.

          gate_up: [rows, 2 * expert_size], rows sorted by expert.
          choice: int32[tokens, k], each token's experts.
          x: [B, T, hidden], the experts' input.
        """
        weights = self.weights(x, choice)
        routing = route(choice, self.moe.num_experts)
        by_row, linear = row_weights(weights, routing), self.experts.down_proj
        if linear.only_adapted(gate_up.dtype):
            out = self._adapted_down(gate_up, by_row, routing)
            out = out if linear.bias is None else token_bias(out, weights, linear.bias[...], choice)
        else:
            split_linear = nnx.split(linear, nnx.Param, ...)
            run = functools.partial(_down, self.gate, *split_linear, gate_up, by_row, weights, routing, choice)
            out = low_rank.of_function(run)
        return out.reshape(*x.shape[:-1], -1)

    def _adapted_down(self, gate_up: jax.Array, by_row: jax.Array, routing: Routing) -> jax.Array:
        linear = self.experts.down_proj
        lora = linear.adapter()
        assert lora is not None
        operands = gate_up, by_row, self.gate, linear.stored_weight, routing, lora
        return gated_to_tokens(*operands, transposed=linear.transposed, fp8=linear.fp8)

    @property
    def gate(self) -> RowGate:
        """How the experts' inner rows follow from gate and up."""
        moe = self.moe
        return RowGate(self.config.activation, moe.swiglu_limit, moe.swiglu_alpha, moe.interleaved)

    def segments(self) -> tuple[Segment, ...]:
        active, hidden = self.moe.experts_per_token, self.config.hidden_size
        choice = Residual("choice", recomputable=False, small=True)

        shared = ()
        if self.moe.shared_size is not None:
            # Its down projection is part of `contract`, because the block adds one value to the residual stream.
            shared = (
                Segment(
                    "expand_shared",
                    (INPUT,),
                    (Residual("shared_gate"), Residual("shared_up")),
                    lambda moe, context, x: moe.shared_expert.gate_up(x, context.key),
                    matrices=("shared_expert.gate_proj", "shared_expert.up_proj"),
                    separable=True,
                ),
            )

        last_of_shared = ("shared_expert.down_proj", *(("shared_expert_gate",) if self.moe.shared_gate else ()))
        last_of_shared = last_of_shared if shared else ()
        scores, routed_by = (), INPUT
        if self.moe.scaled_router:
            routed_by = "router_logits"
            scores = (
                Segment(
                    "score",
                    (STREAM,),
                    (Residual(routed_by),),
                    lambda moe, context, x: (moe.router(x, context.key),),
                    matrices=("router.proj",),
                ),
            )

        def router_alone(tokens: int, length: int, backward: bool) -> float:
            """The router's duration, as multiplications that large products do in that time."""
            return float(tokens * hidden)

        return (
            *scores,
            Segment("route", (routed_by,), (choice,), MoE._route, differentiable=False, multiplications=router_alone),
            Segment(
                "balance",
                (routed_by, "choice"),
                (Residual("router_sums"),),
                lambda moe, context, x, choice: (moe.router_sums(x, choice),),
                aux=(
                    AuxLoss(
                        "router_aux_loss",
                        "load-balancing loss",
                        RouterSums.load_balancing_loss,
                        self.moe.router_aux_loss_coef if self.moe.output_router_logits else 0.0,
                    ),
                    AuxLoss("router_z_loss", "z-loss", RouterSums.z_loss),
                ),
                multiplications=router_alone,
            ),
            Segment(
                "expand",
                (INPUT, "choice"),
                (Residual("gate_up"),),
                lambda moe, context, x, choice: (moe.gate_up(x, choice),),
                matrices=("experts.gate_up_proj",),
                experts_per_token=active,
                decodes_once=True,
            ),
            *shared,
            Segment(
                "contract",
                ("gate_up", "choice", routed_by, *(name for segment in shared for name in segment.outputs)),
                (Residual(OUTPUT),),
                MoE._contract,
                matrices=("experts.down_proj", *last_of_shared),
                experts_per_token=active,
            ),
        )

    def _contract(self, context: Context, gate_up, choice, x, shared_gate=None, shared_up=None):
        """x is what the router's weights and a shared expert's gate are computed from."""
        out = self.down(gate_up, choice, x)
        if shared_gate is not None and shared_up is not None:
            shared = self.shared_expert.down(shared_gate, shared_up, context.key)
            gate = self.shared_expert_gate
            out = out + (shared if gate is None else one_order.sigmoid(gate(x, context.key)) * shared)
        return (out,)

    def _route(self, context: Context, x: jax.Array):
        """Padding, by the layout's doc_end, gets no expert."""
        layout = context.layout
        real = None if layout.full else jnp.arange(layout.doc_end.shape[1]) < layout.doc_end
        # The barrier makes it an array of its own: otherwise XLA keeps the whole sort that it is a part of.
        return (optimization_barrier(self.choose(x, real)),)

    # ---- for the planner

    def forward_bytes(self, sizes: Sizes) -> float:
        return EXPERTS_BYTES.of("mosaic" if sizes.hopper else "reference", sizes.device).forward * sizes["layer_input"]

    def backward_bytes(self, sizes: Sizes) -> Scratch:
        """`own_bytes` is a multiple of the layer's input plus twice a shared expert's gate and up. The other is the
        larger need of the two moments of ExpertsBytes. Where the product gathers no rows itself (Hopper does, unless
        weights are decoded), sorted rows are added at the first moment and the largest decoded weight at the second.
        FP8 products of gathered rows add the rows' codes and the weight's transposed codes.
        """
        gate_up = sizes["gate_up"]
        rows = self.config.hidden_size / (2 * self.moe.expert_size) * gate_up
        linears = (self.experts.gate_up_proj, self.experts.down_proj)
        codes = max((linear.stored_weight.size for linear in linears if linear.fp8 and sizes.hopper), default=0)
        packed = [linear for linear in linears if isinstance(linear.stored_weight, Stored)]
        packed = [linear.stored_weight.size for linear in packed if not (linear.fp8 and sizes.hopper)]
        decoded = max(packed, default=0) * sizes.dtype.itemsize
        gathers = sizes.hopper and not decoded  # as grouped_matmul's `gathers`
        fit = EXPERTS_BYTES.of("mosaic" if gathers else "reference", sizes.device)
        again = fit.rows_again if "gate_up" in sizes.recomputed and not gathers else fit.rows
        work = max(fit.gate_up * gate_up + fit.rows_beside * rows, again * rows + fit.decoded * decoded)
        work += codes + max(gate_up, rows) / sizes.dtype.itemsize if codes else 0.0
        work += 0.0 if in_place(sizes.dtype, self.gate) else gate_up
        shared = 2.0 * (sizes["shared_gate"] + sizes["shared_up"])
        own = fit.own * sizes["layer_input"] + shared
        return Scratch(own, work, covers_mixer=True, mixer_later=sizes.hopper and decoded > 0)
