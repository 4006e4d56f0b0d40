"""The forward of packed attention on Hopper for head dims up to 256, and the running softmax of all head dims."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas.attention.mosaic_parts import (
    LOG2E,
    MASKED,
    QuerySide,
    Turns,
    add_product,
    bringing,
    capped,
    computing,
    constant,
    products,
    rows_of,
)
from jaxtune.pallas.mosaic_modules import plgpu

# The initial running maximum of scores. It is so far above MASKED that a masked score's weight is exactly 0, whatever
# rounding a fused multiply-add leaves.
_UNSEEN = -1e20


class Softmax:
    """Running softmax in powers of two, in one warpgroup's registers, over blocks of keys (as in FlashAttention). Its
    state is (maximum so far, sum of weights), float32[own] each.

      lean: the maximum is of raw scores (of the tanh, with a cap), and the multiply-add that subtracts it applies the
        factor: fewer instructions. A factor that is not positive switches it off.
    """

    def __init__(self, scale, soft_cap, lean):
        self.scale, self.soft_cap = scale, soft_cap
        self.unit = (scale if soft_cap is None else soft_cap) * LOG2E
        self.lean = lean and self.unit > 0  # a negative factor would turn the maximum into the minimum

    def start(self, own_tokens, layout):
        """The state of `own_tokens` queries before the first block: a large negative but finite maximum, so that no
        difference is NaN, and 0.
        """
        return constant((own_tokens,), _UNSEEN if self.lean else MASKED, layout), constant((own_tokens,), 0.0, layout)

    def step(self, scores, state, mask):
        """Takes one block of raw scores float32[own, step]. Returns (weights, factor float32[own] for earlier blocks'
        sums, the new state). While a query has seen no key, masked keys may get weight 1 (not with `lean`); the factor
        is 0 once it sees one and removes their sums.

          mask: puts MASKED where a query does not see a key; it gets scores scaled and capped, or with `lean` unscaled.
          state: of `start`, or of the step before.
        """
        top, total = state
        if not self.lean:
            scores, _ = capped(scores, self.scale, self.soft_cap)
        elif self.soft_cap is not None:
            scores = jnp.tanh(scores * (self.scale / self.soft_cap))
        scores = mask(scores)
        new_top = jnp.maximum(top, scores.max(axis=1))
        if self.lean:
            fade = jnp.exp2((top - new_top) * self.unit)
            weights = jnp.exp2(scores * self.unit - rows_of(new_top * self.unit, scores.shape))
        else:
            fade = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - rows_of(new_top, scores.shape))
        return weights, fade, (new_top, total * fade + weights.sum(axis=1))

    def end(self, state, sink=None):
        """(factor of the output, log-sum-exp in the natural logarithm), float32[own] each; meaningless for a query that
        saw no key.

          sink: float32[] in units of log2, one more term of the sum; None: none.
        """
        top, total = state
        if self.lean:
            top = top * self.unit
        if sink is None:
            return 1.0 / total, (top + jnp.log2(total)) * (1.0 / LOG2E)
        new_top = jnp.maximum(top, sink)
        fade = jnp.exp2(top - new_top)
        total = total * fade + jnp.exp2(sink - new_top)
        return fade / total, (new_top + jnp.log2(total)) * (1.0 / LOG2E)


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
    swap_barrier,
    *,
    blocks,
    pairs,
    scale,
    soft_cap,
    interpreted,
):
    """Writes out and lse (natural logarithm), both 0 at padding, for head dims of 64, 128 and 256; each computing
    warpgroup has `blocks.own` queries of a head.

      q_ref, k_ref, v_ref, out_ref: [B, T, heads or kv_heads, D] in global memory. lse_ref: float32[B, heads, T].
      sinks_ref: float[heads] or None.
      lower_ref: int32[B, T], the first key that each query sees.
      table_ref: int32[tiles of queries, 4]: row, first query, first block of keys, blocks.
      qo_smem: [buffers, own, D], queries, and later results. lower_smem, lse_smem: bounds and lse of these queries.
      k_smem, v_smem: slots of blocks of keys and values.
      own_full, k_full, v_full: barriers: queries and bounds, or a slot's block, have arrived. With blocks.buffers = 1
      the
        warpgroups share three buffers: one each, and one for the queries loaded next.
      k_free, v_free: both warpgroups have read a slot. swap_barrier: of Turns.
      blocks: mosaic_parts.Blocks. pairs: the warpgroups take the same queries of two heads that share keys.
      scale: factor on scores. soft_cap: c of c tanh(s / c), or None.
    """
    wg = lax.axis_index("wg")
    side = QuerySide(q_ref, k_ref, table_ref, blocks, pairs, wg)
    own_tokens, stages, dim = blocks.own, jnp.int32(blocks.stages), q_ref.shape[-1]
    shape, rows = (own_tokens, blocks.step), plgpu.Layout.WGMMA.reduce(1)
    softmax = Softmax(scale, soft_cap, blocks.lean)

    @bringing(wg)
    def _():
        side.bring_keys(k_ref, v_ref, k_smem, v_smem, k_full, v_full, k_free, v_free)

    @computing(wg)
    def _():
        turns = Turns(swap_barrier, wg, blocks.turns)
        single = blocks.buffers == 1

        def buffer_of(warpgroup, turn):
            """(buffer, its barrier) of a warpgroup's queries; of three, results leave one for the other's next."""
            if single:
                buffer = lax.rem(2 * turn + warpgroup, jnp.int32(3))
                return buffer, 3 * warpgroup + buffer
            buffer = warpgroup * blocks.buffers + lax.rem(turn, jnp.int32(blocks.buffers))
            return buffer, buffer

        def fetch(turn, item, warpgroup: jax.Array | int = wg):
            row, head, base = side.queries_of(item, warpgroup)
            buffer, barrier = buffer_of(warpgroup, turn)
            token_slice, full = pl.ds(base, own_tokens), own_full.at[barrier]
            plgpu.copy_gmem_to_smem(q_ref.at[row, token_slice, head], qo_smem.at[buffer], full)
            plgpu.copy_gmem_to_smem(lower_ref.at[row, token_slice], lower_smem.at[buffer], full)

        def work(turn, steps_before, item, following):
            row, head, base = side.queries_of(item)
            buffer, barrier = buffer_of(wg, turn)
            qo = qo_smem.at[buffer]
            plgpu.barrier_wait(own_full.at[barrier])
            first_keys = plgpu.load(lower_smem.at[buffer], layout=rows)
            largest_first_key = lower_smem[buffer, own_tokens - 1]
            sink = None if sinks_ref is None else sinks_ref[head].astype(jnp.float32) * LOG2E

            def fetch_following():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's results have left their buffer
                has_next = turn + 1 < side.items.rounds
                if single:
                    pl.when((wg == 0) & (turn > 0))(lambda: fetch(turn, item, 1))
                    pl.when((wg == 1) & (turn > 0) & has_next)(lambda: fetch(turn + 1, following, 0))
                else:
                    pl.when(has_next)(lambda: fetch(turn + 1, following))

            def key_of(slot):
                return k_smem.at[slot].transpose((1, 0))

            def step(i, before, meanwhile=lambda: None):
                acc, state = before
                slot = lax.rem(steps_before + i, stages)
                plgpu.barrier_wait(k_full.at[slot])

                def issued():
                    meanwhile()
                    turns.swap()
                    plgpu.barrier_wait(v_full.at[slot])

                (scores,) = products((qo, key_of(slot)), shape=shape, issued=issued)
                plgpu.barrier_arrive(k_free.at[slot])
                weights, fade, state = softmax.step(
                    scores, state, lambda scores: side.masked(scores, item, i, first_keys, largest_first_key, MASKED)
                )
                acc = acc * rows_of(fade, acc.shape)
                weights16 = weights.astype(v_ref.dtype)
                turns.swap()
                acc = add_product(acc, weights16, v_smem.at[slot], interpreted)
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, state

            start = constant((own_tokens, dim), 0.0, plgpu.Layout.WGMMA), softmax.start(own_tokens, rows)
            # The first step hides how the last item's results leave the buffer that the next queries go to. With three
            # buffers those may be the ones that the other warpgroup waits for: before this one waits for its turn.
            start = step(jnp.int32(0), start, fetch_following if single else lambda: None)
            if not single:
                fetch_following()
            acc, state = lax.fori_loop(1, item[4], step, start)
            # Padding saw nothing: what stands there is dropped.
            real = first_keys <= plgpu.broadcasted_iota(jnp.int32, (own_tokens,), 0, layout=rows) + base
            inverse, lse = softmax.end(state, sink)
            inverse, lse = jnp.where(real, inverse, 0.0), jnp.where(real, lse, 0.0)
            qo[...] = (acc * rows_of(inverse, (own_tokens, dim))).astype(q_ref.dtype)
            lse_smem.at[wg][...] = lse
            plgpu.commit_smem()
            token_slice = pl.ds(base, own_tokens)
            plgpu.copy_smem_to_gmem(qo, out_ref.at[row, token_slice, head])
            plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[row, head, token_slice])
            return item[4]  # steps: blocks of keys

        pl.when(side.items.rounds > 0)(lambda: fetch(jnp.int32(0), side.items.item_at(jnp.int32(0))))
        if single:
            pl.when((wg == 0) & (side.items.rounds > 1))(lambda: fetch(jnp.int32(1), side.items.item_at(jnp.int32(1))))
        turns.begin()
        side.items.for_each(work)
        turns.end()
        plgpu.wait_smem_to_gmem(0)
