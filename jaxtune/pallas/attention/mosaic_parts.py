"""What the Mosaic GPU attention kernels share; mosaic.py describes and calls them. Blocks says how a kernel divides its
work, and Items deals the work to programs. `computing` and `bringing` choose the warpgroup that runs a part of a body,
and Turns lets the computing ones alternate. `bring` and `drain` load blocks, and QuerySide does it for tiles of
queries. `capped`, `products`, `add_product` and `within` compute scores, products and masks; the other functions make
arrays in registers and shared memory. The kernels of decode_attention use the smallest of these functions, too.

A kernel runs one program on each multiprocessor, with two warpgroups that compute and one that loads blocks. A program
works through a list of items. An item is a tile of queries of two heads (or two tiles of one head, if the number of
query heads of a key head is odd), or a tile of keys of one key head. In each step of an item, the computing warpgroups
process one block of the other side: a block of keys and values for a tile of queries, or a block of queries and their
output gradients for a tile of keys. Each of the two usually has a tile of queries of its own: the same queries of two
heads that share their keys, or, if that number is odd, neighbouring queries of one head. The kernel of dk and dv for
heads of 256 and the kernels for heads of 512 divide items otherwise (mosaic_backward_wide.py, mosaic_halves.py).

An item's own side (queries and their output gradients, or keys and values) is double-buffered for head dims up to 128,
and the loading warpgroup runs ahead across items, so that the start and end of an item overlap with its neighbours'
work. On packed rows an item often has only two to ten steps, so its start and end take as long as the steps.
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
    """How one of the kernels divides its work, and which of its variants runs: a compile-time setting on which the
    speed depends, and the result only by its rounding. Measured ones come from tuning.py, others from
    mosaic.HEURISTIC."""

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
        """{field: value} of the fields that have no default or differ from it, as tuning.py stores blocks in its table
        and looks them up again."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}


def smem(shape, dtype):
    """Describes swizzled shared memory of this shape and 16- or 32-bit dtype, one of a kernel's scratch_types, which
    tensor cores and TMA can read, and warpgroups can access without bank conflicts."""
    return plgpu.SMEM(shape, dtype, transforms=mosaic_types.tiled(dtype))


def rows_of(value, shape):
    """One number per row (value, [rows] in registers), broadcast over the columns to `shape`, (rows, columns), in
    registers, because the kernels scale, shift or mask each row of a block by a number of its own."""
    return lax.broadcast_in_dim(value, shape, [0])


def filled(shape, value, layout):
    """A float32 array of this shape in the registers of the calling warpgroup with one value everywhere, with which an
    accumulator or a running maximum starts; layout: how its numbers are spread over a warpgroup's threads
    (plgpu.Layout)."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def ids(shape, axis, base):
    """Returns `base` + the index along `axis`, int32 of `shape` in registers (Layout.WGMMA): the index in the row of
    each token of a tile that starts at token `base`. Masks compare these."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) + base


def capped(scores, scale, soft_cap):
    """Returns (scores times `scale`, capped and in units of log2, for exp2; the derivative of the soft cap at them, or
    None without one), float32 in registers in the shape of `scores`. The kernels of attention call it on the products
    of queries and keys, except the forward with `lean` (Softmax); those of dq and dk need the derivative.

    Args:
      scores: float32 in registers, the raw products of queries and keys.
      scale: the factor on scores.
      soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap); None: no cap.
    """
    if soft_cap is None:
        return scores * (scale * LOG2E), None
    capped = jnp.tanh(scores * (scale / soft_cap))
    return capped * (soft_cap * LOG2E), 1.0 - capped * capped


