"""The bodies of the forward (half_forward_kernel) and dq (half_query_kernel) kernels of attention on Hopper GPUs for
heads of 512 (Gemma 4), whose results do not fit the registers of one warpgroup; and the functions that the kernels of
dk and dv use too: bring_pieces and bring_both load blocks, multiply and two_products multiply by them, columns_of,
slot_of and last_slot find columns and slots, meet_other synchronises the warpgroups, and unknown_zero saves registers.

A float32 accumulator of 64 rows and 512 columns takes 256 registers of every thread of a warpgroup, which has 240. So
every result is made in two halves of 256 columns, and each half computes all of the scores that it needs:

- forward: an item is one half of the output of a tile of queries. Both warpgroups make the same half, each for queries
  of its own, with the keys and values that they share.
- dq, and dk and dv in mosaic_halves_keys.py, each a kernel of its own: both warpgroups have the same 64 queries, or
  keys, and each makes one half.

Scores are sums over all 512 columns of a block. Where a block is needed for nothing else, it comes in pieces of 128
columns, and each piece's slot is free for the next as soon as its product is done.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas.attention.mosaic_forward import Softmax
from jaxtune.pallas.attention.mosaic_parts import (
    MASKED,
    QuerySide,
    add_product,
    bring,
    bringing,
    capped,
    computing,
    drain,
    filled,
    rows_of,
)

HALF = 256  # columns of a result that one warpgroup accumulates
PIECE = 128  # columns copied at a time of a block of which only scores, or gradients of weights, are computed


def columns_of(number, size: int):
    """Returns the slice (pl.ds) of the columns of a head that its piece or half `number` (int or int32[]) has, counted
    from 0: number * size to (number + 1) * size - 1. size is 128 for pieces and 256 for halves. The kernels copy
    operands and results of heads of 512 by such slices."""
    return pl.ds(number * size, size)


def bring_pieces(ref, place, number, ring, full, free, which=None):
    """Starts the copies of a block into slots of shared memory. A block is a run of tokens with all 512 columns of a
    head; each copy, a piece, has all the tokens and some of the columns. Each waits until its slot is free. The loading
    warpgroup calls it.

    Args:
      ref: the array with the block, [B, T, heads, 512], in global memory.
      place: (row, slice of tokens, head) of the block.
      number: int32[], how many blocks this program has loaded into `ring` before it.
      ring: the slots, [slots, tokens, columns of a piece], with 128 or 256 columns.
      full: a barrier for each slot, which completes when a piece has arrived.
      free: a barrier for each slot, at which readers arrive when the slot may be overwritten.
      which: the numbers of the pieces to copy; None: all of the block.
    """
    row, tokens, head = place
    size = ring.shape[-1]
    pieces = 2 * HALF // size
    for piece in range(pieces) if which is None else which:
        source = ref.at[row, tokens, head, columns_of(piece, size)]
        bring(number * pieces + piece, ((source, ring, full, free),))


def bring_both(pieces, halves):
    """Starts the copies of two blocks that one step uses, one in four pieces of 128 columns and one in two halves of
    256. The step uses first all pieces and then both halves, which stay until its end. A copy, and all after it, wait
    until its slot is free; so the copies of halves are started between those of pieces, where with two slots of each
    they delay no piece. The loading warpgroup calls it, for dq and dk.

    pieces, halves: for each of the two blocks a tuple, the first arguments of `bring_pieces`: (the array in global
    memory, the block's place in it, its number among the blocks that were loaded, the slots, the barriers of slots that
    are full, and of those that are free).
    """
    for ring, which in ((pieces, (0, 1)), (halves, (0,)), (pieces, (2,)), (halves, (1,)), (pieces, (3,))):
        bring_pieces(*ring, which=which)


def multiply(acc, own, first, ring, full, number, release=None):
    """Adds left block^T to acc on the tensor cores, a sum over all 512 columns of a head, piece by piece as the pieces
    of the block arrive. The last products still run when it returns: the caller waits for the result, and releases the
    slot of the last piece (`last_slot`). A computing warpgroup calls it.

    Args:
      acc: the accumulator, [left's rows, tokens of the block].
      own: shared memory [halves, rows, 256]: the left factor is the two halves at index `first` and first + 1.
      first: int32[], where the left factor begins in `own`.
      ring: the slots with the block's pieces, [slots, tokens, columns of a piece].
      full: a barrier for each slot, which completes when a piece has arrived.
      number: int32[], the block's number among those that were loaded into `ring`.
      release: a function that gets the slot of a piece and marks it as free; it is called for all pieces but the last
        one when their products are done. None: the slots are still needed, and no product is waited for.
    """
    size = ring.shape[-1]
    pieces, before = 2 * HALF // size, None
    for piece in range(pieces):
        slot = slot_of(number, piece, ring)
        plgpu.barrier_wait(full.at[slot])
        half, within = divmod(piece * size, HALF)
        left = own.at[first + half]
        right = ring.at[slot + unknown_zero(number)].transpose((1, 0))
        plgpu.wgmma(acc, left if size == HALF else left.at[:, pl.ds(within, size)], right)
        if before is not None and release is not None:
            plgpu.wgmma_wait(1)
            release(before)
        before = slot


def two_products(shape, weight_operands, score_operands, number, zero):
    """Computes the products of a step of dq or dk of heads of 512: returns (scores, gradients of the softmax weights),
    both float32[shape] in registers. The slots of the gradients' block are released as they are read. Those of the
    scores' block are not: the caller multiplies it once more.

    Args:
      shape: (tokens of the item, tokens of the block).
      weight_operands: (own, ring, full, free), the operands of the gradients: own [halves, rows, 256] is the item's
        side in shared memory, ring has the slots with the block's pieces, full is a barrier for each slot, which
        completes when a piece has arrived, and free one at which the slot is released when the product has read it.
      score_operands: (own, ring, full), the same of the scores.
      number: int32[], the number of the block among those that were loaded into either ring.
      zero: unknown_zero of the step, the index of the first half in both `own`.
    """
    own, ring, full, free = weight_operands
    score_own, score_ring, score_full = score_operands

    def compute(dweight_acc, score_acc):
        def release(slot):
            plgpu.barrier_arrive(free.at[slot])

        multiply(dweight_acc, own, zero, ring, full, number, release)
        multiply(score_acc, score_own, zero, score_ring, score_full, number)
        dweights = plgpu.wgmma_accumulator_load(dweight_acc, wait_n=2)
        release(last_slot(number, ring))
        return score_acc[...], dweights

    accumulators = (plgpu.ACC(shape, jnp.float32) for _ in range(2))
    return pl.run_scoped(compute, *accumulators)


def slot_of(number, piece, ring):
    """Returns the index of the slot of `ring` that has piece `piece` (int or int32[]) of block `number` (int32[]): the
    number of that piece among all pieces that are loaded, modulo the number of slots. ring: [slots, tokens, columns of
    a piece]. Readers find by it the slot that they wait for, read or release, and the loading warpgroup the one that
    gets stat and delta. `bring` computes by itself into which slot a piece is copied, and must agree. The result is an
    int where it is the same for every block, otherwise int32[]."""
    stages, pieces = ring.shape[0], 2 * HALF // ring.shape[-1]
    if isinstance(piece, int) and pieces % stages == 0:
        return piece % stages
    return lax.rem(number * pieces + piece, jnp.int32(stages))


def last_slot(number, ring):
    """Returns the index of the slot that has the last piece of a block. A block is a run of tokens with all 512 columns
    of a head, and is copied into shared memory in pieces with some of the columns each, so it has 512 / (columns of a
    piece) of them. The caller releases this slot after the product with the last piece, because `multiply` releases
    only the earlier ones.

    number: int32[], the block's number. ring: the slots, [slots, tokens, columns of a piece].
    """
    return slot_of(number, 2 * HALF // ring.shape[-1] - 1, ring)


def unknown_zero(i):
    """0 as int32[], made from `i`, the number of a step or block, so that the compiler does not know it. Used in an
    index of shared memory, it keeps the compiler from holding the addresses of everything there in registers during
    the loop over steps."""
    return lax.shift_right_logical(i, jnp.int32(30))


def meet_other(barrier):
    """Waits until both computing warpgroups have called this, each with the same `barrier`. In dq, dk and dv they
    call it at the end of an item, before either overwrites shared memory that the other may still read. The forward
    does not, because there each has queries of its own."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def half_forward_kernel(
    q_ref,
    k_ref,
    v_ref,
    sinks_ref,
    lower_ref,
    table_ref,
    out_ref,
    lse_ref,
    q_smem,
    lower_smem,
    lse_smem,
    k_smem,
    v_smem,
    own_full,
    k_full,
    v_full,
    k_free,
    v_free,
    *,
    blocks,
    pairs,
    scale,
    soft_cap,
    interpreted,
):
    """The body of the forward kernel for heads of 512: writes out and lse (natural log), both 0 at padding, of the
    tiles of queries that are dealt to a program. An item is one half, 256 columns, of the output of a tile, for which
    all of the tile's scores are computed. Two warpgroups compute, each `blocks.own` queries; a third loads the blocks
    of keys and values ahead of them.

    Args:
      q_ref, k_ref, v_ref: query, key and value, [B, T, heads or kv_heads, 512], in global memory as all refs.
      sinks_ref: float32[heads], the heads' sinks in units of log2; None: there are none.
      lower_ref: int32[B, T], the first key that each query sees.
      table_ref: int32[lines, 4], the work, a tile of queries a line: row, first query, first block of keys, number of
        blocks.
      out_ref, lse_ref: the results, as q_ref and float32[B, heads, T].
      q_smem to v_smem: shared memory for both halves of each warpgroup's queries, and later results; their bounds; lse;
        slots for pieces of keys, and for halves of values.
      own_full to v_free: barriers: the queries and bounds of each warpgroup have arrived; a piece of keys, a half of
        values has arrived; the slot of a piece, of a half is free again.
      blocks: how the work is divided.
      pairs: True: the two warpgroups take the same queries of two heads that share their keys; False: neighbouring
        queries of one head.
      scale, soft_cap: the factor on scores, and their soft cap or None.
      interpreted: whether Pallas' interpreter runs it, which computes products in another way.
    """
    wg = lax.axis_index("wg")
    side = QuerySide(q_ref, k_ref, table_ref, blocks, pairs, wg, parts=2)
    own = blocks.own
    shape, rows = (own, blocks.step), plgpu.Layout.WGMMA.reduce(1)
    softmax = Softmax(scale, soft_cap, blocks.lean)

    @bringing(wg)
    def _():
        def work(turn, done, item, following):
            def step(i, _):
                row, here, head = side.keys(item, i)
                bring_pieces(k_ref, (row, here, head), done + i, k_smem, k_full, k_free)
                source = v_ref.at[row, here, head, columns_of(side.part(item), HALF)]
                bring(done + i, ((source, v_smem, v_full, v_free),))
                return ()

            lax.fori_loop(0, item[4], step, ())
            return item[4]

        done = side.items.each(work)
        drain(done * (2 * HALF // PIECE), (k_smem, k_free))
        drain(done, (v_smem, v_free))

    @computing(wg)
    def _():
        def fetch(item, half):
            row, head, base = side.place(item)
            source = q_ref.at[row, pl.ds(base, own), head, columns_of(half, HALF)]
            plgpu.copy_gmem_to_smem(source, q_smem.at[wg * 2 + half], own_full.at[wg])

        def fetch_bounds(item):
            row, _, base = side.place(item)
            plgpu.copy_gmem_to_smem(lower_ref.at[row, pl.ds(base, own)], lower_smem.at[wg], own_full.at[wg])

        def work(turn, done, item, following):
            row, head, base = side.place(item)
            part = side.part(item)
            plgpu.barrier_wait(own_full.at[wg])
            lower = plgpu.load(lower_smem.at[wg], layout=rows)
            last_lower = lower_smem[wg, own - 1]
            sink = None if sinks_ref is None else sinks_ref[head]

            def step(i, before):
                acc, state = before
                number = done + i

                def release(slot):
                    plgpu.barrier_arrive(k_free.at[slot])

                def scored(score_acc):
                    first = wg * 2 + unknown_zero(i)
                    multiply(
                        score_acc,
                        q_smem,
                        first,
                        k_smem,
                        k_full,
                        number,
                        release,
                    )
                    plgpu.barrier_wait(v_full.at[lax.rem(number, jnp.int32(v_smem.shape[0]))])
                    return score_acc[...]

                scores = pl.run_scoped(scored, plgpu.ACC(shape, jnp.float32))
                release(last_slot(number, k_smem))
                weights, fade, state = softmax.step(
                    scores, state, lambda scores: side.masked(scores, item, i, lower, last_lower, MASKED)
                )
                acc = acc * rows_of(fade, acc.shape)
                narrow = weights.astype(v_ref.dtype)
                slot = lax.rem(number, jnp.int32(v_smem.shape[0]))
                acc = add_product(acc, narrow, v_smem.at[slot], interpreted)
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, state

            start = filled((own, HALF), 0.0, plgpu.Layout.WGMMA), softmax.start(own, rows)
            acc, state = lax.fori_loop(0, item[4], step, start)
            more = turn + 1 < side.items.rounds
            plgpu.commit_smem()  # all warps are done with the queries and bounds

            @pl.when(more)
            def _():
                fetch(following, 1 - part)
                fetch_bounds(following)

            # Padding saw nothing: what stands there is dropped.
            real = lower <= plgpu.broadcasted_iota(jnp.int32, (own,), 0, layout=rows) + base
            inverse, lse = softmax.end(state, sink)
            inverse, lse = jnp.where(real, inverse, 0.0), jnp.where(real, lse, 0.0)
            out = q_smem.at[wg * 2 + part]
            out[...] = (acc * rows_of(inverse, acc.shape)).astype(q_ref.dtype)
            lse_smem.at[wg][...] = lse
            plgpu.commit_smem()
            here = pl.ds(base, own)
            plgpu.copy_smem_to_gmem(out, out_ref.at[row, here, head, columns_of(part, HALF)])
            # Both halves have the same one.
            pl.when(part == 0)(lambda: plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[row, head, here]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(more)(lambda: fetch(following, part))
            return item[4]

        @pl.when(side.items.rounds > 0)
        def _():
            first = side.items.at(jnp.int32(0))
            fetch(first, 0)
            fetch(first, 1)
            fetch_bounds(first)

        side.items.each(work)
        plgpu.wait_smem_to_gmem(0)


def half_query_kernel(
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
    numbers_smem,
    lower_smem,
    k_smem,
    v_smem,
    own_full,
    k_full,
    v_full,
    k_free,
    v_free,
    meet,
    *,
    blocks,
    scale,
    soft_cap,
    interpreted,
):
    """The body of the kernel for dq of heads of 512: writes dq of the tiles of queries that are dealt to a program.
    Both warpgroups have the same queries, and each computes one half of the columns of dq, and all of the scores for
    it; a third warpgroup loads the blocks of keys and values ahead of them.

    Args:
      q_ref, k_ref, v_ref, do_ref: query, key, value and dout, [B, T, heads or kv_heads, 512], in global memory as all
        refs.
      stat_ref, delta_ref: float32[B, heads, T], the log-sum-exp in log2, and the sum of out * dout times scale.
      lower_ref: int32[B, T], the first key that each query sees.
      table_ref: int32[lines, 4], the work, a tile of queries a line: row, first query, first block of keys, number of
        blocks.
      dq_ref: the result, as q_ref.
      q_smem to v_smem: shared memory for both halves of an item's queries and dout, its numbers (stat and delta) and
        bounds, slots for halves of keys, and for pieces of values.
      own_full to v_free: barriers: the item's operands have arrived; a half of keys, a piece of values has arrived; the
        slot of a half, of a piece is free again.
      meet: a barrier at which both warpgroups arrive when they no longer read an item's queries and dout.
      blocks: how the work is divided.
      scale, soft_cap: the factor on scores, and their soft cap or None.
      interpreted: whether Pallas' interpreter runs it, which computes products in another way.
    """
    wg = lax.axis_index("wg")
    side = QuerySide(q_ref, k_ref, table_ref, blocks, False, wg, shared=True)
    own = blocks.own
    shape, rows = (own, blocks.step), plgpu.Layout.WGMMA.reduce(1)

    @bringing(wg)
    def _():
        def work(turn, done, item, following):
            def step(i, _):
                place, number = side.keys(item, i), done + i
                bring_both(
                    (v_ref, place, number, v_smem, v_full, v_free), (k_ref, place, number, k_smem, k_full, k_free)
                )
                return ()

            lax.fori_loop(0, item[4], step, ())
            return item[4]

        done = side.items.each(work)
        drain(done * (2 * HALF // PIECE), (v_smem, v_free))
        drain(done * 2, (k_smem, k_free))

    @computing(wg)
    def _():
        def fetch(item, ref, target):
            """This warpgroup's half of an item's queries or dout."""
            row, head, base = side.place(item)
            source = ref.at[row, pl.ds(base, own), head, columns_of(wg, HALF)]
            plgpu.copy_gmem_to_smem(source, target.at[wg], own_full.at[0])

        def fetch_beside(item):
            fetch(item, do_ref, do_smem)
            row, head, base = side.place(item)
            here = pl.ds(base, own)

            @pl.when(wg == 0)
            def _():
                plgpu.copy_gmem_to_smem(stat_ref.at[row, head, here], numbers_smem.at[0], own_full.at[0])
                plgpu.copy_gmem_to_smem(delta_ref.at[row, head, here], numbers_smem.at[1], own_full.at[0])
                plgpu.copy_gmem_to_smem(lower_ref.at[row, here], lower_smem, own_full.at[0])

        def work(turn, done, item, following):
            row, head, base = side.place(item)
            plgpu.barrier_wait(own_full.at[0])
            stat = plgpu.load(numbers_smem.at[0], layout=rows)
            delta = plgpu.load(numbers_smem.at[1], layout=rows)
            lower = plgpu.load(lower_smem, layout=rows)
            last_lower = lower_smem[own - 1]

            def step(i, acc):
                number, zero = done + i, unknown_zero(i)

                weight_operands = do_smem, v_smem, v_full, v_free
                score_operands = q_smem, k_smem, k_full
                scores, dweights = two_products(shape, weight_operands, score_operands, number, zero)
                plgpu.barrier_arrive(k_free.at[slot_of(number, 1 - wg, k_smem)])
                raw, slope = capped(scores, scale, soft_cap)
                weights = jnp.exp2(raw - rows_of(stat, shape))
                weights = side.masked(weights if slope is None else weights * slope, item, i, lower, last_lower, 0.0)
                dscores = weights * (dweights * scale - rows_of(delta, shape))  # delta comes times scale
                narrow = dscores.astype(k_ref.dtype)
                slot = slot_of(number, wg, k_smem)
                acc = add_product(acc, narrow, k_smem.at[slot], interpreted)
                plgpu.barrier_arrive(k_free.at[slot])
                return acc

            acc = lax.fori_loop(0, item[4], step, filled((own, HALF), 0.0, plgpu.Layout.WGMMA))
            meet_other(meet)
            more = turn + 1 < side.items.rounds
            pl.when(more)(lambda: fetch_beside(following))
            dq = q_smem.at[wg]
            dq[...] = acc.astype(q_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(dq, dq_ref.at[row, pl.ds(base, own), head, columns_of(wg, HALF)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(more)(lambda: fetch(following, q_ref, q_smem))
            return item[4]

        @pl.when(side.items.rounds > 0)
        def _():
            first = side.items.at(jnp.int32(0))
            fetch(first, q_ref, q_smem)
            fetch_beside(first)

        side.items.each(work)
        plgpu.wait_smem_to_gmem(0)
