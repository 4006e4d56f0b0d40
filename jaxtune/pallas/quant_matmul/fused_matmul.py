"""Dequantising and multiplying in one: a Pallas Mosaic GPU kernel for Hopper (wgmma, TMA, warp specialisation).

Both directions, for tokens by the hundred, where a pass that writes the weight out is much of the time. Persistent: a
program for each multiprocessor takes every n-th item, a tile of tokens times a tile of columns, in a part of the sum
(`Tile.splits`). One warpgroup brings x and codes by TMA and decodes a tile of the weight into shared memory; two others
multiply. An adapter's product is a few more steps, of its own two operands; a bias is added to the sum. What is
multiplied is weight.decode(dtype), to the bit.
"""

# Pallas' annotations know neither its own transforms nor barriers.
# pyright: reportAbstractUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas.quant_matmul import fused_lanes, lanes
from jaxtune.pallas.quant_matmul.formats import BLOCK, NESTED_BLOCK, FourBit

TILE_TOKENS = 128
_WARPGROUPS = 2  # that multiply
_OWN = TILE_TOKENS // _WARPGROUPS
_STEP = BLOCK  # of the sum: 128 bytes, a row of the swizzle
_UNITS = 128  # rows of 32 bytes of codes that are decoded together: one a thread
_SMEM_BYTES = 227 * 1024
_DECODE_REGISTERS, _COMPUTE_REGISTERS = 104, 200
_WEIGHT = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_CODES = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(32))


@dataclasses.dataclass(frozen=True)
class Tile:
    """parts: of 128 columns, of a tile of the output. stages: steps that are on their way. splits: programs that share
    a sum; their parts are added by XLA. band: tiles of tokens that go together."""

    parts: int = 1
    stages: int = 4
    splits: int = 1
    band: int = 16

    @property
    def columns(self) -> int:
        return _UNITS * self.parts


def _smem_bytes(tile: Tile, item_bytes: int) -> int:
    codes = tile.parts * _UNITS * 32
    stage = (TILE_TOKENS + tile.columns) * _STEP * 2 + codes
    return tile.stages * stage + TILE_TOKENS * tile.columns * item_bytes + 1024 + 4096  # map; barriers, alignment


def refusal(tile: Tile, weight: FourBit, contract: int) -> str | None:
    """Why this tile cannot serve a product over side `contract` (1: forward, 0: dx) of the weight, or None."""
    if weight.ndim != 2 or any(size % _UNITS for size in weight.shape):
        return f"weight {weight.shape}; wants multiples of {_UNITS}"
    columns, inner = weight.shape[1 - contract], weight.shape[contract]
    if tile.parts not in (1, 2) or columns % tile.columns or inner % (_STEP * tile.splits):
        return f"{tile} does not divide {columns} columns or {inner} terms"
    needs = _smem_bytes(tile, 2 if tile.splits == 1 else 4)
    if needs > _SMEM_BYTES:
        return f"{tile} takes {needs} bytes of shared memory"
    return None


