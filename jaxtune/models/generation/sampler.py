"""The sampler: rows decode in a fixed number of slots, and when a row ends, the next prompt takes its slot.

The device does not wait for the host: a round of a few tokens is dispatched while the one before runs, which the host
reads only then. What it decides (a stop string, a free slot) takes effect in the round after the next one.

    with jaxtune.Sampler(model, slots=64) as sampler:
        for row in sampler.run(prompts, max_new_tokens=512, temperature=1.0):
            print(row.index, row.ids, row.finish_reason)

Servers and trainers can call `submit`, `step` and `cancel` themselves.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import end_token_ids
from jaxtune.models.generation import slots as device
from jaxtune.models.generation.adapters import Adapter, AdapterBank, read_adapter
from jaxtune.models.generation.converted import Converted, convertible_of, picture_bytes
from jaxtune.models.generation.division import Division
from jaxtune.models.generation.exactness import require_exact
from jaxtune.models.generation.limits import MOST_BIASES, NO_MASK
from jaxtune.models.generation.prefills import Prefills
from jaxtune.models.generation.ready import Decode, Grow, Mark, Ready, Score, Shapes, Size
from jaxtune.models.generation.requests import (
    Constraint,
    Decodes,
    FinishReason,
    Piece,
    PromptPictures,
    Request,
    Row,
    StopStrings,
    accept_all,
    check_pictures,
    checked_bias,
    checked_length,
    checked_prompt,
    constraints_of,
    fill_masks,
    in_turns,
    joined_pieces,
    one_a_prompt,
    seeds_of,
)
from jaxtune.models.generation.sampling import Kind, Sampling
from jaxtune.models.generation.scores import prompt_scores
from jaxtune.models.generation.slot_plan import (
    PREFILL_TOKENS,
    SLOTS,
    SlotPlan,
    length_bucket,
    next_power,
    plan_slots,
    prefilled_at_once,
    room_bytes,
    slot_bytes,
)
from jaxtune.models.generation.structure import Structure, flattened, shapes_of, with_cache
from jaxtune.models.lora import has_adapter
from jaxtune.models.placement.streams import arriving_bytes, is_on_host
from jaxtune.models.programs.kept import Prepared
from jaxtune.system import lifetimes, processes, timing, waiting

_FEWEST_ENDS = 4  # the array of end tokens has at least this many columns
_FEWEST_BIASES = 8  # and that of biases
_FEW = 4  # as a share of the slots, the rows among which a new one has a round of one step
_IN_FLIGHT = 2  # how many rounds are dispatched before the oldest is read
_USUAL_LENGTH = 512  # tokens of a row for which `prepare` has programs beside those of the longest
_SHORT_PROMPT = 100  # tokens of a usual prompt that comes alone
_IDLE_SECONDS = 0.01  # of a step in which all rows wait for programs
_EXACT_ADAPTERS = "Sampler: exact: adapters of several models; merge one, or load it with the model"
_GREEDY, _MOST = Kind(False, False, False), Kind(True, True, True, True, True)
_DRAWN, _FILTERED = Kind(True, False, False), Kind(True, True, False)


class _Free:
    """A constraint that allows any token."""

    def mask(self) -> None:
        return None

    def accept(self, tokens: Sequence[int]) -> bool:
        return False


@dataclasses.dataclass
class _Round:
    """A call of `decode` that was dispatched and is not read yet."""

    emitted: device.Emitted  # its results, which may not have arrived
    steps: int
    # {slot: (the request that it decodes, Request.placements at that time)}. A row that paused in an earlier round
    # makes no tokens in this one; if `placements` is another when this one is read, it has a slot again and is not
    # queued once more
    requests: dict[int, tuple[Request, int]]


class _Model(NamedTuple):
    structure: Structure
    leaves: list[jax.Array]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    gated: bool  # whether rows may have adapters
    newest: int  # the last adapter's number


def _are_arrays(leaves: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> bool:
    return not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def _wait_for(rounds: collections.deque[_Round], prefills: Prefills) -> None:
    """Waits for results that nobody will read."""
    while rounds:
        with contextlib.suppress(Exception):  # a device that has failed has ended too
            jax.tree.map(np.asarray, rounds.popleft().emitted)
    with contextlib.suppress(Exception):
        prefills.forget()


class Sampler:
    """Continues prompts of token ids, up to `slots` rows in one batch; for one thread at a time.

    Programs are compiled for each bucket of capacity and prompt length and each Kind of sampling settings, and shared
    by samplers of equal models and slots. Closing or freeing a sampler waits for the device.

    Args:
      model: its arrays are used, not copied, apart from plain adapters and converted weights. With shapes in place of
        arrays, as from_pretrained gives `beside`, only `prepare` works, until `update`.
      slots: None: `most_slots`, halved until there is memory. Of a model whose weights devices divide (`mesh.fsdp`), on
        each device.
      length: tokens of a row with its prompt. None: as many as there is memory for. Caches grow in buckets up to the
        longest requested row.
      most_converted: the most layers whose weights are converted once (converted.py); None: as many as fit.
      memory_share: of the free memory; the rest is for samplers made next.
      free_bytes: the free memory beside the model, where it is not in memory yet; None: as the device says.
      deterministic: a row has the same bits whatever else is sampled, in any slot and process, for equal `slots` and
        devices; otherwise other rows change its rounding. Slower: prompts are prefilled one at a time, no weights are
        converted, products use the vendor's first algorithm.
      tokens_per_round: fewer stream more smoothly and free slots earlier, but need more dispatches; each value
        compiles.
      prefill_tokens: the most that one program prefills (without `compiles_beside` four times as many while most
        slots are free), and about the most between two rounds.
      prefills_alone: a row's bits do not depend on other prompts.
      first_at_once: while few slots are taken, a new row's first round has one step, so that its first token comes
        early; a program more is compiled.
      adapters: {name: PEFT folder, or Adapter} over the model, which then has none itself; see `load_adapter`.
      adapter_ranks: the most that the ranks of all adapters of a linear may be in sum, for which memory stays free;
        None: no limit, and memory for `adapters` alone.
      compiles_beside: a program that is missing is compiled in a thread, while its row waits and others go on, or runs
        in a larger one that `prepare` or an earlier row has compiled.
      prefix_bytes: the most device memory for states of prompts' beginnings, in blocks of 512 tokens: a later prompt
        that begins with them is prefilled from where it differs, and its row has the bits that it has with 0. Those
        whose use is longest ago go first. Prompts longer than a block are then prefilled alone. Only prefilled tokens
        are reused, so that of an answer in the next turn's prompt nothing is; nor is anything of pictures' prompts.
        None: nothing is stored, and prompts are prefilled together where that is faster.
      cache: "fp8": keys and values are stored in e4m3, without scales, in half the memory; what that loses is in
        docs/sampling.md. None: in the model's dtype.
      exact: log-probabilities have the bits that training with `exact` gives the same tokens; slower. ValueError for
        what it does not cover.

    Attributes:
      plan: the SlotPlan in use.
      ends: ids of the tokens that end a row, by the model's files.
      more_come: set it while requests are about to be submitted: with `first_at_once` rounds then have one step, after
        which these are prefilled.

    Over divided weights all devices decode, each its own slots; `adapters`, `compiles_beside`, `prepare` and `score`
    are refused, and no beginnings of prompts are stored. In several processes all make the same calls in one order.

    Raises ValueError for a model that scores texts, too little memory or positions, or as `load_adapter`.
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
        free_bytes: float | None = None,
        deterministic: bool = False,
        tokens_per_round: int = 8,
        prefill_tokens: int = PREFILL_TOKENS,
        prefills_alone: bool = False,
        first_at_once: bool = False,
        adapters: Mapping[str, Adapter | str | os.PathLike] | None = None,
        adapter_ranks: int | None = None,
        compiles_beside: bool = False,
        prefix_bytes: int | None = None,
        cache: str | None = None,
        exact: bool = False,
    ):
        counts = dict(tokens_per_round=tokens_per_round, prefill_tokens=prefill_tokens)
        counts |= {} if adapter_ranks is None else {"adapter_ranks": adapter_ranks}
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Sampler: {name} = {value!r}: must be a positive integer")
        if not model.config.head.is_text:
            raise ValueError(f"Sampler: {model.config.head.description} and cannot continue texts")
        if exact:
            require_exact(model, "Sampler")
            if cache is not None:
                raise ValueError(f"Sampler: exact: cache = {cache!r}: training reads keys and values unrounded")
            if adapters or adapter_ranks:
                raise ValueError(_EXACT_ADAPTERS)
        self.config, self.ends = model.config, end_token_ids(model)
        self._tower = None if model.vision is None else model.vision.config
        self._base = None if has_adapter(model) else model
        self._bank, self._adapter_ranks = AdapterBank(model), adapter_ranks
        self._adapters: dict[str, tuple[int, tuple[int, ...]]] = {}  # {name: (number, tokens that end its rows)}
        self._adapter_number = 0  # the last
        self._dropped: set[int] = set()  # adapters' numbers that rows still have
        for name, adapter in (adapters or {}).items():
            self._bank, self._adapters[name] = self._with_adapter(name, adapter)
        self._cache, self._exact = cache, exact
        self._structure, self._leaves = flattened(with_cache(self._bank.model(), cache))
        self._division = Division.of(self._leaves)
        if self._division is not None:
            self._require_whole("adapters", bool(adapters) or adapter_ranks is not None)
            self._require_whole("compiles_beside", compiles_beside)
            self._require_whole("exact", exact)
            prefix_bytes = None
        self._gated, self._newest = bool(self._bank), self._adapter_number  # the last adapter in these arrays
        self._coming: _Model | None = None  # with other adapters, for which programs are being compiled
        self._shapes = shapes_of(self._leaves)
        adapter_bytes = max(self._bank.bytes, 0 if adapter_ranks is None else self._bank.bytes_of(adapter_ranks))
        room = room_bytes(memory_share) if free_bytes is None else (free_bytes - self._bank.bytes) * memory_share
        if self._division is not None and self._division.spans_processes:
            room = processes.smallest(room)
        arriving = arriving_bytes(model.layers) if any(map(is_on_host, self._leaves)) else 0.0
        room = None if room is None else room - (adapter_bytes - self._bank.bytes) - arriving
        convertible = None
        if not deterministic and not exact and not arriving and self._division is None:
            convertible = convertible_of(self._structure, self._shapes, prefill_tokens, most_converted)
        self.plan: SlotPlan = plan_slots(
            self._bytes,
            self.config.context_length,
            room,
            slots,
            length,
            most_slots,
            convertible,
            0 if prefix_bytes is None else prefix_bytes,
            lambda tokens: picture_bytes(self._structure, self._shapes, tokens),
        )
        self.plan = dataclasses.replace(self.plan, adapter_bytes=adapter_bytes)
        if self._division is None:
            self._programs = device.programs_of(deterministic, self.plan.slots, exact)
            count = self.plan.slots
        else:
            self._programs = self._division.programs(deterministic, self.plan.slots)
            count = self.plan.slots * self._division.devices
        self._converted = Converted(self.plan.converted_layers) if self.plan.converted_layers else None
        if self._converted is not None:
            self._structure, self._leaves = self._converted.of(self._structure, self._leaves)
            self._shapes = shapes_of(self._leaves)
        self._deterministic, self._steps, self._room_per_round = deterministic, tokens_per_round, prefill_tokens
        alone = deterministic or prefills_alone
        at_once = prefilled_at_once(self.plan, room, prefill_tokens)
        self._rows = device.empty_rows(count, _FEWEST_ENDS, self.config.vocab_size, self._tower is not None)
        self._rows = self._rows._replace(adapter=np.zeros(count, np.int32))
        self._has_arrays = _are_arrays(self._leaves)
        array = self._leaves[0] if self._has_arrays else jax.device_put(np.zeros(()))
        where = jax.sharding.SingleDeviceSharding(min(array.devices(), key=lambda device: device.id))
        shapes = Shapes(self._programs, self._structure, self._shapes, self._gated, where, self._rows, self._tower)
        self._ready = Ready(shapes, compiles_beside)
        self._prefills = Prefills(
            self._programs,
            self._structure,
            self._shapes,
            prefill_tokens,
            at_once,
            one_at_a_time=alone,
            ready=self._ready,
            gated=self._gated,
            prefix_bytes=None if prefix_bytes is None else self.plan.prefix_bytes,
            devices=1 if self._division is None else self._division.devices,
        )
        self._waiting: collections.deque[Request] = collections.deque()
        self._unordered = False  # whether clients must take turns anew
        self._requests: dict[int, Request] = {}  # requests that are not done
        self._slots: list[Request | None] = [None] * count
        # programs of rounds; by the capacity, of the logits of rounds with masks
        self._decoding: dict[Decode | int, Callable] = {}
        self._begun = False  # whether the first round's is being compiled
        self._rounds: collections.deque[_Round] = collections.deque()
        self._end = lifetimes.end_with(self, _wait_for, self._rounds, self._prefills)
        self._closed = False
        self._pieces: list[Piece] = []  # the next step returns these
        self.more_come = False
        self._first_at_once = first_at_once and tokens_per_round > 1
        self._filled: np.ndarray | None = None  # Rows.masks, of the rows in the slots of `_masked`
        self._masked: set[int] = set()
        self._runs = False  # whether `run` has rows to yield
        self._kinds: list[Kind] = []  # of the rounds so far, each once
        self._on_host = jax.default_backend() == "cpu"  # where results lie in the host's memory already
        self._number, self._capacity, self._states, self._seen = 0, 0, None, None
        self._changed = np.zeros(count, bool)
        self._new_live = device.Live(*(np.zeros(count, dtype) for dtype in (np.int32, np.int32, bool)))
        self._live = self._put(jax.tree.map(np.copy, self._new_live))
        self._unchanged = self._put((self._changed.copy(), jax.tree.map(np.copy, self._new_live)))  # without changes
        if compiles_beside:  # as every program's kind may have them
            self._rows = self._rows._replace(adjustments=device.empty_adjustments(count, _FEWEST_BIASES))
        self._longest = length_bucket(self.plan.length)
        self._whole = deterministic or (
            compiles_beside and device.reads_lengths(self._structure, self._shapes, count, self._longest)
        )
        self._refused: list[tuple[Request, str]] = []  # whose programs could not be compiled
        self._sent_rows: device.Rows | None = None  # as the last round got them; None after a change

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels all requests, waits for the device and frees the slots."""
        self._closed = True
        for number in list(self._requests):
            self.cancel(number)
        self._states, self._seen = None, None
        self._end()
        self._ready.close()

    # ---- adapters

    @property
    def adapters(self) -> list[str]:
        """The names by which rows may ask for one."""
        return list(self._adapters)

    def load_adapter(self, name: str, adapter: Adapter | str | os.PathLike) -> None:
        """Adds an adapter under a name, also while rows decode. Programs are compiled anew if the ranks of a linear's
        adapters need more columns, 16, 32, 64 and so on; with `compiles_beside` only its rows wait for them.

        adapter: a PEFT folder (adapters.read_adapter reads one in another thread), or an Adapter.

        ValueError: the name is taken, the folder cannot be read, or its adapter cannot be one of several (adapters of
        experts, DoRA, modules_to_save, QAT); more ranks than adapter_ranks. Nothing has changed then.
        """
        if self._closed:
            raise ValueError("Sampler: load_adapter after close: make a new Sampler")
        self._require_whole("adapters")
        if self._exact:
            raise ValueError(_EXACT_ADAPTERS)
        bank, entry = self._with_adapter(name, adapter)
        self._use(bank)
        self._switch_if_ready()
        self._adapters[name] = entry

    def drop_adapter(self, name: str) -> None:
        """Refuses further rows with an adapter, whose memory is free after the last row that has it. ValueError for an
        unknown name.
        """
        number, _ = self._adapter(name)
        del self._adapters[name]
        self._dropped.add(number)
        self._free_dropped(number)

    def _with_adapter(
        self, name: str, adapter: Adapter | str | os.PathLike
    ) -> tuple[AdapterBank, tuple[int, tuple[int, ...]]]:
        """(the bank with one more adapter, its entry in `_adapters`)"""
        if self._base is None:
            raise ValueError(f"Sampler: adapter {name!r}: the model has one already: give the base (without_adapter)")
        if name in self._adapters:
            raise ValueError(f"Sampler: adapter {name!r} is loaded already: drop it first, or take another name")
        adapter = adapter if isinstance(adapter, Adapter) else read_adapter(self._base, adapter)
        ranks, limit = self._bank.ranks_with(adapter), self._adapter_ranks
        if limit is not None and ranks > limit:
            raise ValueError(
                f"Sampler: adapter {name!r}: with it the ranks are {ranks} in sum, and adapter_ranks is {limit}: drop "
                "another first, or set more"
            )
        self._adapter_number += 1
        return self._bank.with_adapter(self._adapter_number, adapter), (self._adapter_number, adapter.ends)

    def _adapter(self, name: str | None) -> tuple[int, tuple[int, ...]]:
        """(number, tokens that end its rows); those of the model for None."""
        if name is None:
            return 0, tuple(self.ends)
        if name not in self._adapters:
            names = ", ".join(self._adapters) or "none"
            raise ValueError(f"Sampler: adapter = {name!r} is not loaded: there are {names}")
        return self._adapters[name]

    def _free_dropped(self, number: int) -> None:
        """Frees a dropped adapter's columns if no request has it."""
        if number not in self._dropped or self._closed:
            return
        if all(request.adapter != number for request in self._requests.values()):
            self._dropped.remove(number)
            self._prefills.forget_adapter(number)
            self._use(self._bank.without(number))
            self._switch_if_ready()

    def _use(self, bank: AdapterBank, only: Structure | None = None) -> None:
        """Sets the model with its adapters that `_switch` takes. ValueError for another structure than `only`."""
        structure, leaves = flattened(with_cache(bank.model(), self._cache))
        if self._converted is not None:
            structure, leaves = self._converted.of(structure, leaves)
        if only is not None and structure is not only:
            raise ValueError("Sampler: update with a model of another structure: make a new Sampler")
        shapes = shapes_of(leaves)
        self._bank, self._coming = bank, _Model(structure, leaves, shapes, bool(bank), self._adapter_number)

    def _switch_if_ready(self) -> None:
        with contextlib.suppress(RuntimeError):  # which rows with a new adapter end with (_serves)
            if self._coming is None or self._comes():
                self._switch()

    def _comes(self) -> bool:
        """Whether the programs are ready for the adapters that were loaded; otherwise they are being compiled, and rows
        decode without these. RuntimeError: in vain.
        """
        coming = self._coming
        return coming is None or self._ready.follows(coming.structure, coming.shapes, coming.gated)

    def _switch(self) -> None:
        """Uses the adapters that were loaded; rounds that run are not changed."""
        if self._coming is None:
            return
        self._structure, self._leaves, self._shapes, self._gated, self._newest = self._coming
        self._coming, self._has_arrays = None, _are_arrays(self._leaves)
        self._decoding.clear()  # for shapes and dtypes may be others
        self._ready.use(self._structure, self._shapes, self._gated)
        self._prefills.use(self._structure, self._shapes, self._gated)

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
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        min_new_tokens: int = 0,
        client: tuple[Hashable, ...] = (),
        constraint: Constraint | None = None,
        pictures: PromptPictures | None = None,
        adapter: str | None = None,
    ) -> int:
        """Appends a prompt to the queue, also while rows decode. Returns the request's number.

        Args:
          prompt: token ids.
          max_new_tokens: None: as many as the row has room for.
          temperature: divides the logits; 0 takes the most likely token.
          seed, index: with the step they determine what the row draws.
          top_k: only this many most likely tokens remain; 0: all.
          top_p: the fewest most likely tokens with at least this total probability remain.
          min_p: tokens remain that are at least this many times as likely as the likeliest.
          repetition_penalty: divides positive logits of tokens that the row contains, and multiplies negative ones.
          stop_strings: the row ends with the token that completes one; needs `tokenizer`.
          tokenizer: decodes tokens for stop_strings.
          eos_token_ids: end the row; None: those of the model's files, or of the adapter's.
          scaled_logprobs: log-probabilities are of the logits divided by the temperature.
          top_logprobs: how many of the most likely tokens come with each new token, 0 to 20.
          presence_penalty: subtracted from the logits of tokens that the answer contains.
          frequency_penalty: subtracted from them as often as it contains them.
          logit_bias: {token id: what is added to its logit}; None: nothing.
          min_new_tokens: no end token or stop string ends the row before.
          constraint: which tokens the row may make; while one such row decodes, no round is dispatched ahead.
          client: who asks: rows that wait take turns between clients (requests.in_turns).
          pictures: of the prompt, for a model with its tower; None: text alone.
          adapter: its name; None: the model alone.

        Raises ValueError for an empty or too long prompt, ids outside the vocabulary, a setting out of range, filters
        with temperature 0, or while `run` has rows to yield.
        """
        self._require_arrays("submit")
        if self._closed:
            raise ValueError("Sampler: submit after close: make a new Sampler")
        if self._runs:
            raise ValueError("Sampler: submit while `run` has rows to yield: take all of them first, or close it")
        tokens = checked_prompt(prompt, self.config.vocab_size, "Sampler: the prompt")
        whose = "the model has" if self.plan.length == self.config.context_length else "a row of this sampler has"
        limit = checked_length(tokens, max_new_tokens, self.plan.length, "Sampler: the prompt", whose)
        if pictures is not None:
            check_pictures(tokens, pictures, self._tower, self.config, "Sampler: the prompt")
        strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        adapter_number, its_ends = self._adapter(adapter)
        ends = its_ends if eos_token_ids is None else np.atleast_1d(np.asarray(eos_token_ids, np.int64)).tolist()
        ends = [token for token in ends if 0 <= token < self.config.vocab_size]  # no other can be sampled
        biases = [
            (*checked_bias(token, bias, self.config.vocab_size), device.NEVER)
            for token, bias in (logit_bias or {}).items()
        ]
        biases += [
            (token, -np.inf, min(len(tokens) + min_new_tokens, device.NEVER)) for token in ends if min_new_tokens > 0
        ]
        if len(biases) > MOST_BIASES:
            raise ValueError(
                f"Sampler: logit_bias and end tokens are {len(biases)}; at most {MOST_BIASES} are followed"
            )
        request = Request(
            self._number,
            tokens,
            len(tokens),
            limit,
            Sampling(
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty,
                top_logprobs,
                scaled_logprobs,
                presence_penalty,
                frequency_penalty,
                tuple(biases),
            ),
            int(seed),
            int(index),
            frozenset(ends),
            StopStrings(strings, tokenizer, "Sampler") if strings else None,
            min_new_tokens,
            pictures,
            client=client,
            constraint=constraint,
            adapter=adapter_number,
        )
        self._number += 1
        self._requests[request.number] = request
        self._enqueue(request)
        return request.number

    def _require_arrays(self, caller: str) -> None:
        if not self._has_arrays:
            raise ValueError(f"Sampler: {caller}: the model has shapes, no arrays: call `update` first")

    def cancel(self, request: int) -> None:
        """Ends a request that waits or decodes; the next step returns an empty last piece. Other numbers do nothing."""
        live_request = self._requests.get(request)
        if live_request is not None:
            self._finish(live_request, [], [], "cancelled")

    @property
    def pending(self) -> int:
        """The number of requests that are not done; at 0, a step only returns leftover pieces."""
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """The number of requests that have no slot."""
        return len(self._waiting)

    @property
    def waiting_requests(self) -> set[int]:
        """Their numbers."""
        return {request.number for request in self._waiting}

    def score(
        self, prompt: Sequence[int], top: int = 0, adapter: str | None = None
    ) -> tuple[list[float], list[list[tuple[int, float]]]]:
        """(the log-probability of each token of a prompt but the first, the `top` likeliest tokens in the place of
        each); also while rows decode. adapter: its name. ValueError: as `submit`.
        """
        self._require_arrays("score")
        self._require_whole("score")
        if self._exact:
            raise ValueError("Sampler: exact: score adds up as usual: take training_logprobs(..., exact=True)")
        tokens = checked_prompt(prompt, self.config.vocab_size, "Sampler: the prompt")
        if len(tokens) > self.plan.length:
            raise ValueError(f"Sampler: the prompt of {len(tokens)} tokens: a row has {self.plan.length} positions")
        number, _ = self._adapter(adapter)
        if number > self._newest:
            self._switch()
        number = number if self._gated else None
        return prompt_scores(self._structure, self._leaves, tokens, length_bucket(len(tokens)), top, number)

    def can_score(self, count: int, adapter: str | None = None) -> bool:
        """Whether `score` of a prompt of so many tokens needs to compile nothing; otherwise that is compiled in a
        thread with `compiles_beside`. adapter: its name. RuntimeError: in vain.
        """
        self._switch_if_ready()
        if self._adapter(adapter)[0] > self._newest:
            return self._comes()
        return self._ready.choose([Score(length_bucket(count))]) is not None

    def step(self) -> list[Piece]:
        """Makes about one round of progress: fills slots, dispatches a round if a row needs it, and reads the oldest if
        two are dispatched or none was needed. Returns new pieces, at most one a request; [] does not mean done.
        """
        waiting.look()
        with timing.phase("sample"):
            self._switch_if_ready()
            self._fill()
            if not self._has_work():
                if self._rounds:
                    self._read_round()
                elif self._waiting and self._ready.beside and not self._pieces:
                    self._ready.wait(_IDLE_SECONDS)
            elif any(request is not None and request.constraint is not None for request in self._slots):
                self._follow_constraints()
            else:
                self._dispatch(self._steps_of_round())
                if len(self._rounds) >= _IN_FLIGHT:
                    self._read_round()
        return self._due()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int] | None = None,
        temperature: float = 0.0,
        seed: int | Sequence[int] = 0,
        *,
        in_order: bool = True,
        pictures: Sequence[PromptPictures | None] | None = None,
        constraints: Sequence[Constraint | None] | None = None,
        **settings: Any,
    ) -> Iterator[Row]:
        """Continues all prompts and yields each row that has ended. It begins with the first `next`; nothing else can
        be submitted before the last row. Closing it, or an error, cancels the rest.

        Args:
          prompts: token ids of each; equal ones are best consecutive.
          max_new_tokens: for all rows, or one a prompt; None: as many as a row has room for.
          temperature: divides the logits; 0 takes the most likely token.
          seed: for all rows, or one a prompt, which then draws as if alone.
          in_order: whether rows come in the order of the prompts, or as they end.
          pictures: of each prompt, or None for one without; None: no prompt has any.
          constraints: of each row, its own, or None for any tokens; None: no row has any.
          settings: further arguments of `submit`.

        Raises ValueError while requests are not done, for a wrong number of limits or seeds, as submit does, and for a
        constraint that fails.
        """
        if self._requests:
            raise ValueError(f"Sampler: run while {len(self._requests)} requests are not done; use submit and step")
        pictures = one_a_prompt(pictures, len(prompts), "Sampler: pictures")
        constraints = constraints_of(constraints, len(prompts), "Sampler")
        if "constraint" in settings:
            raise ValueError("Sampler: constraint: each row of `run` has its own: give constraints=[...]")
        seeds = seeds_of(seed, len(prompts), "Sampler")
        limits = [max_new_tokens] * len(prompts) if not isinstance(max_new_tokens, Sequence) else max_new_tokens
        if len(limits) != len(prompts):
            raise ValueError(f"Sampler: {len(limits)} numbers of max_new_tokens for {len(prompts)} prompts")
        rows: dict[int, Row] = {}
        earlier, self._pieces = self._pieces, []
        try:
            for index, (row_seed, seed_index) in enumerate(seeds):
                asked = prompts[index], limits[index], temperature, row_seed
                of_row = dict(pictures=pictures[index], constraint=constraints[index])
                number = self.submit(*asked, index=seed_index, **of_row, **settings)
                rows[number] = Row(index, [], [], "length")
            self._runs = True
            yield from self._ended(rows, in_order)
        finally:
            self._runs = False
            for number in rows:
                self.cancel(number)
            self._pieces = [*earlier, *(piece for piece in self._pieces if piece.request not in rows)]

    def _ended(self, rows: dict[int, Row], in_order: bool) -> Iterator[Row]:
        """Steps until all rows have ended, and yields them. rows: {request's number: its row}, whose lists it fills."""
        ended_rows: dict[int, Row] = {}
        following = 0
        while following < len(rows) and (self._requests or self._pieces):
            for piece in self.step():
                if piece.finish_reason == "failed":
                    raise ValueError(f"Sampler: {piece.error}")
                row = rows[piece.request]
                row.ids.extend(piece.ids)
                row.logprobs.extend(piece.logprobs)
                row.top_logprobs.extend(piece.top_logprobs)
                if piece.finish_reason is not None:
                    ended_rows[row.index] = dataclasses.replace(row, finish_reason=piece.finish_reason)
            while ended_rows and (not in_order or following in ended_rows):
                row = ended_rows.pop(following if in_order else next(iter(ended_rows)))
                following += 1
                self._runs = following < len(rows)
                yield row

    def update(self, model: Decoder) -> None:
        """Sets the weights to those of a model with the same structure, whose arrays must not be deleted meanwhile;
        adapters stay. Raises ValueError while requests are not done, for another structure, and for weights that other
        devices divide.
        """
        if self._requests:
            raise ValueError(f"Sampler: update while {len(self._requests)} requests are not done")
        self._switch()  # as nobody waits for a program
        divisions = Division.of(jax.tree.leaves(nnx.state(model))), self._division
        if len({None if division is None else division.mesh for division in divisions}) > 1:
            raise ValueError("Sampler: update: other devices divide these weights: make a new Sampler")
        self._use(self._bank.over(model), only=self._structure)
        self._switch()
        self._base = None if has_adapter(model) else model
        self._prefills.forget()

    # ---- filling slots

    def _enqueue(self, request: Request, first: bool = False) -> None:
        """Queues a request and asks for its prefill. first: before all others, for a row whose states are computed
        anew.
        """
        request.slot, request.key = None, self._prefills.add_waiting(request)
        (self._waiting.appendleft if first else self._waiting.append)(request)
        self._unordered |= bool(request.client)

    def _fill(self) -> None:
        """Prefills prompts and gives ready requests free slots, in order. While at least half of the slots are taken, a
        call prefills about prefill_tokens tokens, so a long prompt may take several.
        """
        free = [slot for slot, request in enumerate(self._slots) if request is None]
        if not free or not self._waiting:
            return
        if self._unordered:
            self._unordered = False
            again = [request for request in self._waiting if request.placements]
            new = in_turns(request for request in self._waiting if not request.placements)
            self._waiting = collections.deque([*again, *new])
        budget = self._room_per_round if 2 * len(free) <= len(self._slots) else float("inf")
        self._reserve(nearest := list(itertools.islice(self._served(grows=True), len(free))))
        if not self._ready.beside and not self._decoding and self._has_arrays:
            self._begin_to_compile(nearest)
        while free and (request := next(self._served(), None)) is not None:
            batch = self._prefills.ready(request)
            if batch is None:
                if budget <= 0:
                    break
                budget -= self._prefills.advance(self._leaves, self._served(), len(free), budget, self._capacity)
                continue
            placed = []
            while free and request is not None and self._prefills.ready(request) is batch:
                self._waiting.remove(request)
                placed.append((self._prefills.take(request), free[0]))
                self._place(request, free.pop(0))
                request = next(self._served(), None)
            self._states = batch.insert(self._programs, self._states, placed)
        refused, self._refused = self._refused, []
        for request, error in refused:
            self._finish(request, [], [], "failed", error=error)

    def _begin_to_compile(self, rows: Sequence[Request]) -> None:
        """Begins to load or compile in a thread the program of the first round, if all rows need the same: their
        prompts' is compiled meanwhile.
        """
        if self._begun or len(self._leaves[0].devices()) > 1:
            return
        needs = {(row.sampling.kind, next_power(len(row.ends)), row.constraint is None) for row in rows}
        if len(needs) != 1:
            return
        ((kind, ends, free),) = needs
        if free and not kind.adjusts and not self._first_at_once:
            size = self._size(kind, self._steps, False)
            size = dataclasses.replace(size, ends=max(ends, size.ends))
            self._begun = True
            self._ready.begin(size)

    def _served(self, grows: bool = False) -> Iterator[Request]:
        """Those that wait, in order, without rows whose programs are being compiled. grows: also with longer rows than
        the caches have room for.
        """
        if not self._ready.beside:
            yield from self._waiting
            return
        rows = [row for row in self._slots if row is not None]
        kind, masks = self._kind_of(rows), any(row.constraint is not None for row in rows)
        for request in [*self._waiting]:
            if (grows or request.limit <= self._capacity) and self._serves(request, kind, masks):
                yield request

    def _serves(self, request: Request, kind: Kind, masks: bool) -> bool:
        """Whether all programs are ready that a row needs, in a batch with those in the slots, of this kind."""
        try:
            if request.adapter > self._newest:
                self._comes()
                return False  # until `step` has switched
            capacity = self._capacity_for(request.limit)
            return (
                capacity is not None
                and self._decodes(request, capacity, kind | request.sampling.kind, masks)
                and self._prefills.serves(request, capacity)
            )
        except RuntimeError as error:
            if all(refused is not request for refused, _ in self._refused):
                self._refused.append((request, str(error)))
            return False

    def _capacity_for(self, limit: int) -> int | None:
        """That of the slots, or a longer one, for rows of so many tokens; None if its programs are not ready."""
        if limit <= self._capacity:
            return self._capacity
        capacities = [capacity for capacity in self._usual_capacities() if capacity >= limit]
        index = self._ready.choose(*map(self._sizes, capacities))
        return None if index is None else capacities[index]

    def _decodes(self, request: Request, capacity: int, kind: Kind, masks: bool) -> bool:
        size = self._size(_MOST, self._steps, False, capacity)
        ends, biases = next_power(len(request.ends)), next_power(len(request.sampling.biases))
        if ends > size.ends or biases > size.biases:  # then no program serves the next rows but those with so many
            size = dataclasses.replace(size, ends=max(ends, size.ends), biases=max(biases, size.biases))
        else:
            size = self._size(kind, self._steps, False, capacity)
        sizes = [size]
        if masks or request.constraint is not None:
            sizes.append(dataclasses.replace(size, steps=1, masks=True))
        columns = max(biases, self._bias_columns)
        missing = [size for size in sizes if self._ready.decode(size, columns) is None]
        return self._ready.choose(missing) is not None

    def _place(self, request: Request, slot: int) -> None:
        """Sets a slot's numbers and settings for the next round; the caller copies the states."""
        self._slots[slot], request.slot = request, slot
        request.placements += 1
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
        self._adjust(slot, request.sampling)
        if rows.adapter is not None:
            rows.adapter[slot] = request.adapter
        if rows.delta is not None:
            rows.delta[slot] = 0 if request.pictures is None else request.pictures.delta
        self._sent_rows = None
        if request.sampling.kind.penalises:
            if self._seen is None:
                self._seen = self._empty_seen()
            counts = device.seen_counts(request.tokens, request.start, self.config.vocab_size)
            self._seen = self._programs.mark(self._seen, np.int32(slot), counts)

    def _adjust(self, slot: int, sampling: Sampling) -> None:
        """Sets a slot's Adjustments, which the arrays have once a request needs them."""
        adjustments, count = self._rows.adjustments, len(sampling.biases)
        if adjustments is None:
            if not sampling.kind.adjusts:
                return
            adjustments = device.empty_adjustments(len(self._slots), _FEWEST_BIASES)
        if (added := count - adjustments.bias.shape[1]) > 0:
            added += next_power(count) - count
            wide = (np.pad(array, ((0, 0), (0, added))) for array in adjustments[2:])
            adjustments = device.Adjustments(*adjustments[:2], *wide)
        self._rows = self._rows._replace(adjustments=adjustments)
        adjustments.presence_penalty[slot], adjustments.frequency_penalty[slot] = (
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        adjustments.bias[slot] = 0
        for column, values in enumerate(sampling.biases):
            for array, value in zip(adjustments[2:], values, strict=True):
                array[slot, column] = value

    def _widen_ends(self, columns: int) -> None:
        present_columns = self._rows.ends.shape[1]
        if columns > present_columns:
            added_columns = next_power(columns) - present_columns
            self._rows = self._rows._replace(
                ends=np.pad(self._rows.ends, ((0, 0), (0, added_columns)), constant_values=-1)
            )

    def _change(self, slot: int, token: int, length: int, active: bool) -> None:
        self._changed[slot] = True
        for array, value in zip(self._new_live, (token, length, active), strict=True):
            array[slot] = value

    # ---- memory

    def _put[T](self, tree: T) -> T:
        """Arrays of the host whose first axis is the slot, on the devices."""
        return jax.device_put(tree) if self._division is None else self._division.put(tree)

    def _require_whole(self, what: str, asked: bool = True) -> None:
        if self._division is not None and asked:
            count, of_hosts = self._division.devices, " of several processes" if self._division.spans_processes else ""
            raise ValueError(
                f"Sampler: {what}: the model's weights are divided over {count} devices{of_hosts}, as a run with "
                "mesh.fsdp or several processes leaves them: save the model and load it (from_pretrained)"
            )

    def _bytes(self, slots: int, length: int) -> int:
        return slot_bytes(self._structure, self._shapes, slots, length)

    def _reserve(self, nearest: Sequence[Request]) -> None:
        """Allocates or grows the slots' caches if `nearest` need it, to the bucket of the longest row, because each
        capacity compiles.
        """
        if all(request.limit <= self._capacity for request in nearest):
            return
        if self._ready.beside:
            self._grow(max(self._capacity_for(request.limit) or 0 for request in nearest))
            return
        live_requests = [*self._waiting, *(request for request in self._slots if request is not None)]
        most = self.plan.length if self._whole else max(request.limit for request in live_requests)
        self._grow(length_bucket(most))

    def _grow(self, capacity: int) -> None:
        if self._states is None:
            of_slots = self._structure, self._shapes, len(self._slots), capacity
            if self._division is None:
                self._states = device.empty_states(*of_slots)
            else:
                self._states = self._division.put(device.states_shape(of_slots[0], tuple(of_slots[1]), *of_slots[2:]))
        else:
            if self._ready.beside:  # the programs that insert what is prefilled may not be ready
                self._prefills.forget_batches()
            shapes = device.states_shape(self._structure, self._shapes, len(self._slots), capacity)
            leaves, treedef = jax.tree.flatten(self._states)
            self._states = None  # so that each array is freed after its copy
            for index, new in enumerate(jax.tree.leaves(shapes)):
                if leaves[index].shape != new.shape:
                    leaves[index] = self._programs.grow(new.shape, leaves[index])
            self._states = jax.tree.unflatten(treedef, leaves)
        self._capacity = capacity

    # ---- programs

    def prepare(self) -> Prepared:
        """Loads or compiles, at the same time, the programs of usual rows, and allocates the slots' caches, with
        `compiles_beside` in their whole length if a longer cache takes a step no longer.
        """
        self._require_whole("prepare")
        self._switch()
        capacities = self._usual_capacities()
        rounds = [(self._steps, False)] + [(1, False), (1, True)] * self._first_at_once
        kinds = itertools.product((_FILTERED, _DRAWN), rounds, capacities)
        sizes = [self._size(kind, *how, capacity) for kind, how, capacity in kinds]
        prepared = self._ready.prepare([*sizes, *itertools.chain(*map(self._sizes, capacities))])
        if self._states is None and self._has_arrays:
            self._grow(capacities[0])
            self._seen = self._empty_seen()
        return prepared

    def begin(self, prompt: int, max_new_tokens: int, sampling: Sampling, end_tokens: int) -> None:
        """Begins to load or compile, in threads, the programs of a lone row, if programs are kept; also for a model of
        shapes. prompt: its tokens. sampling: without biases. end_tokens: how many end it.
        """
        capacity = length_bucket(self.plan.length if self._whole else prompt + max_new_tokens)
        size = self._size(sampling.kind, self._steps, False, capacity)
        size = dataclasses.replace(size, ends=max(next_power(end_tokens), size.ends))
        marks = [Mark()] if sampling.kind.penalises else []
        self._ready.begin(size, *self._prefills.of_lone(prompt - 1, capacity), *marks)

    def rehearse(self) -> None:
        """Runs the programs of usual rows once: the first run of a program takes longer than later ones. ValueError
        while requests are not done.
        """
        self._require_arrays("rehearse")
        if self._requests:
            raise ValueError(f"Sampler: rehearse while {len(self._requests)} requests are not done")
        drawn, filtered = {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}
        lone = min(_SHORT_PROMPT, self.plan.length - 2 * self._steps)
        bursts = [
            [(lone, self._steps + 1, drawn)],
            [(lone, self._steps, filtered)],
            [(lone, 2, {"constraint": _Free()})],
            *([(length, 1, drawn)] * count for length, count in self._prefills.usual_bursts(self.plan.length - 1)),
        ]
        for rows in bursts:
            for number, (length, new, settings) in enumerate(rows):
                if length > 0:
                    prompt = [(number + place) % self.config.vocab_size for place in range(length)]
                    self.submit(prompt, new, eos_token_ids=(), **settings)
            while self._requests or self._pieces:
                self.step()
        self._ready.forget_later()  # no client asked for it

    def _usual_capacities(self) -> list[int]:
        return (
            [self._longest]
            if self._whole
            else sorted({min(length_bucket(_USUAL_LENGTH), self._longest), self._longest})
        )

    def _sizes(self, capacity: int) -> list[Size]:
        """All that must be ready before the slots' caches have this capacity."""
        of_most = [self._size(_MOST, *how, capacity) for how in ((self._steps, False), (1, True))]
        shorter = {self._capacity} if self._capacity else {c for c in self._usual_capacities() if c < capacity}
        grows = (Grow(len(self._slots), c, capacity) for c in shorter)
        return [*of_most, *self._prefills.usual(capacity), *grows, Mark()]

    def _size(self, kind: Kind, steps: int, masks: bool, capacity: int | None = None) -> Decode:
        """With the columns that the slots' arrays have. capacity: None: that of the slots."""
        columns = self._rows.ends.shape[1], self._bias_columns if kind.adjusts else 0
        return Decode(kind, steps, self._capacity if capacity is None else capacity, *columns, masks)

    @property
    def _bias_columns(self) -> int:
        """Of the slots' Adjustments."""
        adjustments = self._rows.adjustments
        return _FEWEST_BIASES if adjustments is None else adjustments.bias.shape[1]

    def _of_round(self, steps: int, masks: bool) -> Decode:
        """The program of a round, as small as there is, and with more steps if there is none with so few."""
        exact = self._size(self._kind_of_slots(), steps, masks)
        size = self._ready.decode(exact, self._bias_columns)
        if size != exact:
            self._ready.choose([exact], ())
        return size or (exact if masks or steps == self._steps else self._of_round(self._steps, masks))

    def _empty_seen(self) -> device.Array:
        return self._put(np.zeros((len(self._slots), self.config.vocab_size), np.int32))

    # ---- rounds

    def _has_work(self) -> bool:
        return any(r is not None and len(r.tokens) + r.ahead < r.limit for r in self._slots)

    def _masks(self) -> np.ndarray:
        """Rows.masks of the slots: an array whose use by earlier rounds is over, as they have been read."""
        shape = len(self._slots), (self.config.vocab_size + 31) // 32
        masks = self._filled if self._filled is not None else np.full(shape, NO_MASK)
        self._filled = masks
        rows = {
            slot: request.constraint
            for slot, request in enumerate(self._slots)
            if request is not None and request.constraint is not None
        }
        masks[[*(self._masked - rows.keys())]] = NO_MASK
        self._masked = set(rows)
        fill_masks([(constraint, slot) for slot, constraint in rows.items()], masks)
        return masks

    def _dispatch(self, steps: int) -> None:
        """Starts a round of decoding steps without waiting; the states are donated. The host's changes of slots take
        effect in it.
        """
        size = self._of_round(steps, False)
        kind, seen, rows = size.kind, self._seen_of(size.kind), self._rows_of(size.kind)
        arguments = self._leaves, self._states, self._live, seen, *self._changes(), rows
        if size not in self._decoding:
            self._decoding[size] = self._programs.decode.program(self._structure, kind, size.steps, *arguments)
        self._states, self._live, seen, emitted = self._decoding[size](*arguments)
        self._seen = seen if kind.penalises else self._seen
        self._dispatched(emitted, size.steps)

    def _follow_constraints(self) -> None:
        """A round of one step: the host reads the tokens before, and makes the next masks, while logits are
        computed.
        """
        size = self._of_round(1, True)
        kind, rows = size.kind, self._rows_of(size.kind)
        arguments = self._leaves, self._states, self._live, *self._changes(), rows.delta, rows.adapter
        if size.capacity not in self._decoding:
            self._decoding[size.capacity] = self._programs.logits.program(self._structure, *arguments)
        self._states, self._live, logits = self._decoding[size.capacity](*arguments)
        while self._rounds:
            self._read_round()
        rows = rows._replace(masks=self._masks(), delta=None, adapter=None)
        seen = self._seen_of(kind)
        if size not in self._decoding:
            program = self._programs.choose.program(self._structure, kind, logits, self._live, seen, rows)
            self._decoding[size] = program
        self._live, seen, emitted = self._decoding[size](logits, self._live, seen, rows)
        self._seen = seen if kind.penalises else self._seen
        self._dispatched(emitted, 1)

    def _due(self) -> list[Piece]:
        """The pieces that `step` returns: those with a row's first tokens, its last, or as many as a usual round makes.
        Of rounds of one step fewer are due at different times of different rows.
        """
        pieces, self._pieces = joined_pieces(self._pieces), []
        due = []
        for piece in pieces:
            request = self._requests.get(piece.request)
            is_due = (
                request is None
                or request.slot is None  # it waits
                or len(piece.ids) >= min(self._steps, len(request.tokens) - request.start)
                or (len(request.tokens) + request.number) % self._steps == 0
            )
            (due if is_due else self._pieces).append(piece)
        return due

    def _seen_of(self, kind: Kind) -> device.Array | None:
        if kind.penalises and self._seen is None:
            self._seen = self._empty_seen()
        return self._seen if kind.penalises else None

    def _rows_of(self, kind: Kind) -> device.Rows:
        """Of a round's rows, what the device has not yet is sent."""
        rows = self._sent_rows or jax.tree.map(np.copy, self._rows)  # the host changes its arrays
        if rows is self._sent_rows and isinstance(rows.start, np.ndarray):
            rows = self._put(rows)  # not before the second round, as it takes the host 2 ms
        self._sent_rows = rows
        adjustments, adapter = rows.adjustments if kind.adjusts else None, rows.adapter if self._gated else None
        return rows._replace(adjustments=adjustments, adapter=adapter)

    def _dispatched(self, emitted: device.Emitted, steps: int) -> None:
        if not self._on_host:
            for array in jax.tree.leaves(emitted):
                array.copy_to_host_async()
        requests = {
            slot: (request, request.placements) for slot, request in enumerate(self._slots) if request is not None
        }
        for request, _ in requests.values():
            request.ahead += steps
        self._rounds.append(_Round(emitted, steps, requests))

    def _steps_of_round(self) -> int:
        """One where others come at once, or a new row gets its first token early at the cost of few others, or all rows
        end so soon that most steps of a longer round would be in vain.
        """
        if not self._first_at_once:
            return self._steps
        rows = [request for request in self._slots if request is not None]
        is_new = any(len(request.tokens) == request.start and not request.ahead for request in rows)
        is_new = is_new and len(rows) <= max(1, len(self._slots) // _FEW)
        left = max(request.limit - len(request.tokens) - request.ahead for request in rows)
        return 1 if self.more_come or is_new or left <= self._steps // 4 else self._steps

    @staticmethod
    def _kind_of(rows: Sequence[Request]) -> Kind:
        return functools.reduce(Kind.__or__, {row.sampling.kind for row in rows}, _GREEDY)

    def _kind_of_slots(self) -> Kind:
        """What the rows need, by an earlier round's kind if there was the same; else with what the last round had, so
        that few programs are compiled.
        """
        kind = self._kind_of([request for request in self._slots if request is not None])
        if self._ready.beside:
            return kind
        if kind not in self._kinds:
            self._kinds.append(kind | self._kinds[-1] if self._kinds else kind)
            kind = self._kinds[-1]
        return kind

    def _changes(self) -> tuple[device.Array, device.Live]:
        """(bool[slots]: changed since the last call, new numbers). Without changes nothing is sent: the device would
        wait for it.
        """
        if not self._changed.any():
            return self._unchanged
        changed, self._changed = self._changed, np.zeros_like(self._changed)
        return changed, device.Live(*(array.copy() for array in self._new_live))

    def _read_round(self) -> None:
        """Reads the oldest round: makes pieces and ends complete rows. A row that paused, because a longrope model
        changes its factors at its length, waits again at the head of the queue.
        """
        oldest = self._rounds.popleft()
        with timing.phase("wait", "the device"):
            tokens, logprobs, counts, ranked = jax.tree.map(np.asarray, oldest.emitted)
        rows: dict[int, list[int]] = {}  # slots whose rows have not ended, and their new tokens
        by_slot, logprobs_by_slot = tokens.T.tolist(), logprobs.T.tolist()
        for slot, (request, _) in oldest.requests.items():
            request.ahead -= oldest.steps
            if not request.done:  # by a stop string or a cancellation that the device did not know of yet
                rows[slot] = by_slot[slot][: int(counts[slot])]
        followed = {slot: its for slot in rows if (its := oldest.requests[slot][0].constraint) is not None}
        said = dict(zip(followed, accept_all([(followed[slot], rows[slot]) for slot in followed]), strict=True))
        for slot, new_tokens in rows.items():
            request, placed = oldest.requests[slot]
            count = len(new_tokens)
            try:
                new_tokens, reason = request.take(new_tokens, said.get(slot, False))
            except ValueError as error:  # of its constraint
                self._finish(request, [], [], "failed", error=str(error))
                continue
            values = logprobs_by_slot[slot][: len(new_tokens)]
            top_count = request.sampling.top_logprobs
            tops = [
                list(zip(ids[slot, :top_count].tolist(), of_ids[slot, :top_count].tolist(), strict=True))
                for ids, of_ids in (
                    zip(*(array[: len(new_tokens)] for array in ranked), strict=True) if top_count else ()
                )
            ]
            if reason is not None:
                self._finish(request, new_tokens, values, reason, tops)
                continue
            if new_tokens:
                self._pieces.append(Piece(request.number, new_tokens, values, None, tops))
            # It paused, so that its states are computed anew. In a round that was dispatched before that was known, it
            # made no token either, but has left its slot.
            if count < oldest.steps and request.placements == placed and self._slots[slot] is request:
                self._slots[slot] = None
                self._enqueue(request, first=True)

    def _finish(
        self, request: Request, ids: list[int], logprobs: list[float], reason: FinishReason, tops=(), error: str = ""
    ) -> None:
        """Ends a request with a last Piece, and frees its slot or removes it from the queue."""
        request.done = True
        del self._requests[request.number]
        self._pieces.append(Piece(request.number, ids, logprobs, reason, list(tops), error, request.reused))
        if request.slot is None:
            self._waiting.remove(request)
            self._prefills.remove_waiting(request)
        elif self._slots[request.slot] is request:
            self._slots[request.slot] = None
            self._change(request.slot, token=0, length=1, active=False)
        self._free_dropped(request.adapter)
