"""The grouped product over weights in four bits as they are stored, as a Pallas Mosaic GPU kernel for Hopper.

As mosaic.py, but the other way round: out^T = W x^T. A warpgroup decodes its 64 columns of the output by 64 along K
from bytes in shared memory to registers, where wgmma takes its left side from; decoded weights are never written. While
one warpgroup decodes, the others multiply. Scales come as bfloat16, by K; XLA makes them from what is stored, a 64th or
a 32nd of the weight. An adapter is a few more steps along K, of its own two operands.

Not run on a GPU yet.
"""

# Pallas' annotations know neither its own transforms nor barriers.
# pyright: reportAbstractUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import gpu_kernel
from jaxtune.pallas.grouped_matmul import fragments, mosaic
from jaxtune.pallas.grouped_matmul.fragments import OWN, STEP, Format
from jaxtune.pallas.grouped_matmul.layout import TILE_ROWS, Groups
from jaxtune.pallas.quant_matmul import NF4, FourBit
from jaxtune.pallas.quant_matmul.formats import BLOCK
from jaxtune.pallas.quant_matmul.mxfp4 import BLOCK as MX_BLOCK
from jaxtune.pallas.quant_matmul.mxfp4 import MXFP4, TABLE

_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True)
class Blocks:
    """warpgroups: that compute, each 64 columns of the output. stages: steps of K on their way. registers: of each of
    their threads, more than it would have; None leaves all threads what they have. band: tiles of rows that go
    together."""

    warpgroups: int
    stages: int
    registers: int | None
    band: int = 16

    @property
    def columns(self) -> int:
        return OWN * self.warpgroups


# The first whose columns divide the output's. Three warpgroups keep the tensor cores busy while one decodes.
BLOCKS = (Blocks(3, 6, 152), Blocks(2, 7, 232), Blocks(1, 8, None))


def refusal(weight, dtype, tile_rows: int) -> str | None:
    """Why this kernel cannot serve this call, or None. weight: [E, ., .]."""
    if isinstance(weight, FourBit) and not isinstance(weight, NF4):
        return "weights in FP4"
    if not isinstance(weight, NF4 | MXFP4):
        return "weights that are not in four bits"
    if dtype != jnp.bfloat16:
        return f"dtype {jnp.dtype(dtype)}"
    return mosaic.refusal(dtype, weight.shape[1], weight.shape[2], tile_rows)


def blocks_for(columns: int) -> Blocks:
    return next(blocks for blocks in BLOCKS if columns % blocks.columns == 0)


