"""Packed attention as Pallas Mosaic GPU kernels for Hopper: 16-bit operands, head dims up to 512.

A tile of queries [a, b] needs keys from the lower bound of a (start of its document or window) to b; queries from a to
the upper bound of b need a tile of keys. Bounds never fall along a row, so a tile's first and last token bound it. Only
blocks between the bounds are loaded, only those that a bound crosses are masked. XLA writes the tiles into a table, the
most expensive first.

dq has one kernel, dk and dv another (one each for heads of 512). A tile of keys visits all query heads of its key head,
or a share of them, whose sums XLA adds. Every sum has a fixed order: bitwise deterministic without atomics.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import gpu_kernel, tuning
from jaxtune.pallas.attention import (
    mosaic_backward,
    mosaic_backward_wide,
    mosaic_forward,
    mosaic_halves,
    mosaic_halves_keys,
)
from jaxtune.pallas.attention.layout import PackedLayout
from jaxtune.pallas.attention.mosaic_parts import LOG2E, WARPGROUPS, Blocks
from jaxtune.pallas.mosaic_modules import plgpu
from jaxtune.pallas.mosaic_types import smem
from jaxtune.pallas.targets import multiprocessors

_PAD = 128  # rows are padded to a multiple of this
_INTERPRETED_PROGRAMS = 2

# Blocks by head dim, used where nothing was measured on the GPU (pallas/tuning.py).
FORWARD = {
    64: Blocks(64, 128, 3, True),
    128: Blocks(64, 128, 2, True),
    256: Blocks(64, 64, 2, True, lean=True, buffers=1),
    512: Blocks(64, 64, 4, False, lean=True, buffers=1, value_stages=1),
}
BACKWARD_QUERY = {
    64: Blocks(64, 64, 4, False),
    128: Blocks(64, 64, 3, False),
    256: Blocks(64, 64, 2, False, lean=True, buffers=1, value_stages=1),
    512: Blocks(64, 64, 2, False, lean=True, buffers=1, value_stages=2),
}
BACKWARD_KEY = {
    64: Blocks(64, 128, 2, False),
    128: Blocks(64, 64, 2, False),
    256: Blocks(64, 64, 2, False, lean=True, buffers=1),  # mosaic_backward_wide.py
    512: Blocks(64, 64, 2, False, lean=True, buffers=1, value_stages=2),  # of dk alone
}
BACKWARD_VALUE = {512: Blocks(64, 64, 6, False, lean=True, buffers=1, value_stages=2)}  # of dv alone
NARROW = 128  # the largest head dim whose dk and dv fit one warpgroup
HALVED = 512  # the head dim whose results are made in halves (mosaic_halves.py)


# {kernel: {head dim: blocks}}
HEURISTIC = {"forward": FORWARD, "dquery": BACKWARD_QUERY, "dkey": BACKWARD_KEY, "dvalue": BACKWARD_VALUE}
_SHORT_WINDOW = 1024


def bucket(dim: int, whole_rows: bool, window: int | None) -> str:
    """Name of the class of calls for which the tuner stores blocks, such as "head_dim=128, whole rows".

    Windows up to 1,024 keys are named by the next power of two ("head_dim=128, window up to 256"), whatever the
    documents: visits are short anyway. Longer ones have no effect. dim: that of the kernels. whole_rows: every row is
    one document.
    """
    if window is not None and window <= _SHORT_WINDOW:
        return f"head_dim={dim}, window up to {max(128, 1 << (window - 1).bit_length())}"
    return f"head_dim={dim}, whole rows" if whole_rows else f"head_dim={dim}"


def _blocks(kernel: str, query, layout: PackedLayout, window: int | None) -> Blocks:
    """Blocks measured for such calls on this kind of GPU, else those measured for packed rows, else HEURISTIC's."""
    op, dim = f"attention {kernel}", query.shape[-1]
    for name in (bucket(dim, layout.max_documents == 1, window), bucket(dim, False, None)):
        measured = tuning.tuned(op, name, query.dtype, Blocks)
        if measured:
            return Blocks(**measured)
    return HEURISTIC[kernel][dim]


def blocks_of(query, layout: PackedLayout, window: int | None) -> dict[str, dict[str, Any]]:
    """{operation of tuning.py: fields of its Blocks that are not defaults}, for the kernels of the call's head dim.

    query: [B, T, heads, D], array or shape. layout: tells whether rows are single documents.
    window: keys that a query sees, or None.
    """
    query = jax.ShapeDtypeStruct((kernel_dim(query.shape[-1]),), query.dtype)
    return {
        f"attention {kernel}": _blocks(kernel, query, layout, window).as_dict()
        for kernel, blocks in HEURISTIC.items()
        if query.shape[-1] in blocks
    }


