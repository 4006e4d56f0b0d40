"""Building blocks of the Mosaic GPU attention kernels.

A kernel runs one program on each multiprocessor: two warpgroups compute, one loads blocks. A program works through
items: tiles of queries of two heads (or two tiles of one head, if a key head has an odd number of query heads), or a
tile of keys of one key head. In each step the computing warpgroups process one block of the other side. The loading
warpgroup runs ahead across items, so that their starts and ends overlap with their neighbours' work: on packed rows an
item often has two to ten steps.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas.mosaic_modules import plgpu

LOG2E = math.log2(math.e)
MASKED = -1e30
WARPGROUPS = 2  # warpgroups that compute
# Registers of a thread that computes, and of one that loads. All three warpgroups start with an equal share of
# 65,536 / 128 = 512, in steps of 8: 168. Asking for more than there are would wait forever.
_REGISTERS = (240, 24)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel divides its work, and which variant runs: compile-time settings that decide speed, and of the result
    only the rounding.
    """

    own: int  # tokens whose results a computing warpgroup accumulates: queries in the forward and dq, keys in dk and dv
    step: int  # tokens of a block that a step visits: keys in the forward and dq, queries in dk and dv
    # slots in shared memory of each of the two operands that are loaded in blocks (but see value_stages): for blocks
    # of `step` tokens, or for heads of 512 for pieces or halves of them
    stages: int
    # True: the two warpgroups take turns on the tensor cores (Turns); False: each runs as fast as it can. The kernel
    # of dk and dv for heads of 256, and all for heads of 512, take no turns and ignore it.
    turns: bool
    # True: fewer instructions per score: a mask by one comparison and, in the forward, scaling and subtraction of the
    # maximum in one multiply-add; False: a mask by two comparisons, and scores that are scaled first
    lean: bool = False
    # how many items' own operands (such as queries) a warpgroup has room for in shared memory, in the forward and dq:
    # 2, so that the next item's are loaded ahead; 1 if 2 do not fit (the forward then has three for both warpgroups).
    # The kernels of dk and dv, and all for heads of 512, ignore it.
    buffers: int = 2
    # slots for the second of the two operands, if not `stages`: for the values in dq, and for heads of 512 (where it
    # must be given) in the forward too, and for dout in dk and dv; None, as in all other kernels: `stages`
    value_stages: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """{field: value} of the fields that have no default or differ from it, as tuning.py stores blocks."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}


def rows_of(value, shape):
    """Broadcasts one number per row (value, [rows] in registers) over the columns of `shape`."""
    return lax.broadcast_in_dim(value, shape, [0])


def constant(shape, value, layout):
    """`value` as a float32 tile of `shape` in registers of `layout`."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def ids(shape, axis, base):
    """`base` + index along `axis`, int32 in registers: the index in the row of each token of a tile from `base` on.

    shape, axis: of the tile, and its axis of tokens.
    """
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) + base


def capped(scores, scale, soft_cap):
    """(scores times `scale`, capped, in units of log2; derivative of the soft cap or None), float32 in registers.
    soft_cap: bounds scores by soft_cap * tanh(scores / soft_cap); None: no bound.
    scores: raw products of queries and keys.
    """
    if soft_cap is None:
        return scores * (scale * LOG2E), None
    capped = jnp.tanh(scores * (scale / soft_cap))
    return capped * (soft_cap * LOG2E), 1.0 - capped * capped


def products(*pairs, shape, issued):
    """left right of each pair (both in shared memory) on the tensor cores, float32 in registers.

    issued: called once all products are started, before the wait for them.
    """

    def compute(*accs):
        for acc, (left, right) in zip(accs, pairs, strict=True):
            plgpu.wgmma(acc, left, right)
        issued()
        return [acc[...] for acc in accs]

    return pl.run_scoped(compute, *(plgpu.ACC(shape, jnp.float32) for _ in pairs))


def add_product(total, left, right, interpreted):
    """total + left right on the tensor cores, in place; left is in registers, right in shared memory. Pallas'
    interpreter has neither run_state nor such a wgmma.

      total: float32 in registers.
    """
    if interpreted:
        return total + lax.dot(left, right[...], preferred_element_type=jnp.float32)

    def compute(acc):
        plgpu.wgmma(acc, left, right)

    return pl.run_state(compute)(plgpu.ACC.init(total))


