"""A mixture of experts, a feed-forward: a router chooses experts for each token, and the tokens' rows are sorted by
expert, so that each expert's matrix multiplies consecutive rows.

`MoE` is the module, `Experts` has the experts' matrices, and ExpertsShape the settings of experts beside an MLP.
`_down` is the part of it whose derivative is written by hand. A token's weight for an expert is applied before the down
projection, where the rows are narrow. The router's gradient then does not need the experts' outputs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import optimization_barrier

from jaxtune.models.config import DecoderConfig, MoEConfig
from jaxtune.models.fitted import EXPERTS_BYTES
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.layers.routers import Router, ScaledRouter
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
from jaxtune.models.linear import Linear
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
    """The matrices of all experts of a layer: gate_up_proj (gate and up in one) and down_proj, each an ExpertLinear. It
    has no computation of its own; MoE multiplies by them.

    Args:
      config: gives the hidden size and the range of initial weights.
      moe: gives the number and the size of the experts, and whether weights are transposed and have biases.
      key: draws the initial weights.
      dtype: of the weights.
    """

    def __init__(self, config: DecoderConfig, moe: MoEConfig, key, dtype):
        keys = jax.random.split(key)
        options: dict[str, Any] = dict(
            transposed=moe.transposed, bias=moe.expert_bias, std=config.initializer_range, dtype=dtype
        )
        hidden, inner = config.hidden_size, moe.expert_size
        self.gate_up_proj = ExpertLinear(moe.num_experts, hidden, 2 * inner, key=keys[0], **options)
        self.down_proj = ExpertLinear(moe.num_experts, inner, hidden, key=keys[1], **options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _down(gate: RowGate, graph, trainable, frozen, gate_up, by_row, by_token, routing: Routing, choice, given):
    """The output of experts' down projection from gate and up: ([T, hidden], the adapters' low-rank inputs). MoE.down
    calls it where the down projection trains or has no adapters, and in quantisation-aware training.

    Its backward multiplies the gradient by the weights first, and then computes the inner rows again, with the
    gradients of gate, up and the rows' weights, in one pass over memory (gated_rows_backward). The inner rows are
    needed for the gradients of adapters, and of weights that train.

    Args:
      gate: how an inner row is computed from gate and up.
      graph, trainable, frozen: the down projection, from nnx.split(linear, nnx.Param, ...).
      gate_up: [rows, 2 * expert_size], rows sorted by expert.
      by_row: float32[rows], the router's weight of each row.
      by_token: float32[T, k], the router's weights, by which biases are multiplied.
      routing: which expert and token each row belongs to.
      choice: int32[T, k], each token's experts; E for none.
      given: the low-rank inputs that an earlier run made (pallas/quant_matmul/low_rank.py); None: they are computed.
    """
    rows = gated_rows(gate_up, by_row, gate)
    with low_rank.kept(given) as made:
        out = nnx.merge(graph, trainable, frozen).to_tokens(rows, routing, choice, by_token)
    return out, tuple(made)


def _down_fwd(gate, graph, trainable, frozen, gate_up, by_row, by_token, routing, choice, given):
    """The forward rule of `_down`, with its arguments: (its results, the residuals for `_down_bwd`, which are all
    arguments that are arrays, but the low-rank inputs that were made in place of the given ones)."""
    arrays = trainable, frozen, gate_up, by_row, by_token, routing, choice
    results: tuple[jax.Array, tuple] = _down(gate, graph, *arrays, given)
    return results, (*arrays, results[1])


def _down_bwd(gate, graph, residuals, gradients):
    """The backward rule of `_down`: the gradients of trainable, gate_up, by_row and by_token, and None for the other
    arguments. gate, graph: as for `_down`. residuals: from `_down_fwd`. gradients: of the results, of which that of the
    output, [T, hidden], is used.

    What reads the gradient of gate_up waits until those of the adapters have been computed, whose large operands can be
    freed then: that lowers the peak memory."""
    (trainable, frozen, gate_up, by_row, by_token, routing, choice, made), (dout, _) = residuals, gradients

    def product(trainable, by_token, rows):
        """The down projection of inner rows [rows, expert_size], whose low-rank inputs are there already."""
        with low_rank.kept(made):
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
    """The settings of experts that are a further part of a layer beside its MLP (Gemma 4), given as Part.config; `make`
    builds the module. Where experts take the place of the MLP, DecoderConfig.moe is enough."""

    moe: MoEConfig  # number and size of the experts, and how tokens are routed to them
    hf_name: str = "mlp"  # the part's name in Hugging Face's tensor names

    def make(self, config: DecoderConfig, key: jax.Array, dtype) -> MoE:
        """Builds the mixture of experts with these settings; Block's constructor calls it. config: the decoder's, for
        all other settings. key: draws the initial weights. dtype: of the weights."""
        return MoE(dataclasses.replace(config, moe=self.moe), key, dtype)


class MoE(nnx.Module):
    """A mixture of experts: `router`, `experts`, and if the config has one a shared expert, an MLP that every token
    passes and whose output is multiplied by a learned gate (`shared_expert`, `shared_expert_gate`).

    In its methods x is [B, T, hidden], E is the number of experts, and choice is int32[B * T, k], the numbers of each
    token's k experts (E for none), as from `choose`. Norm and router run in each segment that reads them, because they
    are cheap; `choice` is computed only once, because it must be the same everywhere. A scaled router, which may have
    an adapter with dropout, is a segment of its own. Then x stands for its logits [B, T, E] in the methods that read x
    for the router's sake. `segments` divides the computation into the steps that the stack runs forward and backward,
    `order` has settings of that backward (BackwardOrder), and `forward_bytes` and `backward_bytes` are the planner's
    estimates of its memory.

    Args:
      config: of the decoder, whose `moe` describes the experts; it must not be None (AssertionError).
      key: draws the initial weights.
      dtype: of the weights.
    """

    # Shared: the sort by `choice`, and the norm of the input, which has a tenth of the bytes of the gradient of the
    # experts' rows. Free: the sort's results, a five-hundredth of a layer's residuals that take a dozen kernels.
    order = BackwardOrder(derivatives_at_once=True, shared=("choice", INPUT), weights_first=False, free=("choice",))

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        assert config.moe is not None
        self.config = config
        self.moe = config.moe
        keys = jax.random.split(key)
        self.router = (ScaledRouter if self.moe.scaled_router else Router)(config, self.moe, keys[0], dtype)
        self.experts = Experts(config, self.moe, keys[1], dtype)
        if self.moe.shared_size is not None:
            keys = jax.random.split(jax.random.fold_in(key, 0))
            wide = dataclasses.replace(config, intermediate_size=self.moe.shared_size)
            self.shared_expert = MLP(wide, keys[0], dtype)
            std = config.initializer_range
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False, std=std, key=keys[1], dtype=dtype)

    def _logits(self, x: jax.Array) -> jax.Array:
        """The router's logits [B * T, E] over the E experts, float32 from a plain router. x: the router's input [B, T,
        hidden], which it multiplies; or, with a scaled router, which is a segment of its own, the logits [B, T, E] that
        it has computed, which are only reshaped. `choose`, `router_sums` and `down` call it, so that an unscaled router
        runs again in each."""
        x = x.reshape(-1, x.shape[-1])
        return self.router(x) if isinstance(self.router, Router) else x

    @jax.named_scope("router")
    def choose(self, x: jax.Array, real: jax.Array | None = None) -> jax.Array:
        """Chooses each token's k of E experts, those with the largest logits of the router, the largest first: their
        numbers int32[B * T, k], without a gradient. The segment `route` calls it, and generation's plain_layer.py.

        x: [B, T, hidden], the input of this feed-forward, after the block's norm; the router computes the logits from
        it. If the router is a ScaledRouter, whose logits are computed in a segment of their own, x is these logits, [B,
        T, E]. real: bool[B, T], False for padding, whose k choices are all E, which is no expert, so that it is routed
        nowhere; None: all tokens are real."""
        return choose_experts(self._logits(x), self.moe.experts_per_token, None if real is None else real.reshape(-1))

    @jax.named_scope("router")
    def router_sums(self, x: jax.Array, choice: jax.Array) -> RouterSums:
        """The sums over tokens from which training computes the router's losses (load balancing and z-loss); padding is
        left out. They are a RouterSums, which can be added over layers and devices. The segment `balance` calls it.

        x: [B, T, hidden], the part's input (a scaled router's logits [B, T, E]). choice: int32[B * T, k], each token's
        experts; E for padding."""
        return router_sums(self._logits(x), choice)

    @jax.named_scope("experts")
    def gate_up(self, x: jax.Array, choice: jax.Array) -> jax.Array:
        """Multiplies each token of x [B, T, hidden] by the gate and up matrices of its experts: [rows, 2 *
        expert_size], one row for each pair of token and expert, sorted by expert; empty rows pad the rows of each
        expert to whole tiles. The segment `expand` calls it.

        choice: int32[B * T, k], each token's experts; E, the number of experts, stands for none, and gets no row."""
        routing = route(choice, self.moe.num_experts)
        return self.experts.gate_up_proj.of_tokens(x.reshape(-1, x.shape[-1]), routing)

    @jax.named_scope("experts")
    def down(self, gate_up: jax.Array, choice: jax.Array, x: jax.Array) -> jax.Array:
        """Computes the experts' output from gate and up: activation and down projection, summed over each token's
        experts with the router's weights: [B, T, hidden]. The segment `contract` calls it, and adds a shared expert's
        output.

        Args:
          gate_up: [rows, 2 * expert_size], rows sorted by expert, from the method `gate_up`.
          choice: int32[B * T, k], each token's experts; E for none.
          x: [B, T, hidden], the part's input, from which the router's weights are computed again (a scaled router's
            logits [B, T, E], which have the dtype of the residual stream). The products are computed in its dtype,
            unless down_proj has another one (`compute`).
        """
        weights = self.router.weights(self._logits(x), choice)
        routing = route(choice, self.moe.num_experts)
        by_row, linear = row_weights(weights, routing), self.experts.down_proj
        if linear.only_adapted(gate_up.dtype):
            out = self._adapted_down(gate_up, by_row, routing)
            out = out if linear.bias is None else token_bias(out, weights, linear.bias[...], choice)
        else:
            parts = nnx.split(linear, nnx.Param, ...)
            run = functools.partial(_down, self._gate, *parts, gate_up, by_row, weights, routing, choice)
            out = low_rank.of_function(run)
        return out.reshape(*x.shape[:-1], -1)

    def _adapted_down(self, gate_up: jax.Array, by_row: jax.Array, routing: Routing) -> jax.Array:
        """The experts' output without biases, [T, hidden], if down_proj is frozen and has adapters
        (ExpertLinear.only_adapted). The arguments are those of `_down`."""
        linear = self.experts.down_proj
        lora = linear.adapter()
        assert lora is not None
        given = gate_up, by_row, self._gate, linear.stored_weight, routing, lora
        return gated_to_tokens(*given, transposed=linear.transposed, fp8=linear.fp8)

    @property
    def _gate(self) -> RowGate:
        """How an expert's inner row is computed from gate and up; `down` computes it so."""
        moe = self.moe
        return RowGate(self.config.activation, moe.swiglu_limit, moe.swiglu_alpha, moe.interleaved)

    def segments(self) -> tuple[Segment, ...]:
        """Its segments, in the order in which they run: `score` (a scaled router's logits), `route` (computes
        `choice`), `balance` (the sums for the router's losses, which the stack runs only if they are wanted), `expand`
        (gate and up), `expand_shared` (gate and up of a shared expert) and `contract` (activation and down projection,
        also of the shared expert). `score` and `expand_shared` are left out where the model has no such router or
        expert. They tell the stack how to run the experts and the planner what they cost."""
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
            """Segment.multiplications of `route` and `balance`: hidden_size for each token."""
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
                matrices=("experts.down_proj", *(("shared_expert.down_proj", "shared_expert_gate") if shared else ())),
                experts_per_token=active,
            ),
        )

    def _contract(self, context: Context, gate_up, choice, x, shared_gate=None, shared_up=None):
        """The function `run` of the segment `contract`: ([B, T, hidden],), the experts' output; if there is a shared
        expert, its output times the sigmoid of its gate is added. context: has the dropout key, which only the shared
        expert's adapters need.

        gate_up [rows, 2 * expert_size], choice int32[B * T, k], and shared_gate and shared_up [B, T, shared_size] are
        the residuals of the other segments, the last two None without a shared expert. x is what the router's weights
        are computed from, and a shared expert's gate: the part's input [B, T, hidden], or a scaled router's logits [B,
        T, E]; MoEConfig refuses a scaled router with a shared expert."""
        out = self.down(gate_up, choice, x)
        if shared_gate is not None and shared_up is not None:
            gate = jax.nn.sigmoid(self.shared_expert_gate(x, context.key))
            out = out + gate * self.shared_expert.down(shared_gate, shared_up, context.key)
        return (out,)

    def _route(self, context: Context, x: jax.Array):
        """The function `run` of the segment `route`: (int32[B * T, k],), the chosen experts of each token. x: the
        part's input [B, T, hidden], or a scaled router's logits [B, T, E]. context: its layout says by doc_end which
        tokens are padding, which gets no expert."""
        layout = context.layout
        real = None if layout.full else jnp.arange(layout.doc_end.shape[1]) < layout.doc_end
        # The barrier makes it an array of its own: otherwise XLA keeps the whole sort that it is a part of.
        return (optimization_barrier(self.choose(x, real)),)

    # ---- for the planner

    def forward_bytes(self, sizes: Sizes) -> float:
        """An estimate of the bytes in memory at the end of the layer's forward in addition to the residuals, for the
        planner's forecasts of a training step's forward and of passes without a backward.

        It is a multiple of the bytes of the layer's input that was fitted to compiled programs (models/fitted.py).
        sizes: the bytes of the layer's residuals by name, with the device's name and whether it is a Hopper GPU."""
        return EXPERTS_BYTES.of("mosaic" if sizes.hopper else "reference", sizes.device).forward * sizes["layer_input"]

    def backward_bytes(self, sizes: Sizes) -> Scratch:
        """An estimate of the bytes that the backward of the layer needs in addition to the residuals, for the planner's
        forecast of the peak. It was fitted to the whole layer, so it covers the mixer too (covers_mixer is True).

        `own` of the result is a multiple of the layer's input plus twice the bytes of a shared expert's gate and up.
        `around` is the larger need of two moments (ExpertsBytes in models/fitted.py), as multiples of the bytes of
        gate_up at the first, and at the second of the experts' rows (a copy of each token's hidden state for each of
        its experts), of which there is another multiple if gate_up is recomputed. If the matrix product does not gather
        rows itself (it does on Hopper, unless a quantised weight must be decoded), sorted rows are added at the first
        moment and the largest decoded weight at the second. If rows are gathered and FP8 codes multiplied, the rows'
        codes and the weight's transposed codes are added to the larger need, at whichever moment. An array of gate_up's
        size is added to it if no kernel writes the activation's gradients over gate_up (in_place). sizes: the
        bytes of the layer's residuals by name, the names of the recomputed ones, the compute dtype, the device's name
        and whether it is a Hopper GPU.
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
        work += 0.0 if in_place(sizes.dtype, self._gate) else gate_up
        shared = 2.0 * (sizes["shared_gate"] + sizes["shared_up"])
        return Scratch(fit.own * sizes["layer_input"] + shared, work, covers_mixer=True)
