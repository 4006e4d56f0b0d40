"""Packed attention as Pallas Mosaic GPU kernels for Hopper (wgmma, TMA, warp specialisation).

Which blocks exist is decided by the layout: a tile of queries [a, b] needs keys from the lower bound of a (its
document's start, or the window's) to b; a tile of keys [a, b] is needed by queries from a to the upper bound of b.
Bounds never fall along a row, so the first and last token of a tile bound all of it. Blocks between the bounds are
loaded; of those only the ones that a bound crosses are masked. XLA writes the tiles into a table, the most expensive
first, and the kernels (mosaic_kernels.py) work through it.

The backward is two kernels, one for dq and one for dk and dv (which walks all query heads of its key head), so that
every sum has one fixed order: bitwise deterministic without atomics.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import tuning
from jaxtune.pallas.attention import mosaic_kernels as kernels
from jaxtune.pallas.attention.layout import PackedLayout
from jaxtune.pallas.attention.mosaic_kernels import LOG2E, WARPGROUPS, Blocks, smem
from jaxtune.pallas.dispatch import compute_capability, multiprocessors

_PAD = 128  # rows are padded to a multiple of this
_INTERPRETED_PROGRAMS = 2

# By head dim, where nothing was measured on the GPU (pallas/tuning.py).
FORWARD = {64: Blocks(64, 128, 3, True), 128: Blocks(64, 128, 2, True)}
BACKWARD_QUERY = {64: Blocks(64, 64, 4, False), 128: Blocks(64, 64, 3, False)}
BACKWARD_KEY = {64: Blocks(64, 128, 2, False), 128: Blocks(64, 64, 2, False)}


def _blocks(kernel: str, heuristic: dict[int, Blocks], query) -> Blocks:
    found = tuning.tuned(f"attention {kernel}", f"head_dim={query.shape[-1]}", query.dtype)
    return Blocks(**found) if found else heuristic[query.shape[-1]]


_interpret: Any = None


@contextlib.contextmanager
def interpreted():
    """Runs the kernels' bodies in Pallas' GPU interpreter, on any machine: for tests."""
    global _interpret
    before, _interpret = _interpret, plgpu.InterpretGPUParams()
    try:
        yield
    finally:
        _interpret = before


def refusal(query, layout: PackedLayout, *, window, soft_cap, sinks) -> str | None:
    """Why these kernels cannot serve this call, or None."""
    if _interpret is None and compute_capability() != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {query.dtype}"
    if query.shape[-1] > max(FORWARD):
        return f"head dim {query.shape[-1]}; at most {max(FORWARD)}"
    return None


def _bounds(layout: PackedLayout, window: int | None):
    """lower, upper int32[B, T]: query q sees keys lower[q] .. q; key k is seen by queries k .. upper[k] - 1.

    Padding gets empty ranges that keep both rising along the row.
    """
    index = jnp.arange(layout.doc_start.shape[1], dtype=jnp.int32)
    lower, upper = layout.doc_start, layout.doc_end
    if window is not None:
        lower = jnp.maximum(lower, index - window + 1)
        upper = jnp.where(upper > index, jnp.minimum(upper, index + window), upper)
    return jnp.where(layout.doc_end > index, lower, index + 1), upper


def _padded(array, axis):
    extra = -array.shape[axis] % _PAD
    if not extra:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, extra)
    return jnp.pad(array, widths)


def _operand(array):
    """[B, T, heads, D] with whole tiles and a head dim that there are kernels for; zeros add nothing to a product."""
    dim = next(dim for dim in FORWARD if dim >= array.shape[-1])
    return jnp.pad(_padded(array, 1), [(0, 0)] * 3 + [(0, dim - array.shape[-1])])


def _prepare(layout, window):
    """Bounds, padded to whole tiles: the padding sees nothing."""
    lower, upper = _bounds(layout, window)
    length = lower.shape[1]
    extra = -length % _PAD
    if extra:
        tail = jnp.broadcast_to(jnp.arange(length, length + extra, dtype=jnp.int32), (lower.shape[0], extra))
        lower, upper = jnp.concatenate([lower, tail + 1], 1), jnp.concatenate([upper, tail], 1)
    return lower, upper


def _table(starts, first, count):
    """The work of a kernel, int32[B * tiles, 4]: row, first token, first block of the other side, number of blocks.

    starts int32[tiles]; first, count int32[B, tiles]. The lines stand in falling order of `count`.
    """
    rows, tiles = count.shape
    row = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[:, None], count.shape)
    lines = jnp.stack([row, jnp.broadcast_to(starts, count.shape), first, count], -1)
    return lines.reshape(rows * tiles, -1)[jnp.argsort(-count.reshape(-1), stable=True)]


def _query_table(lower, blocks: Blocks, pairs: bool):
    """See mosaic_kernels._QuerySide."""
    size = blocks.own * (1 if pairs else WARPGROUPS)
    starts = jnp.arange(0, lower.shape[1], size, dtype=jnp.int32)
    first = lower[:, ::size] // blocks.step
    end = (starts + size + blocks.step - 1) // blocks.step
    # A tile of padding may have its bound past its end.
    count = jnp.maximum(end - first, 1)
    first = jnp.minimum(first, lower.shape[1] // blocks.step - 1)
    return _table(starts, first, count)


def _key_table(upper, blocks: Blocks):
    """See mosaic_kernels.key_kernel."""
    size = blocks.own * WARPGROUPS
    starts = jnp.arange(0, upper.shape[1], size, dtype=jnp.int32)
    first = jnp.broadcast_to(starts // blocks.step, (upper.shape[0], len(starts)))
    count = jnp.maximum((upper[:, size - 1 :: size] + blocks.step - 1) // blocks.step - first, 1)
    return _table(starts, first, count)


def _call(kernel, out_type, own_copies, own_scratch, brought_scratch, brought_copies, blocks: Blocks, **static):
    """A kernel with its buffers and barriers: the item's own, filled by `own_copies` copies, and the pipeline's, of
    which each of the two barriers that announce a block waits for `brought_copies`."""
    barriers = [
        plgpu.Barrier(num_arrivals=own_copies, num_barriers=2 * WARPGROUPS),
        *(plgpu.Barrier(num_arrivals=brought_copies, num_barriers=blocks.stages) for _ in range(2)),
        *(plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=blocks.stages) for _ in range(2)),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
    ]
    return plgpu.kernel(
        functools.partial(kernel, blocks=blocks, interpreted=_interpret is not None, **static),
        out_type=out_type,
        grid=(_INTERPRETED_PROGRAMS if _interpret is not None else multiprocessors(),),
        grid_names=("programs",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=[*own_scratch, *brought_scratch, *barriers],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if _interpret is None else {"interpret": _interpret}),
    )


def _numbers(count, size, dtype):
    return plgpu.SMEM((count, size), dtype)


def _pairs(query, key) -> bool:
    """Whether the warpgroups take two heads that share their keys: narrower tiles see fewer keys in vain."""
    return (query.shape[2] // key.shape[2]) % 2 == 0


def forward(query, key, value, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """See api.attention_forward."""
    _, length, _, given_dim = query.shape
    lower, _ = _prepare(layout, window)
    query, key, value = (_operand(a) for a in (query, key, value))
    rows, padded, heads, dim = query.shape
    blocks, pairs = _blocks("forward", FORWARD, query), _pairs(query, key)
    own = blocks.own
    block = smem((blocks.stages, blocks.step, dim), query.dtype)
    outputs = _call(
        kernels.forward_kernel,
        [jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((rows, heads, padded), jnp.float32)],
        2,
        [
            smem((2 * WARPGROUPS, own, dim), query.dtype),
            _numbers(2 * WARPGROUPS, own, jnp.int32),
            _numbers(WARPGROUPS, own, jnp.float32),
        ],
        [block, block],
        1,
        blocks,
        pairs=pairs,
        scale=scale,
        soft_cap=soft_cap,
    )(query, key, value, lower, _query_table(lower, blocks, pairs))
    out, lse = outputs[0][:, :length, :, :given_dim], outputs[1][..., :length]
    if sinks is None:
        return out, lse
    # A sink is one more term of the softmax's sum and carries no value: it scales what is there.
    with_sink = jnp.logaddexp(lse, sinks.astype(jnp.float32)[:, None])
    share = jnp.moveaxis(jnp.exp(lse - with_sink), 1, 2)[..., None]
    return (out * share).astype(out.dtype), with_sink


def backward(query, key, value, out, lse, dout, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """See api.attention_backward."""
    _, length, _, given_dim = query.shape
    lower, upper = _prepare(layout, window)
    delta = jnp.einsum("bthd,bthd->bht", out.astype(jnp.float32), dout.astype(jnp.float32))
    stat, scaled_delta = _padded(lse * LOG2E, 2), _padded(delta * scale, 2)
    query, key, value, dout = (_operand(a) for a in (query, key, value, dout))
    dim = query.shape[-1]

    blocks, pairs = _blocks("dquery", BACKWARD_QUERY, query), _pairs(query, key)
    own = blocks.own
    both, block = smem((2 * WARPGROUPS, own, dim), query.dtype), smem((blocks.stages, blocks.step, dim), query.dtype)
    dquery = _call(
        kernels.query_kernel,
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        5,
        [both, both, _numbers(2 * WARPGROUPS, own, jnp.float32), _numbers(2 * WARPGROUPS, own, jnp.int32)],
        [block, block],
        1,
        blocks,
        pairs=pairs,
        scale=scale,
        soft_cap=soft_cap,
    )(query, key, value, dout, stat, scaled_delta, lower, _query_table(lower, blocks, pairs))

    blocks = _blocks("dkey", BACKWARD_KEY, query)
    own = blocks.own
    both, block = smem((2 * WARPGROUPS, own, dim), query.dtype), smem((blocks.stages, blocks.step, dim), query.dtype)
    dkey, dvalue = _call(
        kernels.key_kernel,
        [jax.ShapeDtypeStruct(key.shape, key.dtype), jax.ShapeDtypeStruct(value.shape, value.dtype)],
        3,
        [both, both, _numbers(2 * WARPGROUPS, own, jnp.int32)],
        [block, block, _numbers(2 * blocks.stages, blocks.step, jnp.float32)],
        2,
        blocks,
        scale=scale,
        soft_cap=soft_cap,
    )(query, key, value, dout, stat, scaled_delta, upper, _key_table(upper, blocks))
    dsinks = None
    if sinks is not None:
        real = jnp.arange(length) < layout.doc_end
        share = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse) * jnp.where(real, 1.0, 0.0)[:, None]
        dsinks = -(share * delta).sum((0, 2)).astype(sinks.dtype)
    gradients = (array[:, :length, :, :given_dim] for array in (dquery, dkey, dvalue))
    return (*gradients, dsinks)
