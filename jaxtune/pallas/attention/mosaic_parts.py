"""What the Mosaic GPU attention kernels share (mosaic.py says what they do, and starts them).

A kernel runs as many programs as the GPU has multiprocessors, each with two warpgroups that compute and one that
brings blocks. A program works through a list of items: a tile of queries of two heads (or, without grouped heads,
two tiles of one head), or a tile of keys of one key head. An item's own side (queries and their gradient, or keys and
values) is double-buffered and the bringing warpgroup runs ahead across items, so that an item's start and end hide
behind the work of its neighbours: on packed rows an item has two to ten steps, and they cost as much as the steps.
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
WARPGROUPS = 2  # that compute
# A thread's registers, computing and bringing. All three warpgroups start with an equal share of 65,536 / 128 = 512, in
# steps of 8: 168. To ask for more than there are is to wait for ever.
_REGISTERS = (240, 24)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel cuts its work, and in which of its forms it runs.

    Attributes:
      own: rows that a warpgroup holds.
      step: rows of the other side that it takes at a time.
      stages: blocks of `step` rows that are on their way at a time.
      turns: whether the two warpgroups take turns on the tensor cores (Turns).
      lean: fewer instructions a score: a mask by one comparison and, in the forward, the scale and the subtraction of
        the maximum in one multiply-add.
      buffers: of an item's own side; 1 where shared memory has no room for 2 (the forward then has three for both
        warpgroups). That of the forward and of dq.
      value_stages: `stages` of the values in dq, which are given back before the keys; None: as many as of the keys.
    """

    own: int
    step: int
    stages: int
    turns: bool
    lean: bool = False
    buffers: int = 2
    value_stages: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Its fields, without those that have their default."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}


def smem(shape, dtype):
    """Shared memory that the tensor cores and the copy engine can read, and warpgroups without bank conflicts."""
    return plgpu.SMEM(shape, dtype, transforms=mosaic_types.tiled(dtype))


def rows_of(value, shape):
    """Broadcasts one number a row over the columns."""
    return lax.broadcast_in_dim(value, shape, [0])


def filled(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def ids(shape, axis, base):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) + base


def capped(scores, scale, soft_cap):
    """(scores in units of log2, derivative of the cap or None)."""
    if soft_cap is None:
        return scores * (scale * LOG2E), None
    capped = jnp.tanh(scores * (scale / soft_cap))
    return capped * (soft_cap * LOG2E), 1.0 - capped * capped


def products(*pairs, shape, issued):
    """One fresh fp32 accumulator of `shape` for each (left, right); `issued` runs while the tensor cores do."""

    def compute(*accs):
        for acc, (left, right) in zip(accs, pairs, strict=True):
            plgpu.wgmma(acc, left, right)
        issued()
        return [acc[...] for acc in accs]

    return pl.run_scoped(compute, *(plgpu.ACC(shape, jnp.float32) for _ in pairs))


def add_product(total, left, right, interpreted):
    """total + left right, left from registers, accumulated in place. The interpreter knows neither run_state nor wgmma
    with a left side in registers, so there it is written out."""
    if interpreted:
        return total + lax.dot(left, right[...], preferred_element_type=jnp.float32)

    def compute(acc):
        plgpu.wgmma(acc, left, right)

    return pl.run_state(compute)(plgpu.ACC.init(total))


class Turns:
    """Keeps the two warpgroups half a step apart: while one has the tensor cores, the other does its softmax
    (FlashAttention-3, arXiv 2407.08608, calls it ping-pong). Every step swaps twice."""

    def __init__(self, barrier, wg, wanted: bool):
        self.barrier, self.wg, self.wanted = barrier, wg, wanted

    def swap(self):
        if self.wanted:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)

    def begin(self):
        pl.when(self.wg == 1)(self.swap)

    def end(self):
        pl.when(self.wg == 0)(self.swap)


def within(shape, axis, base, first, count):
    """Whether base + the index along `axis` is one of the `count` numbers from `first` on (count, first: one for each
    index of the other axis): as unsigned numbers one comparison is enough."""
    offset = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
    offset = offset - lax.broadcast_in_dim(first - base, shape, [1 - axis])
    count = lax.broadcast_in_dim(count, shape, [1 - axis])
    return offset.astype(jnp.uint32) < count.astype(jnp.uint32)


