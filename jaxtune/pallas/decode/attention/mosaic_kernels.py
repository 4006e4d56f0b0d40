"""Bodies of the two Mosaic kernels of decode attention."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas.attention.mosaic_parts import add_product, capped, constant, ids, rows_of
from jaxtune.pallas.decode.attention import mosaic_lanes
from jaxtune.pallas.decode.attention.mosaic_lanes import TILE
from jaxtune.pallas.decode.attention.splits import MASKED
from jaxtune.pallas.mosaic_modules import plgpu

LINE = 128  # numbers of a partial result that take one register of each thread of the combining kernel
AHEAD = 4  # how many partial results the combining kernel reads at a time
MOST_HEADS = 8  # the most heads of a program of the combining kernel


def split_kernel(
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    count_ref,
    out_ref,
    lse_ref,
    k_smem,
    v_smem,
    k_full,
    v_full,
    *,
    blocks,
    scale,
    soft_cap,
    interpreted,
):
    """Attention of the query heads of one KV head over one split of the keys at a time.

    Of n workers, each a warpgroup, one takes every n-th item, one KV head of one line of the table, and copies its next
    tiles, also of later items. Splits without tiles get no results.

      q_ref: [B, kv_heads, padded heads, D]; k_ref, v_ref: the caches [B, kv_heads, capacity, D].
      table_ref: int32[lines, 6] of mosaic.work_of; count_ref: int32[1], lines that have tiles.
      out_ref, lse_ref: float32[B, kv_heads, splits, heads, D], normalised by the split's own sum of weights, and
        without D, in log2.
      k_smem, v_smem: slots [workers * stages, step, D], each with a barrier of k_full, v_full.
    """
    wg, program = lax.axis_index("wg"), lax.axis_index("program")
    kv_heads, capacity, heads, dim = *k_ref.shape[1:3], *q_ref.shape[2:]
    step, stages, splits = blocks.step, jnp.int32(blocks.stages), out_ref.shape[2]
    workers = lax.axis_size("program") * blocks.workers
    worker = wg * lax.axis_size("program") + program
    items = count_ref[0] * kv_heads
    rounds = jnp.maximum(lax.div(items - worker + (workers - 1), jnp.int32(workers)), 0)
    layout = plgpu.Layout.WGMMA.reduce(1)

    def item_of(turn):
        """[KV head, columns of the table...]; past the last item, of some valid one."""
        number = jnp.minimum(worker + turn * workers, table_ref.shape[0] * kv_heads - 1)
        line = lax.div(number, jnp.int32(kv_heads))
        return [lax.rem(number, jnp.int32(kv_heads)), *(table_ref[line, column] for column in range(6))]

    # The cursor of copies: turn of the item whose tile is copied next, that tile, the item, and the item after it.
    def fetch(source, target, full, cursor, slot):
        turn, tile, (head, row, _document, first, *_rest), _following = cursor

        @pl.when(turn < rounds)
        def _():
            token_slice = pl.ds(pl.multiple_of((first + tile) * step, step), step)
            plgpu.copy_gmem_to_smem(source.at[row, head, token_slice], target.at[slot], full.at[slot])

    def advance(cursor):
        turn, tile, item, following = cursor

        def to_the_next():
            return turn + 1, jnp.int32(0), following, item_of(turn + 2)

        return lax.cond(tile + 1 == item[4], to_the_next, lambda: (turn, tile + 1, item, following))

    def slot_of(number):
        return wg * stages + lax.rem(number, stages)

    def query_of(item):
        head, row, *_ = item
        if interpreted:
            return jnp.pad(q_ref[row, head], ((0, TILE - heads), (0, 0)))
        return mosaic_lanes.load_rows(q_ref, row * kv_heads + head, (heads, dim))

    def store(item, out, lse):
        """Writes an item's out [TILE, dim] and lse [TILE]; the first `heads` rows count."""
        head, row, split, *_ = item
        if interpreted:
            out_ref[row, head, split], lse_ref[row, head, split] = out[:heads], lse[:heads]
        else:
            chunk = (row * kv_heads + head) * splits + split
            mosaic_lanes.store_rows(out, lse, out_ref, lse_ref, chunk, heads)

    def attend(turn, state):
        steps_before, cursor, item = state
        _, _, _, first, tiles, newest, visible_tokens = item
        query = query_of(item)

        def attend_tile(i, state):
            cursor, acc, top, total = state
            slot = slot_of(steps_before + i)
            plgpu.barrier_wait(k_full.at[slot])
            scores = product(query, k_smem.at[slot].transpose((1, 0)), (TILE, step), interpreted)
            fetch(k_ref, k_smem, k_full, cursor, slot)
            scores, _ = capped(scores, scale, soft_cap)
            age = newest - ids(scores.shape, 1, (first + i) * step)
            age = jnp.where(age < 0, age + capacity, age)
            scores = jnp.where(age < visible_tokens, scores, MASKED)
            new_top = jnp.maximum(top, scores.max(axis=1))
            fade = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - rows_of(new_top, scores.shape))
            total = total * fade + weights.sum(axis=1)
            acc = acc * rows_of(fade, acc.shape)
            plgpu.barrier_wait(v_full.at[slot])
            acc = add_product(acc, weights.astype(v_ref.dtype), v_smem.at[slot], interpreted)
            fetch(v_ref, v_smem, v_full, cursor, slot)
            return advance(cursor), acc, new_top, total

        begin = (
            cursor,
            constant((TILE, dim), 0.0, plgpu.Layout.WGMMA),
            constant((TILE,), MASKED, layout),
            constant((TILE,), 0.0, layout),
        )
        cursor, acc, top, total = lax.fori_loop(0, tiles, attend_tile, begin)
        store(item, acc * rows_of(1.0 / total, acc.shape), top + jnp.log2(total))
        return steps_before + tiles, cursor, item_of(turn + 1)

    first_item = item_of(jnp.int32(0))
    cursor = (jnp.int32(0), jnp.int32(0), first_item, item_of(jnp.int32(1)))
    for number in range(blocks.stages):
        fetch(k_ref, k_smem, k_full, cursor, slot_of(jnp.int32(number)))
        fetch(v_ref, v_smem, v_full, cursor, slot_of(jnp.int32(number)))
        cursor = advance(cursor)
    lax.fori_loop(0, rounds, attend, (jnp.int32(0), cursor, first_item))


