"""Prompts that arrive together: packed, in whatever order and number they come, each has the answer it has alone."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from jaxtune import Decoder, Sampler
from jaxtune.models.generation import prefills, ready
from jaxtune.models.generation.prefills import Prefills
from jaxtune.models.generation.requests import Piece
from jaxtune.models.generation.sampling import Kind

VOCAB, LENGTH, SLOTS, CHUNK = 48, 160, 8, 256


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(initializer_range=0.5, max_position_embeddings=LENGTH)


@pytest.fixture(scope="module")
def sampler(model):
    """As a server has it, prepared and rehearsed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ready, "LATER_SECONDS", float("inf"))
        with Sampler(
            model, SLOTS, LENGTH, prefill_tokens=CHUNK, first_at_once=True, compiles_beside=True, prefix_bytes=10**6
        ) as sampler:
            sampler.prepare()
            sampler.rehearse()
            yield sampler


@pytest.fixture(scope="module")
def alone(model):
    """The answer to a prompt when no other is there."""
    sampler, known = Sampler(model, SLOTS, LENGTH, prefill_tokens=CHUNK), {}

    def answer(length: int, seed: int, new: int) -> list[int]:
        if (length, seed, new) not in known:
            sampler.submit(prompt(length, seed), new, 1.0, seed, eos_token_ids=())
            [ids] = answers(sampler, []).values()
            known[length, seed, new] = ids
        return known[length, seed, new]

    return answer


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng([length, seed]).integers(VOCAB, size=length).tolist()


def answers(sampler: Sampler, arrivals: list[list[tuple[int, int, int]]]) -> dict[int, list[int]]:
    """Steps until all rows of `arrivals`, some before each step, have ended."""
    found: dict[int, list[int]] = collections.defaultdict(list)
    arrivals = [*arrivals]
    while arrivals or sampler.pending:
        for length, seed, new in arrivals.pop(0) if arrivals else ():
            found[sampler.submit(prompt(length, seed), new, 1.0, seed, eos_token_ids=())] = []
        sampler.more_come = bool(arrivals)
        for piece in sampler.step():
            found[piece.request] += piece.ids
    return dict(found)


ROWS = st.tuples(st.integers(1, 140), st.integers(0, 5), st.integers(1, 12))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(ROWS, max_size=12), min_size=1, max_size=5))
def test_answers_do_not_depend_on_arrivals(sampler, alone, arrivals):
    rows = [row for several in arrivals for row in several]
    assert [*answers(sampler, arrivals).values()] == [alone(*row) for row in rows]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 65), min_size=1, max_size=8, unique=True))
def test_short_prompts_are_packed_where_that_costs_less(sampler, lengths):
    """Than programs of their own, each of which reads all weights."""
    packed, padded = [], []
    with pytest.MonkeyPatch.context() as patch:
        pack, prefill = Prefills._pack, Prefills._prefill
        patch.setattr(Prefills, "_pack", lambda self, *call: packed.append(call) or pack(self, *call))
        patch.setattr(
            Prefills, "_prefill", lambda self, *call, **rows: padded.append(call) or prefill(self, *call, **rows)
        )
        answers(sampler, [[(length, 0, 2) for length in lengths]])
    prompts = [len(request.tokens) for _, [requests], *_ in packed for request in requests]
    prompts += [len(request.tokens) for _, requests, *_ in padded for request in requests]
    assert len(prompts) == len(lengths)
    rows = [len(requests) for _, [requests], *_ in packed]
    assert all(count * prefills._FREE_TOKENS >= size for count, (*_, size) in zip(rows, packed, strict=True))
    assert len(padded) * prefills._FREE_TOKENS < CHUNK


def test_a_rehearsal_leaves_nothing(model, sampler, alone):
    before = set(sampler._ready._queue.ready)
    sampler.rehearse()
    assert not sampler.pending and not sampler._pieces and not sampler._rounds.dispatched
    assert set(sampler._rows.requests) == {None}
    assert sampler._ready._queue.ready == before and not sampler._ready._queue._due
    assert not sampler._prefills._batches and not sampler._prefills._prefixes._blocks
    assert [*answers(sampler, [[(30, 1, 9)]]).values()] == [alone(30, 1, 9)]
    sampler.submit([1], 1)
    with pytest.raises(ValueError, match="rehearse while 1 requests are not done"):
        sampler.rehearse()
    answers(sampler, [])


def test_usual_rows_with_a_constraint_have_their_own_program(model):
    """One that serves all kinds sorts the logits of each row."""
    with Sampler(model, SLOTS, LENGTH, prefill_tokens=CHUNK, first_at_once=True, compiles_beside=True) as sampler:
        sampler.prepare()
        for kind in (Kind(True, False, False), Kind(True, True, False)):
            for masks in (False, True):
                size = sampler._row_programs.decode(kind, 1, masks)
                assert sampler._ready.decode(size, 0) == size


def test_a_rehearsal_runs_what_a_burst_needs(model, monkeypatch):
    ran = set()
    for name in ("_pack", "_prefill"):
        of_prefills = getattr(Prefills, name)

        def noted(self, *call, name=name, of_prefills=of_prefills, **rows):
            ran.add((name, *call[2:5]))
            return of_prefills(self, *call, **rows)

        monkeypatch.setattr(Prefills, name, noted)
    with Sampler(model, SLOTS, LENGTH, prefill_tokens=CHUNK, first_at_once=True, compiles_beside=True) as sampler:
        sampler.prepare()
        packs = {size for size in sampler._ready._queue.ready if isinstance(size, ready.Pack)}
        sampler.rehearse()
    assert {("_pack", pack.width, pack.size) for pack in packs} == {one for one in ran if one[0] == "_pack"} and packs


class Anything:
    def mask(self):
        return None

    def accept(self, tokens):
        return False


@pytest.mark.parametrize("new", [1, 2, 9, 40])
def test_tokens_of_rows_with_constraints_are_joined(model, new):
    sampler = Sampler(model, SLOTS, LENGTH, first_at_once=True)
    numbers = [sampler.submit([1, 2, place], new, eos_token_ids=(), constraint=Anything()) for place in range(6)]
    pieces: list[list[Piece]] = []
    while sampler.pending:
        pieces.append(sampler.step())
    for number in numbers:
        its = [piece for several in pieces for piece in several if piece.request == number]
        assert sum(len(piece.ids) for piece in its) == new and len(its[0].ids) == 1
        assert len(its) <= 3 + new // 8
    rows = [len(several) for several in pieces[1:-1] if several]
    assert new < 40 or max(rows[2:-2]) < 6  # at different times