class Turns:
    """Keeps the computing warpgroups half a step apart: one uses the tensor cores while the other computes its softmax
    (FlashAttention-3's ping-pong, arXiv 2407.08608). Each calls `begin` before its first step, `swap` twice in every
    step, `end` after its last; both must make equally many steps.
    """

    def __init__(self, barrier, wg, enabled: bool):
        self.barrier, self.wg, self.enabled = barrier, wg, enabled

    def swap(self):
        """Passes the tensor cores to the other warpgroup and waits until it passes them back."""
        if self.enabled:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)

    def begin(self):
        pl.when(self.wg == 1)(self.swap)

    def end(self):
        """Makes warpgroup 0 swap once more, as `begin` did for warpgroup 1, which would otherwise wait forever in its
        last swap.
        """
        pl.when(self.wg == 0)(self.swap)


def within_range(shape, axis, base, first, count):
    """bool of `shape`: whether base + index along `axis` is in first .. first + count - 1, by one unsigned comparison.

    first, count: int32 in registers, a number for each index of the other axis; count is at least 0.
    base: int32[], the index of the tile's first token along `axis`.
    """
    offset = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
    offset = offset - lax.broadcast_in_dim(first - base, shape, [1 - axis])
    count = lax.broadcast_in_dim(count, shape, [1 - axis])
    return offset.astype(jnp.uint32) < count.astype(jnp.uint32)


class Items:
    """Deals a kernel's work to its programs: a line of the work table is `heads` items. Every warpgroup makes its own
    and goes through the same `rounds` items. Lines fall in cost and are dealt back and forth, program 0 to n - 1, then
    n - 1 to 0.

      heads: query heads, pairs of them, or key heads; twice as many where an item is half of an output.
    """

    def __init__(self, table_ref, heads: int):
        self.table_ref, self.heads = table_ref, heads
        self.programs, self.me = lax.axis_size("programs"), lax.axis_index("programs")
        total = table_ref.shape[0] * heads
        full_rounds = total // self.programs
        self.rounds = full_rounds + (self._number(jnp.int32(full_rounds)) < total).astype(jnp.int32)

    def _number(self, turn):
        """Number (line * heads + head) of this program's item in a turn; it may be past the last."""
        forth = lax.rem(turn, jnp.int32(2)) == 0
        return turn * self.programs + jnp.where(forth, self.me, self.programs - 1 - self.me)

    def item_at(self, turn):
        """An item of this program: [head number, columns of its line...], int32[] each. Past the last it is some valid
        item, so that the next one can be read early without a condition.
        """
        number = jnp.minimum(self._number(turn), self.table_ref.shape[0] * self.heads - 1)
        line = lax.div(number, jnp.int32(self.heads))
        columns = [self.table_ref[line, column] for column in range(self.table_ref.shape[1])]
        return [lax.rem(number, jnp.int32(self.heads)), *columns]

    def for_each(self, work):
        """Calls work(turn, steps_before, item, following) for every item in order, and returns the steps of all,
        int32[].

          work: returns its steps. Slots follow from `steps_before`; `following` is the next item.
        """

        def run_item(turn, state):
            steps_before, item = state
            following = self.item_at(turn + 1)
            return steps_before + work(turn, steps_before, item, following), following

        return lax.fori_loop(0, self.rounds, run_item, (jnp.int32(0), self.item_at(jnp.int32(0))))[0]


def computing(wg, number: int | None = None):
    """Decorator: runs a function at once in the computing warpgroups (or in warpgroup `number`), with 240 registers a
    thread. It waits forever unless `bringing` frees them.
    """

    def decorate(body):
        @pl.when(wg < WARPGROUPS if number is None else wg == number)
        def _():
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            body()

    return decorate


def bringing(wg):
    """Decorator: runs a function at once in the loading warpgroup, with 24 registers a thread."""

    def decorate(body):
        @pl.when(wg == WARPGROUPS)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            body()

    return decorate


def bring(number, copies):
    """Starts the TMA copies of step `number` (int32[]; it counts steps of all items, or pieces, from 0) into slot
    number % slots, once that slot is free.

      copies: (source in global memory, slots, barriers `full`, barriers `free`) for each copy.
    """
    for source, target, full, free in copies:
        stages = jnp.int32(target.shape[0])
        slot = lax.rem(number, stages)
        pl.when(number >= stages)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))
        plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])


def drain(step_count, *rings):
    """Waits until everything loaded was read, as a barrier must not end with an arrival that nobody waited for.

    rings: (slots, their `free` barriers) each.
    """
    for target, free in rings:
        for slot in range(target.shape[0]):
            pl.when(slot < step_count)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))