def tiles(weight: FourBit, contract: int, tokens: int, programs: int = 132) -> list[Tile]:
    """Tiles to measure, the one whose busiest multiprocessor has the least to do first."""

    def work(tile: Tile) -> float:
        items = -(-tokens // TILE_TOKENS) * weight.shape[1 - contract] // tile.columns * tile.splits
        return -(-items // programs) * tile.parts / tile.splits

    candidates = [Tile(2, 2), Tile(1, 4), Tile(1, 3, 2), Tile(1, 3, 4)]
    return sorted((tile for tile in candidates if refusal(tile, weight, contract) is None), key=work)


def _rows(contract: int) -> int:
    """Of the weight, in 128 units; blocks of 64 are the rest of them."""
    return _UNITS if contract == 1 else _STEP


def _kernel(
    x_ref, codes_ref, absmax_ref, *refs, tile: Tile, contract: int, programs: int, table: np.ndarray, nested: bool,
    with_extra: bool, with_bias: bool, interpreted: bool,
):  # fmt: skip
    """refs: map, nested absmax, offset; u and its side; bias, as they exist; the output [splits, T, N]."""
    refs = list(refs)
    map_ref, nested_ref, offset_ref = [refs.pop(0) for _ in range(3)] if nested else (None,) * 3
    u_ref, side_ref = [refs.pop(0) for _ in range(2)] if with_extra else (None,) * 2
    bias_ref = refs.pop(0) if with_bias else None
    out_ref, x_smem, w_smem, codes_smem, out_smem, map_smem, full, free, codes_full = refs
    stages, columns = tile.stages, tile.columns
    wg, program = lax.axis_index("wg"), lax.axis_index("sm")
    row_tiles, column_tiles = x_ref.shape[0] // TILE_TOKENS, out_ref.shape[2] // columns
    items = row_tiles * column_tiles * tile.splits
    mine = lax.div(items - program + (programs - 1), jnp.int32(programs))
    main_steps = x_ref.shape[1] // _STEP // tile.splits
    extra_steps = u_ref.shape[1] // _STEP if with_extra else 0

    def place(index):
        """(split, tile of tokens, tile of columns) of the index-th item of this program."""
        item = program + index * programs
        split = lax.div(item, jnp.int32(row_tiles * column_tiles))
        item = item - split * (row_tiles * column_tiles)
        band = lax.div(item, jnp.int32(tile.band * column_tiles))
        within = item - band * (tile.band * column_tiles)
        height = jnp.minimum(tile.band, row_tiles - band * tile.band)
        column = lax.div(within, height)
        return split, band * tile.band + within - column * height, column

    def extra_of(split):
        """The adapter belongs to the first part of a sum."""
        return jnp.where(split == 0, extra_steps, 0)

    def slot_of(at):
        return lax.rem(at, jnp.int32(stages))

    def decode():
        if not interpreted:
            plgpu.set_max_registers(_DECODE_REGISTERS, action="decrease")
        rows = _rows(contract)
        total = mine * main_steps

        def units(number, part):
            """(first row, first block) of a part of a step of all of this program's."""
            index = lax.div(number, jnp.int32(main_steps))
            split, _, column = place(index)
            along = split * main_steps + number - index * main_steps
            across = column * columns + part * _UNITS
            if contract == 1:
                return across, along
            return along * _STEP, lax.div(across, jnp.int32(BLOCK))

        def bring_codes(number):
            slot = slot_of(number)
            for part in range(tile.parts):
                row, block = units(number, part)
                for index in range(_UNITS // rows):
                    plgpu.copy_gmem_to_smem(
                        codes_ref.at[pl.ds(row, rows), pl.ds((block + index) * (BLOCK // 2), BLOCK // 2)],
                        codes_smem.at[slot, part, pl.ds(index * rows, rows)],
                        codes_full.at[slot],
                    )

        def load_absmax(number, part):
            row, block = units(jnp.minimum(number, total - 1), part)
            if not interpreted:
                return fused_lanes.unit_absmax(absmax_ref, nested_ref, row, block, rows)
            unit = jnp.arange(_UNITS)
            row, block = row + unit % rows, block + unit // rows
            values = absmax_ref[...][row, block]
            return values, nested_ref[...][(row * absmax_ref.shape[1] + block) // NESTED_BLOCK] if nested else None

        def all_absmax(number):
            return tuple(load_absmax(number, part) for part in range(tile.parts))

        def decode_part(number, slot, part, share):
            codes = codes_smem.at[slot_of(number), part]
            if not interpreted:
                found = [map_smem, offset_ref] if nested else []
                transforms = (_CODES, _WEIGHT)
                fused_lanes.decode_units(
                    codes, share, found, w_smem.at[slot], part, rows, table, transforms, x_ref.dtype
                )
                return
            values, factors = share
            if nested:
                values = map_ref[...][values] * factors + offset_ref[0]
            bytes_ = codes[...]
            nibbles = jnp.stack([bytes_ >> 4, bytes_ & 15], -1).reshape(_UNITS, BLOCK)
            entries = sum(jnp.where(nibbles == i, float(value), 0.0) for i, value in enumerate(table))
            decoded = (entries * values[:, None]).astype(x_ref.dtype)
            decoded = decoded.reshape(-1, rows, BLOCK).transpose(1, 0, 2).reshape(rows, -1)
            here = pl.ds(part * _UNITS, _UNITS)
            if contract == 1:
                w_smem[slot, here, :] = decoded
            else:
                w_smem[slot, :, here] = decoded

        for number in range(stages):
            pl.when(number < total)(functools.partial(bring_codes, jnp.int32(number)))
        share = all_absmax(jnp.int32(0))
        if nested and not interpreted:
            lanes.fill_table(map_ref, map_smem)
            lanes.warpgroup_barrier()

        def wait_free(at):
            pl.when(at >= stages)(lambda: plgpu.barrier_wait(free.at[slot_of(at)]))

        def item(index, carry):
            split, row_tile, column_tile = place(index)
            tokens = pl.ds(row_tile * TILE_TOKENS, TILE_TOKENS)

            def step(number, carry):
                at, share = carry
                slot, flat = slot_of(at), index * main_steps + number
                wait_free(at)
                along = pl.ds((split * main_steps + number) * _STEP, _STEP)
                plgpu.copy_gmem_to_smem(x_ref.at[tokens, along], x_smem.at[slot], full.at[slot])
                coming = all_absmax(flat + 1)
                plgpu.barrier_wait(codes_full.at[slot_of(flat)])
                for part in range(tile.parts):
                    decode_part(flat, slot, part, share[part])
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot])
                pl.when(flat + stages < total)(lambda: bring_codes(flat + stages))
                return at + 1, coming

            def extra_step(number, at):
                slot = slot_of(at)
                wait_free(at)
                along, here = pl.ds(number * _STEP, _STEP), pl.ds(column_tile * columns, columns)
                plgpu.copy_gmem_to_smem(u_ref.at[tokens, along], x_smem.at[slot], full.at[slot])
                side = side_ref.at[here, along] if contract == 1 else side_ref.at[along, here]
                plgpu.copy_gmem_to_smem(side, w_smem.at[slot], full.at[slot])
                return at + 1

            at, share = lax.fori_loop(0, main_steps, step, carry)
            if with_extra:
                at = lax.fori_loop(0, extra_of(split), extra_step, at)
            return at, share

        last, _ = lax.fori_loop(0, mine, item, (jnp.int32(0), share))
        # Every arrival is waited for: a barrier must not be left halfway.
        first = jnp.maximum(last - stages, 0)
        lax.fori_loop(first, last, lambda at, _: plgpu.barrier_wait(free.at[slot_of(at)]), None)

    def compute():
        if not interpreted:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")

        def release(at):
            plgpu.barrier_arrive(free.at[slot_of(at)])

        def item(index, at):
            split, row_tile, column_tile = place(index)
            steps = main_steps + extra_of(split)

            def accumulate(acc):
                def step(number, at):
                    slot = slot_of(at)
                    plgpu.barrier_wait(full.at[slot])
                    w = w_smem.at[slot]
                    plgpu.wgmma(
                        acc, x_smem.at[slot, pl.ds(wg * _OWN, _OWN)], w.transpose((1, 0)) if contract == 1 else w
                    )
                    plgpu.wgmma_wait(1)  # the one before is done
                    pl.when(number > 0)(lambda: release(at - 1))
                    return at + 1

                lax.fori_loop(0, steps, step, at)
                plgpu.wgmma_wait(0)
                return acc[...]

            total = pl.run_scoped(accumulate, plgpu.ACC((_OWN, columns), jnp.float32))
            at = at + steps
            release(at - 1)
            here = pl.ds(column_tile * columns, columns)
            if with_bias:
                bias = plgpu.load(bias_ref.at[here], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                total = total + lax.broadcast_in_dim(bias, total.shape, [1])
            rows = pl.ds(row_tile * TILE_TOKENS + wg * _OWN, _OWN)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item has left
            out_smem.at[wg][...] = total.astype(out_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[wg], out_ref.at[split, rows, here])
            return at

        lax.fori_loop(0, mine, item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    lax.cond(wg < _WARPGROUPS, compute, decode)


def product(
    x: jax.Array, weight: FourBit, contract: int, tile: Tile, kernel, interpret, *, absmax, nested=(), extra=None,
    bias=None,
) -> jax.Array:  # fmt: skip
    """x [T, K] times the decoded weight, over its side `contract` (1: x weight^T, 0: x weight): [T, N] in x's dtype.

    Args:
      absmax: uint8 or float32 of the weight's blocks; nested: map, nested absmax and offset float32[1] of a quantised
        one. kernel, interpret: as mosaic._kernel takes them.
      extra: (u [T, r], side [N, r] or [r, N] as the weight lies), whose product is added.
      bias: float[N], added in float32.
    """
    from jaxtune.pallas.dispatch import multiprocessors

    tokens, columns = x.shape[0], weight.shape[1 - contract]
    short = -tokens % TILE_TOKENS
    operands = [jnp.pad(x, ((0, short), (0, 0))) if short else x]
    operands += [weight.codes.reshape(weight.shape[0], -1), absmax.reshape(weight.shape[0], -1), *nested]
    if extra is not None:
        u, side = extra
        rank = -u.shape[1] % _STEP
        widths = [(0, 0)] * 2
        widths[contract] = (0, rank)
        operands += [jnp.pad(u.astype(x.dtype), ((0, short), (0, rank))), jnp.pad(side.astype(x.dtype), widths)]
    in_parts = tile.splits > 1
    if bias is not None and not in_parts:
        operands.append(bias.astype(jnp.float32))
    out_dtype = jnp.dtype(jnp.float32 if in_parts else x.dtype)
    items = (tokens + short) // TILE_TOKENS * (columns // tile.columns) * tile.splits
    programs = min(3 if interpret is not None else multiprocessors(), items)
    stages = tile.stages
    out_transforms = (plgpu.TilingTransform((8, 128 // out_dtype.itemsize)), plgpu.SwizzleTransform(128))
    weight_tile = (tile.columns, _STEP) if contract == 1 else (_STEP, tile.columns)
    out = kernel(
        functools.partial(
            _kernel, tile=tile, contract=contract, programs=programs, table=weight.table, nested=bool(nested),
            with_extra=extra is not None, with_bias=bias is not None and not in_parts,
        ),
        "fused_matmul",
        interpret,
        out_type=jax.ShapeDtypeStruct((tile.splits, tokens + short, columns), out_dtype),
        grid=(programs,),
        grid_names=("sm",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((stages, TILE_TOKENS, _STEP), x.dtype, transforms=_WEIGHT),
            plgpu.SMEM((stages, *weight_tile), x.dtype, transforms=_WEIGHT),
            plgpu.SMEM((stages, tile.parts, _UNITS, BLOCK // 2), jnp.uint8, transforms=_CODES),
            plgpu.SMEM((_WARPGROUPS, _OWN, tile.columns), out_dtype, transforms=out_transforms),
            plgpu.SMEM((256,), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=tile.parts * _UNITS // _rows(contract), num_barriers=stages),
        ],
    )(*operands)  # fmt: skip
    if in_parts:
        out = out.sum(0) + (0 if bias is None else bias.astype(jnp.float32))
        out = out.astype(x.dtype)
    else:
        out = out[0]
    return out[:tokens] if short else out