def product(left, right, shape, interpreted):
    """left @ right on the tensor cores, float32[m, n] in registers.

    left: [m = 64, k] of 16 bits in registers; right: [k, n] in shared memory.
    """
    if interpreted:
        return lax.dot(left, right[...], preferred_element_type=jnp.float32)

    def compute(acc):
        plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))


def combine_kernel(part_ref, lse_ref, order_ref, count_ref, sinks_ref, out_ref, *, heads, dim):
    """Combines a row's splits in ascending order, adds the sinks, and divides by the sum of weights; 0 for a row
    without keys.

      part_ref: float32[B, kv_heads, splits, lines, LINE]; lse_ref: float32[B, kv_heads, splits, padded heads], in log2.
      order_ref, count_ref: of splits.order_of.
      sinks_ref: float32[kv_heads, padded heads], in log2; MASKED: none.
      out_ref: [B, kv_heads, lines, LINE]; heads of whole programs, some perhaps padding.
    """
    row, head, head_block = (lax.axis_index(name) for name in ("row", "kv_head", "part"))
    count, lines, vector = count_ref[row], -(-heads * dim // LINE), plgpu.Layout.WG_STRIDED((LINE,), 1)

    def over_line(line, numbers):
        """A vector with its head's number at each position of the line."""
        first, last = (min(position // dim, heads - 1) for position in (line * LINE, (line + 1) * LINE - 1))
        line_numbers = constant((LINE,), numbers[first], vector)
        for member in range(first + 1, last + 1):
            position = plgpu.broadcasted_iota(jnp.int32, (LINE,), 0, layout=vector)
            line_numbers = jnp.where(
                position >= member * dim - line * LINE, constant((LINE,), numbers[member], vector), line_numbers
            )
        return line_numbers

    def partial(split, line):
        return plgpu.load(part_ref.at[row, head, split, head_block * lines + line], layout=vector, optimized=False)

    def add(number, state):
        accs, tops, totals = state
        splits = [order_ref[row, jnp.minimum(number * AHEAD + i, count - 1)] for i in range(AHEAD)]
        partials = [[partial(split, line) for line in range(lines)] for split in splits]
        lses = [[lse_ref[row, head, split, head_block * heads + i] for i in range(heads)] for split in splits]
        for ahead in range(AHEAD):
            live = number * AHEAD + ahead < count
            new_tops, fades, weights = [], [], []
            for top, lse in zip(tops, lses[ahead], strict=True):
                new_top = jnp.where(live, jnp.maximum(top, lse), top)
                new_tops.append(new_top)
                fades.append(jnp.exp2(top - new_top))
                weights.append(jnp.where(live, jnp.exp2(lse - new_top), 0.0))
            totals = [total * fade + weight for total, fade, weight in zip(totals, fades, weights, strict=True)]
            accs = [
                acc * over_line(line, fades) + partials[ahead][line] * over_line(line, weights)
                for line, acc in enumerate(accs)
            ]
            tops = new_tops
        return accs, tops, totals

    sinks = [sinks_ref[head, head_block * heads + i] for i in range(heads)]
    begin = (
        [constant((LINE,), 0.0, vector) for _ in range(lines)],
        sinks,
        [jnp.where(sink > MASKED, 1.0, 0.0) for sink in sinks],
    )
    accs, _, totals = lax.fori_loop(0, lax.div(count + (AHEAD - 1), jnp.int32(AHEAD)), add, begin)
    inverse = [1.0 / jnp.maximum(total, 1e-30) for total in totals]
    for line, acc in enumerate(accs):
        out_ref[row, head, head_block * lines + line] = (acc * over_line(line, inverse)).astype(out_ref.dtype)