class QuerySide:
    """Work of the kernels whose items are tiles of queries (forward and dq). Every warpgroup makes its own. An `item`
    is [head number, row, first query, first block of keys, number of blocks], int32[] each.

      q_ref, k_ref: only shapes are read.
      shared: both warpgroups take the same queries of one head (dq of heads of 512); `pairs` then has no effect.
      column_sections: items into which a tile's result is divided by columns: 2 in the forward for heads of 512, else
        1.
    """

    def __init__(self, q_ref, k_ref, table_ref, blocks: Blocks, pairs: bool, wg, *, shared=False, column_sections=1):
        heads, self.length = q_ref.shape[2], q_ref.shape[1]
        self.blocks, self.pairs, self.wg, self.shared, self.column_sections = (
            blocks,
            pairs and not shared,
            wg,
            shared,
            column_sections,
        )
        self.group = heads // k_ref.shape[2]
        self.items = Items(table_ref, column_sections * (heads // WARPGROUPS if self.pairs else heads))

    def column_section(self, item):
        """Which of the `column_sections` column ranges the item computes, int32[]."""
        return lax.rem(item[0], jnp.int32(self.column_sections))

    def queries_of(self, item, wg=None):
        """(row of the batch, query head, first query): the `blocks.own` queries of an item that warpgroup `wg` computes
        (None: the calling one).
        """
        own_tokens, wg = self.blocks.own, self.wg if wg is None else wg
        if self.shared:
            return item[1], self._head(item), pl.multiple_of(item[2], own_tokens)
        if self.pairs:
            return item[1], self._head(item) * WARPGROUPS + wg, pl.multiple_of(item[2], own_tokens)
        first = item[2] + wg * own_tokens
        if self.length % (WARPGROUPS * own_tokens):
            # The row's last tile may have queries for one warpgroup only; the other repeats its work, bit for bit.
            first = jnp.minimum(first, self.length - own_tokens)
        return item[1], self._head(item), pl.multiple_of(first, own_tokens)

    def _head(self, item):
        """Query head of an item, or its pair of heads if `pairs`."""
        return item[0] if self.column_sections == 1 else lax.div(item[0], jnp.int32(self.column_sections))

    def keys(self, item, i):
        """(row, slice of tokens, key head) of the block of keys that step i of an item takes."""
        head = self._head(item) * WARPGROUPS if self.pairs else self._head(item)
        first = (item[3] + i) * self.blocks.step
        return item[1], pl.ds(first, self.blocks.step), lax.div(head, jnp.int32(self.group))

    def masked(self, values, item, i, first_keys, largest_first_key, fill):
        """`values` float32[own, step] with `fill` where a query does not see a key; no mask is computed if no bound
        crosses the block.

          first_keys: int32[own] in registers, the first key that each query sees; largest_first_key: the last query's.
          i: int32[], the step of the item, one block of keys.
          item: [head number, row, first query, first block of keys, number of blocks], int32[] each.
        """
        base, keys, shape = self.queries_of(item)[2], (item[3] + i) * self.blocks.step, values.shape

        def mask(values):
            if self.blocks.lean:
                query_ids = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1)) + base
                visible = within_range(shape, 1, keys, first_keys, query_ids + 1 - first_keys)
            else:
                key_ids = ids(shape, 1, keys)
                visible = (key_ids <= ids(shape, 0, base)) & (key_ids >= rows_of(first_keys, shape))
            return jnp.where(visible, values, fill)

        crossed = (keys + self.blocks.step > base + 1) | (keys < largest_first_key)
        return lax.cond(crossed, mask, lambda values: values, values)

    def bring_keys(self, k_ref, v_ref, k_smem, v_smem, k_full, v_full, k_free, v_free):
        """The loading warpgroup's work for head dims up to 256: copies keys and values of all steps of all items, as
        far ahead as slots allow.

          k_smem, v_smem: rings of slots. k_full, k_free, v_full, v_free: their barriers, one for each slot.
          k_ref, v_ref: [B, T, kv_heads, D] in global memory.
        """

        def work(turn, steps_before, item, following):
            def step(i, _):
                block_index = self.keys(item, i)
                copies = (
                    (k_ref.at[block_index], k_smem, k_full, k_free),
                    (v_ref.at[block_index], v_smem, v_full, v_free),
                )
                bring(steps_before + i, copies)
                return ()

            lax.fori_loop(0, item[4], step, ())
            return item[4]  # steps: blocks of keys

        drain(self.items.for_each(work), (k_smem, k_free), (v_smem, v_free))
