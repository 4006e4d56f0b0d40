"""Packed attention as Pallas Mosaic GPU kernels for Hopper (wgmma, TMA, warp specialisation), for 16-bit operands and
head dims up to 512: `forward` and `backward` prepare the operands and call the kernels, `refusal` says which calls they
cannot compute, and `blocks_of` how they divide the work. By `kernel_dim` (the head dim of the kernels) and `bucket` (a
class of calls) the tuner stores its measurements.

The layout determines which blocks exist. A tile of queries [a, b] needs keys from the lower bound of a (the start of
its document, or of the window) to b. A tile of keys [a, b] is needed by queries from a to the upper bound of b. Bounds
never fall along a row, so the first and last token of a tile bound all of it. Blocks between the bounds are loaded, and
only those that a bound crosses are masked. XLA writes the tiles into a table, the most expensive first, and the kernels
(mosaic_forward.py, mosaic_backward.py, mosaic_backward_wide.py, and for heads of 512 mosaic_halves.py and
mosaic_halves_keys.py) work through it.

The backward has one kernel for dq and one for dk and dv (for heads of 512, one for each). A tile of keys visits all
query heads of its key head, or a share of them (`_head_shares`), whose sums XLA then adds. So every sum has a fixed
order: results are bitwise deterministic without atomics.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import gpu_kernel, tuning
from jaxtune.pallas.attention import (
    mosaic_backward,
    mosaic_backward_wide,
    mosaic_forward,
    mosaic_halves,
    mosaic_halves_keys,
)
from jaxtune.pallas.attention.layout import PackedLayout
from jaxtune.pallas.attention.mosaic_parts import LOG2E, WARPGROUPS, Blocks, smem
from jaxtune.pallas.dispatch import compute_capability, multiprocessors

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


def bucket(dim: int, whole: bool, window: int | None) -> str:
    """Returns the name of the class of calls for which the tuner stores one choice of blocks, such as "head_dim=128,
    whole rows". It has what the fastest blocks depend on: the head dim of the kernels, and how many blocks a tile
    visits. A short window makes the visits short whatever the documents are; a long window hardly matters. Windows of
    up to 1,024 keys are named by the next power of two from 128 on, such as "head_dim=128, window up to 256", and
    `whole` then has no effect. Longer windows have no effect.

    Args:
      dim: the head dim of the kernels (`kernel_dim`).
      whole: True: every row is one document; False: rows are packed with several.
      window: the sliding window in keys, or None.
    """
    if window is not None and window <= _SHORT_WINDOW:
        return f"head_dim={dim}, window up to {max(128, 1 << (window - 1).bit_length())}"
    return f"head_dim={dim}, whole rows" if whole else f"head_dim={dim}"


def _blocks(kernel: str, query, layout: PackedLayout, window: int | None) -> Blocks:
    """Returns how a kernel divides its work for such calls: the blocks that were measured for them on this kind of GPU
    (tuning.tuned), else those measured for packed rows without a short window, else those of HEURISTIC. Within
    tuning.forced they are the ones given there.

    Args:
      kernel: a key of HEURISTIC: "forward", "dquery", "dkey" or "dvalue".
      query: an array or jax.ShapeDtypeStruct whose last axis is the head dim of the kernels (`kernel_dim`); only that
        and the dtype are used.
      layout: of the call; only max_documents is used: 1 means that every row is one document.
      window: the sliding window of the call in keys, or None.
    """
    op, dim = f"attention {kernel}", query.shape[-1]
    for name in (bucket(dim, layout.max_documents == 1, window), bucket(dim, False, None)):
        found = tuning.tuned(op, name, query.dtype, Blocks)
        if found:
            return Blocks(**found)
    return HEURISTIC[kernel][dim]


def blocks_of(query, layout: PackedLayout, window: int | None) -> dict[str, dict[str, Any]]:
    """How the kernels would divide their work for such a call: {operation of tuning.py, such as "attention forward":
    the fields of its Blocks that are not the defaults}, for the kernels that exist for the head dim: the forward, dq,
    dk (with dv), and for heads of 512 dv. first_use.py asks it, because a kernel with other blocks is compiled anew and
    must be checked again. Of `query` only the head dim, at most 512, and the dtype are used; layout and window are
    those of the call."""
    query = jax.ShapeDtypeStruct((kernel_dim(query.shape[-1]),), query.dtype)
    return {
        f"attention {kernel}": _blocks(kernel, query, layout, window).as_dict()
        for kernel, blocks in HEURISTIC.items()
        if query.shape[-1] in blocks
    }


def refusal(query, layout: PackedLayout, *, window, soft_cap, sinks) -> str | None:
    """The reason, in words, why these kernels cannot serve this call, or None if they can: no Hopper GPU (where they
    are not interpreted), a dtype other than bfloat16 and float16, or a head dim above 512. query is [B, T, heads, D],
    of which only dtype and head dim matter. layout, window, soft_cap and sinks are not looked at, as the kernels
    support all; they are there because all implementations are asked with the same arguments."""
    if gpu_kernel.interpreter() is None and compute_capability() != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {query.dtype}"
    if query.shape[-1] > max(FORWARD):
        return f"head dim {query.shape[-1]}; at most {max(FORWARD)}"
    return None


def _bounds(layout: PackedLayout, window: int | None):
    """What each token sees, and what sees it: (lower, upper), int32[B, T] each. The query at index q sees the keys
    lower[q] to q of its row; the key at index k is seen by the queries k to upper[k] - 1. `_prepare` pads them for the
    kernels.

    At padding these ranges are empty, but the numbers still never fall along the row, so that a tile is bounded by its
    first and last token. layout: the documents of the rows. window: how many keys a query sees, of a sliding window;
    None: all of its document up to itself.
    """
    index = jnp.arange(layout.doc_start.shape[1], dtype=jnp.int32)
    lower, upper = layout.doc_start, layout.doc_end
    if window is not None:
        lower = jnp.maximum(lower, index - window + 1)
        upper = jnp.where(upper > index, jnp.minimum(upper, index + window), upper)
    return jnp.where(layout.doc_end > index, lower, index + 1), upper


def _padded(array, axis):
    """Pads `array` with zeros along `axis`, the axis of tokens, to a multiple of 128, so that the tokens that one
    warpgroup takes at a time are never cut by the end of a row. It returns `array` itself if there is nothing to
    pad."""
    extra = -array.shape[axis] % _PAD
    if not extra:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, extra)
    return jnp.pad(array, widths)


def _operand(array):
    """An operand (array: query, key, value or dout [B, T, heads, D]) in the form that the kernels take: padded with
    zeros to a multiple of 128 tokens, and to a head dim for which there are kernels. Zeros do not change products of
    heads."""
    return jnp.pad(_padded(array, 1), [(0, 0)] * 3 + [(0, kernel_dim(array.shape[-1]) - array.shape[-1])])


def kernel_dim(dim: int) -> int:
    """The head dim of the kernels that serve `dim`: the smallest of 64, 128, 256 and 512 that is not smaller; operands
    are padded with zeros to it. `dim` must be at most 512."""
    return next(possible for possible in sorted(FORWARD) if possible >= dim)


def _prepare(layout, window):
    """(lower, upper) of `_bounds` for the documents of `layout` and a sliding window (None: none), int32[B, T padded
    to a multiple of 128 tokens]; the tokens added see nothing and are seen by none. Tables of work and kernels take
    these."""
    lower, upper = _bounds(layout, window)
    length = lower.shape[1]
    extra = -length % _PAD
    if extra:
        tail = jnp.broadcast_to(jnp.arange(length, length + extra, dtype=jnp.int32), (lower.shape[0], extra))
        lower, upper = jnp.concatenate([lower, tail + 1], 1), jnp.concatenate([upper, tail], 1)
    return lower, upper


def _table(starts, first, count, falling: bool | None):
    """Makes the table of a kernel's work, int32[B * tiles, 4]. A line is a tile of one row of the batch: row, first
    token of the tile, first block that it visits, number of blocks that it visits. A tile of queries visits blocks of
    keys, a tile of keys blocks of queries. The programs take the lines in this order, so the most expensive come first.

    Args:
      starts: int32[tiles], numpy, the first token of each tile.
      first: int32[B, tiles], the number of the first block that the tile visits.
      count: int32[B, tiles], how many blocks it visits.
      falling: True if `count` falls and False if it rises along every row, and rows are equal, which spares the sort;
        None: lines are sorted by falling count.
    """
    rows, tiles = count.shape
    row = np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], count.shape)
    lines = jnp.stack([row, np.broadcast_to(starts, count.shape), first, count], -1)
    if falling is None:
        return lines.reshape(rows * tiles, -1)[jnp.argsort(-count.reshape(-1), stable=True)]
    lines = jnp.swapaxes(lines, 0, 1).reshape(rows * tiles, -1)
    return lines if falling else lines[::-1]


def _whole_blocks(tokens, blocks: Blocks):
    """How many blocks of blocks.step tokens fit before each of `tokens`, int32 of any shape, at least 0: tokens //
    blocks.step, which for the first token that a tile sees is the number of the block that it is in. The tables of work
    contain such numbers. It avoids `//`, which tests every number's sign."""
    return jax.lax.div(tokens, jnp.int32(blocks.step))