def refusal(query, layout: PackedLayout, *, window, soft_cap, sinks) -> str | None:
    """Why these kernels cannot serve the call, or None."""
    if not layout.causal or layout.runs is not None:
        return "tokens that see later ones"
    if (reason := gpu_kernel.refusal()) is not None:
        return reason
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {query.dtype}"
    if query.shape[-1] > max(FORWARD):
        return f"head dim {query.shape[-1]}; at most {max(FORWARD)}"
    return None


def _bounds(layout: PackedLayout, window: int | None):
    """(lower, upper), int32[B, T] each: query q sees keys lower[q] .. q; queries k .. upper[k] - 1 see key k."""
    index = jnp.arange(layout.doc_start.shape[1], dtype=jnp.int32)
    lower, upper = layout.doc_start, layout.doc_end
    if window is not None:
        lower = jnp.maximum(lower, index - window + 1)
        upper = jnp.where(upper > index, jnp.minimum(upper, index + window), upper)
    return jnp.where(layout.doc_end > index, lower, index + 1), upper


def _padded(array, axis):
    """Pads the token axis with zeros to a multiple of 128, so that a row's end never cuts a warpgroup's tokens."""
    extra = -array.shape[axis] % _PAD
    if not extra:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, extra)
    return jnp.pad(array, widths)


def _operand(array):
    array, columns = _padded(array, 1), kernel_dim(array.shape[-1]) - array.shape[-1]
    return jnp.pad(array, [(0, 0)] * 3 + [(0, columns)]) if columns else array


def kernel_dim(dim: int) -> int:
    """Head dim of the kernels that serve `dim` (at most 512): the next of 64, 128, 256 and 512."""
    return next(possible for possible in sorted(FORWARD) if possible >= dim)


def _prepare(layout, window):
    """(lower, upper) of `_bounds`, int32[B, padded T]; added tokens see nothing and nothing sees them."""
    lower, upper = _bounds(layout, window)
    length = lower.shape[1]
    extra = -length % _PAD
    if extra:
        tail = jnp.broadcast_to(jnp.arange(length, length + extra, dtype=jnp.int32), (lower.shape[0], extra))
        lower, upper = jnp.concatenate([lower, tail + 1], 1), jnp.concatenate([upper, tail], 1)
    return lower, upper


def _table(starts, first, count, falling: bool | None):
    """A kernel's work, int32[B * tiles, 4], the most expensive first: row, first token of the tile, first block,
    blocks.

      starts: int32[tiles], numpy; first, count: int32[B, tiles].
      falling: whether `count` falls or rises along all rows alike, which spares the sort; None: sorts.
    """
    rows, tiles = count.shape
    row = np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], count.shape)
    lines = jnp.stack([row, np.broadcast_to(starts, count.shape), first, count], -1)
    if falling is None:
        return lines.reshape(rows * tiles, -1)[jnp.argsort(-count.reshape(-1), stable=True)]
    lines = jnp.swapaxes(lines, 0, 1).reshape(rows * tiles, -1)
    return lines if falling else lines[::-1]


def _whole_blocks(tokens, blocks: Blocks):
    """tokens // blocks.step, without the test of every number's sign; tokens are at least 0."""
    return jax.lax.div(tokens, jnp.int32(blocks.step))


