"""Requests that arrive together are prefilled together, and a lone one at once."""

from __future__ import annotations

import asyncio
import math
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.models.generation.sampler import Sampler
from jaxtune.serve import engine as engines
from jaxtune.serve.engine import Engine
from jaxtune.serve.requests import Row
from tests import patience
from tests.serve.running import engine_of, served_models


@pytest.fixture(scope="module")
def engine():
    engine = engine_of({"base": served_models()["base"]}, slots=8)
    yield engine
    assert engine.close(patience.SECONDS)


@pytest.fixture
def steps():
    """Of each of the sampler's steps: how many rows were there, and whether more were said to come."""
    found: list[tuple[int, bool]] = []
    step = Sampler.step

    def noted(self):
        found.append((self.pending, self.more_come))
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "step", noted)
        yield found


def row(seed: int, new: int) -> Row:
    return Row([5, 6, 7 + seed], new, 1.0, seed, 0, 0, 1.0, 0.0, 1.0, (), ignore_eos=True)


async def answered(engine: Engine, new: int, seed: int, read_seconds: float) -> int:
    """Tokens of an answer to a request that is read for some time."""
    with engine.arrival():
        await asyncio.sleep(read_seconds)
    answers, count = await engine.submit("base", [row(seed, new)]), 0
    while answers.left:
        count += sum(len(piece.ids) for _, piece in await answers.ready())
    answers.close()
    return count


def test_where_no_slot_is_free_nothing_that_comes_is_waited_for(engine, steps):
    async def main() -> None:
        with engine.arrival():
            answers = await engine.submit("base", [row(seed, 20) for seed in range(12)])
            while answers.left:
                await answers.ready()
            answers.close()

    asyncio.run(main())
    full = [more for pending, more in steps if pending >= 8]
    assert full and not any(full)


def test_what_is_being_read_is_waited_for(engine, steps, monkeypatch):
    monkeypatch.setattr(engines, "time", types.SimpleNamespace(monotonic=lambda: 0.0))  # nothing takes long
    monkeypatch.setattr(engines, "_FOLLOWING_SECONDS", 0.0)

    async def main() -> None:
        with engine.arrival():
            first = await engine.submit("base", [row(0, 4)])
            await asyncio.sleep(0.2)
            assert not steps
            second = await engine.submit("base", [row(1, 4)])
        for answers in (first, second):
            while answers.left:
                await answers.ready()
            answers.close()

    asyncio.run(asyncio.wait_for(main(), patience.SECONDS))
    assert steps[0] == (2, False)


@pytest.mark.parametrize("seconds", ["_GATHERING_SECONDS", "_ARRIVING_SECONDS"])
def test_a_slow_request_keeps_nobody_waiting(engine, steps, monkeypatch, seconds):
    """Such as one whose body comes in pieces."""
    monkeypatch.setattr(engines, "_GATHERING_SECONDS", patience.SECONDS)
    monkeypatch.setattr(engines, "_ARRIVING_SECONDS", patience.SECONDS)
    monkeypatch.setattr(engines, seconds, 0.01)
    monkeypatch.setattr(engines, "_FOLLOWING_SECONDS", 0.0)

    async def main() -> int:
        with engine.arrival():
            await asyncio.sleep(0.05)
            return await answered(engine, 5, 3, 0.0)

    assert asyncio.run(asyncio.wait_for(main(), patience.SECONDS)) == 5
    assert all(more == (seconds == "_GATHERING_SECONDS") for _, more in steps)


def test_a_lone_request_waits_for_nobody(engine, steps, monkeypatch):
    for seconds in ("_GATHERING_SECONDS", "_ARRIVING_SECONDS", "_FOLLOWING_SECONDS"):
        monkeypatch.setattr(engines, seconds, math.inf)
    assert asyncio.run(asyncio.wait_for(answered(engine, 5, 0, 0.01), patience.SECONDS)) == 5
    assert all(more for _, more in steps)  # as others are likely


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0, 0.02)), min_size=1, max_size=24))
def test_every_arrival_is_answered(engine, arrivals):
    async def main() -> list[int]:
        asked = (answered(engine, new, place, seconds) for place, (new, seconds) in enumerate(arrivals))
        return await asyncio.gather(*asked)

    assert asyncio.run(main()) == [new for new, _ in arrivals]
    assert not engine._arriving