def products(*pairs, shape, issued):
    """Multiplies each pair (left, right), both in shared memory, on the tensor cores (wgmma) into a new float32
    accumulator of `shape`, and returns the list of the results, left right, in registers. The calling warpgroup
    computes them. `issued`, a function without arguments, is called after all products are started and before they are
    waited for. The forward computes its scores by it, and dk and dv their scores and gradients of weights, for head
    dims up to 256; dq and the kernels for heads of 512, which wait in between, do not use it."""

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
    softmax (the ping-pong schedule of FlashAttention-3, arXiv 2407.08608). Each warpgroup calls `begin` before its
    first step, `swap` twice in every step, and `end` after its last; both must make the same number of steps.

    Args:
      barrier: the barrier at which both warpgroups arrive and wait.
      wg: the number of the calling warpgroup, 0 or 1.
      wanted: True: they take turns; False: all methods do nothing.
    """

    def __init__(self, barrier, wg, wanted: bool):
        self.barrier, self.wg, self.wanted = barrier, wg, wanted

    def swap(self):
        """Passes the tensor cores to the other warpgroup and waits until that one passes them back. Each warpgroup
        calls it between two uses of the tensor cores."""
        if self.wanted:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)

    def begin(self):
        """Makes warpgroup 1 wait for the first `swap` of warpgroup 0, so that it starts half a step later. Both call
        it; in warpgroup 0 it does nothing."""
        pl.when(self.wg == 1)(self.swap)

    def end(self):
        """Makes the first warpgroup swap once more after the last step. `begin` made the second one swap once more
        before the first step, so that both have arrived at the barrier equally often; without this the second one would
        wait forever in its last swap. Both call it; in warpgroup 1 it does nothing."""
        pl.when(self.wg == 0)(self.swap)


def within(shape, axis, base, first, count):
    """Returns a mask, bool of `shape`: whether base + the index along `axis` is one of the numbers first, first + 1,
    ..., first + count - 1. It takes one unsigned comparison in place of two (Blocks.lean).

    Args:
      shape: (rows, columns), of which `axis` is one (0 or 1).
      base: int32[], the token at index 0 of `axis`.
      first, count: int32 in registers, a number for each index of the other axis; count must be at least 0.
    """
    offset = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
    offset = offset - lax.broadcast_in_dim(first - base, shape, [1 - axis])
    count = lax.broadcast_in_dim(count, shape, [1 - axis])
    return offset.astype(jnp.uint32) < count.astype(jnp.uint32)


class Items:
    """Deals the work of a kernel to its programs: each line of the work table (mosaic._table), a tile of a row, is
    `heads` items, one for each head or pair of heads. `rounds` is the number of this program's items, int32[]; `each`
    calls a function for all of them, and `at` reads one. Every warpgroup of a program makes one, within the kernel's
    body, and goes through the same items.

    Lines are sorted by falling cost and dealt back and forth, program 0 to n - 1, then n - 1 to 0, so that every
    program gets about the same amount of work.

    Args:
      table_ref: int32[lines, columns], in global memory.
      heads: the number of items of a line: query heads, pairs of them, or key heads; in the forward for heads of 512
        twice as many, because an item is half of an output.
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
        """Returns one of this program's items: [number of its head or pair of heads, the columns of its line of the
        table...], all int32[]. turn: int32[], counts this program's items from 0. Past the last item it returns some
        valid item, so that the next one can be read early without a condition."""
        number = jnp.minimum(self._number(turn), self.table_ref.shape[0] * self.heads - 1)
        line = lax.div(number, jnp.int32(self.heads))
        columns = [self.table_ref[line, column] for column in range(self.table_ref.shape[1])]
        return [lax.rem(number, jnp.int32(self.heads)), *columns]

    def each(self, work):
        """Calls work(turn, done, item, following) for every item of this program, in order, and returns the number of
        steps of all of them, int32[], 0 if there is none. Every warpgroup of the program goes through all of its items.

        Args:
          work: a function that returns the number of steps that it made, int32[]. `turn` counts the items from 0,
            `done` is the number of steps made before this item, from which slots of the pipeline follow; `item` is this
            item and `following` the next, read early, both as `at` returns them.
        """

        def one(turn, state):
            done, item = state
            following = self.at(turn + 1)
            return done + work(turn, done, item, following), following

        return lax.fori_loop(0, self.rounds, one, (jnp.int32(0), self.at(jnp.int32(0))))[0]


def computing(wg, number: int | None = None):
    """Returns a decorator that runs a function without arguments at once, in the two computing warpgroups, or in
    warpgroup `number` alone; other warpgroups skip it. It first raises the registers of each thread to 240, which
    `bringing` makes free. wg: the number of the warpgroup that runs this code."""

    def decorate(body):
        @pl.when(wg < WARPGROUPS if number is None else wg == number)
        def _():
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            body()

    return decorate


def bringing(wg):
    """Returns a decorator that runs a function without arguments at once, in the warpgroup that loads blocks; others
    skip it. It first lowers the registers of each thread to 24, so that the computing warpgroups can have more; without
    it they would wait forever for registers. wg: the number of the warpgroup that runs this code."""

    def decorate(body):
        @pl.when(wg == WARPGROUPS)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            body()

    return decorate


def bring(number, copies):
    """Starts the TMA copies of step `number` (int32[]) into their slots of the pipeline, each after the slot's previous
    content was used. A step's slot is its number modulo the number of slots; numbers count the steps of all of a
    program's items from 0. The loading warpgroup calls it.

    copies: a tuple for each copy: (source in global memory, its slots in shared memory, the slots' barriers `full`,
    which complete when a copy has arrived, and `free`, at which the computing warpgroups arrive after their last read).
    Where a step copies its block in several pieces into one array of slots, `number` counts pieces in place of steps.
    """
    for source, target, full, free in copies:
        stages = jnp.int32(target.shape[0])
        slot = lax.rem(number, stages)
        pl.when(number >= stages)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))
        plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])


