"""The product of one token with a weight in NF4 or FP4, by whole rows: a Pallas Mosaic GPU kernel for Hopper.

A chunk is some pairs of rows, contiguous in memory, which one bulk copy loads; a warp takes a slice of 1,024 columns of
a pair, the same of every chunk, so that it keeps the token's elements in registers. A table in shared memory has a row
of 256 bytes for each byte of codes, which one instruction makes an address: 32 copies of its two elements, one for each
lane, and an unused half.

Few copies are in flight: with more, the first arrives later. All threads fill the table while a first copy is in
flight; then one warpgroup, which multiplies nothing, starts the others.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas import lanes
from jaxtune.pallas.formats.four_bit import BLOCK, NESTED_BLOCK
from jaxtune.pallas.mosaic_modules import plgpu
from jaxtune.pallas.quant_matmul import line_lanes, row_lanes
from jaxtune.pallas.quant_matmul.row_lanes import SLICE

_WARPS = 20  # the most multiplying warps of a program, unless a row has more slices
_MOST_WARPS = 28  # with the loading warpgroup these are a program's 1,024 threads
_RING_BYTES = 72 * 1024  # the most codes of chunks that are loaded ahead
_SMEM_BYTES = 227 * 1024  # the most shared memory of a program
PROGRAMS = 132  # multiprocessors of an H100 or H200


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernel divides a weight: chunks of pairs of neighbouring rows, and slices of 1,024 columns."""

    slices: int  # the number of slices of 1,024 columns in a row
    pairs: int  # the number of pairs of rows in a chunk: 1, 2, 4, 8 or 16
    stages: int  # 2 to 4: the number of chunks for which a program has shared memory, and that are in flight at most
    chunks_per_program: (
        int  # the largest number of chunks that one program multiplies; it has shared memory for the sums of all
    )

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply; one more loads. Each warp has one slice of one pair of rows; up to three have no
        work.
        """
        return -(-self.slices * self.pairs // 4)

    @property
    def chunk(self) -> int:
        """Bytes of codes in a chunk."""
        return self.pairs * self.slices * SLICE

    @property
    def blocks(self) -> int:
        """Blocks of 64 numbers in a chunk, each with an absmax of one byte or four; `plan` counts four."""
        return self.chunk * 2 // BLOCK


def plan(rows: int, columns: int, programs: int = PROGRAMS) -> Plan | None:
    """The division of a weight [rows, columns] among at most `programs` programs. None if it does not fit: rows must be
    even, columns a multiple of 1,024 up to 28,672, and a program's chunks and sums fit into shared memory.
    """
    slices = columns // SLICE
    if columns % SLICE or not 0 < slices <= _MOST_WARPS or rows % 2:
        return None
    most_pairs = max(1, _WARPS // slices)
    pairs = next(pairs for pairs in (16, 8, 4, 2, 1) if pairs <= most_pairs and rows % (2 * pairs) == 0)
    chunks_per_program = -(-rows // (2 * pairs * programs))
    # With four chunks, two in flight: 5.4 us, with more 5.9 (4,096 x 4,096). With more chunks, four in flight: 11.2 us,
    # with two 12.2.
    stages = max(2, min(4, chunks_per_program // 2, _RING_BYTES // (pairs * columns)))
    sizes = Plan(slices, pairs, stages, chunks_per_program)
    table, barriers = 256 * 64 * 4 + 1024, 1024
    ring = stages * (sizes.chunk + sizes.blocks * 4)
    partial = sizes.chunks_per_program * sizes.warpgroups * 4 * 64
    return sizes if table + barriers + ring + partial <= _SMEM_BYTES else None


def _written_out(codes, absmax, x, pairs_table, plan: Plan):
    """row_lanes.multiply in jnp, for the interpreter: float32[pairs x slices, 8, 2].

    codes: uint8[chunk]; absmax: float32[blocks], decoded; x: [columns]; pairs_table: [256, 2] in x's dtype.
    """
    shape = (plan.pairs, 2, plan.slices, 2, 8)
    values = pairs_table[codes.astype(jnp.int32)].astype(jnp.float32).reshape(*shape, BLOCK)
    x = x.astype(jnp.float32).reshape(plan.slices, 2, 8, BLOCK)
    sums = (jnp.einsum("prshqk,shqk->prshq", values, x) * absmax.reshape(shape)).sum(3)
    return sums.transpose(0, 2, 3, 1).reshape(-1, 8, 2)


def _kernel(x_ref, codes_ref, absmax_ref, pairs_ref, *refs, plan: Plan, dtype, interpreted):
    """Program p of n multiplies the chunks p, p + n, ... of the weight by one token.

    absmax_ref: uint8 or float32[rows x columns / 64].
    pairs_ref: the two elements of each byte: uint32[256], or `dtype`[256, 2] if interpreted.
    refs: map, nested absmax and offset of a uint8 absmax; the output [rows]; shared memory and barriers.
    """
    *nested_refs, out_ref, table_smem, map_smem, codes_smem, absmax_smem, partial_smem, full_smem, empty, finished = (
        refs
    )
    map_ref, nested_ref, offset_ref = nested_refs or (None, None, None)
    wg, program = lax.axis_index("wg"), lax.axis_index("program")
    programs = lax.axis_size("program")
    own_warpgroup = wg - 1  # the number among the multiplying warpgroups
    division = dict(pairs=plan.pairs, slices=plan.slices)
    chunks = out_ref.shape[0] // (2 * plan.pairs)
    chunk_count = lax.div(chunks - program + (programs - 1), jnp.int32(programs))

    def chunk_of(index):
        return program + index * programs

    def slot_of(index):
        return lax.rem(index, jnp.int32(plan.stages))

    def fill_tables():
        if interpreted:
            return
        line_lanes.fill_columns(pairs_ref, table_smem, 0, plan.warpgroups + 1)
        if map_ref is not None:
            lanes.fill_table(map_ref, map_smem)
        lanes.program_barrier()

    def bring():
        if interpreted:
            return
        sizes = [plan.chunk, plan.blocks * absmax_ref.dtype.itemsize]

        def copy(index):
            slots = (codes_smem, absmax_smem)
            lanes.copy_chunk((codes_ref, absmax_ref), slots, sizes, full_smem, chunk_of(index), slot_of(index))

        lanes.begin_barriers(full_smem)
        copy(jnp.int32(0))
        fill_tables()
        lax.fori_loop(1, jnp.minimum(chunk_count, plan.stages), lambda index, _: copy(index), None)

        def again(index, _):
            plgpu.barrier_wait(empty.at[slot_of(index)])
            pl.when(index + plan.stages < chunk_count)(lambda: copy(index + plan.stages))

        lax.fori_loop(0, chunk_count, again, None)

    def nested_of(index):
        if nested_ref is None or interpreted:
            return ()
        chunk = chunk_of(jnp.minimum(index, chunk_count - 1))
        return (row_lanes.own_nested(nested_ref, chunk, own_warpgroup, nested_block=NESTED_BLOCK, **division),)

    def written_out(index):
        chunk = chunk_of(index)
        absmax = absmax_ref[pl.ds(chunk * plan.blocks, plan.blocks)]
        if map_ref is not None and nested_ref is not None and offset_ref is not None:
            number = chunk * plan.blocks + jnp.arange(plan.blocks)
            absmax = map_ref[...][absmax] * nested_ref[...][number // NESTED_BLOCK] + offset_ref[0]
        codes = codes_ref[pl.ds(chunk * plan.chunk, plan.chunk)]
        sums = _written_out(codes, absmax, x_ref[...], pairs_ref[...], plan)
        sums = jnp.pad(sums, ((0, 4 * plan.warpgroups - sums.shape[0]), (0, 0), (0, 0)))
        partial_smem[index, pl.ds(4 * own_warpgroup, 4)] = lax.dynamic_slice_in_dim(sums, 4 * own_warpgroup, 4)

    def compute():
        if not interpreted:
            x = row_lanes.own_x(x_ref, own_warpgroup, plan.slices)
        offset = None if offset_ref is None else offset_ref[0]
        first = nested_of(jnp.int32(0))
        fill_tables()

        def chunk_product(index, nested):
            if interpreted:
                written_out(index)
                return nested
            slot = slot_of(index)
            next_nested = nested_of(index + 1)
            lanes.wait_for_chunk(full_smem, slot, lax.rem(lax.div(index, jnp.int32(plan.stages)), jnp.int32(2)))
            smem_refs = (codes_smem, absmax_smem, table_smem, map_smem if nested else None, partial_smem)
            row_lanes.multiply(
                x, nested[0] if nested else None, offset, index, slot, own_warpgroup, smem_refs, dtype=dtype, **division
            )
            plgpu.barrier_arrive(empty.at[slot])
            return next_nested

        lax.fori_loop(0, chunk_count, chunk_product, first)
        plgpu.barrier_arrive(finished)
        plgpu.barrier_wait(finished)
        if not interpreted:
            row_lanes.store_sums(
                partial_smem,
                out_ref,
                chunk_count,
                program,
                jnp.int32(programs),
                own_warpgroup,
                plan.warpgroups,
                dtype=dtype,
                **division,
            )
            return

        @pl.when(own_warpgroup == 0)
        def _():
            def store(index, _):
                sums = partial_smem[index, pl.ds(0, plan.pairs * plan.slices)]
                sums = sums.reshape(plan.pairs, plan.slices * 8, 2).sum(1).reshape(-1).astype(dtype)
                out_ref[pl.ds(chunk_of(index) * 2 * plan.pairs, 2 * plan.pairs)] = sums

            lax.fori_loop(0, chunk_count, store, None)

    lax.cond(wg == 0, bring, compute)


def matmul(x, codes, absmax, nested, pairs: np.ndarray, rows: int, kernel, interpret, programs=PROGRAMS) -> jax.Array:
    """x [1, in] times a weight [out, in] in NF4 or FP4: [1, out] in x's dtype, bfloat16 or float16. Only if `plan` has
    sizes for it (asserted).

      codes: uint8[out x in / 2], in any shape.
      absmax: uint8 (double quantisation) or float32[out x in / 64], in any shape.
      programs: of the grid.
      nested: [map float32[256], nested absmax, offset float32[1]] of a uint8 absmax; else empty.
      pairs: x's dtype [256, 2], the two elements of each byte. rows: out.
      kernel, interpret: mosaic._kernel, and the interpreter's parameters or None.
    """
    sizes = plan(rows, x.shape[1], programs)
    assert sizes is not None, (rows, x.shape)
    out = kernel(
        functools.partial(_kernel, plan=sizes, dtype=x.dtype),
        "small_matmul",
        interpret,
        out_type=jax.ShapeDtypeStruct((rows,), x.dtype),
        grid=(min(rows // (2 * sizes.pairs), programs),),
        grid_names=("program",),
        num_threads=sizes.warpgroups + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((256, 64), jnp.uint32),
            plgpu.SMEM((256,), jnp.float32),
            plgpu.SMEM((sizes.stages, sizes.chunk), jnp.uint8),
            plgpu.SMEM((sizes.stages, sizes.blocks), absmax.dtype),
            plgpu.SMEM((sizes.chunks_per_program, 4 * sizes.warpgroups, 8, 2), jnp.float32),
            plgpu.SMEM((2 * sizes.stages,), jnp.int32),
            plgpu.Barrier(num_arrivals=sizes.warpgroups, num_barriers=sizes.stages),
            plgpu.Barrier(num_arrivals=sizes.warpgroups),
        ],
        # The kernel itself contains all waits: for copies, for their readers, and for sums.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(
        x.reshape(-1),
        codes.reshape(-1),
        absmax.reshape(-1),
        jnp.asarray(pairs if interpret is not None else pairs.view(np.uint32).reshape(-1)),
        *nested,
    )
    return out.reshape(1, rows)
