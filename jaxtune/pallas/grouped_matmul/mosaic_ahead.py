"""Weights in four bits for the grouped product of mosaic.py, decoded in the same kernel ahead of the products.

A product of many rows leaves a GPU's memory and ordinary lanes idle. An additional warpgroup in every program decodes a
share of each expert's weight, expert by expert, into the buffer that the product reads, and counts its work; the
warpgroup that loads an expert's weight waits for the count. So a weight is decoded once, however many tiles need it.

All programs must run at the same time, because a program spins until every program has decoded its share. There is one
for each multiprocessor, with all its registers, so on a device where nothing else runs all are resident; CUDA
guarantees this only for cooperative launches, and Mosaic's launch is not one. Beside NCCL's kernels, which spin for
another device's, there is no proof that both end: each may wait for multiprocessors that the other occupies. So a mesh
of several devices decodes first by default (`NOT_PROVED`). Programs for all multiprocessors minus NCCL's blocks would
be safe, or a cooperative launch after the collectives.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas import lanes
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.mosaic_modules import plgpu
from jaxtune.pallas.quant_matmul.mosaic_decode import SMALLEST, Chunks

NOT_PROVED = (
    "a mesh of several devices: not proved that its programs, which wait for each other, cannot hang beside NCCL"
)
_AHEAD = 1  # chunks that are loaded while one is decoded; two were no faster


def refusal(weight: Stored) -> str | None:
    """Why a quantised `weight` [E, ., .] cannot be decoded in the kernel, or None."""
    if not Chunks.decodes(weight):
        return f"a weight in {type(weight).__name__}"
    expert_size = weight.size // weight.shape[0]
    return f"{expert_size} numbers an expert, no multiple of {SMALLEST}" if expert_size % SMALLEST else None


@dataclasses.dataclass(frozen=True)
class Decoder:
    """How one warpgroup of each program decodes a weight [E, ., .] into a buffer in global memory, expert by expert,
    while others multiply. Static: a kernel is compiled for it.
    """

    chunks: Chunks  # how the weight is divided into chunks of numbers, and how a chunk is decoded
    experts: int  # the number of experts, E

    @staticmethod
    def of(weight: Stored, dtype) -> Decoder:
        """For a weight that `refusal` does not refuse; dtype, of the decoded weight, is bfloat16 or float16."""
        experts = weight.shape[0]
        return Decoder(Chunks.of(weight, dtype, weight.size // experts), experts)

    @property
    def share(self) -> int:
        """Chunks of each expert's weight. Chunk c belongs to expert c // share; program p of n decodes the chunks p, p
        + n, p + 2 n, ...
        """
        return self.chunks.count // self.experts

    def semaphores(self):
        """One semaphore in global memory for each expert: how many programs have decoded their chunks of its weight,
        without those that have none. Only in a compiled kernel.
        """
        return pl.get_global(plgpu.SemaphoreType.REGULAR((self.experts,)))

    def decode(self, operands, weight_ref, ready, program, programs: int):
        """The decoding warpgroup's work: every n-th chunk of the weight, also for experts without rows, into weight_ref
        [E, ., .] in global memory. After its last chunk of an expert it signals the expert's semaphore.

          operands: Chunks.operands in global memory.
          ready: semaphores, one for each expert.
          program, programs: its number, int32[], and how many there are.
        """

        def load(number):
            chunk = jnp.minimum(program + number * programs, self.chunks.count - 1)
            return self.chunks.load(operands, chunk)

        def step(number, loaded):
            loaded, *queued = loaded
            chunk = program + number * programs
            queued.append(load(number + _AHEAD))
            values = self.chunks.values(operands, chunk, loaded, interpreted=False, beside_products=True)
            lanes.store_chunk(values, weight_ref, chunk, self.chunks.out_layout)
            expert, following = (lax.div(index, jnp.int32(self.share)) for index in (chunk, chunk + programs))

            # A signal costs more than decoding a chunk, so there is one for all of this program's chunks of an expert.
            @pl.when(following != expert)
            def _():
                lanes.copies_see_stores()
                plgpu.semaphore_signal(ready.at[expert], memory_scope="gpu")

            return tuple(queued)

        chunk_count = lax.div(self.chunks.count - program + (programs - 1), jnp.int32(programs))
        lax.fori_loop(0, chunk_count, step, tuple(load(jnp.int32(number)) for number in range(_AHEAD)))

    def decode_all(self, operands, weight_ref):
        """Decodes the whole weight at once, for the interpreter, which has no semaphores. operands: refs of
        Chunks.operands, the weight's arrays and tables, in order.
        """
        chunks = [jnp.int32(chunk) for chunk in range(self.chunks.count)]
        values = [
            self.chunks.values(operands, number, self.chunks.load(operands, number), interpreted=True)
            for number in chunks
        ]
        weight_ref[...] = jnp.concatenate(values).reshape(weight_ref.shape)

    def wait(self, ready, expert, programs: int):
        """Makes the loading warpgroup wait until all programs have decoded their chunks of an expert's weight, which
        TMA can then load. ready: semaphores, one for each expert. programs: of the grid.
        """
        plgpu.semaphore_wait(ready.at[expert], min(self.share, programs), decrement=False, memory_scope="gpu")
        lanes.copies_see_stores()
