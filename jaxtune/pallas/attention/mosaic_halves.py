"""Forward and dq of attention on Hopper for heads of 512 (Gemma 4), whose results do not fit one warpgroup's registers:
a float32 accumulator of 64 rows and 512 columns takes 256 registers of every thread, which has 240.

Every result is made in two halves of 256 columns, and each half computes all its scores. In the forward an item is one
half of a tile's output, which both warpgroups make, each for its own queries. In dq, dk and dv both have the same 64
queries or keys, and each makes one half. A block needed for scores alone comes in pieces of 128 columns, whose slots
are free as soon as their products are done.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas.attention.mosaic_forward import Softmax
from jaxtune.pallas.attention.mosaic_parts import (
    LOG2E,
    MASKED,
    QuerySide,
    add_product,
    bring,
    bringing,
    capped,
    computing,
    constant,
    drain,
    rows_of,
)
from jaxtune.pallas.mosaic_modules import plgpu

HALF = 256  # columns of a result that one warpgroup accumulates
PIECE = 128  # columns copied at a time of a block of which only scores, or gradients of weights, are computed


def columns_of(number, size: int):
    """Columns of piece (size 128) or half (size 256) `number` of a head."""
    return pl.ds(number * size, size)


def bring_pieces(ref, block_index, number, ring, full, free, piece_numbers=None):
    """Starts the copies of a block (a run of tokens, 512 columns), piece by piece, each once its slot is free.

    block_index: (row, slice of tokens, head) in `ref` [B, T, heads, 512].
    number: int32[], blocks loaded into `ring` before.
    ring: [slots, tokens, 128 or 256 columns].
    piece_numbers: pieces to copy; None: all.
    full, free: barriers of `ring`, one for each slot.
    """
    row, tokens, head = block_index
    size = ring.shape[-1]
    pieces = 2 * HALF // size
    for piece in range(pieces) if piece_numbers is None else piece_numbers:
        source = ref.at[row, tokens, head, columns_of(piece, size)]
        bring(number * pieces + piece, ((source, ring, full, free),))


def bring_both(pieces, halves):
    """Starts the copies of a step's two blocks, one in four pieces, one in two halves; each argument has the first six
    of `bring_pieces`. The step uses all pieces, then both halves, which stay until its end. As a copy waits for its
    slot, and all after it, copies of halves start between those of pieces, where with two slots of each they delay
    none.
    """
    for ring, piece_numbers in ((pieces, (0, 1)), (halves, (0,)), (pieces, (2,)), (halves, (1,)), (pieces, (3,))):
        bring_pieces(*ring, piece_numbers=piece_numbers)


def multiply(acc, left_halves, first, ring, full, number, release=None):
    """Adds left block^T to acc over all 512 columns, piece by piece as they arrive. The last products still run on
    return: the caller waits for them, and releases the last piece's slot (`last_slot`).

      left_halves: [halves, rows, 256]; left is the two halves from index `first` on.
      number: int32[], the block's number among those loaded into `ring`.
      release: frees a slot once its product is done; None: nothing is freed or waited for.
      full: barriers of `ring`, one for each slot.
      acc: float32 accumulator of the tensor cores.
    """
    size = ring.shape[-1]
    pieces, before = 2 * HALF // size, None
    for piece in range(pieces):
        slot = slot_of(number, piece, ring)
        plgpu.barrier_wait(full.at[slot])
        half, offset = divmod(piece * size, HALF)
        left = left_halves.at[first + half]
        right = ring.at[slot + opaque_zero(number)].transpose((1, 0))
        plgpu.wgmma(acc, left if size == HALF else left.at[:, pl.ds(offset, size)], right)
        if before is not None and release is not None:
            plgpu.wgmma_wait(1)
            release(before)
        before = slot


def two_products(shape, weight_operands, score_operands, number, zero):
    """(scores, gradients of the softmax weights), float32[shape] in registers, of a step of dq or dk. The slots of the
    gradients' block are released; the scores' are not, as the caller multiplies that block once more.

      weight_operands: (own operand, ring, full, free) of the gradients; score_operands: (own operand, ring, full).
      zero: opaque_zero of the step, the index of the first half in both sides.
      number: int32[], the block's number in both rings (blocks loaded before it).
      shape: (own tokens, tokens of a block).
    """
    item_side, ring, full, free = weight_operands
    score_side, score_ring, score_full = score_operands

    def compute(dweight_acc, score_acc):
        def release(slot):
            plgpu.barrier_arrive(free.at[slot])

        multiply(dweight_acc, item_side, zero, ring, full, number, release)
        multiply(score_acc, score_side, zero, score_ring, score_full, number)
        dweights = plgpu.wgmma_accumulator_load(dweight_acc, wait_n=2)
        release(last_slot(number, ring))
        return score_acc[...], dweights

    accumulators = (plgpu.ACC(shape, jnp.float32) for _ in range(2))
    return pl.run_scoped(compute, *accumulators)


def slot_of(number, piece, ring):
    """Slot of `ring` that has piece `piece` of block `number`. `bring` computes the same by itself and must agree. An
    int where it is the same for every block, else int32[].

      number, piece: int32[] or int; pieces of a block are numbered from 0. ring: [slots, tokens, columns].
    """
    stages, pieces = ring.shape[0], 2 * HALF // ring.shape[-1]
    if isinstance(piece, int) and pieces % stages == 0:
        return piece % stages
    return lax.rem(number * pieces + piece, jnp.int32(stages))


def last_slot(number, ring):
    """Slot of block `number`'s last piece, which `multiply` leaves to its caller to release."""
    return slot_of(number, 2 * HALF // ring.shape[-1] - 1, ring)


def opaque_zero(i):
    """0 as int32[] that the compiler does not know. In an index of shared memory it keeps the addresses of everything
    there out of registers during the loop over steps.
    """
    return lax.shift_right_logical(i, jnp.int32(30))


def wait_for_both(barrier):
    """Waits until both computing warpgroups are here, before either overwrites shared memory that the other may still
    read.
    """
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
    """Writes out and lse (natural logarithm), both 0 at padding, for heads of 512. An item is one half, 256 columns, of
    a tile's output.

      q_ref, k_ref, v_ref, out_ref: [B, T, heads or kv_heads, 512] in global memory. lse_ref: float32[B, heads, T].
      sinks_ref: float[heads] or None.
      lower_ref: int32[B, T], the first key that each query sees.
      table_ref: int32[tiles of queries, 4]: row, first query, first block of keys, blocks.
      q_smem: both halves of each warpgroup's queries, later results; k_smem, v_smem: pieces of keys, halves of values.
      lower_smem, lse_smem: bounds and lse of each warpgroup's queries.
      own_full, k_full, v_full: barriers: an item's own operands, or a slot, have arrived. k_free, v_free: it was read.
      blocks: mosaic_parts.Blocks. pairs: the warpgroups take the same queries of two heads that share keys.
      scale: factor on scores. soft_cap: c of c tanh(s / c), or None.
    """
    wg = lax.axis_index("wg")
    side = QuerySide(q_ref, k_ref, table_ref, blocks, pairs, wg, column_sections=2)
    own_tokens = blocks.own
    shape, rows = (own_tokens, blocks.step), plgpu.Layout.WGMMA.reduce(1)
    softmax = Softmax(scale, soft_cap, blocks.lean)

    @bringing(wg)
    def _():
        def work(turn, steps_before, item, following):
            def step(i, _):
                row, token_slice, head = side.keys(item, i)
                bring_pieces(k_ref, (row, token_slice, head), steps_before + i, k_smem, k_full, k_free)
                source = v_ref.at[row, token_slice, head, columns_of(side.column_section(item), HALF)]
                bring(steps_before + i, ((source, v_smem, v_full, v_free),))
                return ()

            lax.fori_loop(0, item[4], step, ())
            return item[4]  # steps: blocks of keys

        total_steps = side.items.for_each(work)
        drain(total_steps * (2 * HALF // PIECE), (k_smem, k_free))
        drain(total_steps, (v_smem, v_free))

    @computing(wg)
    def _():
        def fetch(item, half):
            row, head, base = side.queries_of(item)
            source = q_ref.at[row, pl.ds(base, own_tokens), head, columns_of(half, HALF)]
            plgpu.copy_gmem_to_smem(source, q_smem.at[wg * 2 + half], own_full.at[wg])

        def fetch_bounds(item):
            row, _, base = side.queries_of(item)
            plgpu.copy_gmem_to_smem(lower_ref.at[row, pl.ds(base, own_tokens)], lower_smem.at[wg], own_full.at[wg])

        def work(turn, steps_before, item, following):
            row, head, base = side.queries_of(item)
            half = side.column_section(item)
            plgpu.barrier_wait(own_full.at[wg])
            first_keys = plgpu.load(lower_smem.at[wg], layout=rows)
            largest_first_key = lower_smem[wg, own_tokens - 1]
            sink = None if sinks_ref is None else sinks_ref[head].astype(jnp.float32) * LOG2E

            def step(i, before):
                acc, state = before
                number = steps_before + i

                def release(slot):
                    plgpu.barrier_arrive(k_free.at[slot])

                def scored(score_acc):
                    first = wg * 2 + opaque_zero(i)
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
                    scores, state, lambda scores: side.masked(scores, item, i, first_keys, largest_first_key, MASKED)
                )
                acc = acc * rows_of(fade, acc.shape)
                weights16 = weights.astype(v_ref.dtype)
                slot = lax.rem(number, jnp.int32(v_smem.shape[0]))
                acc = add_product(acc, weights16, v_smem.at[slot], interpreted)
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, state

            start = constant((own_tokens, HALF), 0.0, plgpu.Layout.WGMMA), softmax.start(own_tokens, rows)
            acc, state = lax.fori_loop(0, item[4], step, start)
            has_next = turn + 1 < side.items.rounds
            plgpu.commit_smem()  # all warps are done with the queries and bounds

            @pl.when(has_next)
            def _():
                fetch(following, 1 - half)
                fetch_bounds(following)

            # Padding saw nothing: what stands there is dropped.
            real = first_keys <= plgpu.broadcasted_iota(jnp.int32, (own_tokens,), 0, layout=rows) + base
            inverse, lse = softmax.end(state, sink)
            inverse, lse = jnp.where(real, inverse, 0.0), jnp.where(real, lse, 0.0)
            out = q_smem.at[wg * 2 + half]
            out[...] = (acc * rows_of(inverse, acc.shape)).astype(q_ref.dtype)
            lse_smem.at[wg][...] = lse
            plgpu.commit_smem()
            token_slice = pl.ds(base, own_tokens)
            plgpu.copy_smem_to_gmem(out, out_ref.at[row, token_slice, head, columns_of(half, HALF)])
            # Both halves have the same one.
            pl.when(half == 0)(lambda: plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[row, head, token_slice]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(has_next)(lambda: fetch(following, half))
            return item[4]  # steps: blocks of keys

        @pl.when(side.items.rounds > 0)
        def _():
            first = side.items.item_at(jnp.int32(0))
            fetch(first, 0)
            fetch(first, 1)
            fetch_bounds(first)

        side.items.for_each(work)
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
    stat_delta_smem,
    lower_smem,
    k_smem,
    v_smem,
    own_full,
    k_full,
    v_full,
    k_free,
    v_free,
    both_done,
    *,
    blocks,
    scale,
    soft_cap,
    interpreted,
):
    """Writes dq for heads of 512. Both warpgroups have the same queries; each makes half of dq's columns, and all
    scores for it. The order of barriers is delicate: a slot of keys is read by both, and the queries' buffer becomes
    dq's.

      q_ref, k_ref, v_ref, do_ref, dq_ref: [B, T, heads or kv_heads, 512]; do: gradient of out. Global memory.
      stat_ref, delta_ref: float32[B, heads, T], log-sum-exp in log2; sum of out * dout, times scale.
      lower_ref: int32[B, T], the first key that each query sees.
      table_ref: int32[tiles of queries, 4]: row, first query, first block of keys, blocks.
      q_smem, do_smem: [2, own, 256], halves of an item's queries (later dq) and dout. lower_smem: its bounds.
      stat_delta_smem: float32[2, own], stat and delta.
      k_smem, v_smem: halves of keys, pieces of values.
      own_full, k_full, v_full: barriers: an item's own operands, or a slot, have arrived. k_free, v_free: it was read.
      both_done: both warpgroups arrive when they no longer read an item's queries and dout.
      blocks: mosaic_parts.Blocks. scale: factor on scores. soft_cap: c of c tanh(s / c), or None.
    """
    wg = lax.axis_index("wg")
    side = QuerySide(q_ref, k_ref, table_ref, blocks, False, wg, shared=True)
    own_tokens = blocks.own
    shape, rows = (own_tokens, blocks.step), plgpu.Layout.WGMMA.reduce(1)

    @bringing(wg)
    def _():
        def work(turn, steps_before, item, following):
            def step(i, _):
                block_index, number = side.keys(item, i), steps_before + i
                bring_both(
                    (v_ref, block_index, number, v_smem, v_full, v_free),
                    (k_ref, block_index, number, k_smem, k_full, k_free),
                )
                return ()

            lax.fori_loop(0, item[4], step, ())
            return item[4]  # steps: blocks of keys

        total_steps = side.items.for_each(work)
        drain(total_steps * (2 * HALF // PIECE), (v_smem, v_free))
        drain(total_steps * 2, (k_smem, k_free))

    @computing(wg)
    def _():
        def fetch(item, ref, target):
            row, head, base = side.queries_of(item)
            source = ref.at[row, pl.ds(base, own_tokens), head, columns_of(wg, HALF)]
            plgpu.copy_gmem_to_smem(source, target.at[wg], own_full.at[0])

        def fetch_beside(item):
            fetch(item, do_ref, do_smem)
            row, head, base = side.queries_of(item)
            token_slice = pl.ds(base, own_tokens)

            @pl.when(wg == 0)
            def _():
                plgpu.copy_gmem_to_smem(stat_ref.at[row, head, token_slice], stat_delta_smem.at[0], own_full.at[0])
                plgpu.copy_gmem_to_smem(delta_ref.at[row, head, token_slice], stat_delta_smem.at[1], own_full.at[0])
                plgpu.copy_gmem_to_smem(lower_ref.at[row, token_slice], lower_smem, own_full.at[0])

        def work(turn, steps_before, item, following):
            row, head, base = side.queries_of(item)
            plgpu.barrier_wait(own_full.at[0])
            stat = plgpu.load(stat_delta_smem.at[0], layout=rows)
            delta = plgpu.load(stat_delta_smem.at[1], layout=rows)
            first_keys = plgpu.load(lower_smem, layout=rows)
            largest_first_key = lower_smem[own_tokens - 1]

            def step(i, acc):
                number, zero = steps_before + i, opaque_zero(i)

                weight_operands = do_smem, v_smem, v_full, v_free
                score_operands = q_smem, k_smem, k_full
                scores, dweights = two_products(shape, weight_operands, score_operands, number, zero)
                plgpu.barrier_arrive(k_free.at[slot_of(number, 1 - wg, k_smem)])
                raw, slope = capped(scores, scale, soft_cap)
                weights = jnp.exp2(raw - rows_of(stat, shape))
                weights = side.masked(
                    weights if slope is None else weights * slope, item, i, first_keys, largest_first_key, 0.0
                )
                dscores = weights * (dweights * scale - rows_of(delta, shape))  # delta comes times scale
                dscores16 = dscores.astype(k_ref.dtype)
                slot = slot_of(number, wg, k_smem)
                acc = add_product(acc, dscores16, k_smem.at[slot], interpreted)
                plgpu.barrier_arrive(k_free.at[slot])
                return acc

            acc = lax.fori_loop(0, item[4], step, constant((own_tokens, HALF), 0.0, plgpu.Layout.WGMMA))
            wait_for_both(both_done)
            has_next = turn + 1 < side.items.rounds
            pl.when(has_next)(lambda: fetch_beside(following))
            dq = q_smem.at[wg]
            dq[...] = acc.astype(q_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(dq, dq_ref.at[row, pl.ds(base, own_tokens), head, columns_of(wg, HALF)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(has_next)(lambda: fetch(following, q_ref, q_smem))
            return item[4]  # steps: blocks of keys

        @pl.when(side.items.rounds > 0)
        def _():
            first = side.items.item_at(jnp.int32(0))
            fetch(first, q_ref, q_smem)
            fetch_beside(first)

        side.items.for_each(work)
        plgpu.wait_smem_to_gmem(0)
