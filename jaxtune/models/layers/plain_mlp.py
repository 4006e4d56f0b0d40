"""The MLP without a gate, a feed-forward: down(activation(up(x)))."""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from jaxtune.models import initial
from jaxtune.models.config import DecoderConfig
from jaxtune.models.layers.segment import INPUT, OUTPUT, BackwardOrder, Residual, Scratch, Segment, Sizes
from jaxtune.models.linear import Linear
from jaxtune.pallas.gated import ACTIVATIONS


@dataclasses.dataclass(frozen=True)
class PlainMLPShape:
    """An MLP without a gate; width, activation and biases are the decoder's."""

    hf_name: str = "mlp"  # the part's name in Hugging Face's tensor names

    def make(self, config: DecoderConfig, key: jax.Array, dtype) -> PlainMLP:
        """Builds the MLP with random weights. dtype: of the weights as stored."""
        return PlainMLP(config, key, dtype)


class PlainMLP(nnx.Module):
    """down(activation(up(x))) with up_proj and down_proj."""

    order = BackwardOrder()

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        self.activation = config.activation
        keys, hidden, inner = initial.split(key, 2), config.hidden_size, config.intermediate_size

        def linear(k, in_size, out_size):
            return Linear(in_size, out_size, bias=config.mlp_bias, std=config.initializer_range, key=k, dtype=dtype)

        self.up_proj, self.down_proj = linear(keys[0], hidden, inner), linear(keys[1], inner, hidden)

    def segments(self) -> tuple[Segment, ...]:
        return (
            Segment(
                "expand",
                (INPUT,),
                (Residual("up"),),
                lambda mlp, context, x: (mlp.up_proj(x, context.key),),
                matrices=("up_proj",),
                tokenwise=True,
                norms=True,
            ),
            Segment(
                "contract",
                ("up",),
                (Residual(OUTPUT),),
                lambda mlp, context, up: (mlp.down_proj(ACTIVATIONS[mlp.activation](up), context.key),),
                matrices=("down_proj",),
                tokenwise=True,
            ),
        )

    # ---- for the planner

    def forward_bytes(self, sizes: Sizes) -> float:
        """The activation's output, `up` if it is recomputed, and three values of the residual stream."""
        return sizes["up"] * (2 if "up" in sizes.recomputed else 1) + 3 * sizes["layer_input"]

    def backward_bytes(self, sizes: Sizes) -> Scratch:
        """The activation's output, its gradient and that of `up`, and the gradient of the output."""
        return Scratch(3 * sizes["up"], sizes["layer_input"], covers_mixer=False)