def _parts(weight) -> tuple[Format, jax.Array, jax.Array]:
    """(format, codes uint8[E, rows, columns / 2], scales bfloat16[E, columns / block, rows]) of a weight [E, rows,
    columns]."""
    experts, rows, columns = weight.shape
    if isinstance(weight, MXFP4):
        form = Format(TABLE.tobytes(), MX_BLOCK, False)
        powers = jnp.ldexp(jnp.float32(1), weight.scales.astype(jnp.int32) - 127)
        return form, weight.codes, powers.astype(jnp.bfloat16).swapaxes(1, 2)
    form = Format(weight.table.tobytes(), BLOCK, True)
    scales = weight.block_absmax().reshape(experts, rows, columns // BLOCK)
    return form, weight.codes.reshape(experts, rows, columns // 2), scales.astype(jnp.bfloat16).swapaxes(1, 2)


def _kernel(
    x_ref, codes_ref, scales_ref, expert_ref, count_ref, *rest,
    blocks: Blocks, form: Format, contract: int, programs: int, rank_steps: int, interpreted: bool,
):  # fmt: skip
    """out [rows, N] = x [rows, K] W[expert of each tile] + u [rows, R] L[expert]^T; L is [E, N, R], its columns in the
    order of the lanes' rows."""
    if interpreted:
        *rest, fragment_smem = rest
    if rank_steps:
        u_ref, l_ref, out_ref, x_smem, codes_smem, scales_smem, out_smem, full, free, u_smem, l_smem, *both = rest
        extra_full, extra_free = both
    else:
        out_ref, x_smem, codes_smem, scales_smem, out_smem, full, free = rest
    columns, stages, block = blocks.columns, blocks.stages, form.block
    wg, program = lax.axis_index("wg"), lax.axis_index("sm")
    row_tiles, column_tiles = x_ref.shape[0] // TILE_ROWS, out_ref.shape[1] // columns
    items = row_tiles * column_tiles
    mine = lax.div(items - program + (programs - 1), jnp.int32(programs))
    main_steps = x_ref.shape[1] // STEP
    count = count_ref[0]

    def place(index):
        return mosaic.place(program + index * programs, row_tiles, column_tiles, blocks.band)

    def steps(row_tile, number):
        """Tiles that hold nothing take no step, and are stored as zeros."""
        return jnp.where(row_tile < count, number, 0)

    def slot_of(at):
        return lax.rem(at, jnp.int32(stages))

    def bring():
        if blocks.registers is not None:
            plgpu.set_max_registers(mosaic.MEMORY_REGISTERS, action="decrease")

        def item(index, at):
            at, extra_at = at
            row_tile, column_tile = place(index)
            expert = expert_ref[row_tile]
            rows, here = pl.ds(row_tile * TILE_ROWS, TILE_ROWS), pl.ds(column_tile * columns, columns)

            def step(number, at):
                slot = slot_of(at)
                pl.when(at >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                along = pl.ds(number * STEP, STEP)
                if contract == 2:
                    codes = codes_ref.at[expert, here, pl.ds(number * (STEP // 2), STEP // 2)]
                    scales = scales_ref.at[expert, pl.ds(number * (STEP // block), STEP // block), here]
                else:
                    codes = codes_ref.at[expert, along, pl.ds(column_tile * (columns // 2), columns // 2)]
                    scales = scales_ref.at[expert, pl.ds(column_tile * (columns // block), columns // block), along]
                plgpu.copy_gmem_to_smem(x_ref.at[rows, along], x_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(codes, codes_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(scales, scales_smem.at[slot], full.at[slot])
                return at + 1

            def extra_step(number, at):
                pl.when(at > 0)(lambda: plgpu.barrier_wait(extra_free))
                along = pl.ds(number * STEP, STEP)
                plgpu.copy_gmem_to_smem(u_ref.at[rows, along], u_smem, extra_full)
                plgpu.copy_gmem_to_smem(l_ref.at[expert, here, along], l_smem, extra_full)
                return at + 1

            if rank_steps:  # first: they are small, and their room is free long before they are needed
                extra_at = lax.fori_loop(0, steps(row_tile, rank_steps), extra_step, extra_at)
            return lax.fori_loop(0, steps(row_tile, main_steps), step, at), extra_at

        total, extra_total = lax.fori_loop(0, mine, item, (jnp.int32(0), jnp.int32(0)))
        # Every arrival is waited for: a barrier must not be left halfway.
        last = jnp.maximum(total - stages, 0)
        lax.fori_loop(last, total, lambda at, _: plgpu.barrier_wait(free.at[slot_of(at)]), None)
        if rank_steps:
            pl.when(extra_total > 0)(lambda: plgpu.barrier_wait(extra_free))

    def compute():
        if blocks.registers is not None:
            plgpu.set_max_registers(blocks.registers, action="increase")

        def decoded(slot):
            codes, scales = codes_smem.at[slot], scales_smem.at[slot]
            if interpreted:  # the interpreter's wgmma takes nothing from registers
                fragment = fragments.written_fragment(form, codes[...], scales[...], columns, contract, wg)
                fragment_smem[wg] = fragment
                return fragment_smem.at[wg]
            return fragments.emitted_fragment(form, codes, scales, columns, contract)

        def item(index, at):
            row_tile, column_tile = place(index)

            def accumulate(acc):
                def extra_step(_, carry):
                    plgpu.barrier_wait(extra_full)
                    plgpu.wgmma(acc, l_smem.at[pl.ds(wg * OWN, OWN)], u_smem.transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(extra_free)
                    return carry

                def step(_, at):
                    slot = slot_of(at)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, decoded(slot), x_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(0)  # the next step writes to the same registers
                    plgpu.barrier_arrive(free.at[slot])
                    return at + 1

                if rank_steps:
                    lax.fori_loop(0, steps(row_tile, rank_steps), extra_step, jnp.int32(0))
                lax.fori_loop(0, steps(row_tile, main_steps), step, at)
                return acc[...]

            total = pl.run_scoped(accumulate, plgpu.ACC((OWN, TILE_ROWS), jnp.float32))
            rows = pl.ds(row_tile * TILE_ROWS, TILE_ROWS)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item has left
            if interpreted:
                out_smem.at[wg][...] = fragments.written_rows(total, contract)
            else:
                fragments.store_rows(total, out_smem.at[wg], _TRANSFORMS, contract)
            plgpu.commit_smem()
            own = pl.ds(column_tile * columns + wg * OWN, OWN)
            plgpu.copy_smem_to_gmem(out_smem.at[wg], out_ref.at[rows, own])
            return at + steps(row_tile, main_steps)

        lax.fori_loop(0, mine, item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    lax.cond(wg < blocks.warpgroups, compute, bring)


def _in_lane_order(side: jax.Array, contract: int) -> jax.Array:
    """side [E, N, R] with each 64 columns in the order of the accumulator's rows (fragments.column_word)."""
    experts, size, rank = side.shape
    if contract == 2:  # column 16 w + 2 g + h is row 16 w + 8 h + g
        split = side.reshape(experts, -1, 4, 8, 2, rank).transpose(0, 1, 2, 4, 3, 5)
    else:  # column 32 v + 4 g + 2 w + h is row 16 (2 v + w) + 8 h + g
        split = side.reshape(experts, -1, 2, 8, 2, 2, rank).transpose(0, 1, 2, 4, 5, 3, 6)
    return split.reshape(experts, size, rank)


def product(x, weight, groups: Groups, contract: int, extra=None, *, blocks: Blocks | None = None):
    """See reference.product; weight: NF4 or MXFP4."""
    columns = weight.shape[3 - contract]
    blocks = blocks or blocks_for(columns)
    interpret = mosaic.interpreter()
    form, codes, scales = _parts(weight)
    operands = [x, codes, scales, groups.tile_expert, groups.count[None]]
    rank_steps = 0
    code_shape = (blocks.columns, STEP // 2) if contract == 2 else (STEP, blocks.columns // 2)
    scale_shape = (STEP // form.block, blocks.columns) if contract == 2 else (blocks.columns // form.block, STEP)
    scratch = [
        plgpu.SMEM((blocks.stages, TILE_ROWS, STEP), x.dtype, transforms=_TRANSFORMS),
        plgpu.SMEM((blocks.stages, *code_shape), jnp.uint8),
        plgpu.SMEM((blocks.stages, *scale_shape), jnp.bfloat16),
        plgpu.SMEM((blocks.warpgroups, TILE_ROWS, OWN), x.dtype, transforms=_TRANSFORMS),
        plgpu.Barrier(num_arrivals=3, num_barriers=blocks.stages),
        plgpu.Barrier(num_arrivals=blocks.warpgroups, num_barriers=blocks.stages),
    ]
    if extra is not None:
        u, side = extra
        side = side if contract == 2 else side.mT  # [E, N, R]
        rank_steps = math.ceil(u.shape[1] / STEP)
        short = rank_steps * STEP - u.shape[1]
        side = jnp.pad(_in_lane_order(side.astype(x.dtype), contract), ((0, 0), (0, 0), (0, short)))
        operands += [jnp.pad(u, ((0, 0), (0, short))), side]
        scratch += [
            plgpu.SMEM((TILE_ROWS, STEP), x.dtype, transforms=_TRANSFORMS),
            plgpu.SMEM((blocks.columns, STEP), x.dtype, transforms=_TRANSFORMS),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=blocks.warpgroups),
        ]
    if interpret is not None:
        scratch.append(plgpu.SMEM((blocks.warpgroups, OWN, STEP), x.dtype))
    # Two of the interpreter's: its blocked threads must be fewer than the CPU's (tests/conftest.py).
    programs = mosaic.cores() if interpret is None else 2
    return gpu_kernel.kernel(
        functools.partial(
            _kernel, blocks=blocks, form=form, contract=contract, programs=programs, rank_steps=rank_steps,
            interpreted=interpret is not None,
        ),
        interpret,
        out_type=jax.ShapeDtypeStruct((groups.rows, columns), x.dtype),
        grid=(programs,),
        grid_names=("sm",),
        num_threads=blocks.warpgroups + 1,
        thread_name="wg",
        scratch_types=scratch,
    )(*operands)  # fmt: skip
