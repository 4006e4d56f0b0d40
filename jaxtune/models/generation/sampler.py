"""The sampler: rows decode in a fixed number of slots, and when a row ends, the next prompt takes its slot.

The device does not wait for the host: a round of a few tokens is dispatched while the round before it runs, and only
then does the host wait for the results of that earlier round. What it decides by them (a stop string, a free slot)
takes effect in the round after the next one.

    sampler = jaxtune.Sampler(model, slots=64)
    for row in sampler.run(prompts, max_new_tokens=512, temperature=1.0):
        print(row.index, row.ids, row.finish_reason)

`run` yields each Row in the order of the prompts, or as it ends (in_order=False). It is built on `submit`, `cancel` and
`step`, which returns new tokens as Pieces. A server, or a trainer that learns from samples, can call these itself.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation import slots as device
from jaxtune.models.generation.converted import Converted, convertible_of
from jaxtune.models.generation.ends import end_token_ids
from jaxtune.models.generation.prefills import Prefills
from jaxtune.models.generation.requests import (
    Decodes,
    FinishReason,
    Piece,
    Request,
    Row,
    StopStrings,
    checked_length,
    checked_prompt,
    seeds_of,
)
from jaxtune.models.generation.sampling import Kind, Sampling
from jaxtune.models.generation.slot_plan import (
    PREFILL_TOKENS,
    SLOTS,
    SlotPlan,
    capacity_bucket,
    plan_slots,
    prefilled_at_once,
    room_bytes,
    slot_bytes,
)
from jaxtune.models.generation.structure import flattened
from jaxtune.system import waiting

_FEWEST_ENDS = 4  # the array of end tokens has at least this many columns
_IN_FLIGHT = 2  # how many rounds are dispatched before the oldest is read


@dataclasses.dataclass
class _Round:
    """A round: a call of `decode` (a few tokens in every slot) that was dispatched and whose results are not read.
    `_dispatch` appends it to a queue, and `_look` reads the oldest one."""

    emitted: device.Emitted  # its results, which may not have arrived
    # {slot: (the request that it decodes, Request.placed at that time)}. A row that paused in an earlier round makes no
    # tokens in this one; if `placed` is another when this one is read, it has a slot again and is not queued once more
    requests: dict[int, tuple[Request, int]]


class Sampler:
    """Continues prompts of token ids. Up to `slots` rows decode in one batch. `submit` queues a prompt, and each `step`
    returns new tokens of the requests. `run` does both for a list of prompts. `generate`, the server, evaluations and
    training from samples use this class. Training makes a new sampler each time; other loops set weights by `update`.

    A row's tokens depend on other rows only by rounding, as the number of prompts that are prefilled at once changes
    the shapes of products. With `deterministic` its results are equal bit for bit. A sampler is used by one
    thread at a time. Its programs are compiled when they are first needed, for each bucket of capacity and of prompt
    length and each Kind of sampling settings, and shared by samplers of equal models with equal slots.

    Args:
      model: with its adapters. Plain adapters are copied in the compute dtype, and so are weights that are converted
        (most_converted); other arrays are the model's own. `update` sets new weights.
      slots: rows that decode in one batch. None: `most_slots`, halved until there is memory for them (plan_slots).
      length: tokens that a row may have, its prompt included. None: as many as there is memory for, at most the model's
        positions. Caches grow in buckets up to the longest row that is requested.
      most_slots: the limit of slots if `slots` is None.
      most_converted: the most layers whose weights are converted once (converted.py); None: as many as fit.
      memory_share: the share of the free memory for slots and converted weights; the rest is for samplers made next.
      deterministic: a row's tokens and log-probabilities have the same bits whatever else is sampled, in any slot and
        any process, for equal `slots` and equal devices. Prompts are then prefilled one at a time, no weights are
        converted, and matrix products use the vendor's first algorithm instead of the fastest.
      tokens_per_round: tokens that each row makes in one round. Fewer stream more smoothly and free slots earlier, but
        need more dispatches; each value needs a program of its own.
      prefill_tokens: the most tokens that one program prefills (four times as many while most slots are free, if memory
        is left). While at least half of the slots decode, programs are dispatched between two rounds only until they
        have as many, so that these rows do not stall.
      prefills_alone: True: each prompt has a prefill of its own, so that a row's bits do not depend on other prompts
        (`deterministic` implies it). Training sets it for dialogues with tools, whose turns are submitted at any time.
    Attributes:
      plan: the SlotPlan in use: slots, length, and the layers converted once. config: the model's DecoderConfig.
    Raises:
      ValueError: a number that is not a positive integer; a model that scores texts; weights divided over devices;
        slots and length for which there is too little memory, or positions.
    """

    def __init__(
        self,
        model: Decoder,
        slots: int | None = None,
        length: int | None = None,
        *,
        most_slots: int = SLOTS,
        most_converted: int | None = None,
        memory_share: float = 1.0,
        deterministic: bool = False,
        tokens_per_round: int = 8,
        prefill_tokens: int = PREFILL_TOKENS,
        prefills_alone: bool = False,
    ):
        for name, value in (("tokens_per_round", tokens_per_round), ("prefill_tokens", prefill_tokens)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Sampler: {name} = {value!r}: must be a positive integer")
        if not model.config.head.is_text:
            raise ValueError(f"Sampler: {model.config.head.what} and cannot continue texts")
        self.config, self._ends = model.config, end_token_ids(model)
        self._structure, self._leaves = flattened(model)
        self._shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self._leaves)
        room = room_bytes(memory_share)
        self.plan: SlotPlan = plan_slots(
            self._bytes,
            self.config.context_length,
            room,
            slots,
            length,
            most_slots,
            None if deterministic else convertible_of(self._structure, self._shapes, prefill_tokens, most_converted),
        )
        self._programs = device.programs_of(deterministic, self.plan.slots)
        self._converted = Converted(self.plan.converted_layers) if self.plan.converted_layers else None
        if self._converted is not None:
            self._structure, self._leaves = self._converted.of(self._structure, self._leaves)
            self._shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self._leaves)
        self._deterministic, self._steps, self._room_per_round = deterministic, tokens_per_round, prefill_tokens
        count, one = self.plan.slots, deterministic or prefills_alone
        at_once = prefilled_at_once(self.plan, room, prefill_tokens)
        self._prefills = Prefills(self._programs, self._structure, self._shapes, prefill_tokens, at_once, one=one)
        self._waiting: collections.deque[Request] = collections.deque()
        self._requests: dict[int, Request] = {}  # requests that are not done
        self._slots: list[Request | None] = [None] * count
        self._rounds: collections.deque[_Round] = collections.deque()
        self._pieces: list[Piece] = []  # the next step returns these
        self._runs = False  # whether `run` has rows to yield
        self._kind = Kind(False, False, False)
        self._number, self._capacity, self._states, self._seen = 0, 0, None, None
        self._live = device.Live(*(jnp.zeros(count, dtype) for dtype in (jnp.int32, jnp.int32, bool)))
        self._unchanged = jnp.zeros(count, bool), jax.tree.map(jnp.copy, self._live)  # for rounds without changes
        self._changed, self._given = np.zeros(count, bool), jax.tree.map(np.array, self._live)
        self._rows = device.empty_rows(count, _FEWEST_ENDS, self.config.vocab_size)
        self._sent_rows: device.Rows | None = None  # as the last round got them; None after a change

    # ---- requests

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        *,
        index: int = 0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop_strings: str | Sequence[str] = (),
        tokenizer: Decodes | None = None,
        eos_token_ids: int | Sequence[int] | None = None,
        scaled_logprobs: bool = False,
        top_logprobs: int = 0,
    ) -> int:
        """Appends a prompt to the queue, also while other rows decode. Consecutive equal prompts are prefilled once.

        Args:
          prompt: token ids, at least one.
          max_new_tokens: the most new tokens. None: as many as the row has room for.
          temperature, top_k, top_p, min_p, repetition_penalty: sampling settings, as in `generate`.
          scaled_logprobs: True: log-probabilities are of the logits divided by the temperature; False: of the logits.
          top_logprobs: how many of the most likely tokens are returned with each new token, from 0 to 20.
          seed, index: what the row draws depends only on these two and its step, so that equal pairs draw alike.
          stop_strings: the row ends with the token that completes one in its new text, as `tokenizer` decodes it.
          eos_token_ids: tokens that end the row. None: those of the model's generation_config.json or config.json; an
            empty sequence: none.
        Returns:
          the request's number, which pieces contain and `cancel` takes.
        Raises:
          ValueError: a prompt that is empty, has ids outside the vocabulary, or is too long with max_new_tokens; a
            setting out of its range; filters with temperature 0; stop_strings without a tokenizer, or an empty one; a
            `run` that has rows to yield.
        """
        if self._runs:
            raise ValueError("Sampler: submit while `run` has rows to yield: take all of them first, or close it")
        tokens = checked_prompt(prompt, self.config.vocab_size, "Sampler: the prompt")
        whose = "the model has" if self.plan.length == self.config.context_length else "a row of this sampler has"
        limit = checked_length(tokens, max_new_tokens, self.plan.length, "Sampler: the prompt", whose)
        strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        ends = self._ends if eos_token_ids is None else np.atleast_1d(np.asarray(eos_token_ids, np.int64)).tolist()
        request = Request(
            self._number,
            tokens,
            len(tokens),
            limit,
            Sampling(temperature, top_k, top_p, min_p, repetition_penalty, top_logprobs, scaled_logprobs),
            int(seed),
            int(index),
            frozenset(ends),
            StopStrings(strings, tokenizer, "Sampler") if strings else None,
        )
        self._number += 1
        self._requests[request.number] = request
        self._wait(request)
        return request.number

    def cancel(self, request: int) -> None:
        """Ends a request that waits or decodes; the next step returns an empty last piece. Other numbers do nothing.
        The server calls it when a client has gone or it shuts down, and `run` for the rows left if its caller stops
        early."""
        found = self._requests.get(request)
        if found is not None:
            self._finish(found, [], [], "cancelled")

    @property
    def pending(self) -> int:
        """The number of requests that are not done; at 0, a step only returns pieces that were not returned yet.
        Callers step until it is 0, and DividedSampler gives a request to the sampler with the fewest."""
        return len(self._requests)

    def step(self) -> list[Piece]:
        """Makes about one round of progress: fills free slots, dispatches a round if a row needs it, and waits for the
        oldest round if two are dispatched or none was needed. Returns the new pieces, at most one for each request, in
        no particular order. An empty list does not mean that nothing is left to do; `pending` says that."""
        waiting.look()
        self._fill()
        if self._has_work():
            self._dispatch()
            if len(self._rounds) >= _IN_FLIGHT:
                self._look()
        elif self._rounds:
            self._look()
        pieces, self._pieces = self._pieces, []
        return pieces

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int] | None = None,
        temperature: float = 0.0,
        seed: int | Sequence[int] = 0,
        *,
        in_order: bool = True,
        **settings: Any,
    ) -> Iterator[Row]:
        """Continues all prompts and yields each row that has ended. Nothing is checked or submitted before the first
        row is asked for; nothing else can be submitted before the last. Closing it, or an error, cancels what is left.
        Last pieces of requests that were cancelled before are returned by the next step after it.

        Args:
          prompts: token ids; for several answers to a prompt, repeat it in consecutive places.
          max_new_tokens: for all rows, or one number per prompt; see submit.
          seed: a row draws by it and its index; or one seed per prompt, by which the row draws as if it were alone.
          in_order: True: rows are yielded in the order of the prompts; False: as they end.
          temperature, settings: other arguments of submit by name, the same for all rows.
        Raises:
          ValueError: requests are not done; a wrong number of limits or seeds; those of submit.
        """
        if self._requests:
            raise ValueError(f"Sampler: run while {len(self._requests)} requests are not done; use submit and step")
        seeds = seeds_of(seed, len(prompts), "Sampler")
        limits = [max_new_tokens] * len(prompts) if not isinstance(max_new_tokens, Sequence) else max_new_tokens
        if len(limits) != len(prompts):
            raise ValueError(f"Sampler: {len(limits)} numbers of max_new_tokens for {len(prompts)} prompts")
        rows: dict[int, Row] = {}
        earlier, self._pieces = self._pieces, []
        try:
            for index, (prompt, limit, (own, place)) in enumerate(zip(prompts, limits, seeds, strict=True)):
                number = self.submit(prompt, limit, temperature, own, index=place, **settings)
                rows[number] = Row(index, [], [], "length")
            self._runs = True
            yield from self._ended(rows, in_order)
        finally:
            self._runs = False
            for number in rows:
                self.cancel(number)
            self._pieces = [*earlier, *(piece for piece in self._pieces if piece.request not in rows)]

    def _ended(self, rows: dict[int, Row], in_order: bool) -> Iterator[Row]:
        """For `run`: steps until all rows have ended, and yields each as it ends, or, if in_order, in the order of
        their indices.

        rows: {request's number: its row, still without tokens}; its lists are filled."""
        ended: dict[int, Row] = {}
        following = 0
        while following < len(rows) and (self._requests or self._pieces):
            for piece in self.step():
                row = rows[piece.request]
                row.ids.extend(piece.ids)
                row.logprobs.extend(piece.logprobs)
                row.top_logprobs.extend(piece.top_logprobs)
                if piece.finish_reason is not None:
                    ended[row.index] = dataclasses.replace(row, finish_reason=piece.finish_reason)
            while ended and (not in_order or following in ended):
                row = ended.pop(following if in_order else next(iter(ended)))
                following += 1
                self._runs = following < len(rows)
                yield row

    def update(self, model: Decoder) -> None:
        """Sets the weights to those of a model with the same structure, for a user's own training loop. Only what must
        be cast or decoded is copied: the model's arrays must not be deleted while the sampler uses them. Raises
        ValueError for requests that are not done, as their states were computed with the old weights, for another
        structure, and for weights that are divided over devices."""
        if self._requests:
            raise ValueError(f"Sampler: update while {len(self._requests)} requests are not done")
        structure, leaves = flattened(model)
        if self._converted is not None:
            structure, leaves = self._converted.of(structure, leaves)
        if structure is not self._structure:
            raise ValueError("Sampler: update with a model of another structure: make a new Sampler")
        self._leaves = leaves
        self._prefills.forget()

    # ---- filling slots

    def _wait(self, request: Request, first: bool = False) -> None:
        """Puts a request into the queue and asks for its prefill. first: True: before all others, for a row that gave
        up its slot to have its states computed anew (a longrope model changed its factors); False: as the last."""
        request.slot, request.key = None, self._prefills.wanted(request)
        (self._waiting.appendleft if first else self._waiting.append)(request)

    def _fill(self) -> None:
        """For `step`: prefills prompts of waiting requests, and gives those that are ready free slots, in the queue's
        order. While at least half of the slots are taken, a call dispatches programs until they have prefill_tokens
        tokens, padding included: the last may exceed it, and a long prompt, in chunks, may take several calls."""
        free = [slot for slot, request in enumerate(self._slots) if request is None]
        if not free or not self._waiting:
            return
        left = self._room_per_round if 2 * len(free) <= len(self._slots) else float("inf")
        self._reserve(list(itertools.islice(self._waiting, len(free))))
        while free and self._waiting:
            batch = self._prefills.ready(self._waiting[0])
            if batch is None:
                if left <= 0:
                    break
                left -= self._prefills.advance(self._leaves, self._waiting, len(free), left)
                continue
            placed = []
            while free and self._waiting and self._prefills.ready(self._waiting[0]) is batch:
                request = self._waiting.popleft()
                placed.append((self._prefills.take(request), free[0]))
                self._place(request, free.pop(0))
            self._states = batch.insert(self._programs, self._states, placed)

    def _place(self, request: Request, slot: int) -> None:
        """For `_fill`: puts a request into a free slot: sets the slot's numbers and settings for the next round, and
        with a repetition penalty marks its tokens as seen. `_fill` copies the states of its prompt afterwards, by
        Batch.insert (prefills.py)."""
        self._slots[slot], request.slot = request, slot
        request.placed += 1
        self._change(slot, request.tokens[-1], len(request.tokens), True)
        rows, numbers = self._rows, request.sampling.numbers(self.config.vocab_size)
        self._widen_ends(len(request.ends))
        self._rows.ends[slot] = -1
        self._rows.ends[slot, : len(request.ends)] = sorted(request.ends)
        pause = self._prefills.switch if len(request.tokens) <= self._prefills.switch else device.NEVER
        values = (request.start, request.limit, pause, request.seed & 0xFFFFFFFF, request.index & 0xFFFFFFFF)
        arrays = (rows.start, rows.limit, rows.pause, rows.seed, rows.index, *rows.numbers)
        for array, value in zip(arrays, (*values, *numbers), strict=True):
            array[slot] = value
        self._sent_rows = None
        self._kind = self._kind | request.sampling.kind
        if self._kind.penalises and self._seen is None:
            self._seen = jnp.zeros((len(self._slots), self.config.vocab_size), bool)
        if request.sampling.kind.penalises:
            padded = np.zeros(capacity_bucket(len(request.tokens)), np.int32)
            padded[: len(request.tokens)] = request.tokens
            self._seen = device.mark_seen(self._seen, np.int32(slot), padded, np.int32(len(request.tokens)))

    def _widen_ends(self, needed: int) -> None:
        """For `_place`: gives the array of end tokens at least `needed` columns, a row's number, padded with -1."""
        have = self._rows.ends.shape[1]
        if needed > have:
            more = (1 << (needed - 1).bit_length()) - have
            self._rows = self._rows._replace(ends=np.pad(self._rows.ends, ((0, 0), (0, more)), constant_values=-1))

    def _change(self, slot: int, token: int, length: int, active: bool) -> None:
        """Sets a slot's newest token, its row's length and whether it decodes (active), for the device's next round.
        `_place` starts a row so, and `_finish` empties the slot."""
        self._changed[slot] = True
        for array, value in zip(self._given, (token, length, active), strict=True):
            array[slot] = value

    # ---- memory

    def _bytes(self, slots: int, length: int) -> int:
        """For plan_slots: device bytes of the states of `slots` rows of `length` tokens, and of a step's logits."""
        return slot_bytes(self._structure, self._shapes, slots, length)

    def _reserve(self, nearest: Sequence[Request]) -> None:
        """Allocates the slots' caches, or grows them, for `_fill`, if a row of `nearest`, the requests that get a slot
        next, may become longer than their capacity. It becomes the capacity_bucket of the longest row of all that wait
        or decode, because programs are compiled anew for each capacity; with `deterministic` it is that of plan.length
        from the start."""
        if all(request.limit <= self._capacity for request in nearest):
            return
        everybody = [*self._waiting, *(request for request in self._slots if request is not None)]
        most = self.plan.length if self._deterministic else max(request.limit for request in everybody)
        capacity = capacity_bucket(most)
        if self._states is None:
            self._states = device.empty_states(self._structure, self._shapes, len(self._slots), capacity)
        else:
            shapes = device.states_shape(self._structure, self._shapes, len(self._slots), capacity)
            leaves, treedef = jax.tree.flatten(self._states)
            self._states = None  # so that each array is freed after its copy
            for at, new in enumerate(jax.tree.leaves(shapes)):
                if leaves[at].shape != new.shape:
                    leaves[at] = device.grown(leaves[at], new.shape)
            self._states = jax.tree.unflatten(treedef, leaves)
        self._capacity = capacity

    # ---- rounds

    def _has_work(self) -> bool:
        """Whether the row of some slot may need more tokens than the rounds that were dispatched and not read yet will
        make. If so, `step` dispatches another round. Requests that wait for a slot do not count."""
        return any(r is not None and len(r.tokens) + r.rounds * self._steps < r.limit for r in self._slots)

    def _dispatch(self) -> None:
        """Dispatches a round, `tokens_per_round` more tokens of every active slot, which `_look` reads later."""
        rows = self._sent_rows or jax.tree.map(np.copy, self._rows)  # the host changes its arrays
        if rows is self._sent_rows and isinstance(rows.start, np.ndarray):
            rows = jax.device_put(rows)  # not before the second round, as it takes the host 2 ms
        self._sent_rows = rows
        before = self._structure, self._kind, self._steps, self._leaves, self._states, self._live, self._seen
        self._states, self._live, self._seen, emitted = self._programs.decode(*before, *self._changes(), rows)
        for array in jax.tree.leaves(emitted):
            array.copy_to_host_async()
        requests = {slot: (request, request.placed) for slot, request in enumerate(self._slots) if request is not None}
        for request, _ in requests.values():
            request.rounds += 1
        self._rounds.append(_Round(emitted, requests))

    def _changes(self) -> tuple[device.Array, device.Live]:
        """For `_dispatch`: (bool[slots]: True for slots that the host changed since the last call; the newest token,
        length and activity of each slot, valid for these). Marks are cleared, numbers copied, as they are read late.
        Without changes nothing is sent: the device would wait for it between two rounds."""
        if not self._changed.any():
            return self._unchanged
        changed, self._changed = self._changed, np.zeros_like(self._changed)
        return changed, device.Live(*(array.copy() for array in self._given))

    def _look(self) -> None:
        """Waits for the oldest round and makes pieces of its tokens, which `step`, its caller, returns. Ends complete
        rows; tokens of rows that ended before are dropped. Rows that paused, as a longrope model changes its factors at
        their length and their states must be computed anew, wait again at the head of the queue."""
        done = self._rounds.popleft()
        tokens, logprobs, counts, ranked = jax.tree.map(np.asarray, done.emitted)
        for slot, (request, placed) in done.requests.items():
            request.rounds -= 1
            if request.done:  # by a stop string or a cancellation that the device did not know of yet
                continue
            count = int(counts[slot])
            made, reason = request.take(tokens[:count, slot].tolist())
            values = logprobs[: len(made), slot].tolist()
            wanted = request.sampling.top_logprobs
            tops = [
                list(zip(ids[slot, :wanted].tolist(), of_ids[slot, :wanted].tolist(), strict=True))
                for ids, of_ids in (zip(*(part[: len(made)] for part in ranked), strict=True) if wanted else ())
            ]
            if reason is not None:
                self._finish(request, made, values, reason, tops)
                continue
            if made:
                self._pieces.append(Piece(request.number, made, values, None, tops))
            # It paused, so that its states are computed anew. In a round that was dispatched before that was known, it
            # made no token either, but has left its slot.
            if count < self._steps and request.placed == placed and self._slots[slot] is request:
                self._slots[slot] = None
                self._wait(request, first=True)

    def _finish(self, request: Request, ids: list[int], logprobs: list[float], reason: FinishReason, tops=()) -> None:
        """Ends `request` with a last Piece of these ids, logprobs, reason and tops (its top_logprobs), which the step
        in progress or, after `cancel`, the next one returns. Frees its slot, or removes it from the queue."""
        request.done = True
        del self._requests[request.number]
        self._pieces.append(Piece(request.number, ids, logprobs, reason, list(tops)))
        if request.slot is None:
            self._waiting.remove(request)
            self._prefills.unwanted(request)
        elif self._slots[request.slot] is request:
            self._slots[request.slot] = None
            self._change(request.slot, 0, 1, False)
