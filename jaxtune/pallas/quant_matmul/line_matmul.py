"""The product of a few tokens with a weight in four bits, by whole memory lines: a Pallas Mosaic GPU kernel for Hopper.

A line is 128 bytes of a row's codes, which are 256 columns. A program has up to 128 rows of the weight, and its
warpgroups take lines in turns, which TMA loads several ahead. Compared with mosaic.py's kernel, loads in flight take
shared memory in place of registers, and x is read once for all rows of a program in place of every 16. Measurements
choose between the two. Programs with other columns of the same rows are a cluster, and read each other's sums, in a
fixed order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas import lanes, mosaic_types
from jaxtune.pallas.formats.four_bit import BLOCK, NESTED_BLOCK
from jaxtune.pallas.mosaic_modules import plgpu
from jaxtune.pallas.quant_matmul import line_lanes

LINE = 256  # elements whose codes are a line of memory
_SPAN = 4  # lines whose scales are decoded at a time
_WARPS = 4
_SMEM_BYTES = 227 * 1024  # the most shared memory of a program


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the kernel divides its work. benchmarks/kernels/quant_matmul.py --lines measures which is fastest; without a
    measurement this kernel is not used.
    """

    groups: int  # a program has this many times 16 rows of the weight
    warpgroups: int  # the number of warpgroups of a program, which take the lines of its rows in turns
    stages: int  # the number of copies that each warpgroup has room for in shared memory, and so loads ahead
    splits: int = 1  # how many programs, a cluster, divide the columns of the same rows
    lines: int = 1  # how many neighbouring lines of each row one copy loads

    @property
    def rows(self) -> int:
        """Rows of the weight that a program (or cluster) multiplies."""
        return 16 * self.groups


def refusal(tile: Tile, rows: int, columns: int, tokens: int) -> str | None:
    """Why the kernel cannot multiply this number of tokens by a weight [rows, columns], or None; the GPU does not
    count.
    """
    if rows % 16 or columns % (_SPAN * LINE) or rows < tile.rows:
        return f"weight {(rows, columns)}; wants rows in multiples of 16, {tile.rows} at least, and columns of 1024"
    if not 1 <= tile.groups <= 8 or not 1 <= tile.warpgroups <= 4 or not 1 <= tile.stages * tile.warpgroups <= 32:
        return f"{tile}: at most 8 groups, 4 warpgroups and 32 stages in all"
    if not 1 <= tile.splits <= 8 or tile.lines not in (1, 2, 4):
        return f"{tile}: at most 8 splits (a portable cluster), and 1, 2 or 4 lines"
    if _smem_bytes(tile, tokens) > _SMEM_BYTES:
        return f"{tile} with {tokens} tokens takes {_smem_bytes(tile, tokens)} bytes of shared memory"
    return None


