"""The norms before the parts of a layer in its backward, where a kernel computes their gradients (`NormsApart`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp

from jaxtune.models.layers.block import Block
from jaxtune.models.layers.places import places_of
from jaxtune.models.layers.segment import Segment, matrix_of
from jaxtune.models.linear import Linear
from jaxtune.models.norm import RMSNorm
from jaxtune.models.stack_segments import differentiated
from jaxtune.pallas.formats import Stored, dense
from jaxtune.pallas.quant_matmul import low_rank


class NormsApart:
    """The norms that a layer's backward takes out of the layer's segments, because a kernel computes their gradients: a
    segment then reads the normed stream. The gradient of such a norm is computed once, after those of all segments that
    read the normed stream, and the kernel adds it to the stream's other gradients. Without a kernel, and in tiles, no
    norm is taken out, and `segments` are as in the forward.

    Args:
      block: the layer.
      x: [B, T, hidden], a value like the residual stream's, of which only shape and dtype matter.
      tile, aux: the arguments of Block.segments.
      saved: {name: value} of the layer's residuals that are there.
    Attributes:
      segments: the layer's chain. In it the normed stream is a value with the norm's name, the block's attribute.
      differentiated: the segments that the backward differentiates (stack_segments.differentiated).
    """

    def __init__(self, block: Block, x: jax.Array, tile: int | None, aux: Collection[str], saved: Mapping):
        self._block = block
        read = {} if tile is not None else {p.norm: p.reads for p in places_of(block.stages)[0].values() if p.norm}
        norms = {name: getattr(block, name) for name in read}
        # {the norm's name: that of the value of the residual stream that it reads}
        self._stream = {n: read[n] for n, norm in norms.items() if isinstance(norm, RMSNorm) and norm.by_kernel(x)}
        self.segments: tuple = block.segments(tile, aux, apart=self._stream)
        self.differentiated = differentiated(self.segments, saved)
        # {the norm's name: the segment that reads the normed stream whose gradient comes last}
        self._last = {name: next((s for s in self.differentiated if name in s.reads), None) for name in self._stream}

    def saved(self, segment: Segment) -> list[str]:
        """The names of the values from which `values` makes what the segment reads."""
        return [self._stream.get(name, name) for name in segment.reads]

    def values(self, segment: Segment, values: Mapping) -> list:
        """The values that the segment reads, as arrays, from those of the layer ({name: value}). The normed stream is
        computed anew."""

        def value(name: str):
            return (
                getattr(self._block, name)(values[self._stream[name]]) if name in self._stream else dense(values[name])
            )

        return [value(name) for name in segment.reads]

    def factors(self, segment: Segment, values: Mapping) -> list[low_rank.Factors | None]:
        """For each value that the segment reads, its Factors if it is a normed stream that the segment's derivative
        reads for the gradients of adapters' A alone; else None. So it is if all matrices are frozen linears, of which
        some have adapters (Linear.plain). float16 has no room for a gradient times a row's factor, which may be less
        than a hundredth. There are no Factors where residuals are in FP8, because memory is short and XLA then leaves
        more of it between the buffers of a layer (0.1 GB of an 8B). values: those of the layer."""
        matrices = [matrix_of(self._block, name) for name in segment.matrices]

        def of(name: str) -> low_rank.Factors | None:
            x = values[self._stream[name]] if name in self._stream else None
            if x is None or x.dtype == jnp.float16 or any(isinstance(v, Stored) for v in values.values()):
                return None
            plain = all(isinstance(m, Linear) and m.plain(x.dtype, drops=False) for m in matrices)
            adapted = any(m.lora is not None for m in matrices)
            return getattr(self._block, name).factors(x) if plain and adapted else None

        return [of(name) for name in segment.reads]

    def added(self, segment: Segment, block_of, trainable, values: Mapping, gradients: dict, total):
        """Computes the gradients of the norms that no segment after this one reads, in the order of the backward. It
        puts those of the stream into `gradients`, and returns `total` with those of the norms' weights.

        Args:
          segment: the one whose gradients were computed last.
          block_of: builds the block from trainable tensors.
          trainable: the block's trainable tensors.
          values: {name: value} of the layer's values.
          gradients: {name: gradient} of the layer's values, also of the normed streams.
          total: the sum of the gradients of the trainable tensors; None if there are none yet.
        """
        for name in [name for name, last in self._last.items() if last is segment]:
            stream = self._stream[name]

            def run(trainable, x, name=name, beside=stream in gradients):
                norm = getattr(block_of(trainable), name)
                return norm.beside(x) if beside else norm(x)

            with jax.named_scope(name):
                pullback = jax.vjp(run, trainable, values[stream])[1]
                given = gradients.pop(name)
                found, gradients[stream] = pullback((gradients[stream], given) if stream in gradients else given)
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        return total
