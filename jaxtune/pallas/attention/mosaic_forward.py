"""The forward of packed attention on Hopper GPUs for head dims up to 256: the body of the kernel, forward_kernel, and
the running softmax, Softmax, which the kernel for heads of 512 uses too. mosaic.py calls the kernel, and
mosaic_parts.py describes how a kernel's programs and warpgroups share the work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas.attention.mosaic_parts import (
    LOG2E,
    MASKED,
    QuerySide,
    Turns,
    add_product,
    bringing,
    capped,
    computing,
    filled,
    products,
    rows_of,
)

# The initial running maximum of scores. It is so far above MASKED that a masked score's weight is exactly 0, whatever
# rounding a fused multiply-add leaves.
_UNSEEN = -1e20


class Softmax:
    """The running softmax of the forward, in powers of two, in the registers of one warpgroup: it takes the keys block
    by block, so that no row of scores exists as a whole (as in FlashAttention). Its state is (maximum so far, sum of
    weights), float32[own] each, one number for each of the warpgroup's `own` queries; with `lean` the maximum is of
    numbers before the factor. `start` makes the first state, `step` takes one block of keys, and `end` gives 1 / sum
    and the log-sum-exp.

    Args:
      scale: the factor on scores.
      soft_cap: the cap on scores, or None.
      lean: True: the maximum is taken over raw scores (over the tanh, with a soft cap), and the factor on them is
        applied in the multiply-add that subtracts the maximum, which takes fewer instructions; a factor that is not
        positive switches it off. False: scores are scaled first.
    """

    def __init__(self, scale, soft_cap, lean):
        self.scale, self.soft_cap = scale, soft_cap
        self.unit = (scale if soft_cap is None else soft_cap) * LOG2E
        self.lean = lean and self.unit > 0  # a negative factor would turn the maximum into the minimum

    def start(self, own, layout):
        """Returns the state before the first block of keys, (maximum, sum), for `own` queries, float32[own] each: a
        large negative number that is finite, so that no difference is NaN, and 0. With `lean` that number is far above
        MASKED, so that masked scores get the weight 0. layout: that of vectors with one number for each row of scores
        (plgpu.Layout.WGMMA.reduce(1))."""
        return filled((own,), _UNSEEN if self.lean else MASKED, layout), filled((own,), 0.0, layout)

    def step(self, scores, state, mask):
        """Takes one block of keys. Returns (weights float32[own, step], factor float32[own] by which the sums of
        earlier blocks are multiplied because the maximum rose, the new state).

        As long as a query has seen no key, masked keys may get the weight 1 (not with `lean`); the factor is 0 once it
        sees one, and so removes their sums.

        Args:
          scores: float32[own, step], the raw products of queries and keys.
          state: the state after the blocks before, (maximum, sum).
          mask: a function of scores that returns them with MASKED, a large negative number, for keys that a query does
            not see. It gets them scaled and capped, or with `lean` before the factor.
        """
        top, total = state
        if not self.lean:
            scores, _ = capped(scores, self.scale, self.soft_cap)
        elif self.soft_cap is not None:
            scores = jnp.tanh(scores * (self.scale / self.soft_cap))
        scores = mask(scores)
        new = jnp.maximum(top, scores.max(axis=1))
        if self.lean:
            fade = jnp.exp2((top - new) * self.unit)
            weights = jnp.exp2(scores * self.unit - rows_of(new * self.unit, scores.shape))
        else:
            fade = jnp.exp2(top - new)
            weights = jnp.exp2(scores - rows_of(new, scores.shape))
        return weights, fade, (new, total * fade + weights.sum(axis=1))

    def end(self, state, sink=None):
        """Ends the softmax of a tile of queries. Returns (the factor of the output, the log-sum-exp of the scores in
        the natural logarithm), float32[own] each. The factor is 1 / sum, unless a sink raises the maximum. Both are
        meaningless for a query that has seen no key.

        Args:
          state: the state after the last block, (maximum, sum).
          sink: float32[], the head's sink in units of log2. The sum has one more term for it, to which no value
            belongs. None: there is no sink.
        """
        top, total = state
        if self.lean:
            top = top * self.unit
        if sink is None:
            return 1.0 / total, (top + jnp.log2(total)) * (1.0 / LOG2E)
        new = jnp.maximum(top, sink)
        fade = jnp.exp2(top - new)
        total = total * fade + jnp.exp2(sink - new)
        return fade / total, (new + jnp.log2(total)) * (1.0 / LOG2E)


def forward_kernel(
    q_ref,
    k_ref,
    v_ref,
    sinks_ref,
    lower_ref,
    table_ref,
    out_ref,
    lse_ref,
    qo_smem,
    lower_smem,
    lse_smem,
    k_smem,
    v_smem,
    own_full,
    k_full,
    v_full,
    k_free,
    v_free,
    turn_barrier,
    *,
    blocks,
    pairs,
    scale,
    soft_cap,
    interpreted,
):
    """The body of the forward kernel of packed attention, which a program runs on each multiprocessor. It writes out
    and lse (natural log), both 0 at padding, of the tiles of queries that are dealt to the program. Two
    of its warpgroups compute, each `blocks.own` queries of one head at a time; a third loads the blocks of keys and
    values ahead of them. It is for head dims of 64, 128 and 256.

    Args:
      q_ref, k_ref, v_ref: query, key and value, [B, T, heads or kv_heads, D], in global memory as all refs.
      sinks_ref: float[heads], the heads' sinks; None: there are none.
      lower_ref: int32[B, T], the first key that each query sees.
      table_ref: int32[lines, 4], the work, a tile of queries a line: row, first query, first block of keys, number of
        blocks.
      out_ref, lse_ref: the results, as q_ref and float32[B, heads, T].
      qo_smem to v_smem: shared memory for queries and later results, their bounds, lse, and slots of keys and values.
      own_full to turn_barrier: barriers: an item's queries and bounds have arrived in a buffer (with blocks.buffers = 1
        the two warpgroups share three buffers, one for each and one for the queries that are loaded next); a block of
        keys, of values has arrived; the slot of either is free again; the one at which the warpgroups take turns.
      blocks: how the work is divided.
      pairs: True: the two warpgroups take the same queries of two heads that share their keys; False: neighbouring
        queries of one head.
      scale, soft_cap: the factor on scores, and their soft cap or None.
      interpreted: whether Pallas' interpreter runs it, which computes products in another way.
    """
    wg = lax.axis_index("wg")
    side = QuerySide(q_ref, k_ref, table_ref, blocks, pairs, wg)
    own, stages, dim = blocks.own, jnp.int32(blocks.stages), q_ref.shape[-1]
    shape, rows = (own, blocks.step), plgpu.Layout.WGMMA.reduce(1)
    softmax = Softmax(scale, soft_cap, blocks.lean)

    @bringing(wg)
    def _():
        side.bring_keys(k_ref, v_ref, k_smem, v_smem, k_full, v_full, k_free, v_free)

    @computing(wg)
    def _():
        turns = Turns(turn_barrier, wg, blocks.turns)
        single = blocks.buffers == 1

        def room(of, turn):
            """(buffer, its barrier) of the queries of warpgroup `of`. Where there is no room for two items, there are
            three buffers: one that a warpgroup's results have left is the next one of the other's."""
            if single:
                buffer = lax.rem(2 * turn + of, jnp.int32(3))
                return buffer, 3 * of + buffer
            buffer = of * blocks.buffers + lax.rem(turn, jnp.int32(blocks.buffers))
            return buffer, buffer

        def fetch(turn, item, of: jax.Array | int = wg):
            row, head, base = side.place(item, of)
            buffer, barrier = room(of, turn)
            here, full = pl.ds(base, own), own_full.at[barrier]
            plgpu.copy_gmem_to_smem(q_ref.at[row, here, head], qo_smem.at[buffer], full)
            plgpu.copy_gmem_to_smem(lower_ref.at[row, here], lower_smem.at[buffer], full)

        def work(turn, done, item, following):
            row, head, base = side.place(item)
            buffer, barrier = room(wg, turn)
            qo = qo_smem.at[buffer]
            plgpu.barrier_wait(own_full.at[barrier])
            lower = plgpu.load(lower_smem.at[buffer], layout=rows)
            last_lower = lower_smem[buffer, own - 1]
            sink = None if sinks_ref is None else sinks_ref[head].astype(jnp.float32) * LOG2E

            def fetch_following():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's results have left their buffer
                more = turn + 1 < side.items.rounds
                if single:
                    pl.when((wg == 0) & (turn > 0))(lambda: fetch(turn, item, 1))
                    pl.when((wg == 1) & (turn > 0) & more)(lambda: fetch(turn + 1, following, 0))
                else:
                    pl.when(more)(lambda: fetch(turn + 1, following))

            def key_of(slot):
                return k_smem.at[slot].transpose((1, 0))

            def step(i, before, meanwhile=lambda: None):
                acc, state = before
                slot = lax.rem(done + i, stages)
                plgpu.barrier_wait(k_full.at[slot])

                def issued():
                    meanwhile()
                    turns.swap()
                    plgpu.barrier_wait(v_full.at[slot])

                (scores,) = products((qo, key_of(slot)), shape=shape, issued=issued)
                plgpu.barrier_arrive(k_free.at[slot])
                weights, fade, state = softmax.step(
                    scores, state, lambda scores: side.masked(scores, item, i, lower, last_lower, MASKED)
                )
                acc = acc * rows_of(fade, acc.shape)
                narrow = weights.astype(v_ref.dtype)
                turns.swap()
                acc = add_product(acc, narrow, v_smem.at[slot], interpreted)
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, state

            start = filled((own, dim), 0.0, plgpu.Layout.WGMMA), softmax.start(own, rows)
            # The first step hides how the last item's results leave the buffer that the next queries go to. With three
            # buffers those may be the ones that the other warpgroup waits for: before this one waits for its turn.
            start = step(jnp.int32(0), start, fetch_following if single else lambda: None)
            if not single:
                fetch_following()
            acc, state = lax.fori_loop(1, item[4], step, start)
            # Padding saw nothing: what stands there is dropped.
            real = lower <= plgpu.broadcasted_iota(jnp.int32, (own,), 0, layout=rows) + base
            inverse, lse = softmax.end(state, sink)
            inverse, lse = jnp.where(real, inverse, 0.0), jnp.where(real, lse, 0.0)
            qo[...] = (acc * rows_of(inverse, (own, dim))).astype(q_ref.dtype)
            lse_smem.at[wg][...] = lse
            plgpu.commit_smem()
            here = pl.ds(base, own)
            plgpu.copy_smem_to_gmem(qo, out_ref.at[row, here, head])
            plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[row, head, here])
            return item[4]

        pl.when(side.items.rounds > 0)(lambda: fetch(jnp.int32(0), side.items.at(jnp.int32(0))))
        if single:
            pl.when((wg == 0) & (side.items.rounds > 1))(lambda: fetch(jnp.int32(1), side.items.at(jnp.int32(1))))
        turns.begin()
        side.items.each(work)
        turns.end()
        plgpu.wait_smem_to_gmem(0)
