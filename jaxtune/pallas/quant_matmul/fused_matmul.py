"""Dequantising and multiplying in one: a Pallas Mosaic GPU kernel for Hopper (wgmma, TMA, warp specialisation).

Both directions, for tokens by the hundred, where a pass that writes the weight out is much of the time. Persistent: a
program for each multiprocessor takes every n-th item, a tile of tokens times a tile of columns, in a part of the sum
(`Tile.splits`). One or two warpgroups bring x and codes by TMA and decode a tile of the weight into shared memory; two
others multiply. An adapter's product is a few more steps, of its own two operands; row scales and biases are applied
to the sum. What is multiplied is weight.decode(dtype), to the bit.
"""

# Pallas' annotations know neither its own transforms nor barriers.
# pyright: reportAbstractUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas.quant_matmul import lanes
from jaxtune.pallas.quant_matmul.formats import BLOCK, NESTED_BLOCK, FourBit

TILE_TOKENS = 128
_WARPGROUPS = 2  # that multiply
_OWN = TILE_TOKENS // _WARPGROUPS
_STEP = BLOCK  # of the sum: 128 bytes, a row of the swizzle
_UNITS = 128  # rows of 32 bytes of codes that a warpgroup decodes in a step: one a thread
_SMEM_BYTES = 227 * 1024
_REGISTERS = {1: (104, 200), 2: (88, 168)}  # by decoding warpgroups: of a thread that decodes, that multiplies
_WEIGHT = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True)
class Tile:
    """decoders: warpgroups that decode, each 128 columns of the output. stages: steps that are on their way.
    splits: programs that share a sum; their parts are added by XLA. band: tiles of tokens that go together."""

    decoders: int = 1
    stages: int = 4
    splits: int = 1
    band: int = 16

    @property
    def columns(self) -> int:
        return _UNITS * self.decoders


def _smem_bytes(tile: Tile, item_bytes: int) -> int:
    codes = tile.decoders * _UNITS * 32
    stage = (TILE_TOKENS + tile.columns) * _STEP * 2 + codes
    return tile.stages * stage + TILE_TOKENS * tile.columns * item_bytes + 1024 + 4096  # map; barriers, alignment


def refusal(tile: Tile, weight: FourBit, contract: int) -> str | None:
    """Why this tile cannot serve a product over side `contract` (1: forward, 0: dx) of the weight, or None."""
    if weight.ndim != 2 or any(size % _UNITS for size in weight.shape):
        return f"weight {weight.shape}; wants multiples of {_UNITS}"
    columns, inner = weight.shape[1 - contract], weight.shape[contract]
    if tile.decoders not in _REGISTERS or columns % tile.columns or inner % (_STEP * tile.splits):
        return f"{tile} does not divide {columns} columns or {inner} terms"
    needs = _smem_bytes(tile, 2 if tile.splits == 1 else 4)
    if needs > _SMEM_BYTES:
        return f"{tile} takes {needs} bytes of shared memory"
    return None


def tiles(weight: FourBit, contract: int) -> list[Tile]:
    """Tiles to measure."""
    candidates = [Tile(1, 4), Tile(1, 3), Tile(2, 2), Tile(1, 3, 2), Tile(1, 3, 4)]
    return [tile for tile in candidates if refusal(tile, weight, contract) is None]


