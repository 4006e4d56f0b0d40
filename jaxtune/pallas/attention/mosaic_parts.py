"""What the Mosaic GPU attention kernels share; mosaic.py describes and calls them.

A kernel runs one program on each multiprocessor, with two warpgroups that compute and one that loads blocks. A program
works through a list of items. An item is a tile of queries of two heads (or, without grouped heads, two tiles of one
head), or a tile of keys of one key head. An item's own side (queries and their gradient, or keys and values) is
double-buffered, and the loading warpgroup runs ahead across items, so that the start and end of an item overlap with
its neighbours' work. On packed rows an item has two to ten steps, and start and end cost as much as the steps.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import mosaic_types

LOG2E = math.log2(math.e)
MASKED = -1e30
WARPGROUPS = 2  # warpgroups that compute
# Registers of a thread that computes, and of one that loads. All three warpgroups start with an equal share of
# 65,536 / 128 = 512, in steps of 8: 168. Asking for more than there are would wait forever.
_REGISTERS = (240, 24)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How one of the kernels divides its work, and which of its variants runs. Measured ones come from tuning.py,
    others from mosaic.HEURISTIC."""

    own: int  # rows of a warpgroup's own side
    step: int  # rows of the other side that are taken at a time
    stages: int  # blocks of `step` rows that are being loaded at a time
    turns: bool  # whether the two warpgroups take turns on the tensor cores (Turns)
    # fewer instructions per score: a mask by one comparison and, in the forward, scaling and subtraction of the maximum
    # in one multiply-add
    lean: bool = False
    # for an item's own side, in the forward and dq; 1 if shared memory has no room for 2 (the forward then has three
    # for both warpgroups)
    buffers: int = 2
    # `stages` of the values in dq, which are freed before the keys; None: the same as for keys
    value_stages: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """{field: value} of the fields that differ from their defaults, as tuning.py stores blocks."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}


def smem(shape, dtype):
    """Swizzled shared memory of this shape and 16- or 32-bit dtype, which tensor cores and TMA can read, and warpgroups
    can access without bank conflicts."""
    return plgpu.SMEM(shape, dtype, transforms=mosaic_types.tiled(dtype))


def rows_of(value, shape):
    """One number per row (value, [rows] in registers), broadcast over the columns to `shape`, (rows, columns)."""
    return lax.broadcast_in_dim(value, shape, [0])


def filled(shape, value, layout):
    """A float32 array of this shape in registers with one value everywhere; layout: how its numbers are spread over a
    warpgroup's threads (plgpu.Layout)."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def ids(shape, axis, base):
    """`base` + the index along an axis, as int32 of this shape in registers (Layout.WGMMA): the positions of tokens."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) + base


def capped(scores, scale, soft_cap):
    """(scores in units of log2, for exp2; the derivative of the soft cap, or None without one), float32 in registers
    in the shape of `scores`, the raw products of queries and keys.

    Args:
      scores: float32 in registers.
      scale: the factor on scores.
      soft_cap: scores are limited to soft_cap * tanh(scores / soft_cap); None: they are not.
    """
    if soft_cap is None:
        return scores * (scale * LOG2E), None
    capped = jnp.tanh(scores * (scale / soft_cap))
    return capped * (soft_cap * LOG2E), 1.0 - capped * capped


def products(*pairs, shape, issued):
    """Multiplies each pair (left, right) on the tensor cores (wgmma) into a new float32 accumulator of `shape`, and
    returns them in registers. `issued`, a function without arguments, runs while the tensor cores compute. The calling
    warpgroup computes them; left and right are in shared memory."""

    def compute(*accs):
        for acc, (left, right) in zip(accs, pairs, strict=True):
            plgpu.wgmma(acc, left, right)
        issued()
        return [acc[...] for acc in accs]

    return pl.run_scoped(compute, *(plgpu.ACC(shape, jnp.float32) for _ in pairs))


def add_product(total, left, right, interpreted):
    """total + left right on the tensor cores, float32 in registers, accumulated in place; left is in registers, right
    in shared memory. interpreted: whether Pallas' interpreter runs it, which has neither run_state nor wgmma with a
    left side in registers, so the product is computed in jnp."""
    if interpreted:
        return total + lax.dot(left, right[...], preferred_element_type=jnp.float32)

    def compute(acc):
        plgpu.wgmma(acc, left, right)

    return pl.run_state(compute)(plgpu.ACC.init(total))


class Turns:
    """Keeps the two computing warpgroups half a step apart: while one uses the tensor cores, the other computes its
    softmax (the ping-pong schedule of FlashAttention-3, arXiv 2407.08608). Every step swaps twice, in both warpgroups,
    which must make the same number of steps.

    Args:
      barrier: at which both warpgroups arrive and wait.
      wg: the warpgroup, 0 or 1.
      wanted: whether they take turns at all; otherwise all methods do nothing.
    """

    def __init__(self, barrier, wg, wanted: bool):
        self.barrier, self.wg, self.wanted = barrier, wg, wanted

    def swap(self):
        """Hands the tensor cores to the other warpgroup and waits for its own turn."""
        if self.wanted:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)

    def begin(self):
        """Makes the second warpgroup start half a step later."""
        pl.when(self.wg == 1)(self.swap)

    def end(self):
        """Makes the first warpgroup swap once more after the last step. `begin` made the second one swap once more
        before the first step, so that both have arrived at the barrier equally often; without this the second one would
        wait forever in its last swap."""
        pl.when(self.wg == 0)(self.swap)


def within(shape, axis, base, first, count):
    """bool of this shape: whether base + the index along `axis` is one of the `count` numbers from `first` on; count
    and first, int32 in registers, have one value for each index of the other axis. On unsigned numbers one comparison
    is enough (Blocks.lean)."""
    offset = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
    offset = offset - lax.broadcast_in_dim(first - base, shape, [1 - axis])
    count = lax.broadcast_in_dim(count, shape, [1 - axis])
    return offset.astype(jnp.uint32) < count.astype(jnp.uint32)


class Items:
    """Deals the work of a kernel to its programs: each line of the work table (mosaic._table), a tile of a row, is
    `heads` items, one for each head or pair of heads.

    Lines are sorted by falling cost and dealt back and forth, program 0 to n - 1, then n - 1 to 0, so that every
    program gets about the same amount of work. `rounds` is the number of this program's items, int32[].

    Args:
      table_ref: int32[lines, columns], in global memory.
      heads: items of a line: query heads, pairs of them, or key heads.
    """

    def __init__(self, table_ref, heads: int):
        self.table_ref, self.heads = table_ref, heads
        self.programs, self.me = lax.axis_size("programs"), lax.axis_index("programs")
        total = table_ref.shape[0] * heads
        whole = total // self.programs
        self.rounds = whole + (self._number(jnp.int32(whole)) < total).astype(jnp.int32)

    def _number(self, turn):
        """The number, int32[], that this program's item in a turn has among all items (line * heads + head), which may
        be past the last. A turn, int32[], counts the items of one program from 0."""
        forth = lax.rem(turn, jnp.int32(2)) == 0
        return turn * self.programs + jnp.where(forth, self.me, self.programs - 1 - self.me)

    def at(self, turn):
        """[head number, the line's columns...] of this program's item in a turn (int32[]), all int32[]; past the last
        item, any item, so that the next one can be read early."""
        number = jnp.minimum(self._number(turn), self.table_ref.shape[0] * self.heads - 1)
        line = lax.div(number, jnp.int32(self.heads))
        columns = [self.table_ref[line, column] for column in range(self.table_ref.shape[1])]
        return [lax.rem(number, jnp.int32(self.heads)), *columns]

    def each(self, work):
        """Calls work(turn, done, item, following) for every item of this program, and returns the number of steps of
        all items, int32[]. Every warpgroup of the program goes through all items.

        Args:
          work: a function that returns the number of steps that it made. `turn` counts the items, `done` is the number
            of steps made before this item, from which slots of the pipeline follow; `item` is this item and `following`
            the next, read early, both as `at` returns them.
        """

        def one(turn, state):
            done, item = state
            following = self.at(turn + 1)
            return done + work(turn, done, item, following), following

        return lax.fori_loop(0, self.rounds, one, (jnp.int32(0), self.at(jnp.int32(0))))[0]


def computing(wg, number: int | None = None):
    """Returns a decorator that runs a function without arguments in the computing warpgroups, or in warpgroup `number`
    alone, with more registers. wg is the warpgroup that runs this code."""

    def decorate(body):
        @pl.when(wg < WARPGROUPS if number is None else wg == number)
        def _():
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            body()

    return decorate


def bringing(wg):
    """Returns a decorator that runs a function without arguments in the warpgroup that loads blocks, with fewer
    registers. wg is the warpgroup that runs this code."""

    def decorate(body):
        @pl.when(wg == WARPGROUPS)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            body()

    return decorate


def bring(number, copies):
    """Starts the TMA copies of step `number` (int32[]) into their slots of the pipeline, each after the slot's previous
    content was used. The loading warpgroup calls it.

    copies: (source in global memory, its slots in shared memory, the slots' barriers `full`, which complete when a copy
    has arrived, and `free`, at which the computing warpgroups arrive after their last read).
    """
    for source, target, full, free in copies:
        stages = jnp.int32(target.shape[0])
        slot = lax.rem(number, stages)
        pl.when(number >= stages)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))
        plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])


def drain(done, *rings):
    """Waits until everything that was loaded has been used, because a barrier must not end with an arrival that was not
    waited for. The loading warpgroup calls it at its end; `done` is the number of all steps (int32[]), and a ring is
    (slots in shared memory, their `free` barrier)."""
    for target, free in rings:
        for slot in range(target.shape[0]):
            pl.when(slot < done)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))


class QuerySide:
    """What the forward and dq share, whose items are tiles of queries: where an item's queries are, which keys a step
    takes, and which scores are masked. `items` deals the work (Items); a line of its table is (row, first query, first
    block of keys, number of blocks).

    Args:
      q_ref, k_ref: query and key in global memory, for their sizes.
      table_ref: int32[lines, 4], the table of work in global memory.
      blocks: how the kernel divides its work.
      pairs: whether the two warpgroups take the same queries of two heads that share their keys; otherwise they take
        neighbouring queries of one head.
      wg: the number of the warpgroup that runs this code.
      shared: whether both warpgroups take the same queries of one head; `pairs` is then not used.
      parts: how many items make different columns of the result of the same queries (`part`).
    """

    def __init__(self, q_ref, k_ref, table_ref, blocks: Blocks, pairs: bool, wg, *, shared=False, parts=1):
        heads, self.length = q_ref.shape[2], q_ref.shape[1]
        self.blocks, self.pairs, self.wg, self.shared, self.parts = blocks, pairs and not shared, wg, shared, parts
        self.group = heads // k_ref.shape[2]
        self.items = Items(table_ref, parts * (heads // WARPGROUPS if self.pairs else heads))

    def part(self, item):
        """Which of the `parts` of its queries' results an item is, int32[]. `item` is one of `items`, as Items.at
        returns it."""
        return lax.rem(item[0], jnp.int32(self.parts))

    def place(self, item, wg=None):
        """Where the queries of a warpgroup are: (row, head, first query), int32[] each. `item` is one of `items`, as
        Items.at returns it; wg is the warpgroup's number, None for the one that runs this code."""
        own, wg = self.blocks.own, self.wg if wg is None else wg
        if self.shared:
            return item[1], self._head(item), pl.multiple_of(item[2], own)
        if self.pairs:
            return item[1], self._head(item) * WARPGROUPS + wg, pl.multiple_of(item[2], own)
        first = item[2] + wg * own
        if self.length % (WARPGROUPS * own):
            # The row's last tile may have queries for one warpgroup only; the other repeats its work, bit for bit.
            first = jnp.minimum(first, self.length - own)
        return item[1], self._head(item), pl.multiple_of(first, own)

    def _head(self, item):
        """The number, int32[], of the query head of an item, or of its pair of heads."""
        return item[0] if self.parts == 1 else lax.div(item[0], jnp.int32(self.parts))

    def keys(self, item, i):
        """The index into key and value [B, T, kv_heads, D] of the block of keys that an item's step i takes: (row,
        slice of tokens, key head)."""
        head = self._head(item) * WARPGROUPS if self.pairs else self._head(item)
        first = (item[3] + i) * self.blocks.step
        return item[1], pl.ds(first, self.blocks.step), lax.div(head, jnp.int32(self.group))

    def masked(self, values, item, i, lower, last_lower, fill):
        """`values` [own, step], with `fill` where a query of this warpgroup does not see a key of step i of an item;
        unchanged if no bound crosses the block.

        Args:
          values: float32 in registers: scores, or weights.
          item, i: a line of the table of work (`items`), and the number of the step within it.
          lower: int32[own] in registers, the first key that each query sees.
          last_lower: int32[], that of the last query.
          fill: a number.
        """
        base, keys, shape = self.place(item)[2], (item[3] + i) * self.blocks.step, values.shape

        def mask(values):
            if self.blocks.lean:
                query_ids = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1)) + base
                seen = within(shape, 1, keys, lower, query_ids + 1 - lower)
            else:
                key_ids = ids(shape, 1, keys)
                seen = (key_ids <= ids(shape, 0, base)) & (key_ids >= rows_of(lower, shape))
            return jnp.where(seen, values, fill)

        crossed = (keys + self.blocks.step > base + 1) | (keys < last_lower)
        return lax.cond(crossed, mask, lambda values: values, values)

    def bring_keys(self, k_ref, v_ref, k_smem, v_smem, k_full, v_full, k_free, v_free):
        """The work of the warpgroup that loads blocks of keys and values: it copies those of all steps of all items, as
        far ahead as there are slots.

        Args:
          k_ref, v_ref: in global memory.
          k_smem, v_smem: their slots in shared memory.
          k_full, v_full: the slots' barriers that complete when a block has arrived.
          k_free, v_free: those at which the computing warpgroups arrive after their last read.
        """

        def work(turn, done, item, following):
            def step(i, _):
                here = self.keys(item, i)
                copies = ((k_ref.at[here], k_smem, k_full, k_free), (v_ref.at[here], v_smem, v_full, v_free))
                bring(done + i, copies)
                return ()

            lax.fori_loop(0, item[4], step, ())
            return item[4]

        drain(self.items.each(work), (k_smem, k_free), (v_smem, v_free))
