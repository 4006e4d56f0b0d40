"""The bodies of the Mosaic GPU attention kernels (mosaic.py says what they do, and starts them).

A kernel runs as many programs as the GPU has multiprocessors, each with two (or three) warpgroups that compute and one
that brings blocks. A program works through a list of items: a tile of queries of two heads (or, without grouped heads,
two tiles of one head), or a tile of keys of one key head. An item's own side (queries and their gradient, or keys and
values) is double-buffered and the bringing warpgroup runs ahead across items, so that an item's start and end hide
behind the work of its neighbours: on packed rows an item has two to ten steps, and they cost as much as the steps.
"""

# Pallas' annotations know neither its own transforms nor loops that carry values.
# pyright: reportAbstractUsage=false, reportArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
_MASKED = -1e30
# Where the running maximum of scores starts: so far above _MASKED that a masked score weighs exactly nothing, whatever
# a fused multiply-add leaves of the difference.
_UNSEEN = -1e20
# A thread's registers, computing and bringing, by the number of computing warpgroups. All warpgroups start with an
# equal share of 65,536 / 128 = 512, in steps of 8: three with 168, four with 128. To ask for more than there are is to
# wait for ever.
_REGISTERS = {2: (240, 24), 3: (160, 32)}


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel cuts its work, and in which of its forms it runs.

    Attributes:
      own: rows that a warpgroup holds.
      step: rows of the other side that it takes at a time.
      stages: blocks of `step` rows that are on their way at a time.
      turns: whether the two warpgroups take turns on the tensor cores (_Turns).
      lean: fewer instructions a score: a mask by one comparison and, in the forward, the scale and the subtraction of
        the maximum in one multiply-add.
      warpgroups: that compute, 2 or 3; the forward's only.
      ahead: the scores of the next block are made while this one's softmax runs; the forward's only.
      buffers: of an item's own side; 1 where shared memory has no room for 2. The forward's only.
    """

    own: int
    step: int
    stages: int
    turns: bool
    lean: bool = False
    warpgroups: int = 2
    ahead: bool = False
    buffers: int = 2

    def __post_init__(self):
        if self.turns and (self.warpgroups != 2 or self.ahead):
            raise ValueError(f"{self}: two warpgroups take turns, and only with the scores of one block at a time")

    def as_dict(self) -> dict[str, Any]:
        """Its fields, without those that have their default."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}


