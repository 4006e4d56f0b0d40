"""The gated MLP, a feed-forward."""

from __future__ import annotations

import dataclasses
import functools

import jax
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.fitted import MLP_BYTES, MLPBytes
from jaxtune.models.layers.segment import INPUT, OUTPUT, BackwardOrder, Residual, Scratch, Segment, Sizes
from jaxtune.models.linear import Linear, apply_together
from jaxtune.pallas.gated import ACTIVATIONS, gated_backward, mosaic


@dataclasses.dataclass(frozen=True)
class MLPShape:
    """Part.config of an MLP of its own width."""

    intermediate_size: int
    their_name: str = "mlp"

    def make(self, config: DecoderConfig, key: jax.Array, dtype) -> MLP:
        return MLP(dataclasses.replace(config, intermediate_size=self.intermediate_size), key, dtype)


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x)); gate_proj and up_proj, or one gate_up_proj."""

    order = BackwardOrder()

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        self.config = config
        keys = jax.random.split(key, 3)
        hidden, inner = config.hidden_size, config.intermediate_size

        def linear(k, in_size, out_size):
            return Linear(in_size, out_size, bias=config.mlp_bias, std=config.initializer_range, key=k, dtype=dtype)

        if config.fused_gate_up:
            self.gate_up_proj = linear(keys[0], hidden, 2 * inner)
        else:
            self.gate_proj = linear(keys[0], hidden, inner)
            self.up_proj = linear(keys[1], hidden, inner)
        self.down_proj = linear(keys[2], inner, hidden)

    def gate_up(self, x: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """[B, T, hidden] -> gate and up, each [B, T, intermediate]."""
        if self.config.fused_gate_up:
            both = self.gate_up_proj(x, key)
            half = self.config.intermediate_size
            return both[..., :half], both[..., half:]
        gate, up = apply_together(x, (self.gate_proj, self.up_proj), key)
        return gate, up

    def down(self, gate: jax.Array, up: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """-> [B, T, hidden]"""
        return _down(self.config.activation, *nnx.split(self.down_proj, nnx.Param, ...), gate, up, key)

    def segments(self) -> tuple[Segment, ...]:
        in_fp8 = self.down_proj.fp8  # what is made of them is rounded to e4m3, and so are their gradients
        return (
            Segment(
                "expand",
                (INPUT,),
                (Residual("gate", in_fp8=in_fp8), Residual("up", in_fp8=in_fp8)),
                lambda mlp, context, x: mlp.gate_up(x, context.key),
                matrices=("gate_up_proj",) if self.config.fused_gate_up else ("gate_proj", "up_proj"),
                separable=True,
                tokenwise=True,
            ),
            Segment(
                "contract",
                ("gate", "up"),
                (Residual(OUTPUT),),
                lambda mlp, context, gate, up: (mlp.down(gate, up, context.key),),
                matrices=("down_proj",),
                tokenwise=True,
            ),
        )

    # ---- what the planner asks

    def forward_bytes(self, sizes: Sizes) -> float:
        """The activation, and what is not kept of gate and up."""
        dropped = sum(sizes[name] for name in ("gate", "up") if name in sizes.recomputed)
        return sizes["gate"] + dropped + self._fitted(sizes).forward * sizes["layer_input"]

    def backward_bytes(self, sizes: Sizes) -> Scratch:
        gate, up, stream = sizes["gate"], sizes["up"], sizes["layer_input"]
        fit = self._fitted(sizes)
        around = (fit.around if sizes.tiles == 1 else fit.around_tiles) * stream
        if self._in_place(sizes):  # the activation's gradient, and what becomes of gate and up takes their place
            return Scratch((gate + up) / 2, around, covers_mixer=False)
        # The activation, its gradient, and those of gate and up; half-ready gradients around it.
        return Scratch(2 * (gate + up) + fit.own * stream, around, covers_mixer=True)

    def _fitted(self, sizes: Sizes) -> MLPBytes:
        return MLP_BYTES.of("mosaic" if self._in_place(sizes) else "reference", sizes.device)

    def _in_place(self, sizes: Sizes) -> bool:
        """Whether pallas/gated writes the gradients of gate and up over them."""
        numbers = sizes.length * self.config.intermediate_size
        runs = mosaic.unsupported(sizes.dtype, numbers, self.config.activation) is None
        return runs and sizes.hopper and sizes["gate"] / sizes.dtype.itemsize < mosaic.MOST


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _down(activation: str, graph, trainable, frozen, gate, up, key):
    """activation(gate) * up through the linear of these parts.

    Its backward never has more than three arrays of gate's size, which gate, up and a gradient become in place.
    """
    return nnx.merge(graph, trainable, frozen)(ACTIVATIONS[activation](gate) * up, key)


def _down_fwd(activation, graph, trainable, frozen, gate, up, key):
    return _down(activation, graph, trainable, frozen, gate, up, key), (trainable, frozen, gate, up, key)


def _down_bwd(activation, graph, residuals, dout):
    trainable, frozen, gate, up, key = residuals

    def linear(trainable, x):
        return nnx.merge(graph, trainable, frozen)(x, key)

    # Of a linear map the gradient to its input is the same at every input: gate, for what was there is made below.
    _, to_input = jax.vjp(functools.partial(linear, trainable), gate)
    (dgated,) = to_input(dout)
    gated, dgate, dup = gated_backward(gate, up, dgated, activation)
    _, to_weights = jax.vjp(lambda trainable: linear(trainable, gated), trainable)
    return *to_weights(dout), None, dgate, dup, None


_down.defvjp(_down_fwd, _down_bwd)