class Items:
    """The items of a program: `heads` for each line of the work table (mosaic.py), whose lines stand in falling
    order of cost. They are dealt out to the programs back and forth, so that every program gets as much work."""

    def __init__(self, table_ref, heads: int):
        self.table_ref, self.heads = table_ref, heads
        self.programs, self.me = lax.axis_size("programs"), lax.axis_index("programs")
        total = table_ref.shape[0] * heads
        whole = total // self.programs
        self.rounds = whole + (self._number(jnp.int32(whole)) < total).astype(jnp.int32)

    def _number(self, turn):
        forth = lax.rem(turn, jnp.int32(2)) == 0
        return turn * self.programs + jnp.where(forth, self.me, self.programs - 1 - self.me)

    def at(self, turn):
        """[head number, the line's columns...] of an item, all int32; past the last one, whatever item there is."""
        number = jnp.minimum(self._number(turn), self.table_ref.shape[0] * self.heads - 1)
        line = lax.div(number, jnp.int32(self.heads))
        columns = [self.table_ref[line, column] for column in range(self.table_ref.shape[1])]
        return [lax.rem(number, jnp.int32(self.heads)), *columns]

    def each(self, work):
        """work(turn, done, item, following) -> steps, for every item; `done` steps were made before it. The following
        item is read a whole item ahead: it is there when it is needed. Returns the steps of all."""

        def one(turn, carry):
            done, item = carry
            following = self.at(turn + 1)
            return done + work(turn, done, item, following), following

        return lax.fori_loop(0, self.rounds, one, (jnp.int32(0), self.at(jnp.int32(0))))[0]


def computing(wg, number: int | None = None):
    """Decorates what the computing warpgroups do, or that one of them; bringing, what brings their blocks."""

    def decorate(body):
        @pl.when(wg < WARPGROUPS if number is None else wg == number)
        def _():
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            body()

    return decorate


def bringing(wg):
    def decorate(body):
        @pl.when(wg == WARPGROUPS)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            body()

    return decorate


def bring(number, copies):
    """Starts each copy (source, slots, full, free) of step `number` into its slot of the pipeline, once that one's last
    content was used."""
    for source, target, full, free in copies:
        stages = jnp.int32(target.shape[0])
        slot = lax.rem(number, stages)
        pl.when(number >= stages)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))
        plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])


def drain(done, *rings):
    """Waits until all that was brought has been used: a barrier must not be left with an unseen arrival. A ring: its
    slots and their `free`."""
    for target, free in rings:
        for slot in range(target.shape[0]):
            pl.when(slot < done)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))


class QuerySide:
    """What the forward and dq share: where an item's queries are, and which of its scores are masked.

    pairs: the warpgroups take the same queries of as many heads that share their keys; else neighbouring queries of
    one head. A line of the table: row, first query, first block of keys, number of blocks.
    """

    def __init__(self, q_ref, k_ref, table_ref, blocks: Blocks, pairs: bool, wg):
        heads, self.length = q_ref.shape[2], q_ref.shape[1]
        self.blocks, self.pairs, self.wg = blocks, pairs, wg
        self.group = heads // k_ref.shape[2]
        self.items = Items(table_ref, heads // WARPGROUPS if pairs else heads)

    def place(self, item, wg=None):
        """(row, head, first query) of this warpgroup, or of warpgroup `wg`."""
        own, wg = self.blocks.own, self.wg if wg is None else wg
        if self.pairs:
            return item[1], item[0] * WARPGROUPS + wg, pl.multiple_of(item[2], own)
        first = item[2] + wg * own
        if self.length % (WARPGROUPS * own):
            # The row's last tile may be a warpgroup short: that one does its neighbour's work again, bit for bit.
            first = jnp.minimum(first, self.length - own)
        return item[1], item[0], pl.multiple_of(first, own)

    def keys(self, item, i):
        """(row, keys of step i, key head)."""
        head = item[0] * WARPGROUPS if self.pairs else item[0]
        first = (item[3] + i) * self.blocks.step
        return item[1], pl.ds(first, self.blocks.step), lax.div(head, jnp.int32(self.group))

    def masked(self, values, item, i, lower, last_lower, fill):
        """`values` [own, step], with `fill` where a query does not see a key; as it is if no bound crosses it."""
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
        """The work of the warpgroup that brings blocks."""

        def work(turn, done, item, following):
            def step(i, _):
                here = self.keys(item, i)
                copies = ((k_ref.at[here], k_smem, k_full, k_free), (v_ref.at[here], v_smem, v_full, v_free))
                bring(done + i, copies)
                return ()

            lax.fori_loop(0, item[4], step, ())
            return item[4]

        drain(self.items.each(work), (k_smem, k_free), (v_smem, v_free))
