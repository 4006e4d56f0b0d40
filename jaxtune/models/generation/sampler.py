"""The sampler: rows decode in a fixed number of slots, and when a row ends, the next prompt takes its slot.

The device does not wait for the host: a round of a few tokens is dispatched while the one before runs, which the host
reads only then. What it decides (a stop string, a free slot) takes effect in the round after the next one.

    with jaxtune.Sampler(model, slots=64) as sampler:
        for row in sampler.run(prompts, max_new_tokens=512, temperature=1.0):
            print(row.index, row.ids, row.finish_reason)

Servers and trainers can call `submit`, `step` and `cancel` themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation import slots as device
from jaxtune.models.generation.adapters import Adapter
from jaxtune.models.generation.assembly import assembled
from jaxtune.models.generation.converted import Convertible, convertible_of, converts_linears, picture_bytes
from jaxtune.models.generation.division import Division
from jaxtune.models.generation.exactness import require_exact
from jaxtune.models.generation.limits import MOST_BIASES
from jaxtune.models.generation.ready import Score
from jaxtune.models.generation.requests import (
    Constraint,
    Decodes,
    FinishReason,
    Piece,
    PromptPictures,
    Request,
    Row,
    StopStrings,
    check_pictures,
    checked_bias,
    checked_length,
    checked_prompt,
    constraints_of,
    joined_pieces,
    one_a_prompt,
    seeds_of,
)
from jaxtune.models.generation.rounds import NewTokens, wait_for
from jaxtune.models.generation.sampled_model import SampledModel
from jaxtune.models.generation.sampling import Sampling
from jaxtune.models.generation.scores import prompt_scores
from jaxtune.models.generation.slot_plan import (
    PREFILL_TOKENS,
    SLOTS,
    SlotPlan,
    length_bucket,
    plan_slots,
    prefilled_at_once,
    room_bytes,
    slot_bytes,
)
from jaxtune.models.generation.structure import check_cache, takes_cache
from jaxtune.models.placement.streams import arriving_bytes, is_on_host
from jaxtune.models.programs.kept import Prepared
from jaxtune.system import lifetimes, processes, timing, waiting

_IN_FLIGHT = 2  # how many rounds are dispatched before the oldest is read
_SHORT_PROMPT = 100  # tokens of a usual prompt that comes alone
_IDLE_SECONDS = 0.01  # of a step in which all rows wait for programs
_EXACT_ADAPTERS = "Sampler: exact: adapters of several models; merge one, or load it with the model"


class _Free:
    """A constraint that allows any token."""

    def mask(self) -> None:
        return None

    def accept(self, tokens: Sequence[int]) -> bool:
        return False


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"Sampler: {name} = {value!r}: must be a positive integer")


def _require_exact(model: Decoder, adapted: bool) -> None:
    require_exact(model, "Sampler")
    if adapted:
        raise ValueError(_EXACT_ADAPTERS)


def _biases_of(
    logit_bias: Mapping[int, float] | None, ends: Sequence[int], least_length: int, vocab_size: int
) -> tuple[tuple[int, float, int], ...]:
    """Sampling.biases, with those that keep a row from ending before it has `least_length` tokens."""
    biases = [(*checked_bias(token, bias, vocab_size), device.NEVER) for token, bias in (logit_bias or {}).items()]
    biases += [(token, -np.inf, min(least_length, device.NEVER)) for token in ends]
    if len(biases) > MOST_BIASES:
        raise ValueError(f"Sampler: logit_bias and end tokens are {len(biases)}; at most {MOST_BIASES} are followed")
    return tuple(biases)


class Sampler:
    """Continues prompts of token ids, up to `slots` rows in one batch; for one thread at a time.

    Programs are compiled for each bucket of capacity and prompt length and each Kind of sampling settings, and shared
    by samplers of equal models and slots. Closing or freeing a sampler waits for the device.

    Args:
      model: its arrays are used, not copied, apart from plain adapters and converted weights. With shapes in place of
        arrays, as from_pretrained gives `beside`, only `prepare` works, until `update`.
      slots: None: `most_slots`, fewer until there is memory. On each device of a mesh that has the model.
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

    Where a run's mesh has the model on several devices, whole or divided, all decode, each its own slots; `adapters`,
    `compiles_beside`, `prepare` and `score` are refused, over divided weights also `exact`. In several processes all
    make the same calls in one order.

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
        _check_count("tokens_per_round", tokens_per_round)
        _check_count("prefill_tokens", prefill_tokens)
        if adapter_ranks is not None:
            _check_count("adapter_ranks", adapter_ranks)
        if not model.config.head.is_text:
            raise ValueError(f"Sampler: {model.config.head.description} and cannot continue texts")
        check_cache("Sampler: cache", cache, exact)
        if exact:
            _require_exact(model, bool(adapters or adapter_ranks))
        self.config, self.more_come = model.config, False
        self._tower = None if model.vision is None else model.vision.config
        self._model, self._exact = SampledModel(model, cache, adapters, adapter_ranks), exact
        self.ends = self._model.ends
        self._division = Division.of(self._model.weights.leaves)
        if self._division is not None:
            self._require_one_device("adapters", bool(adapters) or adapter_ranks is not None)
            self._require_one_device("compiles_beside", compiles_beside)
            if exact and not self._division.weights_are_whole:
                raise ValueError(f"Sampler: exact: {self._division.devices} devices divide the model's weights")
            if prefix_bytes is not None and self._division.spans_processes:
                prefix_bytes = int(processes.smallest(prefix_bytes) or 0)
        arriving = arriving_bytes(model.layers) if any(map(is_on_host, self._model.weights.leaves)) else 0.0
        room = self._room(memory_share, free_bytes, arriving)
        weights, convertible = self._model.weights, None
        whole = self._division is None or self._division.weights_are_whole
        if not deterministic and not arriving and whole:
            convertible = convertible_of(weights.structure, weights.shapes, prefill_tokens, most_converted)
        self.plan: SlotPlan = self._planned(
            room, slots, length, most_slots, convertible, prefix_bytes or 0, takes_cache(model, cache, exact)
        )
        if self.plan.converted_layers:
            linears = converts_linears(self.plan.slots, exact)
            self._model.convert(self.plan.converted_layers, self._division and self._division.mesh, linears)
        self._steps = tokens_per_round
        (
            self._rows,
            self._caches,
            self._ready,
            self._prefills,
            self._row_programs,
            self._rounds,
            self._admission,
        ) = assembled(
            self._model,
            self.plan,
            self._division,
            self._tower,
            steps=tokens_per_round,
            prefill_tokens=prefill_tokens,
            at_once=prefilled_at_once(self.plan, room, prefill_tokens),
            first_at_once=first_at_once and tokens_per_round > 1,
            compiles_beside=compiles_beside,
            prefills_alone=prefills_alone,
            deterministic=deterministic,
            exact=exact,
            prefix_bytes=None if prefix_bytes is None else self.plan.prefix_bytes,
        )
        self._end = lifetimes.end_with(self, wait_for, self._rounds.dispatched, self._prefills)
        self._closed = False
        self._requests: dict[int, Request] = {}  # requests that are not done
        self._number = 0  # of requests so far
        self._pieces: list[Piece] = []  # the next step returns these
        self._runs = False  # whether `run` has rows to yield

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels all requests, waits for the device and frees the slots."""
        self._closed = True
        for number in list(self._requests):
            self.cancel(number)
        self._caches.states, self._rows.seen = None, None
        self._end()
        self._ready.close()

    def _room(self, memory_share: float, free_bytes: float | None, arriving: float) -> float | None:
        """Bytes for slots beside the adapters and layers that arrive; None where the device does not say."""
        adapters = self._model.bank.bytes
        room = room_bytes(memory_share) if free_bytes is None else (free_bytes - adapters) * memory_share
        if self._division is not None and self._division.spans_processes:
            room = processes.smallest(room)
        return None if room is None else room - (self._model.adapter_bytes - adapters) - arriving

    def _planned(
        self,
        room: float | None,
        slots: int | None,
        length: int | None,
        most_slots: int,
        convertible: Convertible | None,
        prefix_bytes: int,
        takes_fp8: bool,
    ) -> SlotPlan:
        structure, shapes = self._model.weights.structure, self._model.weights.shapes
        plan = plan_slots(
            lambda slots, length: slot_bytes(structure, shapes, slots, length),
            self.config.context_length,
            room,
            slots,
            length,
            most_slots,
            convertible,
            prefix_bytes,
            lambda tokens: picture_bytes(structure, shapes, tokens),
            self._exact,
            takes_fp8,
        )
        return dataclasses.replace(plan, adapter_bytes=self._model.adapter_bytes, cache=self._model.cache)

    def _require_one_device(self, what: str, asked: bool = True) -> None:
        if self._division is not None and asked:
            count, of_hosts = self._division.devices, " of several processes" if self._division.spans_processes else ""
            raise ValueError(
                f"Sampler: {what}: the model is on {count} devices{of_hosts}, as a run with a mesh or several "
                "processes leaves it: save the model and load it (from_pretrained)"
            )

    @property
    def model(self) -> Decoder:
        """As its programs compute with it: weights converted, adapters cast."""
        return self._model.weights.structure.model(self._model.weights.leaves)

    def _require_arrays(self, caller: str) -> None:
        if not self._model.weights.are_arrays:
            raise ValueError(f"Sampler: {caller}: the model has shapes, no arrays: call `update` first")

    # ---- weights and adapters

    @property
    def adapters(self) -> list[str]:
        """The names by which rows may ask for one."""
        return self._model.names

    def load_adapter(self, name: str, adapter: Adapter | str | os.PathLike) -> None:
        """Adds an adapter under a name, also while rows decode. Programs are compiled anew if the ranks of a linear's
        adapters need more columns, 16, 32, 64 and so on; with `compiles_beside` only its rows wait for them.

        adapter: a PEFT folder (adapters.read_adapter reads one in another thread), or an Adapter.

        ValueError: the name is taken, the folder cannot be read, or its adapter cannot be one of several (adapters of
        experts, DoRA, modules_to_save, QAT); more ranks than adapter_ranks. Nothing has changed then.
        """
        if self._closed:
            raise ValueError("Sampler: load_adapter after close: make a new Sampler")
        self._require_one_device("adapters")
        if self._exact:
            raise ValueError(_EXACT_ADAPTERS)
        self._model.load(name, adapter)
        self._switch_if_ready()

    def drop_adapter(self, name: str) -> None:
        """Refuses further rows with an adapter, whose memory is free after the last row that has it. ValueError for an
        unknown name.
        """
        self._free_dropped(self._model.drop(name))

    def update(self, model: Decoder) -> None:
        """Sets the weights to those of a model with the same structure, whose arrays must not be deleted meanwhile;
        adapters stay. Raises ValueError while requests are not done, for another structure, and for weights on other
        devices, or divided otherwise.
        """
        if self._requests:
            raise ValueError(f"Sampler: update while {len(self._requests)} requests are not done")
        self._switch()  # as nobody waits for a program
        divisions = Division.of(jax.tree.leaves(nnx.state(model))), self._division
        if len(set(divisions)) > 1:
            raise ValueError("Sampler: update: these weights are on other devices: make a new Sampler")
        self._model.replace(model)
        self._switch()
        self._prefills.forget()

    def _free_dropped(self, number: int) -> None:
        """Frees a dropped adapter's columns if no request has it."""
        if self._closed or not self._model.is_dropped(number):
            return
        if all(request.adapter != number for request in self._requests.values()):
            self._prefills.forget_adapter(number)
            self._model.free(number)
            self._switch_if_ready()

    def _switch_if_ready(self) -> None:
        with contextlib.suppress(RuntimeError):  # which rows with a new adapter end with (Admission.fill)
            if self._model.can_switch(self._ready):
                self._switch()

    def _switch(self) -> None:
        """Uses the weights that were loaded; rounds that run are not changed."""
        if self._model.switch():
            weights = self._model.weights
            self._rounds.forget_programs()
            self._ready.use(weights.structure, weights.shapes, weights.gated)
            self._prefills.use(weights.structure, weights.shapes, weights.gated)

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
          constraint: which tokens the row may make; while one such row decodes, no round is dispatched ahead,
            unless it is a `Waiting` one that waits.
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
        of_adapter = self._model.adapter(adapter)
        ends = of_adapter.ends if eos_token_ids is None else np.atleast_1d(np.asarray(eos_token_ids, np.int64)).tolist()
        ends = [token for token in ends if 0 <= token < self.config.vocab_size]  # no other can be sampled
        too_early = ends if min_new_tokens > 0 else []
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
                _biases_of(logit_bias, too_early, len(tokens) + min_new_tokens, self.config.vocab_size),
            ),
            int(seed),
            int(index),
            frozenset(ends),
            StopStrings(strings, tokenizer, "Sampler") if strings else None,
            min_new_tokens,
            pictures,
            client=client,
            constraint=constraint,
            adapter=of_adapter.number,
        )
        self._number += 1
        self._requests[request.number] = request
        self._admission.add(request)
        return request.number

    def cancel(self, request: int) -> None:
        """Ends a request that waits or decodes; the next step returns an empty last piece. Other numbers do nothing."""
        live_request = self._requests.get(request)
        if live_request is not None:
            self._finish(live_request, "cancelled")

    @property
    def pending(self) -> int:
        """The number of requests that are not done; at 0, a step only returns leftover pieces."""
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """The number of requests that have no slot."""
        return len(self._admission.waiting)

    @property
    def waiting_requests(self) -> set[int]:
        """Their numbers."""
        return {request.number for request in self._admission.waiting}

    def step(self) -> list[Piece]:
        """Makes about one round of progress: fills slots, dispatches a round if a row needs it, and reads the oldest if
        two are dispatched or none was needed. Returns new pieces, at most one a request; [] does not mean done.
        """
        waiting.look()
        rounds = self._rounds
        with timing.phase("sample"):
            self._switch_if_ready()
            for request, error in self._admission.fill(rounds.is_first):
                self._finish(request, "failed", error=error)
            if not rounds.are_needed:
                if rounds.dispatched:
                    self._read_round()
                elif self.waiting and self._ready.beside and not self._pieces:
                    self._ready.wait(_IDLE_SECONDS)
            elif self._rows.constrained:
                logits = rounds.logits()
                while rounds.dispatched:  # and the masks are made while these are computed
                    self._read_round()
                rounds.choose(logits)
            else:
                rounds.dispatch(self.more_come)
                if len(rounds.dispatched) >= _IN_FLIGHT:
                    self._read_round()
        return self._due()

    def _read_round(self) -> None:
        for new in self._rounds.read():
            if new.reason is not None:
                self._finish(new.request, new.reason, new)
                continue
            if new.ids:
                self._pieces.append(Piece(new.request.number, new.ids, new.logprobs, None, new.tops))
            if new.paused:
                self._admission.add(new.request, first=True)

    def _finish(self, request: Request, reason: FinishReason, new: NewTokens | None = None, error: str = "") -> None:
        """Ends a request with a last Piece, and frees its slot or removes it from the queue."""
        new = new or NewTokens(request, [], [], [], error=error)
        request.done = True
        del self._requests[request.number]
        last = Piece(request.number, new.ids, new.logprobs, reason, new.tops, new.error, request.reused)
        self._pieces.append(last)
        if request.slot is None:
            self._admission.remove(request)
        elif self._rows.requests[request.slot] is request:
            self._rows.end(request.slot)
        self._free_dropped(request.adapter)

    def _due(self) -> list[Piece]:
        """The pieces that `step` returns: those with a row's first tokens, its last, or as many as
        a usual round makes.
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

    # ---- scores

    def score(
        self, prompt: Sequence[int], top: int = 0, adapter: str | None = None
    ) -> tuple[list[float], list[list[tuple[int, float]]]]:
        """(the log-probability of each token of a prompt but the first, the `top` likeliest tokens in the place of
        each); also while rows decode. adapter: its name. ValueError: as `submit`.
        """
        self._require_arrays("score")
        self._require_one_device("score")
        if self._exact:
            raise ValueError("Sampler: exact: score adds up as usual: take training_logprobs(..., exact=True)")
        tokens = checked_prompt(prompt, self.config.vocab_size, "Sampler: the prompt")
        if len(tokens) > self.plan.length:
            raise ValueError(f"Sampler: the prompt of {len(tokens)} tokens: a row has {self.plan.length} positions")
        number = self._model.adapter(adapter).number
        if number > self._model.weights.newest:
            self._switch()
        weights = self._model.weights
        adapter_number = number if weights.gated else None
        return prompt_scores(weights.structure, weights.leaves, tokens, length_bucket(len(tokens)), top, adapter_number)

    def can_score(self, count: int, adapter: str | None = None) -> bool:
        """Whether `score` of a prompt of so many tokens needs to compile nothing; otherwise that is compiled in a
        thread with `compiles_beside`. adapter: its name. RuntimeError: in vain.
        """
        self._switch_if_ready()
        if self._model.adapter(adapter).number > self._model.weights.newest:
            return self._model.can_switch(self._ready)
        return self._ready.choose([Score(length_bucket(count))]) is not None

    # ---- programs

    def prepare(self) -> Prepared:
        """Loads or compiles, at the same time, the programs of usual rows, and allocates the slots' caches, with
        `compiles_beside` in their whole length if a longer cache takes a step no longer.
        """
        self._require_one_device("prepare")
        self._switch()
        prepared = self._row_programs.prepare()
        if self._caches.states is None and self._model.weights.are_arrays:
            self._admission.grow(self._row_programs.usual_capacities()[0])
            self._rows.count_seen()
        return prepared

    def begin(self, prompt: int, max_new_tokens: int, sampling: Sampling, end_tokens: int) -> None:
        """Begins to load or compile, in threads, the programs of a lone row, if programs are kept; also for a model of
        shapes. prompt: its tokens. sampling: without biases. end_tokens: how many end it.
        """
        self._row_programs.begin(prompt, max_new_tokens, sampling, end_tokens)

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
