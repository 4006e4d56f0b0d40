"""Whatever is asked of the server, each answer is the text of its row alone: requests that hypothesis draws."""

from __future__ import annotations

import contextlib
import http.client
import threading

import pytest
from drawn import Asked, alone, choices, draws, model_of, new_tokens, prompts
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.generation.requests import text_of
from jaxtune.serve.served import ServedModel
from tests import patience
from tests.serve.running import BASE, ask, engine_of, events, serving

_CHOICES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@pytest.fixture(scope="module")
def tokenizer():
    found = load_tokenizer(BASE)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def port(tokenizer):
    model = model_of(len(tokenizer))
    engine = engine_of({"drawn": ServedModel("drawn", model, tokenizer)}, slots=3, length=model.config.context_length)
    with serving({"drawn": ServedModel("drawn", model, tokenizer)}, engine) as (port, _):
        yield port
    assert engine.close(120)


def texts(port: int, body: dict) -> list[str]:
    """The answers of a request, by their index."""
    if body["stream"]:
        found = [""] * (len(body["prompt"]) * body["n"])
        for event in events(port, "/v1/completions", body):
            for choice in event["choices"]:
                found[choice["index"]] += choice["text"]
        return found
    status, answer = ask(port, "/v1/completions", body)
    assert status == 200, answer
    return [choice["text"] for choice in answer["choices"]]


def test_a_beginning_is_prefilled_once(port):
    """Of a second turn the first prompt's whole blocks, once for each prompt however many answers it has."""
    first = [(7 * place + 3) % 48 for place in range(530)]
    body = dict(model="drawn", max_tokens=4, temperature=0, n=2)
    cached = []
    for asked in ([first], [[*first, 5, 6, 7]], [first, [9, *first]]):
        status, answer = ask(port, "/v1/completions", body | {"prompt": asked})
        assert status == 200, answer
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert answer["usage"]["prompt_tokens"] == sum(map(len, asked))
    assert cached == [0, 512, 512]
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=patience.SECONDS)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    assert 'jaxtune_cached_prompt_tokens_total{model="drawn"} 1024.0' in text


@pytest.mark.full
@draws(2)
@given(data=st.data())
def test_requests_at_the_same_time(data, port, tokenizer):
    vocab_size, bodies = len(tokenizer), []
    for _ in range(data.draw(st.integers(1, 3))):
        asked = data.draw(st.lists(prompts(vocab_size), min_size=1, max_size=2))
        new = data.draw(new_tokens(max(map(len, asked))))
        choice = data.draw(choices(ends=False))
        body = dict(model="drawn", prompt=asked, max_tokens=new, seed=data.draw(st.integers(0, 2**32 - 1)))
        bodies.append(body | choice | dict(n=data.draw(st.integers(1, 2)), stream=data.draw(st.booleans())))
    found: dict[int, list[str]] = {}

    def client(number: int) -> None:
        found[number] = texts(port, bodies[number])

    clients = [threading.Thread(target=client, args=(number,)) for number in range(len(bodies))]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(patience.SECONDS)
    for number, body in enumerate(bodies):
        choice = {name: body[name] for name in _CHOICES if name in body}
        for index, text in enumerate(found[number]):
            one = Asked(body["prompt"][index // body["n"]], body["max_tokens"], choice, body["seed"])
            assert text == text_of(tokenizer, alone(one, vocab_size, index).ids)
