"""dk and dv for head dim 256, whose gradients do not fit one warpgroup's registers: either of 64 keys takes 128 of
every thread. Both warpgroups have the same 64 keys: the first computes weights and dv, the second dweights and dk, two
products a step each. The weights (times the soft cap's slope) go to the second through shared memory, in fp32 and two
slots. The first is up to two steps ahead, and its exponentials overlap with the other's products.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas.attention.mosaic_backward import bring_queries, masked_keys
from jaxtune.pallas.attention.mosaic_parts import (
    Items,
    add_product,
    bringing,
    capped,
    computing,
    constant,
    products,
)
from jaxtune.pallas.mosaic_modules import plgpu


def wide_key_kernel(
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
    weights_smem,
    q_smem,
    do_smem,
    stat_delta_smem,
    key_full,
    value_full,
    q_full,
    do_full,
    q_free,
    do_free,
    weights_full,
    weights_free,
    *,
    blocks,
    scale,
    soft_cap,
    interpreted,
):
    """Writes dk and dv of tiles of keys for heads of 256, visiting the query blocks that see a tile for every query
    head in turn.

      q_ref, k_ref, v_ref, do_ref, dk_ref, dv_ref: [B, T, heads or kv_heads, 256]; do: gradient of out. Global memory.
      stat_ref, delta_ref: float32[B, heads, T], log-sum-exp in log2; sum of out * dout, times scale.
      upper_ref: int32[B, T], the query after the last that sees each key.
      table_ref: int32[tiles of keys, 4]: row, first key, first block of queries, blocks.
      k_smem, v_smem: an item's keys, later its dv; its values, later its dk. upper_smem: its bounds.
      weights_smem: float32[2, keys, queries], what the first warpgroup passes to the second.
      q_smem, do_smem: slots of blocks of queries. stat_delta_smem: float32[2 slots, step], stat, then delta.
      key_full: barrier: keys and bounds have arrived; value_full: values have.
      q_full, do_full, weights_full: barriers: a slot is filled. q_free, do_free, weights_free: it was read.
      blocks: mosaic_parts.Blocks. scale: factor on scores. soft_cap: c of c tanh(s / c), or None.
    """
    wg = lax.axis_index("wg")
    group = q_ref.shape[2] // k_ref.shape[2]
    items = Items(table_ref, k_ref.shape[2])
    own_tokens, width, stages, dim = blocks.own, blocks.step, jnp.int32(blocks.stages), q_ref.shape[-1]
    weight_slots = jnp.int32(weights_smem.shape[0])
    shape = (own_tokens, width)
    rows, columns = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    @bringing(wg)
    def _():
        operands, slots = (q_ref, do_ref, stat_ref, delta_ref), (q_smem, do_smem, stat_delta_smem)
        bring_queries(items, group, width, operands, slots, (q_full, do_full), (q_free, do_free))

    def keys_of(item):
        kv_head, row, start = item[:3]
        return row, pl.ds(pl.multiple_of(start, own_tokens), own_tokens), kv_head

    @computing(wg, 0)
    def _():
        def work(turn, steps_before, item, following):
            row, token_slice, kv_head = keys_of(item)
            base, first, count = item[2], item[3], item[4]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's dv has left the buffer
            plgpu.copy_gmem_to_smem(k_ref.at[row, token_slice, kv_head], k_smem, key_full)
            plgpu.copy_gmem_to_smem(upper_ref.at[row, token_slice], upper_smem, key_full)
            plgpu.barrier_wait(key_full)
            upper = plgpu.load(upper_smem, layout=rows)
            first_upper = upper_smem[0]

            def step(i, dv):
                number = steps_before + i
                slot, weight_slot = lax.rem(number, stages), lax.rem(number, weight_slots)
                queries = (first + lax.rem(i, count)) * width
                plgpu.barrier_wait(q_full.at[slot])
                (scores,) = products((k_smem, q_smem.at[slot].transpose((1, 0))), shape=shape, issued=lambda: None)
                masked = functools.partial(masked_keys, base=base, upper=upper, queries=queries, lean=blocks.lean)
                crossed = (queries < base + own_tokens - 1) | (queries + width > first_upper)
                scores, slope = capped(scores, scale, soft_cap)
                stat = plgpu.load(stat_delta_smem.at[slot], layout=columns)
                plgpu.barrier_arrive(q_free.at[slot])
                weights = jnp.exp2(scores - lax.broadcast_in_dim(stat, shape, [1]))
                weights = lax.cond(crossed, masked, lambda weights: weights, weights)
                pl.when(number >= weight_slots)(lambda: plgpu.barrier_wait(weights_free.at[weight_slot]))
                weights_smem.at[weight_slot][...] = weights if slope is None else weights * slope
                weights16 = weights.astype(v_ref.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(weights_full.at[weight_slot])
                plgpu.barrier_wait(do_full.at[slot])
                dv = add_product(dv, weights16, do_smem.at[slot], interpreted)
                plgpu.barrier_arrive(do_free.at[slot])
                return dv

            dv = lax.fori_loop(0, count * group, step, constant((own_tokens, dim), 0.0, plgpu.Layout.WGMMA))
            k_smem[...] = dv.astype(v_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_smem, dv_ref.at[row, token_slice, kv_head])
            return count * group

        total_steps = items.for_each(work)
        plgpu.wait_smem_to_gmem(0)
        for weight_slot in range(weights_smem.shape[0]):
            pl.when(weight_slot < total_steps)(
                lambda weight_slot=weight_slot: plgpu.barrier_wait(weights_free.at[weight_slot])
            )

    @computing(wg, 1)
    def _():
        def work(turn, steps_before, item, following):
            row, token_slice, kv_head = keys_of(item)
            steps = item[4] * group  # blocks of queries, for each query head
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's dk has left the buffer
            plgpu.copy_gmem_to_smem(v_ref.at[row, token_slice, kv_head], v_smem, value_full)
            plgpu.barrier_wait(value_full)

            def step(i, dk):
                number = steps_before + i
                slot, weight_slot = lax.rem(number, stages), lax.rem(number, weight_slots)
                plgpu.barrier_wait(do_full.at[slot])
                (dweights,) = products((v_smem, do_smem.at[slot].transpose((1, 0))), shape=shape, issued=lambda: None)
                delta = plgpu.load(stat_delta_smem.at[stages + slot], layout=columns)
                plgpu.barrier_arrive(do_free.at[slot])
                dscores = dweights * scale - lax.broadcast_in_dim(delta, shape, [1])
                plgpu.barrier_wait(weights_full.at[weight_slot])
                dscores = dscores * plgpu.load(weights_smem.at[weight_slot], layout=plgpu.Layout.WGMMA)
                dscores16 = dscores.astype(k_ref.dtype)
                plgpu.barrier_arrive(weights_free.at[weight_slot])
                plgpu.barrier_wait(q_full.at[slot])
                dk = add_product(dk, dscores16, q_smem.at[slot], interpreted)
                plgpu.barrier_arrive(q_free.at[slot])
                return dk

            dk = lax.fori_loop(0, steps, step, constant((own_tokens, dim), 0.0, plgpu.Layout.WGMMA))
            v_smem[...] = dk.astype(k_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(v_smem, dk_ref.at[row, token_slice, kv_head])
            return steps

        items.for_each(work)
        plgpu.wait_smem_to_gmem(0)
