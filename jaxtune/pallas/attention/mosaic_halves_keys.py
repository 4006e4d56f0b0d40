"""dk and dv of attention on Hopper for heads of 512, a kernel each. Both warpgroups have the same 64 keys, and each
makes 256 columns (why: mosaic_halves.py).
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas.attention.mosaic_backward import masked_keys
from jaxtune.pallas.attention.mosaic_halves import (
    HALF,
    PIECE,
    bring_both,
    bring_pieces,
    columns_of,
    last_slot,
    multiply,
    opaque_zero,
    slot_of,
    two_products,
    wait_for_both,
)
from jaxtune.pallas.attention.mosaic_parts import (
    Items,
    add_product,
    bringing,
    capped,
    computing,
    constant,
    drain,
)
from jaxtune.pallas.mosaic_modules import plgpu


def _bring_queries(items, group, width, copies):
    """Starts the copies of all blocks of queries and dout that the program visits; their number, whose slots the caller
    drains.
    """

    def work(turn, steps_before, item, following):
        kv_head, row, _, first, count = item

        def step(i, _):
            head = kv_head * group + lax.div(i, count)
            copies(steps_before + i, row, pl.ds((first + lax.rem(i, count)) * width, width), head)
            return ()

        lax.fori_loop(0, count * group, step, ())
        return count * group

    return items.for_each(work)


class _KeySide:
    """Work of dk and dv for heads of 512, items [key head, row, first key, first block of queries,
    number of blocks].
    """

    def __init__(self, q_ref, k_ref, table_ref, blocks):
        self.blocks = blocks
        self.group = q_ref.shape[2] // k_ref.shape[2]
        self.items = Items(table_ref, k_ref.shape[2])

    def keys_of(self, item):
        return item[1], pl.ds(pl.multiple_of(item[2], self.blocks.own), self.blocks.own), item[0]

    def masked(self, weights, item, i, upper, first_upper):
        """`weights` float32[keys, queries] with 0 where a query does not see a key; upper: int32[keys], the query after
        the last.
        """
        base, width = item[2], self.blocks.step
        queries = (item[3] + lax.rem(i, item[4])) * width
        masked = functools.partial(masked_keys, base=base, upper=upper, queries=queries, lean=self.blocks.lean)
        crossed = (queries < base + self.blocks.own - 1) | (queries + width > first_upper)
        return lax.cond(crossed, masked, lambda weights: weights, weights)


def half_key_kernel(
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    stat_ref,
    delta_ref,
    upper_ref,
    table_ref,
    dk_ref,
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
    both_done,
    *,
    blocks,
    scale,
    soft_cap,
    interpreted,
):
    """Writes dk for heads of 512: each warpgroup makes half of its columns, and all scores for it. It visits the query
    blocks that see a tile for every query head in turn.

      q_ref, k_ref, v_ref, do_ref, dk_ref: [B, T, heads or kv_heads, 512]; do: gradient of out. Global memory.
      stat_ref, delta_ref: float32[B, heads, T], log-sum-exp in log2; sum of out * dout, times scale.
      upper_ref: int32[B, T], the query after the last that sees each key.
      table_ref: int32[tiles of keys, 4]: row, first key, first block of queries, blocks.
      k_smem, v_smem: [2, own, 256], halves of an item's keys (later dk) and values. upper_smem: its bounds.
      q_smem, do_smem, stat_delta_smem: halves of queries, pieces of dout, stat and delta with each half of the queries.
      own_full, q_full, do_full: barriers: an item's own operands, or a slot, have arrived. q_free, do_free: it was
      read.
      both_done: both warpgroups arrive when they no longer read an item's keys and values.
      blocks: mosaic_parts.Blocks. scale: factor on scores. soft_cap: c of c tanh(s / c), or None.
    """
    wg = lax.axis_index("wg")
    side = _KeySide(q_ref, k_ref, table_ref, blocks)
    own_tokens, width, stages = blocks.own, blocks.step, q_smem.shape[0]
    shape = (own_tokens, width)
    rows, columns = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    @bringing(wg)
    def _():
        def copies(number, row, token_slice, head):
            block_index = (row, token_slice, head)
            bring_both(
                (do_ref, block_index, number, do_smem, do_full, do_free),
                (q_ref, block_index, number, q_smem, q_full, q_free),
            )
            for half in range(2):
                slot = slot_of(number, half, q_smem)
                for target, ref in ((slot, stat_ref), (stages + slot, delta_ref)):
                    plgpu.copy_gmem_to_smem(ref.at[row, head, token_slice], stat_delta_smem.at[target], q_full.at[slot])

        total_blocks = _bring_queries(side.items, side.group, width, copies)
        drain(total_blocks * (2 * HALF // PIECE), (do_smem, do_free))
        drain(total_blocks * 2, (q_smem, q_free))

    @computing(wg)
    def _():
        def fetch(item, ref, target):
            row, token_slice, kv_head = side.keys_of(item)
            plgpu.copy_gmem_to_smem(
                ref.at[row, token_slice, kv_head, columns_of(wg, HALF)], target.at[wg], own_full.at[0]
            )

        def fetch_beside(item):
            fetch(item, v_ref, v_smem)
            row, token_slice, _ = side.keys_of(item)
            pl.when(wg == 0)(
                lambda: plgpu.copy_gmem_to_smem(upper_ref.at[row, token_slice], upper_smem, own_full.at[0])
            )

        def work(turn, steps_before, item, following):
            row, token_slice, kv_head = side.keys_of(item)
            steps = item[4] * side.group  # blocks of queries, for each query head
            plgpu.barrier_wait(own_full.at[0])
            upper = plgpu.load(upper_smem, layout=rows)
            first_upper = upper_smem[0]

            def step(i, dk):
                number, zero = steps_before + i, opaque_zero(i)

                weight_operands = v_smem, do_smem, do_full, do_free
                score_operands = k_smem, q_smem, q_full
                scores, dweights = two_products(shape, weight_operands, score_operands, number, zero)
                plgpu.barrier_arrive(q_free.at[slot_of(number, 1 - wg, q_smem)])
                slot = slot_of(number, wg, q_smem)
                raw, slope = capped(scores, scale, soft_cap)
                stat = plgpu.load(stat_delta_smem.at[slot], layout=columns)
                weights = jnp.exp2(raw - lax.broadcast_in_dim(stat, shape, [1]))
                weights = weights if slope is None else weights * slope
                weights = side.masked(weights, item, i, upper, first_upper)
                delta = plgpu.load(stat_delta_smem.at[stages + slot], layout=columns)
                # delta comes times scale
                dscores = weights * (dweights * scale - lax.broadcast_in_dim(delta, shape, [1]))
                dscores16 = dscores.astype(k_ref.dtype)
                dk = add_product(dk, dscores16, q_smem.at[slot], interpreted)
                plgpu.barrier_arrive(q_free.at[slot])
                return dk

            dk = lax.fori_loop(0, steps, step, constant((own_tokens, HALF), 0.0, plgpu.Layout.WGMMA))
            wait_for_both(both_done)
            has_next = turn + 1 < side.items.rounds
            pl.when(has_next)(lambda: fetch_beside(following))
            result = k_smem.at[wg]
            result[...] = dk.astype(k_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result, dk_ref.at[row, token_slice, kv_head, columns_of(wg, HALF)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(has_next)(lambda: fetch(following, k_ref, k_smem))
            return steps

        @pl.when(side.items.rounds > 0)
        def _():
            first = side.items.item_at(jnp.int32(0))
            fetch(first, k_ref, k_smem)
            fetch_beside(first)

        side.items.for_each(work)
        plgpu.wait_smem_to_gmem(0)


def half_value_kernel(
    q_ref,
    k_ref,
    do_ref,
    stat_ref,
    upper_ref,
    table_ref,
    dv_ref,
    k_smem,
    upper_smem,
    q_smem,
    do_smem,
    stat_delta_smem,
    own_full,
    q_full,
    do_full,
    q_free,
    do_free,
    both_done,
    *,
    blocks,
    scale,
    soft_cap,
    interpreted,
):
    """Writes dv for heads of 512, as half_key_kernel does dk.

    q_ref, k_ref, do_ref, dv_ref: [B, T, heads or kv_heads, 512]; do: gradient of out. Global memory.
    stat_ref: float32[B, heads, T], log-sum-exp in log2.
    upper_ref: int32[B, T], the query after the last that sees each key.
    table_ref: int32[tiles of keys, 4]: row, first key, first block of queries, blocks.
    k_smem, upper_smem: halves of an item's keys (later dv), and its bounds.
    q_smem, do_smem, stat_delta_smem: pieces of queries, halves of dout, stat with each half of dout. One warpgroup
    reads and frees each half.
    own_full, q_full, do_full: barriers: an item's own operands, or a slot, have arrived. q_free, do_free: it was
    read.
    both_done: both warpgroups arrive when they no longer read an item's keys.
    blocks: mosaic_parts.Blocks. scale: factor on scores. soft_cap: c of c tanh(s / c), or None.
    """
    wg = lax.axis_index("wg")
    side = _KeySide(q_ref, k_ref, table_ref, blocks)
    own_tokens, width = blocks.own, blocks.step
    shape = (own_tokens, width)
    rows, columns = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    @bringing(wg)
    def _():
        def copies(number, row, token_slice, head):
            block_index = (row, token_slice, head)
            bring_pieces(q_ref, block_index, number, q_smem, q_full, q_free)
            bring_pieces(do_ref, block_index, number, do_smem, do_full, do_free)
            for half in range(2):
                slot = slot_of(number, half, do_smem)
                plgpu.copy_gmem_to_smem(stat_ref.at[row, head, token_slice], stat_delta_smem.at[slot], do_full.at[slot])

        total_blocks = _bring_queries(side.items, side.group, width, copies)
        drain(total_blocks * (2 * HALF // PIECE), (q_smem, q_free))
        drain(total_blocks * 2, (do_smem, do_free))

    @computing(wg)
    def _():
        def fetch(item):
            row, token_slice, kv_head = side.keys_of(item)
            plgpu.copy_gmem_to_smem(
                k_ref.at[row, token_slice, kv_head, columns_of(wg, HALF)], k_smem.at[wg], own_full.at[0]
            )
            pl.when(wg == 0)(
                lambda: plgpu.copy_gmem_to_smem(upper_ref.at[row, token_slice], upper_smem, own_full.at[0])
            )

        def work(turn, steps_before, item, following):
            row, token_slice, kv_head = side.keys_of(item)
            steps = item[4] * side.group  # blocks of queries, for each query head
            plgpu.barrier_wait(own_full.at[0])
            upper = plgpu.load(upper_smem, layout=rows)
            first_upper = upper_smem[0]

            def step(i, dv):
                number = steps_before + i
                slot = slot_of(number, wg, do_smem)

                def release(slot):
                    plgpu.barrier_arrive(q_free.at[slot])

                def compute(score_acc):
                    multiply(score_acc, k_smem, opaque_zero(i), q_smem, q_full, number, release)
                    plgpu.barrier_wait(do_full.at[slot])
                    return score_acc[...]

                scores = pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))
                release(last_slot(number, q_smem))
                raw, _ = capped(scores, scale, soft_cap)
                stat = plgpu.load(stat_delta_smem.at[slot], layout=columns)
                weights = jnp.exp2(raw - lax.broadcast_in_dim(stat, shape, [1]))
                weights16 = side.masked(weights, item, i, upper, first_upper).astype(do_ref.dtype)
                dv = add_product(dv, weights16, do_smem.at[slot], interpreted)
                plgpu.barrier_arrive(do_free.at[slot])
                return dv

            dv = lax.fori_loop(0, steps, step, constant((own_tokens, HALF), 0.0, plgpu.Layout.WGMMA))
            wait_for_both(both_done)
            result = k_smem.at[wg]
            result[...] = dv.astype(k_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result, dv_ref.at[row, token_slice, kv_head, columns_of(wg, HALF)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(turn + 1 < side.items.rounds)(lambda: fetch(following))
            return steps

        pl.when(side.items.rounds > 0)(lambda: fetch(side.items.item_at(jnp.int32(0))))
        side.items.for_each(work)
        plgpu.wait_smem_to_gmem(0)
