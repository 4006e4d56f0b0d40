"""The bodies of the kernels of attention on Hopper GPUs that compute dk (half_key_kernel) and dv (half_value_kernel),
the gradients of keys and values, for a head dim of 512. A float32 accumulator of 64 rows and 512 columns does not fit
the registers of one warpgroup. So both warpgroups of a program have the same 64 keys, and each computes the gradient of
one half, 256 of the 512 columns. mosaic_halves.py has the forward and dq kernels, and the functions that all of them
share."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas.attention.mosaic_backward import masked_keys
from jaxtune.pallas.attention.mosaic_halves import (
    HALF,
    PIECE,
    bring_both,
    bring_pieces,
    columns_of,
    last_slot,
    meet_other,
    multiply,
    slot_of,
    two_products,
    unknown_zero,
)
from jaxtune.pallas.attention.mosaic_parts import (
    Items,
    add_product,
    bringing,
    capped,
    computing,
    drain,
    filled,
)


def _bring_queries(items, group, width, copies):
    """Starts the copies of all blocks of queries and dout that a dk or dv kernel visits, for all items of a program:
    the work of its loading warpgroup. For each tile of keys it goes through the query heads that share the key head,
    and for each through the blocks that see the tile. Returns the number of all blocks, int32[].

    Args:
      items: deals the work to the program, an Items.
      group: number of query heads that share a key head.
      width: queries of a block.
      copies: a function that starts the copies of one block, given how many blocks came before it, its row, its slice
        of tokens and its query head. It waits for free slots; the caller drains them at the end.
    """

    def work(turn, done, item, following):
        kv_head, row, _, first, count = item

        def step(i, _):
            head = kv_head * group + lax.div(i, count)
            copies(done + i, row, pl.ds((first + lax.rem(i, count)) * width, width), head)
            return ()

        lax.fori_loop(0, count * group, step, ())
        return count * group

    return items.each(work)


class _KeySide:
    """What the kernels of dk and dv for heads of 512 share; every warpgroup of a program makes one: `items` deals the
    work to programs (an Items; an item is a tile of keys that both warpgroups have), `group` is the number of query
    heads that share a key head, `place` says which keys an item has, and `masked` masks the weights of a block of
    queries.

    Args:
      q_ref, k_ref: query and key in global memory; only their numbers of heads are used.
      table_ref: int32[lines, 4], the work, a tile of keys a line: row, first key, first block of queries, number of
        blocks.
      blocks: how the kernel divides its work.
    """

    def __init__(self, q_ref, k_ref, table_ref, blocks):
        self.blocks = blocks
        self.group = q_ref.shape[2] // k_ref.shape[2]
        self.items = Items(table_ref, k_ref.shape[2])

    def place(self, item):
        """Returns where an item's keys are: (row, slice of tokens, key head), an index into key without its last axis.
        item: [key head, the columns of its line of the table], as Items.at returns it."""
        return item[1], pl.ds(pl.multiple_of(item[2], self.blocks.own), self.blocks.own), item[0]

    def masked(self, weights, item, i, upper, first_upper):
        """Returns `weights`, float32[keys of the item, queries of a block], with 0 where a query does not see a key;
        unchanged, without the cost of a mask, if no bound crosses the block.

        Args:
          weights: the softmax weights, in registers.
          item: [key head, the columns of its line of the table], as Items.at returns it.
          i: int32[], the number of the step within the item, which determines the query head and the block.
          upper: int32[keys] in registers, the query after the last that sees each key.
          first_upper: int32[], that number for the item's first key, the smallest.
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
    numbers_smem,
    own_full,
    q_full,
    do_full,
    q_free,
    do_free,
    meet,
    *,
    blocks,
    scale,
    soft_cap,
    interpreted,
):
    """The body of the kernel for dk of heads of 512: writes dk of the tiles of keys that are dealt to a program. Both
    warpgroups have the same keys, and each computes one half of the columns of dk, and all of the scores for it; a
    third warpgroup loads the blocks of queries and dout ahead of them. It visits the query blocks that see the tile,
    for every query head of the key head in turn.

    Args:
      q_ref, k_ref, v_ref, do_ref: query, key, value and dout, [B, T, heads or kv_heads, 512], in global memory as all
        refs.
      stat_ref, delta_ref: float32[B, heads, T], the log-sum-exp in log2, and the sum of out * dout times scale.
      upper_ref: int32[B, T], the query after the last that sees each key.
      table_ref: int32[lines, 4], the work, a tile of keys a line: row, first key, first block of queries, number of
        blocks.
      dk_ref: the result, as k_ref.
      k_smem to numbers_smem: shared memory for both halves of an item's keys and values, its bounds, slots for halves
        of queries, for pieces of dout, and for the vectors of stat and delta, which come with each half of the queries.
      own_full to do_free: barriers: the item's operands have arrived; a half of queries, a piece of dout has arrived;
        the slot of a half, of a piece is free again.
      meet: a barrier at which both warpgroups arrive when they no longer read an item's keys and values.
      blocks: how the work is divided.
      scale, soft_cap: the factor on scores, and their soft cap or None.
      interpreted: whether Pallas' interpreter runs it, which computes products in another way.
    """
    wg = lax.axis_index("wg")
    side = _KeySide(q_ref, k_ref, table_ref, blocks)
    own, width, stages = blocks.own, blocks.step, q_smem.shape[0]
    shape = (own, width)
    rows, columns = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    @bringing(wg)
    def _():
        def copies(number, row, here, head):
            place = (row, here, head)
            bring_both(
                (do_ref, place, number, do_smem, do_full, do_free), (q_ref, place, number, q_smem, q_full, q_free)
            )
            for half in range(2):
                slot = slot_of(number, half, q_smem)
                for target, ref in ((slot, stat_ref), (stages + slot, delta_ref)):
                    plgpu.copy_gmem_to_smem(ref.at[row, head, here], numbers_smem.at[target], q_full.at[slot])

        done = _bring_queries(side.items, side.group, width, copies)
        drain(done * (2 * HALF // PIECE), (do_smem, do_free))
        drain(done * 2, (q_smem, q_free))

    @computing(wg)
    def _():
        def fetch(item, ref, target):
            """This warpgroup's half of an item's keys or values."""
            row, here, kv_head = side.place(item)
            plgpu.copy_gmem_to_smem(ref.at[row, here, kv_head, columns_of(wg, HALF)], target.at[wg], own_full.at[0])

        def fetch_beside(item):
            fetch(item, v_ref, v_smem)
            row, here, _ = side.place(item)
            pl.when(wg == 0)(lambda: plgpu.copy_gmem_to_smem(upper_ref.at[row, here], upper_smem, own_full.at[0]))

        def work(turn, done, item, following):
            row, here, kv_head = side.place(item)
            steps = item[4] * side.group
            plgpu.barrier_wait(own_full.at[0])
            upper = plgpu.load(upper_smem, layout=rows)
            first_upper = upper_smem[0]

            def step(i, dk):
                number, zero = done + i, unknown_zero(i)

                weight_operands = v_smem, do_smem, do_full, do_free
                score_operands = k_smem, q_smem, q_full
                scores, dweights = two_products(shape, weight_operands, score_operands, number, zero)
                plgpu.barrier_arrive(q_free.at[slot_of(number, 1 - wg, q_smem)])
                slot = slot_of(number, wg, q_smem)
                raw, slope = capped(scores, scale, soft_cap)
                stat = plgpu.load(numbers_smem.at[slot], layout=columns)
                weights = jnp.exp2(raw - lax.broadcast_in_dim(stat, shape, [1]))
                weights = weights if slope is None else weights * slope
                weights = side.masked(weights, item, i, upper, first_upper)
                delta = plgpu.load(numbers_smem.at[stages + slot], layout=columns)
                # delta comes times scale
                dscores = weights * (dweights * scale - lax.broadcast_in_dim(delta, shape, [1]))
                narrow = dscores.astype(k_ref.dtype)
                dk = add_product(dk, narrow, q_smem.at[slot], interpreted)
                plgpu.barrier_arrive(q_free.at[slot])
                return dk

            dk = lax.fori_loop(0, steps, step, filled((own, HALF), 0.0, plgpu.Layout.WGMMA))
            meet_other(meet)
            more = turn + 1 < side.items.rounds
            pl.when(more)(lambda: fetch_beside(following))
            result = k_smem.at[wg]
            result[...] = dk.astype(k_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result, dk_ref.at[row, here, kv_head, columns_of(wg, HALF)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(more)(lambda: fetch(following, k_ref, k_smem))
            return steps

        @pl.when(side.items.rounds > 0)
        def _():
            first = side.items.at(jnp.int32(0))
            fetch(first, k_ref, k_smem)
            fetch_beside(first)

        side.items.each(work)
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
    numbers_smem,
    own_full,
    q_full,
    do_full,
    q_free,
    do_free,
    meet,
    *,
    blocks,
    scale,
    soft_cap,
    interpreted,
):
    """The body of the kernel for dv of heads of 512: writes dv of the tiles of keys that are dealt to a program. Both
    warpgroups have the same keys, and each computes one half of the columns of dv, and all of the scores for it; a
    third warpgroup loads the blocks of queries and dout ahead of them. It visits the query blocks that see the tile,
    for every query head of the key head in turn.

    Args:
      q_ref, k_ref, do_ref: query, key and dout, [B, T, heads or kv_heads, 512], in global memory as all refs.
      stat_ref: float32[B, heads, T], the log-sum-exp in log2.
      upper_ref: int32[B, T], the query after the last that sees each key.
      table_ref: int32[lines, 4], the work, a tile of keys a line: row, first key, first block of queries, number of
        blocks.
      dv_ref: the result, as k_ref.
      k_smem to numbers_smem: shared memory for both halves of an item's keys, its bounds, slots for pieces of queries,
        for halves of dout, and for a vector of stat that comes with each half of dout.
      own_full to do_free: barriers: the item's operands have arrived; a piece of queries, a half of dout has arrived;
        the slot of a piece, of a half is free again. Each half of dout is read and freed by one warpgroup.
      meet: a barrier at which both warpgroups arrive when they no longer read an item's keys.
      blocks: how the work is divided.
      scale, soft_cap: the factor on scores, and their soft cap or None.
      interpreted: whether Pallas' interpreter runs it, which computes products in another way.
    """
    wg = lax.axis_index("wg")
    side = _KeySide(q_ref, k_ref, table_ref, blocks)
    own, width = blocks.own, blocks.step
    shape = (own, width)
    rows, columns = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    @bringing(wg)
    def _():
        def copies(number, row, here, head):
            place = (row, here, head)
            bring_pieces(q_ref, place, number, q_smem, q_full, q_free)
            bring_pieces(do_ref, place, number, do_smem, do_full, do_free)
            for half in range(2):
                slot = slot_of(number, half, do_smem)
                plgpu.copy_gmem_to_smem(stat_ref.at[row, head, here], numbers_smem.at[slot], do_full.at[slot])

        done = _bring_queries(side.items, side.group, width, copies)
        drain(done * (2 * HALF // PIECE), (q_smem, q_free))
        drain(done * 2, (do_smem, do_free))

    @computing(wg)
    def _():
        def fetch(item):
            row, here, kv_head = side.place(item)
            plgpu.copy_gmem_to_smem(k_ref.at[row, here, kv_head, columns_of(wg, HALF)], k_smem.at[wg], own_full.at[0])
            pl.when(wg == 0)(lambda: plgpu.copy_gmem_to_smem(upper_ref.at[row, here], upper_smem, own_full.at[0]))

        def work(turn, done, item, following):
            row, here, kv_head = side.place(item)
            steps = item[4] * side.group
            plgpu.barrier_wait(own_full.at[0])
            upper = plgpu.load(upper_smem, layout=rows)
            first_upper = upper_smem[0]

            def step(i, dv):
                number = done + i
                slot = slot_of(number, wg, do_smem)

                def release(slot):
                    plgpu.barrier_arrive(q_free.at[slot])

                def compute(score_acc):
                    multiply(score_acc, k_smem, unknown_zero(i), q_smem, q_full, number, release)
                    plgpu.barrier_wait(do_full.at[slot])
                    return score_acc[...]

                scores = pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))
                release(last_slot(number, q_smem))
                raw, _ = capped(scores, scale, soft_cap)
                stat = plgpu.load(numbers_smem.at[slot], layout=columns)
                weights = jnp.exp2(raw - lax.broadcast_in_dim(stat, shape, [1]))
                narrow = side.masked(weights, item, i, upper, first_upper).astype(do_ref.dtype)
                dv = add_product(dv, narrow, do_smem.at[slot], interpreted)
                plgpu.barrier_arrive(do_free.at[slot])
                return dv

            dv = lax.fori_loop(0, steps, step, filled((own, HALF), 0.0, plgpu.Layout.WGMMA))
            meet_other(meet)
            result = k_smem.at[wg]
            result[...] = dv.astype(k_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result, dv_ref.at[row, here, kv_head, columns_of(wg, HALF)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(turn + 1 < side.items.rounds)(lambda: fetch(following))
            return steps

        pl.when(side.items.rounds > 0)(lambda: fetch(side.items.at(jnp.int32(0))))
        side.items.each(work)
        plgpu.wait_smem_to_gmem(0)