def drain(done, *rings):
    """Waits until everything that was loaded has been used, because a barrier must not end with an arrival that was not
    waited for. The loading warpgroup calls it at its end; `done` is the number of all steps or pieces, as `bring`
    counts them (int32[]), and a ring is (slots in shared memory, their `free` barriers)."""
    for target, free in rings:
        for slot in range(target.shape[0]):
            pl.when(slot < done)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))


class QuerySide:
    """What the kernels of the forward and of dq share, whose items (what a program computes at a time) are tiles of
    queries. Every warpgroup of a program makes one. `items` deals the work to programs (Items); a line of its table is
    (row, first query, first block of keys, number of blocks). `place` says which queries an item has, `keys` which keys
    a step takes, `masked` masks their scores, `bring_keys` loads keys and values, and `part` says which columns of the
    result an item computes.

    Args:
      q_ref, k_ref: query and key in global memory; only their shapes are used.
      table_ref: int32[lines, 4], the table of work in global memory.
      blocks: how the kernel divides its work.
      pairs: True: the two warpgroups take the same queries of two heads that share their keys; False: they take
        neighbouring queries of one head.
      wg: the number of the warpgroup that runs this code.
      shared: True, in dq of heads of 512: both warpgroups take the same queries of one head, and `pairs` is not used;
        False: see `pairs`.
      parts: the number of items into which the result of a tile is divided by columns: 2 in the forward for heads of
        512, where an item has one half of the output's columns; otherwise 1.
    """

    def __init__(self, q_ref, k_ref, table_ref, blocks: Blocks, pairs: bool, wg, *, shared=False, parts=1):
        heads, self.length = q_ref.shape[2], q_ref.shape[1]
        self.blocks, self.pairs, self.wg, self.shared, self.parts = blocks, pairs and not shared, wg, shared, parts
        self.group = heads // k_ref.shape[2]
        self.items = Items(table_ref, parts * (heads // WARPGROUPS if self.pairs else heads))

    def part(self, item):
        """Returns which of the `parts` ranges of columns of the result the item computes, int32[] counted from 0. item:
        [head number, the columns of its line of the table], as Items.at returns it."""
        return lax.rem(item[0], jnp.int32(self.parts))

    def place(self, item, wg=None):
        """Says which queries of an item a warpgroup computes: (row of the batch, query head, index of the first query
        in the row), int32[] each; there are `blocks.own`. With `pairs` the two warpgroups have the same queries of two
        heads, with `shared` the same queries of one head, and otherwise neighbouring ones of one head; where a row's
        last tile has queries for one warpgroup only, the other has the same ones, and repeats their results bit for
        bit.

        Args:
          item: [head number, row, first query, first block of keys, number of blocks], int32[] each, from Items.at.
          wg: the number of a computing warpgroup, 0 or 1; None: that of the one that runs this code. forward_kernel
            gives the other's where one warpgroup starts the copy of the other's queries.
        """
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
        """Returns the number, int32[], of the query head of an item, or of its pair of heads if `pairs`. item: [head
        number, the columns of its line of the table], as Items.at returns it; its head number counts `parts` items for
        each head."""
        return item[0] if self.parts == 1 else lax.div(item[0], jnp.int32(self.parts))

    def keys(self, item, i):
        """Returns the index into key and value [B, T, kv_heads, D] of the block of keys that step i (int32[]) of an
        item takes: (row, slice of tokens, key head). item: [head number, the columns of its line of the table], as
        Items.at returns it."""
        head = self._head(item) * WARPGROUPS if self.pairs else self._head(item)
        first = (item[3] + i) * self.blocks.step
        return item[1], pl.ds(first, self.blocks.step), lax.div(head, jnp.int32(self.group))

    def masked(self, values, item, i, lower, last_lower, fill):
        """Returns `values`, float32[own, step], with `fill` where a query of this warpgroup does not see a key of the
        block; unchanged, without the cost of a mask, if no bound crosses the block.

        Args:
          values: scores or weights of a block, in registers.
          item: [head number, the columns of its line of the table], as Items.at returns it.
          i: int32[], the number of the step within the item, which determines the block of keys.
          lower: int32[own] in registers, the first key that each query sees.
          last_lower: int32[], that number for the last query, the largest.
          fill: the number to fill in: MASKED for scores, 0 for weights.
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
        """The work of the warpgroup that loads blocks of keys and values, for head dims up to 256 (the kernels for
        heads of 512 load pieces themselves): it copies those of all steps of all items, as far ahead as there are
        slots, and at last waits until all were used. The order is the one in which the computing warpgroups take them.

        Args:
          k_ref, v_ref: key and value, [B, T, kv_heads, D], in global memory.
          k_smem, v_smem: their slots in shared memory, [slots, blocks.step, D].
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