def _query_table(lower, blocks: Blocks, pairs: bool, full: bool):
    """Makes the table of work of the forward and of dq, int32[B * tiles, 4]. A line is a tile of queries: (row, first
    query, first block of keys that it sees, number of blocks); `_table` makes and orders the lines. The number is at
    least 1 even for padding, because forward_kernel and query_kernel take a tile's first step without a condition.

    Args:
      lower: int32[B, T], the first key that each query sees, from `_prepare`.
      blocks: how the kernel divides its work.
      pairs: True: a tile has blocks.own queries, which both warpgroups take, of two heads (in dq of heads of 512, of
        one head); False: a tile has queries for both warpgroups, 2 blocks.own.
      full: True: every row is one document without padding, so that rows are equal and need no sort; False: lines are
        sorted.
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
    """Makes the table of work of dk and dv, int32[B * tiles, 4]. A line is a tile of keys: (row, first key, first block
    of queries that sees it, number of blocks, at least 1 even for padding); `_table` makes and orders the lines.

    Args:
      upper: int32[B, T], the query after the last that sees each key, from `_prepare`.
      blocks: how the kernel divides its work.
      shared: True: both warpgroups have the same blocks.own keys (wide heads); False: a tile has keys for both, 2
        blocks.own.
      full: True: every row is one document without padding, so that rows are equal and need no sort; False: lines are
        sorted.
    """
    size = blocks.own * (1 if shared else WARPGROUPS)
    starts = np.arange(0, upper.shape[1], size, dtype=np.int32)
    first = np.broadcast_to(starts // blocks.step, (upper.shape[0], len(starts)))
    count = jnp.maximum(_whole_blocks(upper[:, size - 1 :: size] + (blocks.step - 1), blocks) - first, 1)
    return _table(starts, first, count, True if full else None)


def _barriers(blocks: Blocks, own_copies: int, brought_copies: int, buffers: int) -> list:
    """Makes the barriers of the kernels whose warpgroups can take turns, as a list in the order of their parameters. An
    item is what a program computes at a time (mosaic_parts.py): a tile of queries, or of keys.

    The first array has `buffers` barriers, each of which completes after `own_copies` copies: one for each buffer in
    shared memory for an item's own operands (its queries, or its keys and values). Where the two warpgroups share the
    buffers (three, in the forward), `buffers` is twice their number, a barrier for each warpgroup and buffer. Then come
    four arrays for the slots of shared memory into which blocks of two operands (keys and values, or queries and dout)
    are loaded, each with one barrier for each slot: a block of the first operand has arrived, after `brought_copies`
    copies; one of the second has, after as many; the slot of the first is free again, because both computing warpgroups
    have read it; the slot of the second is. The last barrier is the one at which the two warpgroups take turns
    (mosaic_parts.Turns).
    """
    return [
        plgpu.Barrier(num_arrivals=own_copies, num_barriers=buffers),
        *_pipeline_barriers(blocks, brought_copies),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
    ]


def _pipeline_barriers(blocks: Blocks, copies: int) -> list:
    """Makes the barriers of the pipeline in which one warpgroup loads blocks of two operands (keys and values, or
    queries and dout) into slots of shared memory. It returns four arrays of barriers, each with one for each slot: a
    block of the first operand has arrived, after `copies` copies; one of the second has; the slot of the first is free
    again, after both computing warpgroups have read it; that of the second is."""
    return _ring_barriers(blocks, (copies, copies), (WARPGROUPS, WARPGROUPS))


def _ring_barriers(blocks: Blocks, copies: tuple[int, int], readers: tuple[int, int]) -> list:
    """Makes the barriers of the pipeline for two operands of which blocks are loaded into slots of shared memory, in
    four arrays: for the first and for the second operand, one for each slot that a block has arrived; then for the
    first and for the second, one for each slot that it is free again.

    Args:
      blocks: has the number of slots of each operand, `stages` and `value_stages` (None: as `stages`).
      copies: how many copies fill a slot of the first, and of the second operand.
      readers: how many warpgroups read a slot of the first, and of the second.
    """
    slots = (blocks.stages, blocks.value_stages or blocks.stages)
    return [
        plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
        for both in (copies, readers)
        for arrivals, count in zip(both, slots, strict=True)
    ]


def _call(kernel, out_type, scratch, blocks: Blocks, compiler: dict[str, Any] | None = None, **static):
    """Returns a kernel as a function of its arrays in global memory, with one program for each multiprocessor, two
    computing warpgroups and a loading one. Within gpu_kernel.interpreted Pallas' interpreter runs it, with two
    programs, for tests without a GPU. Exponentials and the like are the GPU's approximate instructions.

    Args:
      kernel: the body, a Python function such as forward_kernel. The kernel's name, which profiles show, is
        "attention_" and the body's without "_kernel".
      out_type: shape and dtype of the result (jax.ShapeDtypeStruct), or a list of them.
      scratch: the shared memory and barriers that the body takes after the arrays.
      blocks: how the work is divided, which is passed to the body.
      compiler: further parameters of plgpu.CompilerParams.
      static: further keyword arguments of the body, such as scale.
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
    """Shared memory [count, size] of a dtype for `count` vectors of numbers, such as a tile's log-sum-exps; it is not
    swizzled, because no tensor core reads it. It is an entry of a kernel's scratch shapes."""
    return plgpu.SMEM((count, size), dtype)