def _query_table(lower, blocks: Blocks, pairs: bool, full: bool):
    """Work of the forward and dq, a tile of queries a line, at least one block each.

    pairs: a tile has blocks.own queries, which both warpgroups take; otherwise 2 blocks.own.
    """
    size = blocks.own * (1 if pairs else WARPGROUPS)
    starts = np.arange(0, lower.shape[1], size, dtype=np.int32)
    first = _whole_blocks(lower[:, ::size], blocks)
    end = (np.minimum(starts + size, lower.shape[1]) + blocks.step - 1) // blocks.step
    # The bound of a tile of padding may be past its end.
    count = jnp.maximum(end - first, 1)
    first = jnp.minimum(first, lower.shape[1] // blocks.step - 1)
    return _table(starts, first, count, False if full else None)


def _key_table(upper, blocks: Blocks, shared: bool, full: bool):
    """Work of dk and dv, a tile of keys a line, at least one block each.

    shared: both warpgroups have the same blocks.own keys (wide heads); otherwise a tile has 2 blocks.own.
    """
    size = blocks.own * (1 if shared else WARPGROUPS)
    starts = np.arange(0, upper.shape[1], size, dtype=np.int32)
    first = np.broadcast_to(starts // blocks.step, (upper.shape[0], len(starts)))
    count = jnp.maximum(_whole_blocks(upper[:, size - 1 :: size] + (blocks.step - 1), blocks) - first, 1)
    return _table(starts, first, count, True if full else None)


def _barriers(blocks: Blocks, own_copies: int, brought_copies: int, buffers: int) -> list:
    """Barriers of kernels whose warpgroups take turns: of an item's operands, of the pipeline, and that of Turns."""
    return [
        plgpu.Barrier(num_arrivals=own_copies, num_barriers=buffers),
        *_pipeline_barriers(blocks, brought_copies),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
    ]


def _pipeline_barriers(blocks: Blocks, copies: int) -> list:
    return _ring_barriers(blocks, (copies, copies), (WARPGROUPS, WARPGROUPS))


def _ring_barriers(blocks: Blocks, copies: tuple[int, int], readers: tuple[int, int]) -> list:
    """Barriers of a pipeline of two operands, one for each slot: first arrived, second arrived, first free, second
    free.
    """
    slots = (blocks.stages, blocks.value_stages or blocks.stages)
    return [
        plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
        for arrivals_of_operands in (copies, readers)
        for arrivals, count in zip(arrivals_of_operands, slots, strict=True)
    ]


def _call(kernel, out_type, scratch, blocks: Blocks, compiler: dict[str, Any] | None = None, **static):
    """A kernel as a function of its arrays, one program a multiprocessor.

    scratch: shared memory and barriers, which the body takes after the arrays.
    static: further keyword arguments of the body.
    """
    return gpu_kernel.kernel(
        functools.partial(kernel, blocks=blocks, interpreted=gpu_kernel.interpreter() is not None, **static),
        f"attention_{kernel.__name__.removesuffix('_kernel')}",
        gpu_kernel.interpreter(),
        out_type=out_type,
        grid=(_programs(),),
        grid_names=("programs",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, **(compiler or {})),
    )


def _numbers(count, size, dtype):
    """Unswizzled shared memory for `count` vectors of numbers, which no tensor core reads."""
    return plgpu.SMEM((count, size), dtype)


def _pairs(query, key) -> bool:
    """Whether each warpgroup takes one of two query heads that share keys, not half of a tile of one head."""
    return (query.shape[2] // key.shape[2]) % WARPGROUPS == 0


def forward(query, key, value, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """As api.attention_forward: (out, lse); lse is 0 at padding, too. The same call gives the same bits."""
    _, length, _, given_dim = query.shape
    lower, _ = _prepare(layout, window)
    query, key, value = (_operand(a) for a in (query, key, value))
    rows, padded, heads, dim = query.shape
    blocks = _blocks("forward", query, layout, window)
    own_tokens, pairs = blocks.own, _pairs(query, key)
    if dim == HALVED:
        kernel, buffers, bounds = mosaic_halves.half_forward_kernel, 2 * WARPGROUPS, WARPGROUPS
        ring_smem = _halved_rings(blocks, query.dtype)
        own_dim = mosaic_halves.HALF
        barriers = [plgpu.Barrier(num_arrivals=3, num_barriers=WARPGROUPS), *_pipeline_barriers(blocks, 1)]
    else:
        kernel = mosaic_forward.forward_kernel
        bounds = buffers = 3 if blocks.buffers == 1 else blocks.buffers * WARPGROUPS
        ring_smem = [smem((blocks.stages, blocks.step, dim), query.dtype)] * 2
        own_dim, barriers = dim, _barriers(blocks, 2, 1, buffers * WARPGROUPS if buffers == 3 else buffers)
    outputs = _call(
        kernel,
        [jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((rows, heads, padded), jnp.float32)],
        [
            smem((buffers, own_tokens, own_dim), query.dtype),
            _numbers(bounds, own_tokens, jnp.int32),
            _numbers(WARPGROUPS, own_tokens, jnp.float32),
            *(*ring_smem, *barriers),
        ],
        blocks,
        compiler=dict(
            reduction_scratch_bytes=0
        ),  # no scratch is needed, as a row of scores belongs to one warp; three buffers leave 2 KB
        pairs=pairs,
        scale=scale,
        soft_cap=soft_cap,
    )(query, key, value, sinks, lower, _query_table(lower, blocks, pairs, layout.full))
    return outputs[0][:, :length, :, :given_dim], outputs[1][..., :length]


def _halved_rings(blocks: Blocks, dtype, pieces_first: bool = True) -> list:
    """Slots [slots, blocks.step, columns] of both operands of a kernel for heads of 512."""
    columns = [mosaic_halves.PIECE, mosaic_halves.HALF]
    slots = zip((blocks.stages, blocks.value_stages), columns if pieces_first else columns[::-1], strict=True)
    return [smem((count, blocks.step, size), dtype) for count, size in slots]


def _halved_gradient(kernel, operands, bounds, like, blocks: Blocks, table, options):
    """dq, dk or dv of heads of 512, in the shape of `like`; bounds: lower for dq, upper for dk and dv."""
    own_tokens, dtype = blocks.own, like.dtype
    halves_smem = smem((WARPGROUPS, own_tokens, mosaic_halves.HALF), dtype)
    vector, single = plgpu.SMEM((own_tokens,), jnp.int32), plgpu.Barrier(num_arrivals=WARPGROUPS)
    if kernel is mosaic_halves.half_query_kernel:
        side_smem = [
            halves_smem,
            halves_smem,
            _numbers(2, own_tokens, jnp.float32),
            vector,
            *_halved_rings(blocks, dtype, False),
        ]
        copies, barriers = 2 * WARPGROUPS + 3, _ring_barriers(blocks, (1, 1), (WARPGROUPS, WARPGROUPS))
    elif kernel is mosaic_halves_keys.half_key_kernel:
        numbers = _numbers(2 * blocks.stages, blocks.step, jnp.float32)
        side_smem = [halves_smem, halves_smem, vector, *_halved_rings(blocks, dtype, False), numbers]
        copies, barriers = 2 * WARPGROUPS + 1, _ring_barriers(blocks, (3, 1), (WARPGROUPS, WARPGROUPS))
    else:
        numbers = _numbers(blocks.value_stages, blocks.step, jnp.float32)
        side_smem = [halves_smem, vector, *_halved_rings(blocks, dtype), numbers]
        copies, barriers = WARPGROUPS + 1, _ring_barriers(blocks, (1, 2), (WARPGROUPS, 1))
    scratch = [*side_smem, plgpu.Barrier(num_arrivals=copies, num_barriers=1), *barriers, single]
    result = jax.ShapeDtypeStruct(like.shape, dtype)
    return _call(kernel, result, scratch, blocks, **options)(*operands, bounds, table)


def _query_gradient(operands, lower, blocks: Blocks, layout, options):
    """dq, in query's shape; operands: (query, key, value, dout, stat, delta), padded, stat in log2,
    delta times scale.
    """
    query, key = operands[:2]
    if query.shape[-1] == HALVED:
        table = _query_table(lower, blocks, True, layout.full)
        return _halved_gradient(mosaic_halves.half_query_kernel, operands, lower, query, blocks, table, options)
    own_tokens, pairs, count, dim = blocks.own, _pairs(query, key), blocks.buffers * WARPGROUPS, query.shape[-1]
    operand_smem = smem((count, own_tokens, dim), query.dtype)
    return _call(
        mosaic_backward.query_kernel,
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        [
            *(
                operand_smem,
                operand_smem,
                _numbers(2 * WARPGROUPS, own_tokens, jnp.float32),
                _numbers(count, own_tokens, jnp.int32),
            ),
            smem((blocks.stages, blocks.step, dim), query.dtype),
            smem((blocks.value_stages or blocks.stages, blocks.step, dim), query.dtype),
            *_barriers(blocks, 5, 1, count),
        ],
        blocks,
        pairs=pairs,
        **options,
    )(*operands, lower, _query_table(lower, blocks, pairs, layout.full))


def _key_gradients(operands, upper, blocks: Blocks, layout, options):
    query, key, value = operands[:3]
    own_tokens, dim = blocks.own, query.shape[-1]
    block = smem((blocks.stages, blocks.step, dim), query.dtype)
    ring_smem = [block, block, _numbers(2 * blocks.stages, blocks.step, jnp.float32)]
    wide = dim > NARROW
    if wide:
        kernel, item_smem, weight_slots = mosaic_backward_wide.wide_key_kernel, smem((own_tokens, dim), query.dtype), 2
        scratch = [
            *(
                item_smem,
                item_smem,
                plgpu.SMEM((own_tokens,), jnp.int32),
                smem((weight_slots, own_tokens, blocks.step), jnp.float32),
                *ring_smem,
            ),
            *(plgpu.Barrier(num_arrivals=copies) for copies in (2, 1)),
            *_pipeline_barriers(blocks, 2),
            *(plgpu.Barrier(num_arrivals=1, num_barriers=weight_slots) for _ in range(2)),
        ]
    else:
        kernel, count = mosaic_backward.key_kernel, 2 * WARPGROUPS
        operand_smem = smem((count, own_tokens, dim), query.dtype)
        scratch = [
            operand_smem,
            operand_smem,
            _numbers(count, own_tokens, jnp.int32),
            *ring_smem,
            *_barriers(blocks, 3, 2, count),
        ]
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (key, value)]
    table = _key_table(upper, blocks, wide, layout.full)
    return _call(kernel, results, scratch, blocks, **options)(*operands, upper, table)


def _halved_key_gradients(operands, upper, blocks: Blocks, value_blocks: Blocks, layout, options):
    """(dk, dv) of heads of 512, a kernel each, as both do not fit the registers at once; operands as in
    _query_gradient.
    """
    query, key, value, dout, stat, _ = operands

    def gradient(kernel, operands, like, blocks):
        table = _key_table(upper, blocks, True, layout.full)
        return _halved_gradient(kernel, operands, upper, like, blocks, table, options)

    dkey = gradient(mosaic_halves_keys.half_key_kernel, operands, key, blocks)
    return dkey, gradient(mosaic_halves_keys.half_value_kernel, (query, key, dout, stat), value, value_blocks)


def _programs() -> int:
    """Programs of a kernel: one for each multiprocessor, or two in Pallas' interpreter."""
    return _INTERPRETED_PROGRAMS if gpu_kernel.interpreter() is not None else multiprocessors()


def _head_shares(query, key, blocks: Blocks, window: int | None) -> int:
    """Shares into which the query heads of a key head are divided for dk and dv, as if each had a
    key head of its own.
    """
    rows, length, heads, dim = query.shape
    group, size = heads // key.shape[2], blocks.own * (1 if dim > NARROW else WARPGROUPS)
    tiles = rows * (length // size) * key.shape[2]
    if 2 * tiles > _programs() or (window is not None and window < length):
        return 1
    return next(n for n in range(1, group + 1) if group % n == 0 and (n == group or n * tiles >= _programs()))


def _sum_of_shares(gradient, shares: int):
    """[B, T, kv_heads * shares, D] -> [B, T, kv_heads, D], added in float32, in order."""
    if shares == 1:
        return gradient
    share_gradients = gradient.reshape(*gradient.shape[:2], -1, shares, gradient.shape[-1])
    return share_gradients.astype(jnp.float32).sum(3).astype(gradient.dtype)


def backward(query, key, value, out, lse, dout, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """As api.attention_backward: (dquery, dkey, dvalue, dsinks). The same call gives the same bits."""
    _, length, _, given_dim = query.shape
    lower, upper = _prepare(layout, window)
    delta = jnp.einsum("bthd,bthd->bht", out.astype(jnp.float32), dout.astype(jnp.float32))
    stat, scaled_delta = _padded(lse * LOG2E, 2), _padded(delta * scale, 2)
    query, key, value, dout = (_operand(a) for a in (query, key, value, dout))
    operands, options = (query, key, value, dout, stat, scaled_delta), dict(scale=scale, soft_cap=soft_cap)
    dquery = _query_gradient(operands, lower, _blocks("dquery", query, layout, window), layout, options)
    key_blocks = _blocks("dkey", query, layout, window)
    shares = _head_shares(query, key, key_blocks, window)
    shared = (query, *(jnp.repeat(array, shares, axis=2) for array in (key, value)), *operands[3:])
    if query.shape[-1] == HALVED:
        value_blocks = _blocks("dvalue", query, layout, window)
        partial = _halved_key_gradients(shared, upper, key_blocks, value_blocks, layout, options)
    else:
        partial = _key_gradients(shared, upper, key_blocks, layout, options)
    dkey, dvalue = (_sum_of_shares(array, shares) for array in partial)
    dsinks = None
    if sinks is not None:
        real = jnp.arange(length) < layout.doc_end
        share = jnp.where(real[:, None], jnp.exp(sinks.astype(jnp.float32)[:, None] - lse), 0.0)
        dsinks = -(share * delta).sum((0, 2)).astype(sinks.dtype)
    gradients = (array[:, :length, :, :given_dim] for array in (dquery, dkey, dvalue))
    return (*gradients, dsinks)
