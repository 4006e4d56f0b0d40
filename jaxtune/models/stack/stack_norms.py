"""The norms before the parts of a layer in its backward, where a kernel computes their gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp

from jaxtune.models.layers.block import Block
from jaxtune.models.layers.gradients import added, pulled_back
from jaxtune.models.layers.places import connections_of
from jaxtune.models.layers.segment import Segment, matrix_of
from jaxtune.models.linear import Linear
from jaxtune.models.norm import RMSNorm
from jaxtune.models.stack.stack_segments import differentiated
from jaxtune.pallas.formats import Stored, dense
from jaxtune.pallas.quant_matmul import low_rank


class NormsApart:
    """The norms that a layer's backward takes out of its segments, because a kernel computes their gradients: a segment
    then reads the normed stream, a value with the norm's name. Such a gradient is computed once, after those of all
    segments that read the stream, and the kernel adds it to the stream's other gradients. Without a kernel, and in
    tiles, no norm is taken out.

      x: like the residual stream; only shape and dtype matter.
      tile: tokens of each row in a tile of tokenwise segments; None: no tiles.
      aux: names of the auxiliary values that have gradients.
      saved: {name: residual} that the backward has.
    """

    def __init__(self, block: Block, x: jax.Array, tile: int | None, aux: Collection[str], saved: Mapping):
        self._block = block
        read = {} if tile is not None else {p.norm: p.reads for p in connections_of(block.stages)[0].values() if p.norm}
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
        """The arrays that the segment reads; the normed stream is computed anew.

        values: {name: value} of the layer; those that `saved` names are needed.
        """

        def value(name: str):
            return (
                getattr(self._block, name)(values[self._stream[name]]) if name in self._stream else dense(values[name])
            )

        return [value(name) for name in segment.reads]

    def factors(self, segment: Segment, values: Mapping) -> list[low_rank.Factors | None]:
        """For each value that the segment reads, its Factors if it is a normed stream that only gradients of adapters'
        A read (all matrices are frozen linears, some with adapters), else None.

        float16 has none: a gradient times a row's factor, perhaps below a hundredth, would underflow. Nor has a layer
        with residuals in FP8: memory is short, and XLA then leaves more between buffers (0.1 GB of an 8B).
        """
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
        """Computes the gradients of the norms that no segment after this one reads, puts those of the stream into
        `gradients`, and returns `total` with those of the norms' weights.

          segment: the one whose gradients were computed last.
          block_of: trainable tensors -> the layer's Block.
          trainable: the layer's trainable tensors.
          values: {name: value} of the layer, as far as the backward has them.
          gradients: {name: gradient}, changed in place.
          total: the sum of gradients for the trainable tensors so far; None: there are none yet.
        """
        for name in [name for name, last in self._last.items() if last is segment]:
            stream = self._stream[name]

            def run(trainable, x, name=name, with_stream=stream in gradients):
                """The norm of x [B, T, hidden], after x itself if the stream has other gradients already
                (`with_stream`).
                """
                norm = getattr(block_of(trainable), name)
                return norm.stream_and_normed(x) if with_stream else norm(x)

            with jax.named_scope(name):
                pullback = jax.vjp(run, trainable, values[stream])[1]
                dnormed = gradients.pop(name)
                dnorm, gradients[stream] = pulled_back(
                    pullback, (gradients[stream], dnormed) if stream in gradients else dnormed
                )
            total = added(total, dnorm)
        return total