def smem(shape, dtype):
    """Shared memory that the tensor cores and the copy engine can read."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def _rows(value, shape):
    """Broadcasts one number a row over the columns."""
    return lax.broadcast_in_dim(value, shape, [0])


def _filled(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _ids(shape, axis, base):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) + base


def _capped(scores, scale, soft_cap):
    """(scores in units of log2, derivative of the cap or None)."""
    if soft_cap is None:
        return scores * (scale * LOG2E), None
    capped = jnp.tanh(scores * (scale / soft_cap))
    return capped * (soft_cap * LOG2E), 1.0 - capped * capped


def _products(*pairs, shape, issued):
    """One fresh fp32 accumulator of `shape` for each (left, right); `issued` runs while the tensor cores do."""

    def compute(*accs):
        for acc, (left, right) in zip(accs, pairs, strict=True):
            plgpu.wgmma(acc, left, right)
        issued()
        return [acc[...] for acc in accs]

    return pl.run_scoped(compute, *(plgpu.ACC(shape, jnp.float32) for _ in pairs))


def _weights_and_gradient(scores, dweights, shape, stat, seen, issued, scale, soft_cap):
    """(weights, slope of the soft cap or None, dweights) from the products (left, right) that give the raw scores and
    dweights; stat is the log-sum-exp, in log2. The weights are computed while the tensor cores make dweights."""

    def compute(score_acc, dweight_acc):
        plgpu.wgmma(score_acc, *scores)
        plgpu.wgmma(dweight_acc, *dweights)
        issued()
        raw, slope = _capped(plgpu.wgmma_accumulator_load(score_acc, wait_n=1), scale, soft_cap)
        weights = seen(jnp.exp2(raw - stat))
        return weights, slope, dweight_acc[...]

    return pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))


def _gradient_of_scores(weights, slope, dweights, delta, scale):
    """Times scale; delta comes times scale."""
    dscores = weights * (dweights * scale - delta)
    return dscores if slope is None else dscores * slope


def _add_product(total, left, right, interpreted):
    """total + left right, left from registers, accumulated in place. The interpreter knows neither run_state nor wgmma
    with a left side in registers, so there it is written out."""
    if interpreted:
        return total + lax.dot(left, right[...], preferred_element_type=jnp.float32)

    def compute(acc):
        plgpu.wgmma(acc, left, right)

    return pl.run_state(compute)(plgpu.ACC.init(total))


class _Softmax:
    """The running softmax of the forward, in powers of two. Its state, one number a row: the maximum so far and the sum
    of the weights. lean: the maximum is that of the scores as they are (of the tanh, with a soft cap), and the factor
    on them goes into the multiply-add that subtracts it."""

    def __init__(self, scale, soft_cap, lean):
        self.scale, self.soft_cap = scale, soft_cap
        self.unit = (scale if soft_cap is None else soft_cap) * LOG2E
        self.lean = lean and self.unit > 0  # a negative factor would turn the maximum into the minimum

    def start(self, own, layout):
        return _filled((own,), _UNSEEN if self.lean else _MASKED, layout), _filled((own,), 0.0, layout)

    def step(self, scores, state, mask):
        """(weights of a block, by what the sums so far fade, state)."""
        top, total = state
        if not self.lean:
            scores, _ = _capped(scores, self.scale, self.soft_cap)
        elif self.soft_cap is not None:
            scores = jnp.tanh(scores * (self.scale / self.soft_cap))
        scores = mask(scores)
        new = jnp.maximum(top, scores.max(axis=1))
        if self.lean:
            fade = jnp.exp2((top - new) * self.unit)
            weights = jnp.exp2(scores * self.unit - _rows(new * self.unit, scores.shape))
        else:
            fade = jnp.exp2(top - new)
            weights = jnp.exp2(scores - _rows(new, scores.shape))
        return weights, fade, (new, total * fade + weights.sum(axis=1))

    def end(self, state):
        """(1 / sum, log-sum-exp in natural log)."""
        top, total = state
        if self.lean:
            top = top * self.unit
        return 1.0 / total, (top + jnp.log2(total)) * (1.0 / LOG2E)


class _Turns:
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


def _within(shape, axis, base, first, count):
    """Whether base + the index along `axis` is one of the `count` numbers from `first` on (count, first: one for each
    index of the other axis): as unsigned numbers one comparison is enough."""
    offset = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
    offset = offset - lax.broadcast_in_dim(first - base, shape, [1 - axis])
    count = lax.broadcast_in_dim(count, shape, [1 - axis])
    return offset.astype(jnp.uint32) < count.astype(jnp.uint32)


class _Items:
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


def _compute(wg, blocks: Blocks):
    """Decorates what the computing warpgroups do; _memory, what the one that brings blocks does."""

    def decorate(body):
        @pl.when(wg < blocks.warpgroups)
        def _():
            plgpu.set_max_registers(_REGISTERS[blocks.warpgroups][0], action="increase")
            body()

    return decorate


def _memory(wg, blocks: Blocks):
    def decorate(body):
        @pl.when(wg == blocks.warpgroups)
        def _():
            plgpu.set_max_registers(_REGISTERS[blocks.warpgroups][1], action="decrease")
            body()

    return decorate


def _bring(slot, reused, copies):
    """Starts each copy (source, slots, full, free) into a slot of the pipeline, once its last content was used."""
    for source, target, full, free in copies:
        pl.when(reused)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
        plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])


def _drain(done, stages: int, *frees):
    """Waits until all that was brought has been used: a barrier must not be left with an unseen arrival."""
    for slot in range(stages):
        for free in frees:
            pl.when(slot < done)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))


class _QuerySide:
    """What the forward and dq share: where an item's queries are, and which of its scores are masked.

    pairs: the warpgroups take the same queries of as many heads that share their keys; else neighbouring queries of
    one head. A line of the table: row, first query, first block of keys, number of blocks.
    """

    def __init__(self, q_ref, k_ref, table_ref, blocks: Blocks, pairs: bool, wg):
        heads, self.length = q_ref.shape[2], q_ref.shape[1]
        self.blocks, self.pairs, self.wg = blocks, pairs, wg
        self.group = heads // k_ref.shape[2]
        self.items = _Items(table_ref, heads // blocks.warpgroups if pairs else heads)

    def place(self, item):
        """(row, head, first query) of this warpgroup."""
        own = self.blocks.own
        if self.pairs:
            return item[1], item[0] * self.blocks.warpgroups + self.wg, pl.multiple_of(item[2], own)
        first = item[2] + self.wg * own
        if self.length % (self.blocks.warpgroups * own):
            # The row's last tile may be a warpgroup short: that one does its neighbour's work again, bit for bit.
            first = jnp.minimum(first, self.length - own)
        return item[1], item[0], pl.multiple_of(first, own)

    def keys(self, item, i):
        """(row, keys of step i, key head)."""
        head = item[0] * self.blocks.warpgroups if self.pairs else item[0]
        first = (item[3] + i) * self.blocks.step
        return item[1], pl.ds(first, self.blocks.step), lax.div(head, jnp.int32(self.group))

    def masked(self, values, item, i, lower, last_lower, fill):
        """`values` [own, step], with `fill` where a query does not see a key; as it is if no bound crosses it."""
        base, keys, shape = self.place(item)[2], (item[3] + i) * self.blocks.step, values.shape

        def mask(values):
            if self.blocks.lean:
                query_ids = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1)) + base
                seen = _within(shape, 1, keys, lower, query_ids + 1 - lower)
            else:
                key_ids = _ids(shape, 1, keys)
                seen = (key_ids <= _ids(shape, 0, base)) & (key_ids >= _rows(lower, shape))
            return jnp.where(seen, values, fill)

        crossed = (keys + self.blocks.step > base + 1) | (keys < last_lower)
        return lax.cond(crossed, mask, lambda values: values, values)

    def bring_keys(self, k_ref, v_ref, k_smem, v_smem, k_full, v_full, k_free, v_free):
        """The work of the warpgroup that brings blocks."""
        stages = jnp.int32(self.blocks.stages)

        def work(turn, done, item, following):
            def step(i, _):
                here = self.keys(item, i)
                copies = ((k_ref.at[here], k_smem, k_full, k_free), (v_ref.at[here], v_smem, v_full, v_free))
                _bring(lax.rem(done + i, stages), done + i >= stages, copies)
                return ()

            lax.fori_loop(0, item[4], step, ())
            return item[4]

        _drain(self.items.each(work), self.blocks.stages, k_free, v_free)


def forward_kernel(
    q_ref,
    k_ref,
    v_ref,
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
    """out and lse (natural log, without sinks; 0 at padding) of tiles of queries."""
    wg = lax.axis_index("wg")
    side = _QuerySide(q_ref, k_ref, table_ref, blocks, pairs, wg)
    own, stages, dim = blocks.own, jnp.int32(blocks.stages), q_ref.shape[-1]
    shape, rows = (own, blocks.step), plgpu.Layout.WGMMA.reduce(1)
    softmax = _Softmax(scale, soft_cap, blocks.lean)

    @_memory(wg, blocks)
    def _():
        side.bring_keys(k_ref, v_ref, k_smem, v_smem, k_full, v_full, k_free, v_free)

    @_compute(wg, blocks)
    def _():
        turns = _Turns(turn_barrier, wg, blocks.turns)

        def buffer(turn):
            return wg * blocks.buffers + lax.rem(turn, jnp.int32(blocks.buffers))

        def fetch(turn, item):
            row, head, base = side.place(item)
            here, full = pl.ds(base, own), own_full.at[buffer(turn)]
            plgpu.copy_gmem_to_smem(q_ref.at[row, here, head], qo_smem.at[buffer(turn)], full)
            plgpu.copy_gmem_to_smem(lower_ref.at[row, here], lower_smem.at[buffer(turn)], full)

        def work(turn, done, item, following):
            row, head, base = side.place(item)
            qo = qo_smem.at[buffer(turn)]
            if blocks.buffers == 1:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's results have left the buffer
                fetch(turn, item)
            plgpu.barrier_wait(own_full.at[buffer(turn)])
            lower = plgpu.load(lower_smem.at[buffer(turn)], layout=rows)
            last_lower = lower_smem[buffer(turn), own - 1]

            def fetch_following():
                if blocks.buffers == 2:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    pl.when(turn + 1 < side.items.rounds)(lambda: fetch(turn + 1, following))

            def key_of(slot):
                return k_smem.at[slot].transpose((1, 0))

            def add_values(i, scores, carry) -> Any:
                """What is left of step i once its scores are there."""
                acc, state = carry
                slot = lax.rem(done + i, stages)
                weights, fade, state = softmax.step(
                    scores, state, lambda scores: side.masked(scores, item, i, lower, last_lower, _MASKED)
                )
                acc = acc * _rows(fade, acc.shape)
                narrow = weights.astype(v_ref.dtype)
                turns.swap()
                if blocks.ahead:
                    plgpu.barrier_wait(v_full.at[slot])
                acc = _add_product(acc, narrow, v_smem.at[slot], interpreted)
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, state

            def step(i, carry):
                slot = lax.rem(done + i, stages)
                plgpu.barrier_wait(k_full.at[slot])

                def issued():
                    turns.swap()
                    plgpu.barrier_wait(v_full.at[slot])

                (scores,) = _products((qo, key_of(slot)), shape=shape, issued=issued)
                plgpu.barrier_arrive(k_free.at[slot])
                return add_values(i, scores, carry)

            def step_ahead(i, carry):
                """Step i, and the scores of step i + 1."""
                scores, carry = carry
                slot = lax.rem(done + i + 1, stages)
                plgpu.barrier_wait(k_full.at[slot])

                def compute(next_scores):
                    plgpu.wgmma(next_scores, qo, key_of(slot))
                    results = add_values(i, scores, carry)
                    return next_scores[...], results

                carry = pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                return carry

            start = _filled((own, dim), 0.0, plgpu.Layout.WGMMA), softmax.start(own, rows)
            # The first product or step hides how the last item's results leave the buffer that the next item's
            # queries go to.
            if blocks.ahead:
                slot = lax.rem(done, stages)
                plgpu.barrier_wait(k_full.at[slot])
                (scores,) = _products((qo, key_of(slot)), shape=shape, issued=fetch_following)
                plgpu.barrier_arrive(k_free.at[slot])
                scores, carry = lax.fori_loop(0, item[4] - 1, step_ahead, (scores, start))
                acc, state = add_values(item[4] - 1, scores, carry)
            else:
                start = step(jnp.int32(0), start)
                fetch_following()
                acc, state = lax.fori_loop(1, item[4], step, start)
            # Padding saw nothing: what stands there is dropped.
            real = lower <= plgpu.broadcasted_iota(jnp.int32, (own,), 0, layout=rows) + base
            inverse, lse = softmax.end(state)
            inverse, lse = jnp.where(real, inverse, 0.0), jnp.where(real, lse, 0.0)
            qo[...] = (acc * _rows(inverse, (own, dim))).astype(q_ref.dtype)
            lse_smem.at[wg][...] = lse
            plgpu.commit_smem()
            here = pl.ds(base, own)
            plgpu.copy_smem_to_gmem(qo, out_ref.at[row, here, head])
            plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[row, head, here])
            return item[4]

        if blocks.buffers == 2:
            pl.when(side.items.rounds > 0)(lambda: fetch(jnp.int32(0), side.items.at(jnp.int32(0))))
        turns.begin()
        side.items.each(work)
        turns.end()
        plgpu.wait_smem_to_gmem(0)


def query_kernel(
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
    turn_barrier,
    *,
    blocks,
    pairs,
    scale,
    soft_cap,
    interpreted,
):
    """dq of tiles of queries."""
    wg = lax.axis_index("wg")
    side = _QuerySide(q_ref, k_ref, table_ref, blocks, pairs, wg)
    own, stages, dim = blocks.own, jnp.int32(blocks.stages), q_ref.shape[-1]
    shape, rows = (own, blocks.step), plgpu.Layout.WGMMA.reduce(1)

    @_memory(wg, blocks)
    def _():
        side.bring_keys(k_ref, v_ref, k_smem, v_smem, k_full, v_full, k_free, v_free)

    @_compute(wg, blocks)
    def _():
        turns = _Turns(turn_barrier, wg, blocks.turns)

        def buffer(turn):
            return wg * 2 + lax.rem(turn, jnp.int32(2))

        def fetch(turn, item):
            row, head, base = side.place(item)
            here, full = pl.ds(base, own), own_full.at[buffer(turn)]
            plgpu.copy_gmem_to_smem(q_ref.at[row, here, head], q_smem.at[buffer(turn)], full)
            plgpu.copy_gmem_to_smem(do_ref.at[row, here, head], do_smem.at[buffer(turn)], full)
            plgpu.copy_gmem_to_smem(stat_ref.at[row, head, here], numbers_smem.at[wg], full)
            plgpu.copy_gmem_to_smem(delta_ref.at[row, head, here], numbers_smem.at[blocks.warpgroups + wg], full)
            plgpu.copy_gmem_to_smem(lower_ref.at[row, here], lower_smem.at[buffer(turn)], full)

        def work(turn, done, item, following):
            row, head, base = side.place(item)
            query, dout = q_smem.at[buffer(turn)], do_smem.at[buffer(turn)]
            plgpu.barrier_wait(own_full.at[buffer(turn)])
            stat = plgpu.load(numbers_smem.at[wg], layout=rows)
            delta = plgpu.load(numbers_smem.at[blocks.warpgroups + wg], layout=rows)
            lower = plgpu.load(lower_smem.at[buffer(turn)], layout=rows)
            last_lower = lower_smem[buffer(turn), own - 1]
            plgpu.commit_smem()  # every warp has read them: the next item's may come

            def step(i, acc):
                slot = lax.rem(done + i, stages)
                plgpu.barrier_wait(k_full.at[slot])
                plgpu.barrier_wait(v_full.at[slot])
                weights, slope, dweights = _weights_and_gradient(
                    (query, k_smem.at[slot].transpose((1, 0))),
                    (dout, v_smem.at[slot].transpose((1, 0))),
                    shape,
                    _rows(stat, shape),
                    lambda weights: side.masked(weights, item, i, lower, last_lower, 0.0),
                    turns.swap,
                    scale,
                    soft_cap,
                )
                plgpu.barrier_arrive(v_free.at[slot])

                dscores = _gradient_of_scores(weights, slope, dweights, _rows(delta, shape), scale)
                narrow = dscores.astype(k_ref.dtype)
                turns.swap()
                acc = _add_product(acc, narrow, k_smem.at[slot], interpreted)
                plgpu.barrier_arrive(k_free.at[slot])
                return acc

            # The first step hides how the last item's results leave the buffer that the next item's operands go to.
            acc = step(jnp.int32(0), _filled((own, dim), 0.0, plgpu.Layout.WGMMA))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(turn + 1 < side.items.rounds)(lambda: fetch(turn + 1, following))
            acc = lax.fori_loop(1, item[4], step, acc)
            query[...] = acc.astype(q_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(query, dq_ref.at[row, pl.ds(base, own), head])
            return item[4]

        pl.when(side.items.rounds > 0)(lambda: fetch(jnp.int32(0), side.items.at(jnp.int32(0))))
        turns.begin()
        side.items.each(work)
        turns.end()
        plgpu.wait_smem_to_gmem(0)


def key_kernel(
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
    q_smem,
    do_smem,
    numbers_smem,
    own_full,
    q_full,
    do_full,
    q_free,
    do_free,
    turn_barrier,
    *,
    blocks,
    scale,
    soft_cap,
    interpreted,
):
    """dk and dv of tiles of keys: walks the query blocks that see the tile, of every query head in turn.

    A line of the table: row, first key, first block of queries, number of blocks.
    """
    wg = lax.axis_index("wg")
    group = q_ref.shape[2] // k_ref.shape[2]
    items = _Items(table_ref, k_ref.shape[2])
    own, width, stages, dim = blocks.own, blocks.step, jnp.int32(blocks.stages), q_ref.shape[-1]
    shape = (own, width)
    rows, columns = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    @_memory(wg, blocks)
    def _():
        def work(turn, done, item, following):
            kv_head, row, _, first, count, *_ = item

            def step(i, _):
                head = kv_head * group + lax.div(i, count)
                here = pl.ds((first + lax.rem(i, count)) * width, width)
                slot, reused = lax.rem(done + i, stages), done + i >= stages
                _bring(
                    slot,
                    reused,
                    (
                        (q_ref.at[row, here, head], q_smem, q_full, q_free),
                        (do_ref.at[row, here, head], do_smem, do_full, do_free),
                    ),
                )
                # These go with q and do, whose slots are free when theirs are.
                plgpu.copy_gmem_to_smem(stat_ref.at[row, head, here], numbers_smem.at[slot], q_full.at[slot])
                plgpu.copy_gmem_to_smem(delta_ref.at[row, head, here], numbers_smem.at[stages + slot], do_full.at[slot])
                return ()

            lax.fori_loop(0, count * group, step, ())
            return count * group

        _drain(items.each(work), blocks.stages, q_free, do_free)

    @_compute(wg, blocks)
    def _():
        turns = _Turns(turn_barrier, wg, blocks.turns)

        def buffer(turn):
            return wg * 2 + lax.rem(turn, jnp.int32(2))

        def fetch(turn, item):
            kv_head, row, start = item[:3]
            here, full = pl.ds(pl.multiple_of(start + wg * own, own), own), own_full.at[buffer(turn)]
            plgpu.copy_gmem_to_smem(k_ref.at[row, here, kv_head], k_smem.at[buffer(turn)], full)
            plgpu.copy_gmem_to_smem(v_ref.at[row, here, kv_head], v_smem.at[buffer(turn)], full)
            plgpu.copy_gmem_to_smem(upper_ref.at[row, here], upper_smem.at[buffer(turn)], full)

        def work(turn, done, item, following):
            kv_head, row, start, first, count = item
            base = pl.multiple_of(start + wg * own, own)
            key, value = k_smem.at[buffer(turn)], v_smem.at[buffer(turn)]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's results have left the other buffers
            pl.when(turn + 1 < items.rounds)(lambda: fetch(turn + 1, following))
            plgpu.barrier_wait(own_full.at[buffer(turn)])
            upper = plgpu.load(upper_smem.at[buffer(turn)], layout=rows)
            first_upper, last_upper = upper_smem[buffer(turn), 0], upper_smem[buffer(turn), own - 1]
            # The blocks are those of both warpgroups: the ones at the edges may be the other's alone.
            lead = wg * (own // width)
            last = jnp.clip(lax.div(last_upper + (width - 1), jnp.int32(width)) - first, lead, count)

            def arrive(slot):
                plgpu.barrier_wait(q_full.at[slot])
                plgpu.barrier_wait(do_full.at[slot])

            def leave(slot):
                plgpu.barrier_arrive(do_free.at[slot])
                plgpu.barrier_arrive(q_free.at[slot])

            def skip(before, block, _):
                slot = lax.rem(before + block, stages)
                arrive(slot)
                turns.swap()
                turns.swap()
                leave(slot)
                return ()

            def step(before, block, carry):
                dk, dv = carry
                slot = lax.rem(before + block, stages)
                queries = (first + block) * width
                query, dout = q_smem.at[slot], do_smem.at[slot]
                arrive(slot)
                scores, dweights = _products(
                    (key, query.transpose((1, 0))), (value, dout.transpose((1, 0))), shape=shape, issued=turns.swap
                )

                def masked(weights):
                    if blocks.lean:
                        key_ids = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=rows) + base
                        seen = _within(shape, 1, queries, key_ids, upper - key_ids)
                    else:
                        query_ids = _ids(shape, 1, queries)
                        seen = (query_ids >= _ids(shape, 0, base)) & (query_ids < _rows(upper, shape))
                    return jnp.where(seen, weights, 0.0)

                crossed = (queries < base + own - 1) | (queries + width > first_upper)
                scores, slope = _capped(scores, scale, soft_cap)
                stat = plgpu.load(numbers_smem.at[slot], layout=columns)
                weights = jnp.exp2(scores - lax.broadcast_in_dim(stat, shape, [1]))
                weights = lax.cond(crossed, masked, lambda weights: weights, weights)
                delta = plgpu.load(numbers_smem.at[stages + slot], layout=columns)
                dscores = _gradient_of_scores(weights, slope, dweights, lax.broadcast_in_dim(delta, shape, [1]), scale)
                weights, dscores = weights.astype(v_ref.dtype), dscores.astype(k_ref.dtype)
                turns.swap()
                dv = _add_product(dv, weights, dout, interpreted)
                dk = _add_product(dk, dscores, query, interpreted)
                leave(slot)
                return dk, dv

            def head(number, carry):
                before = done + number * count
                lax.fori_loop(0, lead, functools.partial(skip, before), ())
                carry = lax.fori_loop(lead, last, functools.partial(step, before), carry)
                lax.fori_loop(last, count, functools.partial(skip, before), ())
                return carry

            zeros = _filled((own, dim), 0.0, plgpu.Layout.WGMMA)
            dk, dv = lax.fori_loop(0, group, head, (zeros, zeros))
            key[...] = dk.astype(k_ref.dtype)
            value[...] = dv.astype(v_ref.dtype)
            plgpu.commit_smem()
            here = pl.ds(base, own)
            plgpu.copy_smem_to_gmem(key, dk_ref.at[row, here, kv_head])
            plgpu.copy_smem_to_gmem(value, dv_ref.at[row, here, kv_head])
            return count * group

        pl.when(items.rounds > 0)(lambda: fetch(jnp.int32(0), items.at(jnp.int32(0))))
        turns.begin()
        items.each(work)
        turns.end()
        plgpu.wait_smem_to_gmem(0)
