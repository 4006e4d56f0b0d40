"""Per-layer embeddings (Gemma 4 E2B and E4B): besides the usual embedding, a second table has an embedding of each
token for every layer, which the layer adds to its residual stream.

The decoder computes the values of all layers once for a batch (PerLayerInputs) and gives each layer its own; in the
layer they enter the residual stream through a gate (PerLayerGate, a feed-forward, of which PerLayerShape has the
settings)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.layers.segment import INPUT, OUTPUT, BackwardOrder, Residual, Scratch, Segment, Sizes
from jaxtune.models.linear import Linear
from jaxtune.models.norm import norm_of
from jaxtune.models.placement import host_table
from jaxtune.pallas.gated import ACTIVATIONS

PER_LAYER = "per_layer_input"  # the name of a layer's own value among what it takes


@dataclasses.dataclass(frozen=True)
class PerLayerShape:
    """The settings of the part (Gemma 4 E2B) that adds a layer's embedding of the token to the residual stream, given
    as Part.config; `make` builds the module."""

    size: int  # how many numbers a layer's embedding of a token has
    # the part's name in Hugging Face's tensor names: empty, because these name its matrices directly under the layer
    hf_name: str = ""

    def make(self, config: DecoderConfig, key: jax.Array, dtype) -> PerLayerGate:
        """Builds the layer's PerLayerGate of this size; Block's constructor calls it. config: the decoder's. key: draws
        the initial weights. dtype: of the weights."""
        return PerLayerGate(config, self.size, key, dtype)


class PerLayerGate(nnx.Module):
    """A feed-forward that adds the layer's embedding of each token:
    per_layer_projection(activation(per_layer_input_gate(x)) * the layer's embedding of the token).

    `takes` names that embedding, `segments` divides the computation into the steps that the stack runs forward and
    backward, `order` has settings of that backward (BackwardOrder), and `forward_bytes` and `backward_bytes` are the
    planner's estimates of its memory.

    Args:
      config: gives the hidden size, the activation and the range of initial weights.
      size: numbers of the layer's embedding of a token.
      key: draws the initial weights.
      dtype: of the weights.
    """

    order = BackwardOrder()

    def __init__(self, config: DecoderConfig, size: int, key: jax.Array, dtype):
        self.activation, self.size = config.activation, size
        first, second = jax.random.split(key)
        std, hidden = config.initializer_range, config.hidden_size
        self.per_layer_input_gate = Linear(hidden, size, bias=False, std=std, key=first, dtype=dtype)
        self.per_layer_projection = Linear(size, hidden, bias=False, std=std, key=second, dtype=dtype)

    @property
    def takes(self) -> dict[str, tuple[int, ...]]:
        """{"per_layer_input": (size,)}, the name and the shape for one token of the value that the part reads from
        outside the layer: the layer's embedding of the token, which the decoder gives (Decoder.given) and the segment
        `project_per_layer` reads. Block.takes collects it."""
        return {PER_LAYER: (self.size,)}

    def segments(self) -> tuple[Segment, ...]:
        """Returns the steps of the part's computation, as Segments, between which a plan may keep, offload or recompute
        values: `gate_per_layer` multiplies the input by per_layer_input_gate; `project_per_layer` multiplies the
        layer's embedding of the token by the activated gate, and projects the product to the hidden size."""
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
                lambda part, context, gate, own: (
                    part.per_layer_projection(ACTIVATIONS[part.activation](gate) * own, context.key),
                ),
                matrices=("per_layer_projection",),
            ),
        )

    # ---- for the planner

    def forward_bytes(self, sizes: Sizes) -> float:
        """An estimate of the bytes in memory at the end of the layer's forward in addition to the residuals, for the
        planner's forecasts of a training step's forward and of passes without a backward: the gated embedding, and
        input, output and normed output of the part. sizes: the bytes of the layer's residuals by name."""
        return sizes["per_layer_gate"] + 3.0 * sizes["layer_input"]

    def backward_bytes(self, sizes: Sizes) -> Scratch:
        """An estimate of the bytes that the part's backward needs in addition to the residuals, for the planner. `own`
        of the result counts gradients of the gate and of the embedding, their product, and two values of the residual
        stream; `around` is 0, and covers_mixer False. sizes: the bytes of the layer's residuals by name."""
        return Scratch(3.0 * sizes["per_layer_gate"] + 2.0 * sizes["layer_input"], 0.0, covers_mixer=False)


class PerLayerInputs(nnx.Module):
    """Computes the per-layer embeddings of tokens for all layers, which the Decoder gives to the layers. Each is the
    sum of a row of a table and of a projection of the token's usual embedding x, divided by sqrt(2):

        given = (norm(projection(x) / sqrt(hidden)) + table[token] * sqrt(size)) / sqrt(2)

    table is [vocabulary, layers * size] and projection [layers * size, hidden]. The norm, over the `size` numbers of
    one layer, is the same for all layers. The module is called with the tokens, x, the function (table, tokens) -> rows
    that looks up rows of the table, the key of dropout, and rows [B, T, layers * size] that were looked up already, or
    None; it returns one array [B, T, size] for each layer. A training run may have the table on the host
    (placement/host_table.py), and then gives the rows.

    Args:
      config: gives the sizes: num_layers, hidden_size, per_layer_size and per_layer_vocab_size.
      key: draws the initial weights; the `key` of a call draws the dropout mask of the projection's adapter.
      dtype: of the weights.
    """

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        assert config.per_layer_size is not None
        self.size, self.layers, std = config.per_layer_size, config.num_layers, config.initializer_range
        first, second = jax.random.split(key)
        shape = (config.per_layer_vocab_size, self.layers * self.size)
        self.weight: nnx.Variable = nnx.Param(
            (jax.random.normal(first, shape, jnp.float32) * std).astype(dtype), axes=("vocab", "hidden")
        )
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
    ) -> list[jax.Array]:
        """Returns the per-layer embeddings of the tokens, one array [B, T, size] in x's dtype for each layer.

        Args:
          tokens: int32[B, T].
          x: [B, T, hidden], the tokens' embeddings as the first layer gets them.
          take: the function (table, tokens) -> rows [B, T, layers * size] that looks up the rows of the table, and
            decides how the table's gradient is computed; not called if `rows` are given or the host looks them up.
          key: draws the dropout mask of the projection's adapter; None: no dropout.
          rows: [B, T, layers * size], the rows of the table for these tokens; None: they are looked up.
        Raises:
          ValueError: the table is on the host, and no rows are given (host_table.rows_of).
        """
        rows = host_table.rows_of("per_layer", self.weight, tokens, take, rows)
        rows = rows.astype(x.dtype) * jnp.asarray(self.size**0.5, x.dtype)
        projected = self.projection(x, key)
        projected = (projected.astype(jnp.float32) * x.shape[-1] ** -0.5).astype(x.dtype)
        by_layer = (*x.shape[:2], self.layers, self.size)
        both = self.norm(projected.reshape(by_layer)) + rows.reshape(by_layer)
        both = (both.astype(jnp.float32) * 2.0**-0.5).astype(x.dtype)
        return [both[:, :, index] for index in range(self.layers)]
