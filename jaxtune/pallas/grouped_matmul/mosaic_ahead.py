"""Weights in four bits for the grouped product of mosaic.py: decoded in the same kernel, ahead of the products.

A product of many rows leaves a GPU's memory and its lanes idle, which is all that decoding takes. The warpgroup of each
program that brings operands also decodes a share of each expert's weight, slice by slice between two steps of bringing,
to the buffer that the product reads. What all programs need for their next items is decoded while they bring for these:
so it is still in L2 when it is read. A program counts, and who brings an expert's weight waits for the count. So a
weight is decoded once, whatever the tiles that need it; inside the products it would be for every tile of rows.

A warpgroup of its own decoded as fast as it could, in the first half of a kernel: 0.84 and 0.79 of bf16's speed for
Qwen3-30B-A3B's two products (H200), whose tiles also had to be narrower, for the registers; a pass before the product
0.82 and 0.81.
"""

# Pallas' annotations know neither its own barriers nor its refs.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas.quant_matmul import FourBit, lanes
from jaxtune.pallas.quant_matmul.mosaic_decode import SMALLEST, Chunks
from jaxtune.pallas.quant_matmul.mxfp4 import MXFP4

_AHEAD = 2  # slices that are on their way while one is decoded
_LINES = 2  # of a slice: it takes a third of a step of the product


def refusal(weight: FourBit | MXFP4) -> str | None:
    """Why a weight [E, ., .] cannot be decoded ahead, or None."""
    whole = weight.size // weight.shape[0]
    return f"{whole} numbers an expert, no multiple of {SMALLEST}" if whole % SMALLEST else None


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decodes a weight [E, ., .] by warpgroups of all programs, one of each; a slice is a chunk of `chunks`."""

    chunks: Chunks
    experts: int

    @staticmethod
    def of(weight: FourBit | MXFP4, dtype) -> Decoder:
        experts = weight.shape[0]
        return Decoder(Chunks.of(weight, dtype, weight.size // experts, _LINES), experts)

    @property
    def share(self) -> int:
        """Slices of an expert."""
        return self.chunks.count // self.experts

    def semaphores(self):
        """One for each expert, of all programs."""
        return pl.get_global(plgpu.SemaphoreType.REGULAR((self.experts,)))

    def slices_for(self, expert, program, programs: int):
        """How many of this program's slices, which are every so many-th, are of experts up to this one."""
        upto = jnp.minimum(expert + 1, self.experts) * self.share
        return lax.div(jnp.maximum(upto - program + (programs - 1), 0), jnp.int32(programs))

    def begin(self, operands, program, programs: int):
        """The state for `advance`: (number of the next slice, what it and others are decoded from)."""
        loaded = (self._load(operands, jnp.int32(number), program, programs) for number in range(_AHEAD))
        return jnp.int32(0), *loaded

    def _load(self, operands, number, program, programs):
        chunk = jnp.minimum(program + number * programs, self.chunks.count - 1)
        return self.chunks.load(operands, chunk)

    def advance(self, state, limit, operands, weight_ref, ready, program, programs: int):
        """Decodes this program's slices up to number `limit`."""

        def slice_of(number, coming):
            loaded, *coming = coming
            chunk = program + number * programs
            coming.append(self._load(operands, number + _AHEAD, program, programs))
            values = self.chunks.values(operands, chunk, loaded, interpreted=False, beside_products=True)
            lanes.store_chunk(values, weight_ref, chunk, self.chunks.out_layout)
            expert = lax.div(chunk, jnp.int32(self.share))

            # To tell of it costs more than to decode a slice: once for all of an expert that are this program's.
            @pl.when(
                (chunk + programs >= self.chunks.count) | (lax.div(chunk + programs, jnp.int32(self.share)) != expert)
            )
            def _():
                lanes.copies_see_stores()
                plgpu.semaphore_signal(ready.at[expert], memory_scope="gpu")

            return tuple(coming)

        number, *coming = state
        return jnp.maximum(number, limit), *lax.fori_loop(number, limit, slice_of, tuple(coming))

    def written_out(self, operands, weight_ref):
        """What `decode` does, of all programs, for the interpreter, which knows no semaphores."""
        chunks = [jnp.int32(chunk) for chunk in range(self.chunks.count)]
        values = [self.chunks.values(operands, at, self.chunks.load(operands, at), interpreted=True) for at in chunks]
        weight_ref[...] = jnp.concatenate(values).reshape(weight_ref.shape)

    def wait(self, ready, expert, programs: int):
        """Until the expert's weight is decoded, and can be brought by TMA."""
        plgpu.semaphore_wait(ready.at[expert], min(self.share, programs), decrement=False, memory_scope="gpu")
        lanes.copies_see_stores()