def _pairs(query, key) -> bool:
    """Whether each warpgroup takes one of two query heads that share their keys, and not half of a tile of one head;
    the tiles are then narrower, and see fewer masked keys. It is so if the number of query heads of a key head is even,
    which follows from query [B, T, heads, D] and key [B, T, kv_heads, D]."""
    return (query.shape[2] // key.shape[2]) % WARPGROUPS == 0


def forward(query, key, value, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """Returns (out [B, T, heads, D], lse float32[B, heads, T] in the natural logarithm) of packed causal attention,
    computed by the Mosaic kernels. out has query's dtype; both are 0 at padding. The same call gives the same bits.

    Args:
      query: [B, T, heads, D] in 16 bits, D at most 512.
      key, value: [B, T, kv_heads, D].
      layout: the bounds of the documents; a query sees only its own document.
      scale: the factor on scores.
      window: how many keys a query sees, itself included; None: all of its document before it.
      soft_cap: scores s become soft_cap * tanh(s / soft_cap); None: no cap.
      sinks: float[heads], an extra logit for each head that has no value; None: none.
    """
    _, length, _, given_dim = query.shape
    lower, _ = _prepare(layout, window)
    query, key, value = (_operand(a) for a in (query, key, value))
    rows, padded, heads, dim = query.shape
    blocks = _blocks("forward", query, layout, window)
    own, pairs = blocks.own, _pairs(query, key)
    sinks = None if sinks is None else sinks.astype(jnp.float32) * LOG2E
    if dim == HALVED:
        kernel, buffers, bounds = mosaic_halves.half_forward_kernel, 2 * WARPGROUPS, WARPGROUPS
        brought = _halved_rings(blocks, query.dtype)
        own_dim = mosaic_halves.HALF
        barriers = [plgpu.Barrier(num_arrivals=3, num_barriers=WARPGROUPS), *_pipeline_barriers(blocks, 1)]
    else:
        kernel = mosaic_forward.forward_kernel
        bounds = buffers = 3 if blocks.buffers == 1 else blocks.buffers * WARPGROUPS
        brought = [smem((blocks.stages, blocks.step, dim), query.dtype)] * 2
        own_dim, barriers = dim, _barriers(blocks, 2, 1, buffers * WARPGROUPS if buffers == 3 else buffers)
    outputs = _call(
        kernel,
        [jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((rows, heads, padded), jnp.float32)],
        [
            smem((buffers, own, own_dim), query.dtype),
            _numbers(bounds, own, jnp.int32),
            _numbers(WARPGROUPS, own, jnp.float32),
            *(*brought, *barriers),
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
    """Makes the slots of shared memory for the two operands whose blocks a kernel for heads of 512 loads: [slots of the
    first, slots of the second], each [slots, blocks.step, columns]. A block of tokens is copied with some of its 512
    columns at a time: in pieces of 128 columns if only scores (or the gradients of weights) are computed from it, and
    in halves of 256 if it is multiplied into the result.

    Args:
      blocks: has the tokens of a block (`step`), and the number of slots of the first operand (`stages`) and of the
        second (`value_stages`, which must not be None here).
      dtype: of both operands.
      pieces_first: True: the first comes in pieces of 128 columns and the second in halves of 256; False: the reverse.
    """
    columns = [mosaic_halves.PIECE, mosaic_halves.HALF]
    slots = zip((blocks.stages, blocks.value_stages), columns if pieces_first else columns[::-1], strict=True)
    return [smem((count, blocks.step, size), dtype) for count, size in slots]


def _halved_gradient(kernel, operands, bounds, like, blocks: Blocks, table, options):
    """Computes dq, dk or dv of heads of 512, in the shape of `like`, by one of the three backward kernels of
    mosaic_halves.py and mosaic_halves_keys.py.

    Args:
      kernel: the body: half_query_kernel for dq, half_key_kernel for dk, half_value_kernel for dv.
      operands: the arrays that the body takes first: query, key, value, dout, stat and delta for dq and dk, query, key,
        dout and stat for dv, as `_halved_key_gradients` describes them.
      bounds: int32[B, T], from `_prepare`: lower for dq, upper for dk and dv.
      like: the operand whose gradient it is: query, key or value.
      blocks: how the kernel divides its work.
      table: int32[lines, 4], the work, from _query_table or _key_table.
      options: {"scale": the factor on scores, "soft_cap": the cap or None}.
    """
    own, dtype = blocks.own, like.dtype
    both = smem((WARPGROUPS, own, mosaic_halves.HALF), dtype)
    vector, single = plgpu.SMEM((own,), jnp.int32), plgpu.Barrier(num_arrivals=WARPGROUPS)
    if kernel is mosaic_halves.half_query_kernel:
        sides = [both, both, _numbers(2, own, jnp.float32), vector, *_halved_rings(blocks, dtype, False)]
        copies, barriers = 2 * WARPGROUPS + 3, _ring_barriers(blocks, (1, 1), (WARPGROUPS, WARPGROUPS))
    elif kernel is mosaic_halves_keys.half_key_kernel:
        numbers = _numbers(2 * blocks.stages, blocks.step, jnp.float32)
        sides = [both, both, vector, *_halved_rings(blocks, dtype, False), numbers]
        copies, barriers = 2 * WARPGROUPS + 1, _ring_barriers(blocks, (3, 1), (WARPGROUPS, WARPGROUPS))
    else:
        numbers = _numbers(blocks.value_stages, blocks.step, jnp.float32)
        sides = [both, vector, *_halved_rings(blocks, dtype), numbers]
        copies, barriers = WARPGROUPS + 1, _ring_barriers(blocks, (1, 2), (WARPGROUPS, 1))
    scratch = [*sides, plgpu.Barrier(num_arrivals=copies, num_barriers=1), *barriers, single]
    result = jax.ShapeDtypeStruct(like.shape, dtype)
    return _call(kernel, result, scratch, blocks, **options)(*operands, bounds, table)


def _query_gradient(operands, lower, blocks: Blocks, layout, options):
    """Computes dq, in query's shape, by the kernel of mosaic_backward.py, or for heads of 512 that of mosaic_halves.py.
    All arrays are padded as `_operand` and `_prepare` do it.

    Args:
      operands: (query, key, value, dout, stat, delta). The first four are [B, T, heads or kv_heads, D]; stat and delta
        are float32[B, heads, T], the log-sum-exp in units of log2, and the sum of out * dout over a head times scale.
      lower: int32[B, T], the first key that each query sees, from `_prepare`.
      blocks: how the kernel divides its work.
      layout: the PackedLayout of the call; only `full` is used. True: every row is one document without padding, so
        that the table of work needs no sort; False: the table is sorted.
      options: {"scale": the factor on scores, "soft_cap": the cap or None}.
    """
    query, key = operands[:2]
    if query.shape[-1] == HALVED:
        table = _query_table(lower, blocks, True, layout.full)
        return _halved_gradient(mosaic_halves.half_query_kernel, operands, lower, query, blocks, table, options)
    own, pairs, count, dim = blocks.own, _pairs(query, key), blocks.buffers * WARPGROUPS, query.shape[-1]
    both = smem((count, own, dim), query.dtype)
    return _call(
        mosaic_backward.query_kernel,
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        [
            *(both, both, _numbers(2 * WARPGROUPS, own, jnp.float32), _numbers(count, own, jnp.int32)),
            smem((blocks.stages, blocks.step, dim), query.dtype),
            smem((blocks.value_stages or blocks.stages, blocks.step, dim), query.dtype),
            *_barriers(blocks, 5, 1, count),
        ],
        blocks,
        pairs=pairs,
        **options,
    )(*operands, lower, _query_table(lower, blocks, pairs, layout.full))


def _key_gradients(operands, upper, blocks: Blocks, layout, options):
    """Computes (dk, dv) for head dims of 64, 128 and 256, in the shapes of key and value, by one of two kernels: for
    256, whose gradients do not fit the registers of one warpgroup, by that of mosaic_backward_wide.py, otherwise by
    that of mosaic_backward.py. All arrays are padded.

    Args:
      operands: (query, key, value, dout, stat, delta). The first four are [B, T, heads or kv_heads, D]; stat and delta
        are float32[B, heads, T], the log-sum-exp in units of log2, and the sum of out * dout over a head times scale.
      upper: int32[B, T], the query after the last that sees each key, from `_prepare`.
      blocks: how the kernel divides its work.
      layout: the PackedLayout of the call; only `full` is used. True: every row is one document without padding, so
        that the table of work needs no sort; False: the table is sorted.
      options: {"scale": the factor on scores, "soft_cap": the cap or None}.
    """
    query, key, value = operands[:3]
    own, dim = blocks.own, query.shape[-1]
    block = smem((blocks.stages, blocks.step, dim), query.dtype)
    brought = [block, block, _numbers(2 * blocks.stages, blocks.step, jnp.float32)]
    wide = dim > NARROW
    if wide:
        kernel, one, handed = mosaic_backward_wide.wide_key_kernel, smem((own, dim), query.dtype), 2
        scratch = [
            *(one, one, plgpu.SMEM((own,), jnp.int32), smem((handed, own, blocks.step), jnp.float32), *brought),
            *(plgpu.Barrier(num_arrivals=copies) for copies in (2, 1)),
            *_pipeline_barriers(blocks, 2),
            *(plgpu.Barrier(num_arrivals=1, num_barriers=handed) for _ in range(2)),
        ]
    else:
        kernel, count = mosaic_backward.key_kernel, 2 * WARPGROUPS
        both = smem((count, own, dim), query.dtype)
        scratch = [both, both, _numbers(count, own, jnp.int32), *brought, *_barriers(blocks, 3, 2, count)]
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (key, value)]
    table = _key_table(upper, blocks, wide, layout.full)
    return _call(kernel, results, scratch, blocks, **options)(*operands, upper, table)


def _halved_key_gradients(operands, upper, blocks: Blocks, value_blocks: Blocks, layout, options):
    """Computes (dk, dv) of heads of 512, in the shapes of key and value, each by a kernel of its own, because the two
    do not fit the registers at once. All arrays are padded.

    Args:
      operands: (query, key, value, dout, stat, delta). The first four are [B, T, heads or kv_heads, 512]; stat and
        delta are float32[B, heads, T], the log-sum-exp in units of log2, and the sum of out * dout times scale.
      upper: int32[B, T], the query after the last that sees each key, from `_prepare`.
      blocks: how the kernel of dk divides its work.
      value_blocks: how the kernel of dv divides its work.
      layout: the PackedLayout of the call; only `full` is used. True: every row is one document without padding, so
        that the table of work needs no sort; False: the table is sorted.
      options: {"scale": the factor on scores, "soft_cap": the cap or None}.
    """
    query, key, value, dout, stat, _ = operands

    def gradient(kernel, operands, like, blocks):
        table = _key_table(upper, blocks, True, layout.full)
        return _halved_gradient(kernel, operands, upper, like, blocks, table, options)

    dkey = gradient(mosaic_halves_keys.half_key_kernel, operands, key, blocks)
    return dkey, gradient(mosaic_halves_keys.half_value_kernel, (query, key, dout, stat), value, value_blocks)


def _programs() -> int:
    """The number of programs of a kernel, the grid of `_call`: one for each multiprocessor, or two in Pallas'
    interpreter. `_head_shares` compares the number of tiles with it."""
    return _INTERPRETED_PROGRAMS if gpu_kernel.interpreter() is not None else multiprocessors()


def _head_shares(query, key, blocks: Blocks, window: int | None) -> int:
    """Into how many shares `backward` divides the query heads of each key head for the kernels of dk and dv, which
    compute every share as if it had a key head of its own. It is 1 if there are enough tiles of keys to occupy more
    than half of the multiprocessors; there are fewer only for a few rows with few key heads. Then it is the smallest
    divisor of the number of query heads of a key head that gives each multiprocessor a tile, or else that number
    itself. It is 1 also with a sliding window shorter than the rows, whose tiles take so little time that shares gain
    nothing (measured).

    query [B, T, heads, D] and key [B, T, kv_heads, D] are padded. blocks: how the kernel of dk divides its work.
    window: of the call, None without one."""
    rows, length, heads, dim = query.shape
    group, size = heads // key.shape[2], blocks.own * (1 if dim > NARROW else WARPGROUPS)
    tiles = rows * (length // size) * key.shape[2]
    if 2 * tiles > _programs() or (window is not None and window < length):
        return 1
    return next(n for n in range(1, group + 1) if group % n == 0 and (n == group or n * tiles >= _programs()))


def _sum_of_shares(gradient, shares: int):
    """Adds the gradients of the shares of each key head, in float32 and in their order: [B, T, kv_heads, D] from
    [B, T, kv_heads * shares, D], in the dtype of `gradient`."""
    if shares == 1:
        return gradient
    parts = gradient.reshape(*gradient.shape[:2], -1, shares, gradient.shape[-1])
    return parts.astype(jnp.float32).sum(3).astype(gradient.dtype)


def backward(query, key, value, out, lse, dout, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """Returns (dquery, dkey, dvalue, dsinks) of packed causal attention, computed by the Mosaic kernels, in the
    operands' shapes and dtypes and 0 at padding. dsinks is None without sinks. The same call gives the same bits.

    Args:
      query, key, value: the operands of `forward`, [B, T, heads, D] and twice [B, T, kv_heads, D].
      out, lse: its results, or another implementation's, which were saved, [B, T, heads, D] and float32[B, heads, T].
      dout: the gradient of out, [B, T, heads, D], finite at padding.
      layout, scale, window, soft_cap, sinks: the arguments of `forward`.
    """
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
