"""Per-layer embeddings (Gemma 4 E2B and E4B): a second table has an embedding of each token for every layer, which
enters the layer's residual stream through a gate.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models import initial
from jaxtune.models.config import DecoderConfig
from jaxtune.models.layers.segment import INPUT, OUTPUT, BackwardOrder, Residual, Scratch, Segment, Sizes
from jaxtune.models.linear import Linear
from jaxtune.models.norm import norm_of
from jaxtune.models.placement import host_table
from jaxtune.pallas.gated import ACTIVATIONS

PER_LAYER = "per_layer_input"  # the name of a layer's own value among what it takes


@dataclasses.dataclass(frozen=True)
class PerLayerShape:
    """The settings of the part that adds a layer's embedding of the token to the residual stream."""

    size: int  # how many numbers a layer's embedding of a token has
    # the part's name in Hugging Face's tensor names: empty, because these name its matrices directly under the layer
    hf_name: str = ""

    def make(self, config: DecoderConfig, key: jax.Array, dtype) -> PerLayerGate:
        """Builds the gate with random weights. config: the decoder's. key: draws the weights. dtype: of the weights as
        stored.
        """
        return PerLayerGate(config, self.size, key, dtype)


class PerLayerGate(nnx.Module):
    """per_layer_projection(activation(per_layer_input_gate(x)) * the layer's embedding of the token).

    size: numbers of a layer's embedding of a token.
    """

    order = BackwardOrder()

    def __init__(self, config: DecoderConfig, size: int, key: jax.Array, dtype):
        self.activation, self.size = config.activation, size
        first, second = initial.split(key)
        std, hidden = config.initializer_range, config.hidden_size
        self.per_layer_input_gate = Linear(hidden, size, bias=False, std=std, key=first, dtype=dtype)
        self.per_layer_projection = Linear(size, hidden, bias=False, std=std, key=second, dtype=dtype)

    @property
    def takes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape for one token} of the value from outside the layer, its embedding of the token."""
        return {PER_LAYER: (self.size,)}

    def segments(self) -> tuple[Segment, ...]:
        return (
            Segment(
                "gate_per_layer",
                (INPUT,),
                (Residual("per_layer_gate"),),
                lambda part, context, x: (part.per_layer_input_gate(x, context.key),),
                matrices=("per_layer_input_gate",),
            ),
            Segment(
                "project_per_layer",
                ("per_layer_gate", PER_LAYER),
                (Residual(OUTPUT),),
                lambda part, context, gate, embedding: (
                    part.per_layer_projection(ACTIVATIONS[part.activation](gate) * embedding, context.key),
                ),
                matrices=("per_layer_projection",),
            ),
        )

    # ---- for the planner

    def forward_bytes(self, sizes: Sizes) -> float:
        """The gated embedding, and input, output and normed output of the part."""
        return sizes["per_layer_gate"] + 3.0 * sizes["layer_input"]

    def backward_bytes(self, sizes: Sizes) -> Scratch:
        """Gradients of the gate and the embedding, their product, and two values of the residual stream."""
        return Scratch(3.0 * sizes["per_layer_gate"] + 2.0 * sizes["layer_input"], 0.0, covers_mixer=False)


class PerLayerInputs(nnx.Module):
    """Computes the per-layer embeddings of tokens for all layers, from a table [vocabulary, layers * size] and the
    usual embedding x:

        given = (norm(projection(x) / sqrt(hidden)) + table[token] * sqrt(size)) / sqrt(2)

    The norm over a layer's `size` numbers is the same for all layers.
    """

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        assert config.per_layer_size is not None
        self.size, self.layers, std = config.per_layer_size, config.num_layers, config.initializer_range
        first, second = initial.split(key)
        shape = (config.per_layer_vocab_size, self.layers * self.size)
        self.weight: nnx.Variable = nnx.Param(initial.normal(first, shape, std, dtype), axes=("vocab", "hidden"))
        self.projection = Linear(config.hidden_size, shape[1], bias=False, std=std, key=second, dtype=dtype)
        # Without logical axes, because no device divides a matrix that is used outside of the stack.
        self.projection.weight = nnx.Param(self.projection.weight.get_value())
        self.norm = norm_of(config, self.size, dtype)

    def __call__(
        self,
        tokens: jax.Array,
        x: jax.Array,
        take,
        key: jax.Array | None = None,
        rows: jax.Array | None = None,
        placed: jax.Array | None = None,
    ) -> list[jax.Array]:
        """The per-layer embeddings, one array [B, T, size] in x's dtype for each layer.

        x: [B, T, hidden], the first layer's input.
        take: (table, tokens) -> rows [B, T, layers * size], which decides the table's gradient.
        key: draws the dropout mask of the projection's adapter; None: no dropout.
        rows: [B, T, layers * size], the tokens' rows of a table on the host; ValueError if they are missing then.
        placed: bool[B, T], tokens that give the table no gradient; None: none.
        """
        rows = host_table.rows_of("per_layer", self.weight, tokens, take, rows)
        if placed is not None:
            rows = jnp.where(placed[..., None], jax.lax.stop_gradient(rows), rows)
        rows = rows.astype(x.dtype) * jnp.asarray(self.size**0.5, x.dtype)
        projected = self.projection(x, key)
        projected = (projected.astype(jnp.float32) * x.shape[-1] ** -0.5).astype(x.dtype)
        by_layer = (*x.shape[:2], self.layers, self.size)
        total = self.norm(projected.reshape(by_layer)) + rows.reshape(by_layer)
        total = (total.astype(jnp.float32) * 2.0**-0.5).astype(x.dtype)
        return [total[:, :, index] for index in range(self.layers)]
