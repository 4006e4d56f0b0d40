"""Weights in four bits for the grouped product of mosaic.py, decoded in the same kernel ahead of the products.

A product of many rows leaves a GPU's memory and ordinary lanes idle, which is what decoding needs. An additional
warpgroup in every program decodes a share of each expert's weight, expert by expert, into the buffer that the product
reads, and counts its work; the warpgroup that loads an expert's weight waits for the count. A weight is thus decoded
once, however many tiles need it. Decoded within the products, it would be decoded for every tile of rows.

Measured (Qwen3-30B-A3B's gate/up, H200): this kernel 1.35 ms, a product without decoding 1.16, decoding alone 0.25 by a
separate pass and 0.6 by these warpgroups. Slices of the decoding between two steps of the loading warpgroup: 1.94 ms.
Decoding shortly before the weight is needed: 1 % faster, with more that can go wrong.

All programs must run at the same time, because a program that waits for an expert spins until every program has decoded
its share. The grid is one program per multiprocessor, and a program takes all of its registers (64,512 of 65,536), so
on a device where nothing else runs all programs are resident. CUDA guarantees this only for cooperative launches, and
Mosaic's launch is not one.

Beside a kernel that ends by itself, a program only starts late. Beside NCCL's kernels, which spin for those of another
device, there is no complete proof that both end. The attempt: all devices run one program. Take the first collective c,
in its order, that is not done everywhere. Everything before c has ended. If c is completely resident on all devices, it
ends. If it has not started, it waits for a product like this, which then has all multiprocessors and ends. The
remaining case is that c is partly resident on a device where this kernel is too: c's other blocks wait for
multiprocessors that our programs occupy, which spin for programs of ours that wait for multiprocessors that c occupies.
c's channels are independent, and the first ones of two devices would end and free their multiprocessors. But the blocks
of NCCL on Hopper come in clusters, which need several free multiprocessors of one neighbourhood at a time, and which of
two waiting kernels gets a free one is not documented (XLA gives collectives a stream of higher priority). So c may be
resident nowhere that matters while ours is partly resident, and then both wait for ever. Two of these kernels at the
same time on one device would wait for each other too; XLA runs products on one stream.

Therefore the default on a mesh of several devices decodes first (`NOT_PROVED`, the reason with which this kernel is
refused there). The kernel would be safe with programs for fewer multiprocessors (all minus NCCL's blocks), or in a
cooperative launch before which the collectives have ended.

`refusal` says which weights can be decoded like this, and Decoder is what the kernel of mosaic.py calls.
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
_AHEAD = 1  # chunks that are loaded while one is decoded; two were no faster


def refusal(weight: Stored) -> str | None:
    """The reason why `weight` [E, ., .], a quantised weight, cannot be decoded by the kernel that multiplies, or None.
    The reason is its format (Chunks.decodes), also an NVFP4 weight with more than one tensor scale, or that an expert's
    matrix has not a multiple of 1,024 numbers, of which decoding takes whole chunks. It does not ask which GPU there
    is, or for the sizes of the product; mosaic.refusal does. `implementations` of api.py asks both."""
    if not Chunks.decodes(weight):
        return f"a weight in {type(weight).__name__}"
    whole = weight.size // weight.shape[0]
    return f"{whole} numbers an expert, no multiple of {SMALLEST}" if whole % SMALLEST else None


@dataclasses.dataclass(frozen=True)
class Decoder:
    """How one warpgroup of each program of the grouped product decodes a weight [E, ., .] into a buffer in global
    memory, expert by expert, while others multiply. It is static: a kernel is compiled for it. mosaic.product makes it.

    `decode` is the work of the decoding warpgroup, `wait` makes the loading warpgroup wait for an expert, by the
    `semaphores`. In the interpreter, each program decodes the whole weight by `written_out` instead.
    """

    chunks: Chunks  # how the weight is divided into chunks of numbers, and how a chunk is decoded
    experts: int  # the number of experts, E

    @staticmethod
    def of(weight: Stored, dtype) -> Decoder:
        """Makes the decoder of a weight in four bits [E, ., .] that `refusal` does not refuse. dtype: that of the
        decoded weight, bfloat16 or float16. mosaic.product calls it."""
        experts = weight.shape[0]
        return Decoder(Chunks.of(weight, dtype, weight.size // experts), experts)

    @property
    def share(self) -> int:
        """The number of chunks of each expert's weight. A chunk is a run of numbers that is decoded at once. Chunks are
        numbered through the whole weight, expert by expert, so chunk c belongs to expert c // share. Program p of n
        decodes the chunks p, p + n, p + 2 n, ... of the whole weight. `decode` and `wait` find by it which chunks are
        an expert's."""
        return self.chunks.count // self.experts

    def semaphores(self):
        """Returns a reference to the semaphores in global memory, one for each expert, by which the decoding warpgroups
        tell the loading ones that a weight is decoded. An expert's semaphore counts the programs that have decoded
        their chunks of this expert's weight, without those that have none. It can be called only in a kernel that is
        compiled for a GPU."""
        return pl.get_global(plgpu.SemaphoreType.REGULAR((self.experts,)))

    def decode(self, operands, weight_ref, ready, program, programs: int):
        """The work of the decoding warpgroup of a program: it decodes every n-th chunk of the weight, n being the
        number of programs, also for experts without rows. After its last chunk of an expert it signals the expert's
        semaphore.

        Args:
          operands: the arrays from which chunks are decoded (Chunks.operands), as references to global memory.
          weight_ref: [E, ., .] in global memory, the buffer into which decoded numbers are written and which the
            products read.
          ready: the semaphores, from `semaphores`.
          program: int32[], the number of this program.
          programs: the number of all programs.
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
            expert, following = (lax.div(at, jnp.int32(self.share)) for at in (chunk, chunk + programs))

            # A signal costs more than decoding a chunk, so there is one for all of this program's chunks of an expert.
            @pl.when(following != expert)
            def _():
                lanes.copies_see_stores()
                plgpu.semaphore_signal(ready.at[expert], memory_scope="gpu")

            return tuple(queued)

        mine = lax.div(self.chunks.count - program + (programs - 1), jnp.int32(programs))
        lax.fori_loop(0, mine, step, tuple(load(jnp.int32(number)) for number in range(_AHEAD)))

    def written_out(self, operands, weight_ref):
        """Decodes the whole weight into weight_ref [E, ., .], as `decode` does in all programs. It is for the
        interpreter, which has no semaphores. operands: the arrays from which chunks are decoded (Chunks.operands), as
        references to global memory."""
        chunks = [jnp.int32(chunk) for chunk in range(self.chunks.count)]
        values = [self.chunks.values(operands, at, self.chunks.load(operands, at), interpreted=True) for at in chunks]
        weight_ref[...] = jnp.concatenate(values).reshape(weight_ref.shape)

    def wait(self, ready, expert, programs: int):
        """Makes the loading warpgroup wait until all programs have decoded their chunks of an expert's weight, which it
        can then load by TMA. The kernel calls it before the loads of every tile of the output that has an expert, also
        if the tile before had the same one; once the weight is decoded, it returns at once.

        Args:
          ready: the semaphores, from `semaphores`.
          expert: int32[], the expert's number.
          programs: the number of programs.
        """
        plgpu.semaphore_wait(ready.at[expert], min(self.share, programs), decrement=False, memory_scope="gpu")
        lanes.copies_see_stores()
