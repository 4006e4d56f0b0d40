"""Packed attention as Pallas Mosaic GPU kernels for Hopper (wgmma, TMA, warp specialisation).

Two warpgroups compute, a third brings the blocks. Which blocks exist is decided by the layout: a tile of queries
[a, b] needs keys from the lower bound of a (its document's start, or the window's) to b; a tile of keys [a, b] is
needed by queries from a to the upper bound of b. Bounds never fall along a row, so the first and last token of a tile
bound all of it. Blocks between the bounds are loaded; of those only the ones that a bound crosses are masked.

The backward is two kernels, one for dq and one for dk and dv (which walks all query heads of its key head), so that
every sum has one fixed order: bitwise deterministic without atomics.
"""

# Pallas' annotations know neither its own transforms nor pipelines that carry values.
# pyright: reportAbstractUsage=false, reportArgumentType=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas.attention.layout import PackedLayout

_LOG2E = math.log2(math.e)
_MASKED = -1e30
_WARPGROUPS = 2  # that compute
_PAD = 128  # rows are padded to a multiple of this


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel cuts its work: each warpgroup holds `own` rows and walks the other side in blocks of `step`, of
    which `stages` are on their way at a time. turns: whether the warpgroups take turns on the tensor cores (_Turns)."""

    own: int
    step: int
    stages: int
    turns: bool


# By head dim, as measured on an H200. Taking turns is worth 10 % in the forward, and costs where the step is short.
FORWARD = {64: Blocks(64, 128, 3, True), 128: Blocks(64, 128, 2, True)}
BACKWARD_QUERY = {64: Blocks(64, 128, 2, False), 128: Blocks(64, 64, 3, False)}
BACKWARD_KEY = {64: Blocks(64, 64, 3, False), 128: Blocks(64, 64, 2, True)}


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
    from jaxtune.pallas.dispatch import compute_capability

    if _interpret is None and compute_capability() != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {query.dtype}"
    if query.shape[-1] not in FORWARD:
        return f"head dim {query.shape[-1]}; there are {', '.join(map(str, FORWARD))}"
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


def _prepare(layout, window):
    """Bounds, padded to whole tiles: the padding sees nothing."""
    lower, upper = _bounds(layout, window)
    length = lower.shape[1]
    extra = -length % _PAD
    if extra:
        tail = jnp.broadcast_to(jnp.arange(length, length + extra, dtype=jnp.int32), (lower.shape[0], extra))
        lower, upper = jnp.concatenate([lower, tail + 1], 1), jnp.concatenate([upper, tail], 1)
    return lower, upper


def _tiles():
    return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def _smem(shape, dtype):
    return plgpu.SMEM(shape, dtype, transforms=_tiles())


def _rows(value, shape):
    """Broadcasts one number a row over the columns."""
    return lax.broadcast_in_dim(value, shape, [0])


def _filled(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _capped(scores, scale, soft_cap):
    """(scores in units of log2, derivative of the cap or None)."""
    if soft_cap is None:
        return scores * (scale * _LOG2E), None
    capped = jnp.tanh(scores * (scale / soft_cap))
    return capped * (soft_cap * _LOG2E), 1.0 - capped * capped


def _products(*pairs, shape, issued):
    """One fresh fp32 accumulator of `shape` for each (left, right); `issued` runs while the tensor cores do."""

    def compute(*accs):
        for acc, (left, right) in zip(accs, pairs, strict=True):
            plgpu.wgmma(acc, left, right)
        issued()
        return [acc[...] for acc in accs]

    return pl.run_scoped(compute, *(plgpu.ACC(shape, jnp.float32) for _ in pairs))


class _Turns:
    """Keeps the two warpgroups half a step apart: while one has the tensor cores, the other does its softmax
    (FlashAttention-3, arXiv 2407.08608, calls it ping-pong). Every step swaps twice."""

    def __init__(self, barrier, wg, wanted: bool):
        self.barrier, self.wg, self.wanted = barrier, wg, wanted

    def swap(self):
        if self.wanted:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)

    def begin(self):
        pl.when(self.wg == 1)(self.swap)

    def end(self):
        pl.when(self.wg == 0)(self.swap)


def _add_product(total, left, right, interpreted):
    """total + left right, left from registers, accumulated in place. The interpreter knows neither run_state nor wgmma
    with a left side in registers, so there it is written out."""
    if interpreted:
        return total + lax.dot(left, right[...], preferred_element_type=jnp.float32)

    def compute(acc):
        plgpu.wgmma(acc, left, right)

    return pl.run_state(compute)(plgpu.ACC.init(total))


def _ids(shape, axis, base):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) + base


class _QueryTile:
    """Where a program of the forward or of dq stands: its tile of queries, and the blocks of keys that they see."""

    def __init__(self, q_ref, k_ref, lower_ref, blocks: Blocks):
        self.own, self.step = blocks.own, blocks.step
        self.lower_ref = lower_ref
        self.batch, self.head, self.wg = lax.axis_index("batch"), lax.axis_index("heads"), lax.axis_index("wg")
        self.kv_head = lax.div(self.head, jnp.int32(q_ref.shape[2] // k_ref.shape[2]))
        # Late tiles see most: they go first, so that no long one is left for the end.
        start = (lax.axis_size("tiles") - 1 - lax.axis_index("tiles")) * (_WARPGROUPS * self.own)
        self.base = start + self.wg * self.own
        first = lax.div(lower_ref[self.batch, start], jnp.int32(self.step))
        # A tile of padding may have its bound past its end.
        end = lax.div(start + (_WARPGROUPS * self.own + self.step - 1), jnp.int32(self.step))
        self.count = jnp.maximum(end - first, 1)
        self.first = jnp.minimum(first, jnp.int32(k_ref.shape[1] // self.step - 1))

    def keys(self, index):
        """The first key of the block at a step of the pipeline."""
        return (self.first + index[0]) * self.step

    def masked(self, values, keys, lower, fill):
        """`values` [own, step], with `fill` where a query does not see a key; as it is if no bound crosses it."""

        def mask(values):
            key_ids = _ids(values.shape, 1, keys)
            seen = (key_ids <= _ids(values.shape, 0, self.base)) & (key_ids >= _rows(lower, values.shape))
            return jnp.where(seen, values, fill)

        last_lower = self.lower_ref[self.batch, self.base + self.own - 1]
        crossed = (keys + self.step > self.base + 1) | (keys < last_lower)
        return lax.cond(crossed, mask, lambda values: values, values)


def _pipeline(block, compute, blocks: Blocks, steps, specs):
    """A warpgroup brings what `specs` name, `blocks.stages` ahead; the others run `compute` around `block`s."""
    return plgpu.emit_pipeline_warp_specialized(
        block,
        grid=(steps,),
        in_specs=specs,
        max_concurrent_steps=blocks.stages,
        num_compute_wgs=_WARPGROUPS,
        memory_registers=40,
        wg_axis="wg",
        manual_consumed_barriers=True,
        compute_context=compute,
    )


def _call(kernel, out_type, grid, grid_names, scratch, **static):
    return plgpu.kernel(
        functools.partial(kernel, interpreted=_interpret is not None, **static),
        out_type=out_type,
        grid=grid,
        grid_names=grid_names,
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if _interpret is None else {"interpret": _interpret}),
    )


def _forward_kernel(
    q_ref,
    k_ref,
    v_ref,
    lower_ref,
    out_ref,
    lse_ref,
    qo_smem,
    lower_smem,
    lse_smem,
    barriers,
    turn,
    *,
    blocks,
    scale,
    soft_cap,
    interpreted,
):
    """One tile of queries of one head; out and lse (natural log, without sinks)."""
    tile = _QueryTile(q_ref, k_ref, lower_ref, blocks)
    batch, head, wg, base = tile.batch, tile.head, tile.wg, tile.base
    own, shape, dim = blocks.own, (blocks.own, blocks.step), q_ref.shape[-1]
    rows = plgpu.Layout.WGMMA.reduce(1)
    turns = _Turns(turn, wg, blocks.turns)

    def compute(pipeline):
        here = pl.ds(base, own)
        qo, low = qo_smem.at[wg], lower_smem.at[wg]
        plgpu.copy_gmem_to_smem(q_ref.at[batch, here, head], qo, barriers.at[2 * wg])
        plgpu.copy_gmem_to_smem(lower_ref.at[batch, here], low, barriers.at[2 * wg + 1])
        plgpu.barrier_wait(barriers.at[2 * wg])
        plgpu.barrier_wait(barriers.at[2 * wg + 1])
        lower = plgpu.load(low, layout=rows)
        start = (
            _filled((own, dim), 0.0, plgpu.Layout.WGMMA),
            _filled((own,), _MASKED, rows),
            _filled((own,), 0.0, rows),
            lower,
        )
        turns.begin()
        acc, top, total, lower = pipeline(start)
        turns.end()
        # Padding saw nothing: its weights are those of masked scores, and are dropped here.
        real = lower <= plgpu.broadcasted_iota(jnp.int32, (own,), 0, layout=rows) + base
        inverse = jnp.where(real, 1.0 / total, 0.0)
        qo[...] = (acc * _rows(inverse, (own, dim))).astype(q_ref.dtype)
        lse_smem.at[wg][...] = (top + jnp.log2(total)) * (1.0 / _LOG2E)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(qo, out_ref.at[batch, here, head])
        plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[batch, head, here])
        plgpu.wait_smem_to_gmem(0)

    def block(index, k_smem, v_smem, k_done, v_done, carry):
        acc, top, total, lower = carry
        keys = tile.keys(index)
        (scores,) = _products((qo_smem.at[wg], k_smem.transpose((1, 0))), shape=shape, issued=turns.swap)
        plgpu.barrier_arrive(k_done)
        scores, _ = _capped(scores, scale, soft_cap)

        scores = tile.masked(scores, keys, lower, _MASKED)
        new = jnp.maximum(top, scores.max(axis=1))
        fade = jnp.exp2(top - new)
        weights = jnp.exp2(scores - _rows(new, shape))
        total = total * fade + weights.sum(axis=1)
        acc = acc * _rows(fade, acc.shape)
        narrow = weights.astype(v_ref.dtype)
        turns.swap()
        acc = _add_product(acc, narrow, v_smem, interpreted)
        plgpu.barrier_arrive(v_done)
        return acc, new, total, lower

    spec = plgpu.BlockSpec((blocks.step, dim), lambda i: (tile.first + i, 0), transforms=_tiles())
    _pipeline(block, compute, blocks, tile.count, [spec, spec])(
        k_ref.at[batch, :, tile.kv_head], v_ref.at[batch, :, tile.kv_head]
    )


def forward(query, key, value, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """See api.attention_forward."""
    length = query.shape[1]
    lower, _ = _prepare(layout, window)
    query, key, value = (_padded(a, 1) for a in (query, key, value))
    rows, padded, heads, dim = query.shape
    blocks = FORWARD[dim]
    own = blocks.own
    outputs = _call(
        _forward_kernel,
        [jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((rows, heads, padded), jnp.float32)],
        (heads, padded // (_WARPGROUPS * own), rows),
        ("heads", "tiles", "batch"),
        [
            _smem((_WARPGROUPS, own, dim), query.dtype),
            plgpu.SMEM((_WARPGROUPS, own), jnp.int32),
            plgpu.SMEM((_WARPGROUPS, own), jnp.float32),
            plgpu.Barrier(num_barriers=_WARPGROUPS * 2),
            plgpu.Barrier(num_arrivals=_WARPGROUPS),
        ],
        blocks=blocks,
        scale=scale,
        soft_cap=soft_cap,
    )(query, key, value, lower)
    out, lse = outputs[0][:, :length], outputs[1][..., :length]
    if sinks is None:
        return out, lse
    # A sink is one more term of the softmax's sum and carries no value: it scales what is there.
    with_sink = jnp.logaddexp(lse, sinks.astype(jnp.float32)[:, None])
    share = jnp.moveaxis(jnp.exp(lse - with_sink), 1, 2)[..., None]
    return (out * share).astype(out.dtype), with_sink


def _gradient_of_scores(scores, dweights, stat, delta, seen, scale, soft_cap):
    """(weights, dscores) from raw scores = q . k; stat and delta are broadcast to their shape; stat in log2."""
    scores, slope = _capped(scores, scale, soft_cap)
    weights = seen(jnp.exp2(scores - stat))
    dscores = weights * (dweights - delta)
    return weights, (dscores if slope is None else dscores * slope) * scale


def _query_kernel(
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    stat_ref,
    delta_ref,
    lower_ref,
    dq_ref,
    q_smem,
    do_smem,
    stat_smem,
    delta_smem,
    lower_smem,
    barriers,
    turn,
    *,
    blocks,
    scale,
    soft_cap,
    interpreted,
):
    """dq of one tile of queries of one head: walks the key blocks that the tile sees."""
    tile = _QueryTile(q_ref, k_ref, lower_ref, blocks)
    batch, head, wg, base = tile.batch, tile.head, tile.wg, tile.base
    own, shape, dim = blocks.own, (blocks.own, blocks.step), q_ref.shape[-1]
    rows = plgpu.Layout.WGMMA.reduce(1)
    turns = _Turns(turn, wg, blocks.turns)

    def compute(pipeline):
        here = pl.ds(base, own)
        copies = (
            (q_ref.at[batch, here, head], q_smem),
            (do_ref.at[batch, here, head], do_smem),
            (stat_ref.at[batch, head, here], stat_smem),
            (delta_ref.at[batch, head, here], delta_smem),
            (lower_ref.at[batch, here], lower_smem),
        )
        for number, (source, target) in enumerate(copies):
            plgpu.copy_gmem_to_smem(source, target.at[wg], barriers.at[len(copies) * wg + number])
        for number in range(len(copies)):
            plgpu.barrier_wait(barriers.at[len(copies) * wg + number])
        stat, delta, lower = (plgpu.load(ref.at[wg], layout=rows) for ref in (stat_smem, delta_smem, lower_smem))
        turns.begin()
        acc, *_ = pipeline((_filled((own, dim), 0.0, plgpu.Layout.WGMMA), stat, delta, lower))
        turns.end()
        q_smem.at[wg][...] = acc.astype(q_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem.at[wg], dq_ref.at[batch, here, head])
        plgpu.wait_smem_to_gmem(0)

    def block(index, k_smem, v_smem, k_done, v_done, carry):
        acc, stat, delta, lower = carry
        keys = tile.keys(index)
        scores, dweights = _products(
            (q_smem.at[wg], k_smem.transpose((1, 0))),
            (do_smem.at[wg], v_smem.transpose((1, 0))),
            shape=shape,
            issued=turns.swap,
        )
        plgpu.barrier_arrive(v_done)

        _, dscores = _gradient_of_scores(
            scores,
            dweights,
            _rows(stat, shape),
            _rows(delta, shape),
            lambda weights: tile.masked(weights, keys, lower, 0.0),
            scale,
            soft_cap,
        )
        narrow = dscores.astype(k_ref.dtype)
        turns.swap()
        acc = _add_product(acc, narrow, k_smem, interpreted)
        plgpu.barrier_arrive(k_done)
        return acc, stat, delta, lower

    spec = plgpu.BlockSpec((blocks.step, dim), lambda i: (tile.first + i, 0), transforms=_tiles())
    _pipeline(block, compute, blocks, tile.count, [spec, spec])(
        k_ref.at[batch, :, tile.kv_head], v_ref.at[batch, :, tile.kv_head]
    )


def _key_kernel(
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    stat_ref,
    delta_ref,
    upper_ref,
    dk_ref,
    dv_ref,
    k_smem,
    v_smem,
    upper_smem,
    barriers,
    turn,
    *,
    blocks,
    scale,
    soft_cap,
    interpreted,
):
    """dk and dv of one tile of keys: walks the query blocks that see the tile, of every query head in turn."""
    own, step = blocks.own, blocks.step
    dim = q_ref.shape[-1]
    batch, kv_head, wg = lax.axis_index("batch"), lax.axis_index("heads"), lax.axis_index("wg")
    group = q_ref.shape[2] // k_ref.shape[2]
    tile = lax.axis_index("tiles") * (_WARPGROUPS * own)
    base = tile + wg * own
    first = lax.div(tile, jnp.int32(step))
    end = upper_ref[batch, tile + (_WARPGROUPS * own - 1)]
    count = jnp.maximum(lax.div(end + (step - 1), jnp.int32(step)) - first, 1)
    rows = plgpu.Layout.WGMMA.reduce(1)
    columns = plgpu.Layout.WGMMA.reduce(0)
    turns = _Turns(turn, wg, blocks.turns)

    def compute(pipeline):
        here = pl.ds(base, own)
        copies = (
            (k_ref.at[batch, here, kv_head], k_smem),
            (v_ref.at[batch, here, kv_head], v_smem),
            (upper_ref.at[batch, here], upper_smem),
        )
        for number, (source, target) in enumerate(copies):
            plgpu.copy_gmem_to_smem(source, target.at[wg], barriers.at[len(copies) * wg + number])
        for number in range(len(copies)):
            plgpu.barrier_wait(barriers.at[len(copies) * wg + number])
        upper = plgpu.load(upper_smem.at[wg], layout=rows)
        zeros = _filled((own, dim), 0.0, plgpu.Layout.WGMMA)
        turns.begin()
        dk, dv, _ = pipeline((zeros, zeros, upper))
        turns.end()
        k_smem.at[wg][...] = dk.astype(k_ref.dtype)
        v_smem.at[wg][...] = dv.astype(v_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_smem.at[wg], dk_ref.at[batch, here, kv_head])
        plgpu.copy_smem_to_gmem(v_smem.at[wg], dv_ref.at[batch, here, kv_head])
        plgpu.wait_smem_to_gmem(0)

    def block(index, q_smem, do_smem, stat_smem, delta_smem, q_done, do_done, stat_done, delta_done, carry):
        dk, dv, upper = carry
        queries = (first + lax.rem(index[0], count)) * step
        shape = (own, step)
        scores, dweights = _products(
            (k_smem.at[wg], q_smem.transpose((1, 0))),
            (v_smem.at[wg], do_smem.transpose((1, 0))),
            shape=shape,
            issued=turns.swap,
        )
        stat, delta = plgpu.load(stat_smem, layout=columns), plgpu.load(delta_smem, layout=columns)
        plgpu.barrier_arrive(stat_done)
        plgpu.barrier_arrive(delta_done)

        def masked(weights):
            query_ids = _ids(shape, 1, queries)
            seen = (query_ids >= _ids(shape, 0, base)) & (query_ids < _rows(upper, shape))
            return jnp.where(seen, weights, 0.0)

        crossed = (queries < base + own - 1) | (queries + step > upper_ref[batch, base])
        weights, dscores = _gradient_of_scores(
            scores,
            dweights,
            lax.broadcast_in_dim(stat, shape, [1]),
            lax.broadcast_in_dim(delta, shape, [1]),
            lambda weights: lax.cond(crossed, masked, lambda w: w, weights),
            scale,
            soft_cap,
        )
        weights, dscores = weights.astype(v_ref.dtype), dscores.astype(k_ref.dtype)
        turns.swap()
        dv = _add_product(dv, weights, do_smem, interpreted)
        plgpu.barrier_arrive(do_done)
        dk = _add_product(dk, dscores, q_smem, interpreted)
        plgpu.barrier_arrive(q_done)
        return dk, dv, upper

    def head_of(i):
        return kv_head * group + lax.div(i, count)

    def block_of(i):
        return first + lax.rem(i, count)

    side = plgpu.BlockSpec((step, None, dim), lambda i: (block_of(i), head_of(i), 0), transforms=_tiles())
    row = plgpu.BlockSpec((None, step), lambda i: (head_of(i), block_of(i)))
    _pipeline(block, compute, blocks, count * group, [side, side, row, row])(
        q_ref.at[batch], do_ref.at[batch], stat_ref.at[batch], delta_ref.at[batch]
    )


def backward(query, key, value, out, lse, dout, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """See api.attention_backward."""
    length = query.shape[1]
    lower, upper = _prepare(layout, window)
    if not layout.full:
        dout = jnp.where((jnp.arange(length) < layout.doc_end)[:, :, None, None], dout, 0)
    delta = jnp.einsum("bthd,bthd->bht", out.astype(jnp.float32), dout.astype(jnp.float32))
    stat, delta = _padded(lse * _LOG2E, 2), _padded(delta, 2)
    query, key, value, dout = (_padded(a, 1) for a in (query, key, value, dout))
    rows, padded, heads, dim = query.shape

    def numbers(own, dtype):
        return plgpu.SMEM((_WARPGROUPS, own), dtype)

    blocks = BACKWARD_QUERY[dim]
    own = blocks.own
    both = _smem((_WARPGROUPS, own, dim), query.dtype)
    dquery = _call(
        _query_kernel,
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        (heads, padded // (_WARPGROUPS * own), rows),
        ("heads", "tiles", "batch"),
        [
            both,
            both,
            numbers(own, jnp.float32),
            numbers(own, jnp.float32),
            numbers(own, jnp.int32),
            plgpu.Barrier(num_barriers=_WARPGROUPS * 5),
            plgpu.Barrier(num_arrivals=_WARPGROUPS),
        ],
        blocks=blocks,
        scale=scale,
        soft_cap=soft_cap,
    )(query, key, value, dout, stat, delta, lower)

    blocks = BACKWARD_KEY[dim]
    own = blocks.own
    both = _smem((_WARPGROUPS, own, dim), key.dtype)
    dkey, dvalue = _call(
        _key_kernel,
        [jax.ShapeDtypeStruct(key.shape, key.dtype), jax.ShapeDtypeStruct(value.shape, value.dtype)],
        (key.shape[2], padded // (_WARPGROUPS * own), rows),
        ("heads", "tiles", "batch"),
        [
            both,
            both,
            numbers(own, jnp.int32),
            plgpu.Barrier(num_barriers=_WARPGROUPS * 3),
            plgpu.Barrier(num_arrivals=_WARPGROUPS),
        ],
        blocks=blocks,
        scale=scale,
        soft_cap=soft_cap,
    )(query, key, value, dout, stat, delta, upper)
    dsinks = None
    if sinks is not None:
        real = jnp.arange(length) < layout.doc_end
        share = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse) * jnp.where(real, 1.0, 0.0)[:, None]
        dsinks = -(share * delta[..., :length]).sum((0, 2)).astype(sinks.dtype)
    return dquery[:, :length], dkey[:, :length], dvalue[:, :length], dsinks