def _smem_bytes(tile: Tile, tokens: int) -> int:
    ring = tile.warpgroups * tile.stages * tile.lines * (tile.rows * LINE // 2 + tokens * LINE * 2)
    partial = tile.warpgroups * _WARPS * tokens * (tile.rows + 4) * 4
    scales = tile.warpgroups * 4 * _SPAN * (tile.rows + 2) * 4
    return 256 * 64 * 4 + max(ring, partial) + scales + 4096  # barriers and alignment


def tiles(rows: int, columns: int, tokens: int, programs: int = 132) -> list[Tile]:
    """At most nine candidates to measure for a weight [rows, columns]: for 1 to 4 splits the rows of a program with the
    least estimated time; of these up to three within 25 % of the best, and always the one without a cluster.

      programs: that run at the same time, one on each multiprocessor.
      tokens: 1 to 16.
    """

    def work(division: tuple[int, int]) -> float:
        """The time of the busiest multiprocessor, in rows of the weight; rounds after the first cost 15 % more."""
        splits, groups = division
        rounds = -(-(-(-rows // (16 * groups)) * splits) // programs)
        return rounds * 16 * groups / splits * (1 + 0.15 * (rounds - 1))

    best = [min(((splits, g) for g in range(8, 0, -1) if 16 * g <= rows), key=work) for splits in (1, 2, 4, 3)]
    divisions = [division for division in sorted(best, key=work) if work(division) <= 1.25 * min(map(work, best))][:3]
    if best[0] not in divisions:
        divisions = [*divisions[:2], best[0]]  # the last one is without a cluster
    candidates = []
    for (warpgroups, lines), (splits, groups) in itertools.product(((4, 1), (2, 1), (2, 2)), divisions):
        fitting = (Tile(groups, warpgroups, stages, splits, lines) for stages in (8, 7, 6, 5, 4, 3, 2))
        candidates += [next((tile for tile in fitting if refusal(tile, rows, columns, tokens) is None), None)]
    return [tile for tile in candidates if tile is not None]


def _written_out_sums(codes, x, scales, table, widths: int):
    """line_product's addition in jnp. codes: uint8[rows, 128]; x: [tokens, 256]; scales: float32[rows, 4]."""
    rows = codes.shape[0]
    values = table[codes.astype(jnp.int32)].astype(jnp.float32).reshape(rows, _WARPS, BLOCK)
    x = jnp.pad(x.astype(jnp.float32), ((0, 8 * widths - x.shape[0]), (0, 0))).reshape(-1, _WARPS, BLOCK)
    sums = jnp.einsum("rwk,twk->rtw", values, x) * scales[:, None, :]
    # Axes: row (i, h, low bits of the quad's number, its upper bit), token (width, q, e), warp.
    sums = sums.reshape(rows // 16, 2, 4, 2, widths, 4, 2, _WARPS)
    return sums.transpose(0, 4, 7, 3, 2, 5, 1, 6).reshape(-1)


def _written_out_partial(acc, tokens: int, groups: int, widths: int):
    """line_lanes.keep_line_sums in jnp, for the interpreter: float32[4 warps, tokens, 16 * groups rows]."""
    sums = acc.reshape(groups, widths, _WARPS, 2, 4, 4, 2, 2)
    return sums.transpose(2, 1, 5, 7, 0, 6, 4, 3).reshape(_WARPS, 8 * widths, 16 * groups)[:, :tokens]


def _kernel(x_ref, codes_ref, absmax_ref, pairs_ref, *refs, tile: Tile, dtype, interpreted):
    """Multiplies tile.rows rows of the weight by all tokens, over this program's columns.

    absmax_ref: uint8 or float32[rows, columns / 64].
    pairs_ref: the two elements of each byte: uint32[256], or `dtype`[256, 2] if interpreted.
    refs: map, nested absmax and offset of a uint8 absmax; the output, [1, tokens, rows], or [splits, tokens, rows] if
    interpreted; shared memory and barriers.
    """
    *nested_refs, out_ref, table_smem, aliased, scales_smem, full, finished = refs
    (codes_smem, x_smem), (partial_smem,) = aliased
    wg, split = lax.axis_index("wg"), lax.axis_index("split") if tile.splits > 1 else jnp.int32(0)
    tokens, lines = x_ref.shape[:2]
    rows, warpgroups, stages = tile.rows, tile.warpgroups, tile.stages
    widths, steps_of_span = -(-tokens // 8), _SPAN // tile.lines
    # The last program's rows may overlap with the one before.
    first_row = jnp.minimum(lax.axis_index("tile") * rows, codes_ref.shape[0] - rows)
    first = lax.div(split * (lines // tile.lines), jnp.int32(tile.splits))
    steps = lax.div((split + 1) * (lines // tile.lines), jnp.int32(tile.splits)) - first  # of this program
    steps = lax.div(steps - wg + (warpgroups - 1), jnp.int32(warpgroups))  # of this warpgroup

    def slot_of(step):
        return lax.rem(step, jnp.int32(stages))

    def line_of(step):
        return (first + wg + step * warpgroups) * tile.lines

    def bring(step):
        slot, line = slot_of(step), line_of(step)
        barrier = full.at[wg * stages + slot]
        bytes_ = pl.ds(line * (LINE // 2), tile.lines * (LINE // 2))
        plgpu.copy_gmem_to_smem(codes_ref.at[pl.ds(first_row, rows), bytes_], codes_smem.at[wg, slot], barrier)
        plgpu.copy_gmem_to_smem(x_ref.at[:, pl.ds(line, tile.lines)], x_smem.at[wg, slot], barrier)

    def all_of_this_warpgroup():
        if not interpreted:
            lanes.warpgroup_barrier()

    def load_absmax(span):
        if not interpreted:
            nested = nested_refs[1] if nested_refs else None
            line = line_of(span * steps_of_span)
            return line_lanes.span_absmax(absmax_ref, nested, first_row, line, rows, tile.lines, warpgroups)
        line = line_of(span * steps_of_span + jnp.arange(steps_of_span))[:, None] + jnp.arange(tile.lines)
        line = jnp.minimum(line.reshape(-1), lines - 1)
        block = (4 * line[:, None] + jnp.arange(4)).reshape(-1)
        values = absmax_ref[pl.ds(first_row, rows)][:, block]
        if not nested_refs:
            return values, None
        position = (first_row + jnp.arange(rows)[:, None]) * absmax_ref.shape[1] + block
        return values, nested_refs[1][...][position // NESTED_BLOCK]

    def keep_scales(share):
        scales = scales_smem.at[wg]
        if not interpreted:
            line_lanes.keep_span(share, offset, table_smem, scales, rows)
            return
        values, factors = share
        if nested_refs:
            values = nested_refs[0][...][values] * factors + offset
        scales[:, pl.ds(0, rows)] = values.T

    def multiply(step, line, acc):
        codes, x, scales = codes_smem.at[wg, slot_of(step)], x_smem.at[wg, slot_of(step)], scales_smem.at[wg]
        block = (lax.rem(step, jnp.int32(steps_of_span)) * tile.lines + line) * 4
        if not interpreted:
            return line_lanes.line_product(
                acc, codes, x, scales, line, block, table_smem, mosaic_types.tiled(jnp.uint8), dtype
            )
        own_scales = scales[pl.ds(block, 4), pl.ds(0, rows)].T
        codes = codes[...].reshape(rows, tile.lines, LINE // 2)[:, line]
        return acc + _written_out_sums(codes, x[...][:, line], own_scales, pairs_ref[...], widths)

    share = load_absmax(0)
    offset = nested_refs[2][0] if nested_refs else None
    for step in range(stages):
        pl.when(step < steps)(functools.partial(bring, jnp.int32(step)))
    if not interpreted:
        line_lanes.fill_columns(pairs_ref, table_smem, 0, warpgroups)
        if nested_refs:
            line_lanes.fill_columns(nested_refs[0], table_smem, 32, warpgroups)
    plgpu.barrier_arrive(finished)
    plgpu.barrier_wait(finished)

    def one_span(span, state):
        acc, share = state
        keep_scales(share)  # every warp has finished the previous span
        share = load_absmax(span + 1)
        all_of_this_warpgroup()

        def one_step(step, acc):
            plgpu.barrier_wait(full.at[wg * stages + slot_of(step)])
            for line in range(tile.lines):
                acc = multiply(step, jnp.int32(line), acc)
            all_of_this_warpgroup()
            pl.when(step + stages < steps)(lambda: bring(step + stages))
            return acc

        return lax.fori_loop(span * steps_of_span, jnp.minimum((span + 1) * steps_of_span, steps), one_step, acc), share

    size = 512 * tile.groups * widths
    acc = plgpu.layout_cast(jnp.zeros(size, jnp.float32), plgpu.Layout.WG_STRIDED((size,), 4))
    acc, _ = lax.fori_loop(0, lax.div(steps + (steps_of_span - 1), jnp.int32(steps_of_span)), one_span, (acc, share))
    plgpu.barrier_arrive(finished)  # the sums reuse the memory of the lines
    plgpu.barrier_wait(finished)
    if interpreted:
        partial = _written_out_partial(acc, tokens, tile.groups, widths)
        partial_smem[pl.ds(wg * _WARPS, _WARPS), :, pl.ds(0, rows)] = partial
    else:
        line_lanes.keep_line_sums(acc, partial_smem, wg * _WARPS)
    plgpu.barrier_arrive(finished)
    plgpu.barrier_wait(finished)
    if not interpreted:
        line_lanes.store_line_sums(partial_smem, table_smem, out_ref, split, first_row, warpgroups, tile.splits)
    else:

        @pl.when(wg == 0)
        def _():
            total = partial_smem[:, :, pl.ds(0, rows)].sum(0).astype(out_ref.dtype)
            out_ref[split, :, pl.ds(first_row, rows)] = total


def matmul(x, codes, absmax, nested, pairs: np.ndarray, tile: Tile, kernel, interpret) -> jax.Array:
    """x [tokens, in] times a four-bit weight [out, in]: [tokens, out] in x's dtype. Only if `refusal` is None.

    codes, absmax: uint8[out, in / 2]; uint8 (double quantisation) or float32[out, in / 64].
    nested: [map float32[256], nested absmax, offset float32[1]] of a uint8 absmax; else empty.
    pairs: x's dtype [256, 2], the two elements of each byte.
    kernel, interpret: mosaic._kernel (mosaic.py imports this module), and the interpreter's parameters or None.
    """
    (tokens, columns), rows = x.shape, codes.shape[0]
    ring = (tile.warpgroups, tile.stages)
    lines = (
        plgpu.SMEM((*ring, tile.rows, tile.lines * LINE // 2), jnp.uint8, transforms=mosaic_types.tiled(jnp.uint8)),
        plgpu.SMEM((*ring, tokens, tile.lines, LINE), x.dtype),
    )
    partial = (plgpu.SMEM((tile.warpgroups * _WARPS, tokens, tile.rows + 4), jnp.float32),)
    # The interpreter has no clusters whose programs read each other's memory, so XLA adds the splits.
    summed_splits = tile.splits if interpret is not None else 1
    programs = -(-rows // tile.rows)
    if summed_splits == tile.splits:
        axes = dict(grid=(programs, summed_splits), grid_names=("tile", "split"))
    else:
        axes = dict(grid=(programs,), grid_names=("tile",), cluster=(tile.splits,), cluster_names=("split",))
    sums = kernel(
        functools.partial(_kernel, tile=tile, dtype=x.dtype),
        "small_matmul",
        interpret,
        out_type=jax.ShapeDtypeStruct((summed_splits, tokens, rows), x.dtype if summed_splits == 1 else jnp.float32),
        **axes,
        num_threads=tile.warpgroups,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((256, 64), jnp.uint32),
            plgpu.RefUnion(lines, partial),
            # Two more than a multiple of 16, so that four lines of a row are stored to different banks.
            plgpu.SMEM((tile.warpgroups, 4 * _SPAN, tile.rows + 2), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=tile.warpgroups * tile.stages),
            plgpu.Barrier(num_arrivals=tile.warpgroups),
        ],
        # The kernel itself contains all waits that a warpgroup needs.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(
        x.reshape(tokens, columns // LINE, LINE),
        codes,
        absmax,
        jnp.asarray(pairs if interpret is not None else pairs.view(np.uint32).reshape(-1)),
        *nested,
    )
    return sums[0] if summed_splits == 1 else sums.sum(0).astype(x.dtype)
