"""Clients take turns at the processes that read bodies."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.serve import readers
from jaxtune.serve.errors import ApiError
from jaxtune.serve.readers import Readers
from jaxtune.serve.served import Readable
from jaxtune.serve.turns import Turns, client_of
from tests.serve.running import served_models


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz")), max_size=30), st.data())
def test_turns_are_all_given_and_no_client_has_two_between_anothers_waits(count, clients, data):
    turns = Turns(count)
    asked = [(client, turns.ask(client)) for client in clients]
    while asked:
        running = [one for one in asked if one[1].done()]
        assert 0 < len(running) <= count
        waits = {client for client, turn in asked if not turn.done()}
        for client in {client for client, _ in running}:
            have = sum(other == client for other, _ in running)
            assert have <= max(1, count - 1)
        if len(running) < count:  # one is free only as those who wait have all but one
            assert all(sum(other == client for other, _ in running) == max(1, count - 1) for client in waits)
        done = data.draw(st.sampled_from(running))
        asked.remove(done)
        turns.end(done[0])
    assert not turns._last and not turns._have and turns._free == count


def test_a_client_waits_for_one_turn_of_each_other():
    turns = Turns(1)
    many = [turns.ask(("a", "many")) for _ in range(9)]
    few, far = turns.ask(("a", "few")), turns.ask(("b", ""))
    many[3].cancel()
    turns.end(("a", "many"))
    assert far.done() and not few.done()
    turns.end(("b", ""))
    assert few.done() and sum(turn.done() for turn in many) == 2  # with the cancelled one
    turns.end(("a", "few"))
    assert sum(turn.done() for turn in many) == 3


def test_who_asks_is_seen_before_a_body_is_read():
    body = {"messages": [{"role": "user", "content": '"user": "no"' + "x" * 10000}], "model": "m", "user": "me"}
    assert client_of("h", json.dumps(body).encode()) == ("h", "me")
    assert client_of("h", b'{"safety_identifier": "it"}') == ("h", "it")
    assert client_of("h", b"\xff" * 9) == ("h", "")


def test_slow_bodies_of_one_client_stop_no_other(monkeypatch):
    monkeypatch.setattr(readers, "_SECONDS", 5.0)
    tokenizer = copy.deepcopy(served_models()["base"].tokenizer)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    vars(tokenizer)["chat_template"] = endless
    slow = {"model": "base", "messages": [{"role": "user", "content": "a"}], "user": "slow"}

    async def ask(own: Readers) -> None:
        path, lengths = "/v1/chat/completions", {"base": 256}
        warm = await own.read("/tokenize", b'{"model": "base", "prompt": "a"}', lengths)
        assert warm
        many = [asyncio.ensure_future(own.read(path, json.dumps(slow).encode(), lengths)) for _ in range(2)]
        await asyncio.sleep(0.1)
        for _ in range(3):
            assert await own.read("/tokenize", b'{"model": "base", "prompt": "a"}', lengths)
        assert not many[0].done()
        many[1].cancel()
        with pytest.raises(ApiError, match="longer than 5 s"):
            await many[0]

    with Readers(2) as own:
        own.serve({"base": Readable("base", tokenizer)})
        asyncio.run(ask(own))