def _codes_shape(contract: int) -> tuple[int, int]:
    """Of what a warpgroup decodes in a step: rows of the weight, bytes."""
    return (_UNITS, 32) if contract == 1 else (_STEP, _UNITS * 32 // _STEP)


def _codes_transforms(contract: int):
    wide = _codes_shape(contract)[1]
    return (plgpu.TilingTransform((8, wide)), plgpu.SwizzleTransform(wide))


def _kernel(
    x_ref, codes_ref, absmax_ref, *refs, tile: Tile, contract: int, programs: int, table: np.ndarray, nested: bool,
    with_extra: bool, with_scale: bool, with_bias: bool, interpreted: bool,
):  # fmt: skip
    """refs: map, nested absmax, offset; u and its side; row scale; bias, as they exist; the output [splits, T, N]."""
    refs = list(refs)
    map_ref, nested_ref, offset_ref = [refs.pop(0) for _ in range(3)] if nested else (None,) * 3
    u_ref, side_ref = [refs.pop(0) for _ in range(2)] if with_extra else (None,) * 2
    scale_ref = refs.pop(0) if with_scale else None
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
            plgpu.set_max_registers(_REGISTERS[tile.decoders][0], action="decrease")
        decoder = wg - _WARPGROUPS
        total = mine * main_steps

        def units(number):
            """(first row, first block) that this warpgroup decodes in a step of all of this program's."""
            index = lax.div(number, jnp.int32(main_steps))
            split, _, column = place(index)
            along = split * main_steps + number - index * main_steps
            across = column * columns + decoder * _UNITS
            if contract == 1:
                return across, along
            return along * _STEP, lax.div(across, jnp.int32(BLOCK))

        def bring_codes(number):
            row, block = units(number)
            rows, wide = _codes_shape(contract)
            slot = slot_of(number)
            plgpu.copy_gmem_to_smem(
                codes_ref.at[pl.ds(row, rows), pl.ds(block * (BLOCK // 2), wide)],
                codes_smem.at[decoder, slot],
                codes_full.at[decoder * stages + slot],
            )

        def load_absmax(number):
            row, block = units(jnp.minimum(number, total - 1))
            rows = _codes_shape(contract)[0]
            if not interpreted:
                return lanes.unit_absmax(absmax_ref, nested_ref, row, block, rows)
            unit = jnp.arange(_UNITS)
            row, block = row + unit % rows, block + unit // rows
            values = absmax_ref[...][row, block]
            return values, nested_ref[...][(row * absmax_ref.shape[1] + block) // NESTED_BLOCK] if nested else None

        def decode_step(number, slot, share):
            rows, wide = _codes_shape(contract)
            codes = codes_smem.at[decoder, slot_of(number)]
            if not interpreted:
                found = [map_smem.at[decoder], offset_ref] if nested else []
                transforms = (_codes_transforms(contract), _WEIGHT)
                dtype = x_ref.dtype
                lanes.decode_units(codes, share, found, w_smem.at[slot], decoder, table, transforms, dtype)
                return
            values, factors = share
            if nested:
                values = map_ref[...][values] * factors + offset_ref[0]
            bytes_ = codes[...]
            nibbles = jnp.stack([bytes_ >> 4, bytes_ & 15], -1).reshape(rows, -1)
            entries = sum(jnp.where(nibbles == i, float(value), 0.0) for i, value in enumerate(table))
            scales = jnp.repeat(values.reshape(-1, rows).T, BLOCK, axis=1)
            decoded = (entries * scales).astype(x_ref.dtype)
            here = pl.ds(decoder * _UNITS, _UNITS)
            if contract == 1:
                w_smem[slot, here, :] = decoded
            else:
                w_smem[slot, :, here] = decoded

        for number in range(stages):
            pl.when(number < total)(functools.partial(bring_codes, jnp.int32(number)))
        share = load_absmax(jnp.int32(0))
        if nested and not interpreted:
            lanes.fill_table(map_ref, map_smem.at[decoder])
            lanes.warpgroup_barrier()

        def wait_free(at):
            pl.when(at >= stages)(lambda: plgpu.barrier_wait(free.at[slot_of(at)]))

        def item(index, carry):
            split, row_tile, column_tile = place(index)
            rows = pl.ds(row_tile * TILE_TOKENS, TILE_TOKENS)

            def step(number, carry):
                at, share = carry
                slot, flat = slot_of(at), index * main_steps + number
                wait_free(at)

                @pl.when(decoder == 0)
                def _():
                    along = pl.ds((split * main_steps + number) * _STEP, _STEP)
                    plgpu.copy_gmem_to_smem(x_ref.at[rows, along], x_smem.at[slot], full.at[slot])

                coming = load_absmax(flat + 1)
                plgpu.barrier_wait(codes_full.at[decoder * stages + slot_of(flat)])
                decode_step(flat, slot, share)
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot])
                pl.when(flat + stages < total)(lambda: bring_codes(flat + stages))
                return at + 1, coming

            def extra_step(number, at):
                slot = slot_of(at)
                wait_free(at)

                def bring():
                    along = pl.ds(number * _STEP, _STEP)
                    plgpu.copy_gmem_to_smem(u_ref.at[rows, along], x_smem.at[slot], full.at[slot])
                    here = pl.ds(column_tile * columns, columns)
                    side = side_ref.at[here, along] if contract == 1 else side_ref.at[along, here]
                    plgpu.copy_gmem_to_smem(side, w_smem.at[slot], full.at[slot])

                if tile.decoders == 1:
                    bring()
                else:
                    lax.cond(decoder == 0, bring, lambda: plgpu.barrier_arrive(full.at[slot]))
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
            plgpu.set_max_registers(_REGISTERS[tile.decoders][1], action="increase")

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
            for ref, apply in ((scale_ref, jnp.multiply), (bias_ref, jnp.add)):
                if ref is not None:
                    values = plgpu.load(ref.at[here], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                    total = apply(total, lax.broadcast_in_dim(values, total.shape, [1]))
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
    row_scale=None, bias=None,
) -> jax.Array:  # fmt: skip
    """x [T, K] times the decoded weight, over its side `contract` (1: x weight^T, 0: x weight): [T, N] in x's dtype.

    Args:
      absmax: uint8 or float32 of the weight's blocks; nested: map, nested absmax and offset float32[1] of a quantised
        one. kernel, interpret: as mosaic._kernel takes them.
      extra: (u [T, r], side [N, r] or [r, N] as the weight lies), whose product is added.
      row_scale, bias: float32[N]; the sum is multiplied by the one, then the other is added. Not with splits.
    """
    from jaxtune.pallas.dispatch import multiprocessors

    tokens, columns = x.shape[0], weight.shape[1 - contract]
    if tile.splits > 1 and (row_scale is not None or bias is not None):
        raise ValueError("fused product: a sum in parts has no epilogue")
    short = -tokens % TILE_TOKENS
    operands = [jnp.pad(x, ((0, short), (0, 0))) if short else x]
    operands += [weight.codes.reshape(weight.shape[0], -1), absmax.reshape(weight.shape[0], -1), *nested]
    if extra is not None:
        u, side = extra
        rank = -u.shape[1] % _STEP
        widths = [(0, 0)] * 2
        widths[contract] = (0, rank)
        operands += [jnp.pad(u.astype(x.dtype), ((0, short), (0, rank))), jnp.pad(side.astype(x.dtype), widths)]
    operands += [each for each in (row_scale, bias) if each is not None]
    out_dtype = jnp.dtype(x.dtype if tile.splits == 1 else jnp.float32)
    programs = 3 if interpret is not None else multiprocessors()
    stages = tile.stages
    out_transforms = (plgpu.TilingTransform((8, 128 // out_dtype.itemsize)), plgpu.SwizzleTransform(128))
    weight_tile = (tile.columns, _STEP) if contract == 1 else (_STEP, tile.columns)
    out = kernel(
        functools.partial(
            _kernel, tile=tile, contract=contract, programs=programs, table=weight.table, nested=bool(nested),
            with_extra=extra is not None, with_scale=row_scale is not None, with_bias=bias is not None,
        ),
        interpret,
        out_type=jax.ShapeDtypeStruct((tile.splits, tokens + short, columns), out_dtype),
        grid=(programs,),
        grid_names=("sm",),
        num_threads=_WARPGROUPS + tile.decoders,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((stages, TILE_TOKENS, _STEP), x.dtype, transforms=_WEIGHT),
            plgpu.SMEM((stages, *weight_tile), x.dtype, transforms=_WEIGHT),
            plgpu.SMEM(
                (tile.decoders, stages, *_codes_shape(contract)), jnp.uint8, transforms=_codes_transforms(contract)
            ),
            plgpu.SMEM((_WARPGROUPS, _OWN, tile.columns), out_dtype, transforms=out_transforms),
            plgpu.SMEM((tile.decoders, 256), jnp.float32),
            plgpu.Barrier(num_arrivals=1 + tile.decoders, num_barriers=stages),
            plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=tile.decoders * stages),
        ],
    )(*operands)  # fmt: skip
    out = out[0] if tile.splits == 1 else out.sum(0).astype(x.dtype)
    return out[:tokens] if short else out
