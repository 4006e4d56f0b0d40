"""Weights in four bits for the grouped product of mosaic.py: decoded in the same kernel, ahead of the products.

A product of many rows leaves a GPU's memory and its lanes idle, which is all that decoding takes. A warpgroup more in
every program decodes a share of each expert's weight, expert after expert, to the buffer that the product reads, and
counts; who brings an expert's weight waits for the count. So a weight is decoded once, whatever the tiles that need it;
inside the products it would be for every tile of rows.

Measured (Qwen3-30B-A3B's gate/up, H200): this 1.35 ms, a product without decoding 1.16, decoding alone 0.25 by a pass
and 0.6 by these warpgroups. Slices of the decoding between two steps of the warpgroup that brings: 1.94 ms. Decoding
not long before it is needed: 1 % faster, for more that can go wrong.

All programs must run at once: those that wait for an expert spin until every program has decoded its share of it. The
grid is one program a multiprocessor, and a program takes all of its registers (64,512 of 65,536), so that on a device
where nothing else runs all are resident. Nothing guarantees it: only a cooperative launch does in CUDA, which Mosaic's
is not.

Beside a kernel that ends by itself a program comes late, and that is all. Beside NCCL's, which spin for those of
another device, it takes an argument, and this one does not close. All devices run one program: take the first
collective c, in its order, that is not done everywhere. What was before c has left. Where c is wholly resident on all
devices, it ends. Where it has not come yet, it waits for a product like this, which then has all multiprocessors and
ends. What is left is c resident in part, on a device where this kernel is, too: c's other blocks wait for
multiprocessors that our programs hold, which spin for programs of ours that wait for those that c holds. c's channels
are independent, and the first ones of two devices would end and free theirs; but the blocks of NCCL on Hopper come in
clusters, which want several multiprocessors of one neighbourhood free at a time, and which of two waiting kernels gets
a free one is not documented (XLA gives collectives a stream of higher priority). So c may be resident nowhere that
matters, while ours is in part: then both wait for ever. Two of these kernels at once on one device would, too; XLA
runs products on one stream.

So on a mesh of several devices the default decodes first (`NOT_PROVED`). It would be safe with programs for fewer
multiprocessors than there are less NCCL's blocks, or in a cooperative launch before which the collectives have ended.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import lanes
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.quant_matmul.mosaic_decode import SMALLEST, Chunks

NOT_PROVED = (
    "a mesh of several devices: not proved that its programs, which wait for each other, cannot hang beside NCCL"
)
_AHEAD = 1  # chunks that are on their way while one is decoded; two were no faster


def refusal(weight: Stored) -> str | None:
    """Why a weight [E, ., .] cannot be decoded ahead, or None."""
    if not Chunks.decodes(weight):
        return f"a weight in {type(weight).__name__}"
    whole = weight.size // weight.shape[0]
    return f"{whole} numbers an expert, no multiple of {SMALLEST}" if whole % SMALLEST else None


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decodes a weight [E, ., .] by warpgroups of all programs, one of each."""

    chunks: Chunks
    experts: int

    @staticmethod
    def of(weight: Stored, dtype) -> Decoder:
        experts = weight.shape[0]
        return Decoder(Chunks.of(weight, dtype, weight.size // experts), experts)

    @property
    def share(self) -> int:
        """Chunks of an expert."""
        return self.chunks.count // self.experts

    def semaphores(self):
        """One for each expert, of all programs."""
        return pl.get_global(plgpu.SemaphoreType.REGULAR((self.experts,)))

    def decode(self, operands, weight_ref, ready, program, programs: int):
        """What the warpgroup does: every so many-th chunk."""

        def load(number):
            chunk = jnp.minimum(program + number * programs, self.chunks.count - 1)
            return self.chunks.load(operands, chunk)

        def step(number, loaded):
            loaded, *coming = loaded
            chunk = program + number * programs
            coming.append(load(number + _AHEAD))
            values = self.chunks.values(operands, chunk, loaded, interpreted=False, beside_products=True)
            lanes.store_chunk(values, weight_ref, chunk, self.chunks.out_layout)
            expert, following = (lax.div(at, jnp.int32(self.share)) for at in (chunk, chunk + programs))

            # To tell of it costs more than to decode a chunk: once for all of an expert that are this program's.
            @pl.when(following != expert)
            def _():
                lanes.copies_see_stores()
                plgpu.semaphore_signal(ready.at[expert], memory_scope="gpu")

            return tuple(coming)

        mine = lax.div(self.chunks.count - program + (programs - 1), jnp.int32(programs))
        lax.fori_loop(0, mine, step, tuple(load(jnp.int32(number)) for number in range(_AHEAD)))

    def written_out(self, operands, weight_ref):
        """What `decode` does, of all programs, for the interpreter, which knows no semaphores."""
        chunks = [jnp.int32(chunk) for chunk in range(self.chunks.count)]
        values = [self.chunks.values(operands, at, self.chunks.load(operands, at), interpreted=True) for at in chunks]
        weight_ref[...] = jnp.concatenate(values).reshape(weight_ref.shape)

    def wait(self, ready, expert, programs: int):
        """Until the expert's weight is decoded, and can be brought by TMA."""
        plgpu.semaphore_wait(ready.at[expert], min(self.share, programs), decrement=False, memory_scope="gpu")
        lanes.copies_see_stores()
