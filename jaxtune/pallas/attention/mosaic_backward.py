"""Backward kernels of attention on Hopper for head dims up to 128 (dq: up to 256)."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas.attention.mosaic_parts import (
    WARPGROUPS,
    Items,
    QuerySide,
    Turns,
    add_product,
    bring,
    bringing,
    capped,
    computing,
    constant,
    drain,
    ids,
    products,
    rows_of,
    within_range,
)
from jaxtune.pallas.mosaic_modules import plgpu


def _weights_and_gradient(scores, dweights, shape, stat, mask, between, issued, scale, soft_cap):
    """(masked softmax weights times the soft cap's slope, gradients of the weights) of a block of keys, float32 of
    `shape`.

      scores, dweights: (left, right) in shared memory, of which the results are products.
      mask: puts 0 where a query does not see a key.
      between, issued: called between the products' starts (waits for the values), and after both.
    """

    def compute(score_acc, dweight_acc):
        plgpu.wgmma(score_acc, *scores)
        between()
        plgpu.wgmma(dweight_acc, *dweights)
        issued()
        raw, slope = capped(plgpu.wgmma_accumulator_load(score_acc, wait_n=1), scale, soft_cap)
        weights = jnp.exp2(raw - stat)
        return mask(weights if slope is None else weights * slope), dweight_acc[...]

    return pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))


def query_kernel(
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    stat_ref,
    delta_ref,
    lower_ref,
    table_ref,
    dq_ref,
    q_smem,
    do_smem,
    stat_delta_smem,
    lower_smem,
    k_smem,
    v_smem,
    own_full,
    k_full,
    v_full,
    k_free,
    v_free,
    swap_barrier,
    *,
    blocks,
    pairs,
    scale,
    soft_cap,
    interpreted,
):
    """Writes dq of tiles of queries for head dims of 64, 128 and 256, a warpgroup `blocks.own` queries of a head. The
    order of barriers is delicate: the buffer of queries is reused for dq, so the next item's queries are loaded after
    its store.

      q_ref, k_ref, v_ref, do_ref, dq_ref: [B, T, heads or kv_heads, D]; do: gradient of out. Global memory.
      stat_ref, delta_ref: float32[B, heads, T], log-sum-exp in log2; sum of out * dout, times scale.
      lower_ref: int32[B, T], the first key that each query sees.
      table_ref: int32[tiles of queries, 4]: row, first query, first block of keys, blocks.
      q_smem, do_smem, lower_smem: [buffers, own, ...], the warpgroups' own queries (later dq), dout and bounds.
      stat_delta_smem: float32[4, own], stat of both warpgroups, then delta.
      k_smem, v_smem: slots of blocks of keys and values.
      own_full, k_full, v_full: barriers: an item's own operands, or a slot's block, have arrived.
      k_free, v_free: both warpgroups have read a slot. swap_barrier: of Turns.
      blocks: mosaic_parts.Blocks. pairs: the warpgroups take the same queries of two heads that share keys.
      scale: factor on scores. soft_cap: c of c tanh(s / c), or None.
    """
    wg = lax.axis_index("wg")
    side = QuerySide(q_ref, k_ref, table_ref, blocks, pairs, wg)
    own_tokens, dim = blocks.own, q_ref.shape[-1]
    stages, value_stages = (jnp.int32(slots.shape[0]) for slots in (k_smem, v_smem))
    shape, rows = (own_tokens, blocks.step), plgpu.Layout.WGMMA.reduce(1)

    @bringing(wg)
    def _():
        side.bring_keys(k_ref, v_ref, k_smem, v_smem, k_full, v_full, k_free, v_free)

    @computing(wg)
    def _():
        turns = Turns(swap_barrier, wg, blocks.turns)

        def buffer(turn):
            return wg * blocks.buffers + lax.rem(turn, jnp.int32(blocks.buffers))

        def fetch(turn, item):
            row, head, base = side.queries_of(item)
            token_slice, full = pl.ds(base, own_tokens), own_full.at[buffer(turn)]
            plgpu.copy_gmem_to_smem(q_ref.at[row, token_slice, head], q_smem.at[buffer(turn)], full)
            plgpu.copy_gmem_to_smem(do_ref.at[row, token_slice, head], do_smem.at[buffer(turn)], full)
            plgpu.copy_gmem_to_smem(stat_ref.at[row, head, token_slice], stat_delta_smem.at[wg], full)
            plgpu.copy_gmem_to_smem(delta_ref.at[row, head, token_slice], stat_delta_smem.at[WARPGROUPS + wg], full)
            plgpu.copy_gmem_to_smem(lower_ref.at[row, token_slice], lower_smem.at[buffer(turn)], full)

        def work(turn, steps_before, item, following):
            row, head, base = side.queries_of(item)
            query = q_smem.at[buffer(turn)]
            if blocks.buffers == 1:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's results have left the buffer
                fetch(turn, item)
            plgpu.barrier_wait(own_full.at[buffer(turn)])
            stat = plgpu.load(stat_delta_smem.at[wg], layout=rows)
            delta = plgpu.load(stat_delta_smem.at[WARPGROUPS + wg], layout=rows)
            first_keys = plgpu.load(lower_smem.at[buffer(turn)], layout=rows)
            largest_first_key = lower_smem[buffer(turn), own_tokens - 1]
            plgpu.commit_smem()  # every warp has read them: the next item's may come

            def step(i, acc):
                slot, value_slot = lax.rem(steps_before + i, stages), lax.rem(steps_before + i, value_stages)
                operand_buffer = buffer(turn)
                if blocks.buffers == 1:
                    # The same number, but the compiler does not know that. Otherwise it keeps the addresses of
                    # everything in these buffers in registers during the loop, and spills (390 bytes a thread, D=256).
                    operand_buffer += lax.shift_right_logical(i, jnp.int32(30))
                plgpu.barrier_wait(k_full.at[slot])
                weights, dweights = _weights_and_gradient(
                    (q_smem.at[operand_buffer], k_smem.at[slot].transpose((1, 0))),
                    (do_smem.at[operand_buffer], v_smem.at[value_slot].transpose((1, 0))),
                    shape,
                    rows_of(stat, shape),
                    lambda weights: side.masked(weights, item, i, first_keys, largest_first_key, 0.0),
                    lambda: plgpu.barrier_wait(v_full.at[value_slot]),
                    turns.swap,
                    scale,
                    soft_cap,
                )
                plgpu.barrier_arrive(v_free.at[value_slot])

                dscores = weights * (dweights * scale - rows_of(delta, shape))  # delta comes times scale
                dscores16 = dscores.astype(k_ref.dtype)
                turns.swap()
                acc = add_product(acc, dscores16, k_smem.at[slot], interpreted)
                plgpu.barrier_arrive(k_free.at[slot])
                return acc

            acc, ahead = constant((own_tokens, dim), 0.0, plgpu.Layout.WGMMA), 0
            if blocks.buffers == 2:
                # The first step hides how the last item's results leave the buffer that the next item's operands go to.
                acc, ahead = step(jnp.int32(0), acc), 1
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                pl.when(turn + 1 < side.items.rounds)(lambda: fetch(turn + 1, following))
            acc = lax.fori_loop(ahead, item[4], step, acc)
            query[...] = acc.astype(q_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(query, dq_ref.at[row, pl.ds(base, own_tokens), head])
            return item[4]  # steps: blocks of keys

        if blocks.buffers == 2:
            pl.when(side.items.rounds > 0)(lambda: fetch(jnp.int32(0), side.items.item_at(jnp.int32(0))))
        turns.begin()
        side.items.for_each(work)
        turns.end()
        plgpu.wait_smem_to_gmem(0)


def masked_keys(weights, *, base, upper, queries, lean):
    """`weights` float32[keys, queries] with 0 where a query does not see a key.

    upper: int32[keys], the query after the last that sees each key.
    lean: one unsigned comparison in place of two.
    weights: in registers.
    base, queries: int32[], index in the row of the first key, and of the first query.
    """
    shape = weights.shape
    if lean:
        key_ids = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1)) + base
        visible = within_range(shape, 1, queries, key_ids, upper - key_ids)
    else:
        query_ids = ids(shape, 1, queries)
        visible = (query_ids >= ids(shape, 0, base)) & (query_ids < rows_of(upper, shape))
    return jnp.where(visible, weights, 0.0)


def bring_queries(items, group, width, operands, slots, full, free):
    """The loading warpgroup's work for dk and dv: copies the blocks of queries and dout of all items, head by head, as
    far ahead as slots allow, and waits until all were read.

      group: query heads of a key head; width: queries of a block.
      operands: (query, dout, stat, delta); slots: (query's, dout's, numbers: stat of each slot, then delta).
      full, free: (query's, dout's) barriers; stat comes with query, delta with dout.
      items: mosaic_parts.Items, whose lines are tiles of keys.
    """
    q_ref, do_ref, stat_ref, delta_ref = operands
    q_smem, do_smem, stat_delta_smem = slots
    (q_full, do_full), (q_free, do_free) = full, free
    stages = jnp.int32(q_smem.shape[0])

    def work(turn, steps_before, item, following):
        kv_head, row, _, first, count, *_ = item

        def step(i, _):
            head = kv_head * group + lax.div(i, count)
            token_slice = pl.ds((first + lax.rem(i, count)) * width, width)
            slot = lax.rem(steps_before + i, stages)
            bring(
                steps_before + i,
                (
                    (q_ref.at[row, token_slice, head], q_smem, q_full, q_free),
                    (do_ref.at[row, token_slice, head], do_smem, do_full, do_free),
                ),
            )
            # These have the same slots as q and do, which are free at the same time.
            plgpu.copy_gmem_to_smem(stat_ref.at[row, head, token_slice], stat_delta_smem.at[slot], q_full.at[slot])
            plgpu.copy_gmem_to_smem(
                delta_ref.at[row, head, token_slice], stat_delta_smem.at[stages + slot], do_full.at[slot]
            )
            return ()

        lax.fori_loop(0, count * group, step, ())
        return count * group

    drain(items.for_each(work), (q_smem, q_free), (do_smem, do_free))


def key_kernel(
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    stat_ref,
    delta_ref,
    upper_ref,
    table_ref,
    dk_ref,
    dv_ref,
    k_smem,
    v_smem,
    upper_smem,
    q_smem,
    do_smem,
    stat_delta_smem,
    own_full,
    q_full,
    do_full,
    q_free,
    do_free,
    swap_barrier,
    *,
    blocks,
    scale,
    soft_cap,
    interpreted,
):
    """Writes dk and dv of tiles of keys for head dims up to 128, a warpgroup `blocks.own` keys of a head. It visits the
    query blocks that see a tile, for every query head in turn: sums in one fixed order without atomics.

      q_ref, k_ref, v_ref, do_ref, dk_ref, dv_ref: [B, T, heads or kv_heads, D]; do: gradient of out. Global memory.
      stat_ref, delta_ref: float32[B, heads, T], log-sum-exp in log2; sum of out * dout, times scale.
      upper_ref: int32[B, T], the query after the last that sees each key.
      table_ref: int32[tiles of keys, 4]: row, first key, first block of queries, blocks.
      k_smem, v_smem, upper_smem: [4, own, ...], two buffers a warpgroup: keys (later dk), values (later dv), bounds.
      q_smem, do_smem: slots of blocks of queries. stat_delta_smem: float32[2 slots, step], stat, then delta.
      own_full, q_full, do_full: barriers: an item's own operands, or a slot's block, have arrived.
      q_free, do_free: both warpgroups have read a slot. swap_barrier: of Turns.
      blocks: mosaic_parts.Blocks. scale: factor on scores. soft_cap: c of c tanh(s / c), or None.
    """
    wg = lax.axis_index("wg")
    group = q_ref.shape[2] // k_ref.shape[2]
    items = Items(table_ref, k_ref.shape[2])
    own_tokens, width, stages, dim = blocks.own, blocks.step, jnp.int32(blocks.stages), q_ref.shape[-1]
    shape = (own_tokens, width)
    rows, columns = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    @bringing(wg)
    def _():
        operands, slots = (q_ref, do_ref, stat_ref, delta_ref), (q_smem, do_smem, stat_delta_smem)
        bring_queries(items, group, width, operands, slots, (q_full, do_full), (q_free, do_free))

    @computing(wg)
    def _():
        turns = Turns(swap_barrier, wg, blocks.turns)

        def buffer(turn):
            return wg * 2 + lax.rem(turn, jnp.int32(2))

        def fetch(turn, item):
            kv_head, row, start = item[:3]
            token_slice, full = (
                pl.ds(pl.multiple_of(start + wg * own_tokens, own_tokens), own_tokens),
                own_full.at[buffer(turn)],
            )
            plgpu.copy_gmem_to_smem(k_ref.at[row, token_slice, kv_head], k_smem.at[buffer(turn)], full)
            plgpu.copy_gmem_to_smem(v_ref.at[row, token_slice, kv_head], v_smem.at[buffer(turn)], full)
            plgpu.copy_gmem_to_smem(upper_ref.at[row, token_slice], upper_smem.at[buffer(turn)], full)

        def work(turn, steps_before, item, following):
            kv_head, row, start, first, count = item
            base = pl.multiple_of(start + wg * own_tokens, own_tokens)
            key, value = k_smem.at[buffer(turn)], v_smem.at[buffer(turn)]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's results have left the other buffers
            pl.when(turn + 1 < items.rounds)(lambda: fetch(turn + 1, following))
            plgpu.barrier_wait(own_full.at[buffer(turn)])
            upper = plgpu.load(upper_smem.at[buffer(turn)], layout=rows)
            first_upper, last_upper = upper_smem[buffer(turn), 0], upper_smem[buffer(turn), own_tokens - 1]
            # The blocks are those of both warpgroups: the ones at the edges may be the other's alone.
            lead = wg * (own_tokens // width)
            last = jnp.clip(lax.div(last_upper + (width - 1), jnp.int32(width)) - first, lead, count)

            def arrive(slot):
                plgpu.barrier_wait(q_full.at[slot])
                plgpu.barrier_wait(do_full.at[slot])

            def leave(slot):
                plgpu.barrier_arrive(do_free.at[slot])
                plgpu.barrier_arrive(q_free.at[slot])

            def skip(before, block, _):
                slot = lax.rem(before + block, stages)
                arrive(slot)
                turns.swap()
                turns.swap()
                leave(slot)
                return ()

            def step(before, block, state):
                dk, dv = state
                slot = lax.rem(before + block, stages)
                queries = (first + block) * width
                query, dout = q_smem.at[slot], do_smem.at[slot]
                arrive(slot)
                scores, dweights = products(
                    (key, query.transpose((1, 0))), (value, dout.transpose((1, 0))), shape=shape, issued=turns.swap
                )
                masked = functools.partial(masked_keys, base=base, upper=upper, queries=queries, lean=blocks.lean)
                crossed = (queries < base + own_tokens - 1) | (queries + width > first_upper)
                scores, slope = capped(scores, scale, soft_cap)
                stat = plgpu.load(stat_delta_smem.at[slot], layout=columns)
                weights = jnp.exp2(scores - lax.broadcast_in_dim(stat, shape, [1]))
                weights = lax.cond(crossed, masked, lambda weights: weights, weights)
                delta = plgpu.load(stat_delta_smem.at[stages + slot], layout=columns)
                # delta comes times scale
                dscores = weights * (dweights * scale - lax.broadcast_in_dim(delta, shape, [1]))
                if slope is not None:
                    dscores = dscores * slope
                weights, dscores = weights.astype(v_ref.dtype), dscores.astype(k_ref.dtype)
                turns.swap()
                dv = add_product(dv, weights, dout, interpreted)
                dk = add_product(dk, dscores, query, interpreted)
                leave(slot)
                return dk, dv

            def head(number, state):
                before = steps_before + number * count
                lax.fori_loop(0, lead, functools.partial(skip, before), ())
                state = lax.fori_loop(lead, last, functools.partial(step, before), state)
                lax.fori_loop(last, count, functools.partial(skip, before), ())
                return state

            zeros = constant((own_tokens, dim), 0.0, plgpu.Layout.WGMMA)
            dk, dv = lax.fori_loop(0, group, head, (zeros, zeros))
            key[...] = dk.astype(k_ref.dtype)
            value[...] = dv.astype(v_ref.dtype)
            plgpu.commit_smem()
            token_slice = pl.ds(base, own_tokens)
            plgpu.copy_smem_to_gmem(key, dk_ref.at[row, token_slice, kv_head])
            plgpu.copy_smem_to_gmem(value, dv_ref.at[row, token_slice, kv_head])
            return count * group

        pl.when(items.rounds > 0)(lambda: fetch(jnp.int32(0), items.item_at(jnp.int32(0))))
        turns.begin()
        items.for_each(work)
        turns.end()
        plgpu.wait_smem_to_gmem(0)
