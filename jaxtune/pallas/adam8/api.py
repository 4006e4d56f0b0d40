"""Adam's update with 8-bit moments as one Pallas Mosaic GPU kernel for Hopper that reads and writes every byte once,
and in plain JAX for other devices.

A warp has whole blocks of 256 elements, so a block's new absmax is known before its codes are written. The gradient is
scaled here and moments are updated in place, so that only the direction is in memory besides the state. While a
warpgroup computes a chunk of 8 blocks from registers, bulk copies load its next into shared memory.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas import dispatch, gpu_kernel, lanes, meshes
from jaxtune.pallas.adam8 import adam_lanes
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.formats.blockwise8 import (
    BLOCK,
    SIGNED_ZERO,
    decode,
    dynamic_map,
    encode,
    in_blocks,
    upper_bounds,
)
from jaxtune.pallas.mosaic_modules import fragmented_array, plgpu

_BLOCKS = 8  # blocks that a warpgroup works on at a time, two per warp
_CHUNK = _BLOCKS * BLOCK
_GRADIENTS = ("bfloat16", "float32")  # the dtypes of gradients that the kernel reads
# Warpgroups of a program, which share the maps (64 KB), and number of programs. By ptxas' registers and by shared
# memory, one program of six warpgroups fits a multiprocessor, of which an H100 and an H200 have 132.
WARPGROUPS, _PROGRAMS = 6, 132
# By signedness: the number of lower bits of a float32 number within a cell (see `cells`), and the first cell, which
# starts at 2^-22 or 2^-23; smaller magnitudes are rounded to 0.
_SHIFT = {True: 17, False: 16}
_FIRST = {True: (127 - 22) << 6, False: (127 - 23) << 7}


def _layout():
    """Of [8, 256]: two blocks per warp and four neighbours per lane, so that a warp's float32 writes fill sectors."""
    tiling = fragmented_array.Tiling(((4, 128), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


@functools.cache
def cells(signed: bool) -> np.ndarray:
    """int32[cells]: the table with which `adam_lanes.nearest_codes` encodes a moment's number in one read.

    A cell is a range of magnitudes whose float32 bits are equal but for the lowest 17 (signed) or 16; a bound is the
    middle between two neighbouring magnitudes of the map. A cell's entry is the number of bounds below it, shifted left
    by that many bits, plus a number that overflows together with a magnitude's lower bits exactly if the magnitude is
    above the cell's bound.
    """
    shift, first = _SHIFT[signed], _FIRST[signed]
    bounds = upper_bounds(signed).view(np.int32)
    starts = np.arange(first, (0x3F800000 >> shift) + 1, dtype=np.int64) << shift
    below = np.searchsorted(bounds, starts, side="left")
    inside = np.searchsorted(bounds, starts + (1 << shift), side="left") - below
    if inside.max() > 1:
        raise AssertionError("a cell has more than one bound")
    bound = bounds[np.minimum(below, bounds.size - 1)] & ((1 << shift) - 1)
    return ((below << shift) + np.where(inside, (1 << shift) - 1 - bound, 0)).astype(np.int32)


def refusal(gradient, m_codes) -> str | None:
    """Why the kernel cannot update this tensor, or None; of the gradient only dtype and size are read."""
    if (reason := gpu_kernel.refusal()) is not None:
        return reason
    if str(gradient.dtype) not in _GRADIENTS:
        return f"dtype {gradient.dtype}"
    if m_codes.dtype != jnp.uint8:
        return f"codes of {m_codes.dtype}"
    if gradient.size < _CHUNK:
        return f"{gradient.size} elements, fewer than {_CHUNK}"
    if gpu_kernel.interpreter() is not None:
        return None
    return dispatch.first_use("adamw_8bit", "mosaic", str(gradient.dtype), lambda: _small_case(gradient.dtype))


def _small_case(dtype):
    """(the kernel's results, XLA's) of a second step of Adam, once taken and once skipped, in one program."""
    betas, eps, size = (0.9, 0.95), 1e-8, (3 * WARPGROUPS + 2) * _CHUNK + 300

    @jax.jit
    def run_both():
        first, second = (jax.random.normal(jax.random.key(i), (size,)).astype(dtype) for i in range(2))
        m, v = ((1 - beta) * first.astype(jnp.float32) ** power for beta, power in zip(betas, (1, 2), strict=True))
        operands = [second, *encode(m, signed=True), *encode(v, signed=False)]
        operands += [jnp.float32(1 - beta**2) for beta in betas] + [jnp.float32(0.7)]
        results_of_updates = []
        for update in (
            lambda finite: _adam_update(
                *operands, finite, betas=betas, eps=eps, programs=1, interpret=gpu_kernel.interpreter()
            ),
            lambda finite: plain_update(*operands, finite=finite, betas=betas, eps=eps),
        ):
            results = []
            for finite in (True, False):
                direction, m, m_absmax, v, v_absmax = update(finite)
                results += [decode(m, m_absmax, signed=True), decode(v, v_absmax, signed=False)]
                results += [direction] * finite
            results_of_updates.append(results)
        return results_of_updates

    return run_both()


def plain_update(gradient, m, m_absmax, v, v_absmax, correction1, correction2, scale, finite, *, betas, eps):
    """One step of Adam on a tensor with 8-bit moments in jnp, which XLA divides over any mesh.

    Returns (direction, new m, m_absmax, v, v_absmax); direction is float32 in gradient's shape, (m / correction1) /
    (sqrt(v / correction2) + eps) of the new moments before they are rounded, without learning rate and weight decay.

      gradient: bfloat16, float16 or float32, any shape.
      m, v: codes uint8[blocks, 256] of blockwise8.encode; m_absmax, v_absmax: float32[blocks].
      correction1, correction2: float32, 1 - beta^t.
      scale: float32 factor on the gradient.
      finite: False: the moments stay, and the direction means nothing.
      betas: (beta1, beta2).
      eps: added to the root of v / correction2.

    Raises TypeError or ValueError for other arrays, betas or eps; the scalars are not checked.
    """
    _check("plain_update", FLOATS, gradient, m, m_absmax, v, v_absmax, betas, eps)
    (beta1, beta2), shape, old = betas, gradient.shape, (m, m_absmax, v, v_absmax)
    g = in_blocks(gradient) * scale
    m = beta1 * decode(m, m_absmax, signed=True) + (1 - beta1) * g
    v = beta2 * decode(v, v_absmax, signed=False) + (1 - beta2) * g * g
    direction = m / correction1 / (jnp.sqrt(v) / jnp.sqrt(correction2) + eps)
    direction = direction.reshape(-1)[: gradient.size].reshape(shape)
    new = (*encode(m, signed=True), *encode(v, signed=False))
    return direction, *(jnp.where(finite, n, o) for n, o in zip(new, old, strict=True))


def _check(op, dtypes, gradient, m, m_absmax, v, v_absmax, betas, eps) -> None:
    check = Arguments(op)
    check.array("gradient", gradient, "...", dtypes)
    check.sizes["blocks"] = (-(-gradient.size // BLOCK), f" ({BLOCK} elements of the gradient in each)")
    for name, codes, absmax in (("m", m, m_absmax), ("v", v, v_absmax)):
        check.array(name, codes, f"blocks {BLOCK}", jnp.uint8)
        check.array(f"{name}_absmax", absmax, "blocks", jnp.float32)
    check.sequence("betas", betas, "two numbers", 2)
    for beta in betas:
        check.number("betas", beta, least=0, below=1)
    check.number("eps", eps, least=0)


def nearest_codes_in_jnp(x, table, signed: bool):
    """adam_lanes.nearest_codes in jnp, as Pallas' interpreter cannot run PTX. x: float32, in [-1, 1] if `signed`, else
    in [0, 1]. table: int32, of the cells.

      table: int32, `cells(signed)`. signed: the first moment's map.
    """
    shift, first = _SHIFT[signed], _FIRST[signed]
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = jnp.clip(bits & 0x7FFFFFFF, first << shift, 0x3F800000)
    entry = (table[(magnitude >> shift) - first] + (magnitude & ((1 << shift) - 1))) >> shift
    if signed:
        entry = jnp.where(bits < 0, SIGNED_ZERO - jnp.minimum(entry, SIGNED_ZERO), SIGNED_ZERO + entry)
    return entry.astype(jnp.uint8)


def _kernel(g_ref, m_ref, m_max_ref, v_ref, v_max_ref, factors_ref, *refs, betas, eps, interpreted):
    """Updates the chunks (8 blocks of 256 elements) of this warpgroup, which has each in registers before it writes it.

    g_ref: flat gradient; the refs up to the direction are in global memory.
    m_ref, m_max_ref, v_ref, v_max_ref: codes uint8[blocks, 256] and absmax float32[blocks], updated in place, but for
      blocks after the last whole chunk.
    factors_ref: float32[4]: 1 / correction1, 1 / sqrt(correction2), scale, and 0 if nothing may change; then nothing
      is written, not even the direction.
    refs: two maps and two tables of `cells` (first moment, second); flat float32 direction; then shared memory: these
      four, a slot of each of the five inputs for each warpgroup, and the slots' barriers.
    """
    tables, direction_ref, smem, slots, full_smem = refs[:4], refs[4], refs[5:9], refs[9:14], refs[14]
    moments = (m_ref, m_max_ref, v_ref, v_max_ref)
    sources = (g_ref, *moments)
    sizes = [_CHUNK * g_ref.dtype.itemsize] + 2 * [_CHUNK, _BLOCKS * 4]  # bytes of a chunk
    wg = lax.axis_index("wg")
    worker = lax.axis_index("program") * WARPGROUPS + wg
    workers = lax.axis_size("program") * WARPGROUPS
    chunks = lax.div(direction_ref.shape[0] // _CHUNK - worker + (workers - 1), workers)
    *factors, changes = (factors_ref[i] for i in range(4))
    chunks = jnp.where(changes == 0, 0, chunks)
    (beta1, beta2), shape = betas, (_BLOCKS, BLOCK)
    whole = _layout()
    layouts = (whole, whole.reduce(1))
    own_slot = pl.ds(wg * _BLOCKS, _BLOCKS)

    def chunk_of(index):
        return worker + index * workers

    def bring(index):
        chunk = chunk_of(index)
        if not interpreted:
            lanes.copy_chunk(sources, slots, sizes, full_smem, chunk, wg)
            return
        slots[0][own_slot] = g_ref[pl.ds(chunk * _CHUNK, _CHUNK)].reshape(shape)
        for ref, slot in zip(moments, slots[1:], strict=True):
            slot[own_slot] = ref[pl.ds(chunk * _BLOCKS, _BLOCKS)]

    def factor(index):
        spread = jnp.broadcast_to(factors[index], shape)
        return spread if interpreted else plgpu.layout_cast(spread, whole)

    def all_columns(values):
        return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, [0]), whole)

    def decoded(codes, absmax, moment):
        entries = tables[moment][...][codes] if interpreted else adam_lanes.looked_up(codes, smem[moment], whole)
        return entries * all_columns(absmax)

    def encoded(x, moment):
        """(codes, absmax)"""
        signed = moment == 0
        absmax = jnp.max(jnp.abs(x), axis=1)
        absmax = jnp.where(absmax < np.finfo(np.float32).tiny, 0.0, absmax)
        scaled = x * all_columns(1.0 / jnp.where(absmax == 0, 1.0, absmax))
        if interpreted:
            return nearest_codes_in_jnp(scaled, tables[2 + moment][...], signed), absmax
        return adam_lanes.nearest_codes(scaled, smem[2 + moment], _SHIFT[signed], _FIRST[signed], signed, whole), absmax

    def update_chunk(index, _):
        if not interpreted:
            lanes.wait_for_chunk(full_smem, wg, index & 1)
        g, m, m_max, v, v_max = (
            plgpu.load(slot.at[own_slot], layout=layout, optimized=False)
            for slot, layout in zip(slots, (whole, *layouts, *layouts), strict=True)
        )
        if not interpreted:
            lanes.warpgroup_barrier()  # all have read the slot
        pl.when(index + 1 < chunks)(lambda: bring(index + 1))
        g = g.astype(jnp.float32) * factor(2)
        m, v = decoded(m, m_max, 0), decoded(v, v_max, 1)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * (g * g)
        chunk = chunk_of(index)
        if interpreted:
            direction = m * factor(0) / (jnp.sqrt(v) * factor(1) + eps)
            direction_ref[pl.ds(chunk * _CHUNK, _CHUNK)] = direction.reshape(_CHUNK)
        else:
            direction = adam_lanes.direction(m, v, factor(0), factor(1), eps, whole)
            adam_lanes.store_chunk(direction, direction_ref, chunk, whole)
        for ref, values in zip(moments, (*encoded(m, 0), *encoded(v, 1)), strict=True):
            ref[pl.ds(chunk * _BLOCKS, _BLOCKS)] = values

    if not interpreted:
        lanes.begin_barriers(full_smem)
        for table_ref, banks_smem in zip(tables[:2], smem[:2], strict=True):
            lanes.fill_banks(table_ref, banks_smem, WARPGROUPS)
        for table_ref, cells_smem in zip(tables[2:], smem[2:], strict=True):
            lanes.fill_table(table_ref, cells_smem)  # by every warpgroup, the same
        lanes.program_barrier()
    pl.when(chunks > 0)(lambda: bring(0))
    lax.fori_loop(0, chunks, update_chunk, None)


def adam_update(
    gradient, m, m_absmax, v, v_absmax, correction1, correction2, scale, finite, *, betas, eps, divided=None
):
    """One step of Adam on a tensor with 8-bit moments by the Hopper kernel; ask `refusal` first. Results are
    those of plain_update; the gradient is bfloat16 or float32.

    Donated moments are updated in place if nothing else reads them; a choice between old and new moments outside would
    read them, so `finite` makes it here.

      divided: the mesh axis along which each device has a shard of the gradient's leading axis and of its moments;
        None: they are whole, and each device updates all, which is faster and smaller than an exchange. A divided
        tensor is gathered first if its gradient has one axis, or its shards are uneven, no whole blocks, or below 2,048
        elements.
      m, v: codes uint8[blocks, 256]; m_absmax, v_absmax: float32[blocks].
      correction1, correction2: float32[], 1 - beta^t. scale: float32[], factor on the gradient.
      finite: bool[]; False: nothing changes, and the direction means nothing.
      betas, eps: (beta1, beta2), and what is added to the root of the second moment.
    """
    _check("adam_update", _GRADIENTS, gradient, m, m_absmax, v, v_absmax, betas, eps)
    numbers = (correction1, correction2, scale, finite)
    update = functools.partial(_adam_update, programs=_PROGRAMS, interpret=gpu_kernel.interpreter())
    update = functools.partial(update, betas=tuple(betas), eps=float(eps))
    # If both are divided, at borders of blocks, each device updates its own part of the tensor.
    shards = jax.sharding.get_abstract_mesh().shape.get(divided, 1)
    even = gradient.ndim >= 2 and not any(size % shards for size in (gradient.shape[0], m.shape[0]))
    if divided is not None and even and gradient.size % (shards * BLOCK) == 0 and gradient.size >= shards * _CHUNK:
        update = meshes.on_each_device(update, rows=5, axis=divided)
    else:
        update = meshes.on_each_device(update)
    return update(gradient, m, m_absmax, v, v_absmax, *numbers)


@functools.partial(jax.jit, static_argnames=("betas", "eps", "programs", "interpret"))
def _adam_update(
    gradient, m, m_absmax, v, v_absmax, correction1, correction2, scale, finite, *, betas, eps, programs, interpret
):
    """adam_update on one device; XLA updates the elements after the last whole chunk of 2,048."""
    size = gradient.size
    kernel_elements = size // _CHUNK * _CHUNK  # elements that the kernel takes; XLA takes the rest
    flat = gradient.reshape(size)
    factors = [1 / correction1, 1 / jnp.sqrt(correction2), scale, finite]
    factors = jnp.stack([jnp.asarray(array, jnp.float32) for array in factors])
    tables = [dynamic_map(True), dynamic_map(False), cells(True), cells(False)]
    moments = [jax.new_ref(array) for array in (m, m_absmax, v, v_absmax)]
    tail_direction = []
    if kernel_elements < size:
        m, m_absmax, v, v_absmax = (ref[kernel_elements // BLOCK :] for ref in moments)
        numbers = (correction1, correction2, scale, finite)
        last, *new = plain_update(flat[kernel_elements:], m, m_absmax, v, v_absmax, *numbers, betas=betas, eps=eps)
        for ref, values in zip(moments, new, strict=True):  # before the kernel, whose results XLA cannot write into
            ref[kernel_elements // BLOCK :] = values
        tail_direction = [last]
    codes = plgpu.SMEM((WARPGROUPS * _BLOCKS, BLOCK), jnp.uint8)
    absmax = plgpu.SMEM((WARPGROUPS * _BLOCKS,), jnp.float32)
    direction = gpu_kernel.kernel(
        functools.partial(_kernel, betas=betas, eps=eps, interpreted=interpret is not None),
        "adam8",
        interpret,
        out_type=jax.ShapeDtypeStruct((kernel_elements,), jnp.float32),
        grid=(min(-(-kernel_elements // (_CHUNK * WARPGROUPS)), programs),),
        grid_names=("program",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        scratch_types=[
            *(plgpu.SMEM((256, 32), jnp.float32) for _ in range(2)),
            *(plgpu.SMEM(table.shape, table.dtype) for table in tables[2:]),
            *(
                plgpu.SMEM((WARPGROUPS * _BLOCKS, BLOCK), gradient.dtype),
                codes,
                absmax,
                codes,
                absmax,
            ),  # a slot for each warpgroup
            plgpu.SMEM((2 * WARPGROUPS,), jnp.int32),  # barriers of the slots
        ],
        # The kernel itself waits for tables and copies, and before it copies to a slot again.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(flat, *moments, factors, *map(jnp.asarray, tables))
    direction = jnp.concatenate([direction, *tail_direction]).reshape(gradient.shape)
    return direction, *(ref[...] for ref in moments)
