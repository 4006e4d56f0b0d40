"""What clients send beside the conversation: settings, lm-eval's echo, tokens, metrics, turns."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import jaxtune
from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.generation.generate import training_logprobs
from jaxtune.models.generation.limits import that_count
from jaxtune.models.generation.requests import Piece
from jaxtune.models.generation.sampling import Sampling
from jaxtune.serve.bodies import read_chat, read_completion
from jaxtune.serve.errors import ApiError
from jaxtune.serve.forms import Answer
from jaxtune.serve.served import Readable
from tests import patience
from tests.serve.running import BASE, ask, engine_of, events, served_models, serving, stub_model

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"model": "base", "prompt": "What is 12 + 30?", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def models():
    return served_models()


@pytest.fixture(scope="module")
def engine(models):
    engine = engine_of(models)
    yield engine
    assert engine.close(60)


@pytest.fixture(scope="module")
def port(models, engine):
    with serving(models, engine) as (port, _):
        yield port


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BASE)


def said(port, **body):
    status, answer = ask(port, PLAIN, BODY | body)
    assert status == 200, answer
    return answer["choices"][0]


def test_settings_reach_the_sampler(models, port):
    """Those of the sampler have their own test; here that each arrives."""
    tokenizer = models["base"].tokenizer
    prompt = tokenizer(BODY["prompt"])["input_ids"]
    with jaxtune.Sampler(models["base"].model, 1, 64) as sampler:

        def alone(**settings) -> str:
            [row] = sampler.run([prompt], 12, **settings)
            return tokenizer.decode(row.ids, skip_special_tokens=True)

        plain = alone()
        first = tokenizer(plain)["input_ids"][0]
        for body, settings in (
            ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
            ({"frequency_penalty": -1.5}, {"frequency_penalty": -1.5}),
            ({"logit_bias": {str(first): -100}}, {"logit_bias": {first: -100.0}}),
            ({"ignore_eos": True, "min_tokens": 4}, {"eos_token_ids": []}),
            ({"stop_token_ids": [first]}, {"eos_token_ids": [first]}),
        ):
            assert said(port, **body)["text"] == alone(**settings), body
        assert said(port, logit_bias={str(first): -100})["text"] != plain


def test_a_stop_is_not_looked_for_in_the_least_tokens(port):
    whole = said(port, ignore_eos=True)
    stop = whole["text"][:2]
    assert said(port, ignore_eos=True, stop=stop)["text"] == ""
    late = said(port, ignore_eos=True, stop=stop, min_tokens=12)
    assert late["text"] == whole["text"] and late["finish_reason"] == "length"
    pieces = events(port, PLAIN, BODY | {"ignore_eos": True, "stop": stop, "min_tokens": 12})
    assert "".join(one["choices"][0]["text"] for one in pieces) == whole["text"]


@pytest.mark.parametrize("most", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_has_the_prompts_log_probabilities(models, port, most, stream):
    """As lm-eval's local-completions asks: token ids, echo, one token."""
    prompts = [models["base"].tokenizer(text)["input_ids"] for text in ("Once upon a time there was", "The number")]
    body = {"model": "base", "prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": most, "temperature": 0}
    expected = training_logprobs(models["base"].model, [ids[:1] for ids in prompts], [ids[1:] for ids in prompts], 16)
    if stream:
        found = [
            {"text": "", "logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}},
            None,
        ]
        found[1] = json.loads(json.dumps(found[0]))
        for event in events(port, PLAIN, body):
            for choice in event["choices"]:
                found[choice["index"]]["text"] += choice["text"]
                for key, values in choice["logprobs"].items():
                    found[choice["index"]]["logprobs"][key] += values
    else:
        status, answer = ask(port, PLAIN, body)
        assert status == 200, answer
        found = answer["choices"]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    for choice, ids, logprobs in zip(found, prompts, expected, strict=True):
        given = choice["logprobs"]
        tokenizer = models["base"].tokenizer
        assert choice["text"].startswith(tokenizer.decode(ids, skip_special_tokens=True))
        assert given["tokens"][: len(ids)] == [tokenizer.decode([token]) for token in ids]
        assert given["token_logprobs"][0] is None and given["top_logprobs"][0] is None
        np.testing.assert_allclose(given["token_logprobs"][1 : len(ids)], logprobs, atol=1e-3)
        assert len(given["tokens"]) == len(given["top_logprobs"]) == len(given["text_offset"]) >= len(ids) + bool(most)
        for token, value, top in list(
            zip(given["tokens"], given["token_logprobs"], given["top_logprobs"], strict=True)
        )[1:]:
            assert value <= max(top.values()) + 1e-4
            assert token not in top or abs(top[token] - value) < 1e-4
    assert said(port, echo=True)["text"] == BODY["prompt"] + said(port)["text"]


def test_echo_of_what_the_sampler_refuses(port):
    status, answer = ask(port, PLAIN, BODY | {"prompt": [99999], "echo": True, "logprobs": 0})
    assert status == 400 and "outside the vocabulary" in answer["error"]["message"]
    for prompt in ([5, -1], [2**40], [[5], [-1]]):
        status, answer = ask(port, PLAIN, BODY | {"prompt": prompt, "echo": True})
        assert status == 400 and answer["error"]["param"] == "prompt"
    assert ask(port, PLAIN, BODY | {"max_tokens": 0})[1]["error"]["param"] == "max_tokens"


def test_tokens_and_back(models, port):
    for text in ("What is 12 + 30?", "Grüße, 世界 🙂", ""):
        status, found = ask(port, "/tokenize", {"model": "mine", "prompt": text, "return_token_strs": True})
        ids = models["base"].tokenizer(text)["input_ids"]
        assert status == 200 and (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 256)
        assert found["token_strs"] == [models["base"].tokenizer.decode([token]) for token in ids]
        assert ask(port, "/detokenize", {"tokens": ids}) == (200, {"prompt": text})
    messages = [{"role": "user", "content": "Hello"}]
    _, found = ask(port, "/tokenize", {"messages": messages})
    _, answer = ask(port, CHAT, {"model": "base", "messages": messages, "max_tokens": 1})
    assert found["count"] == answer["usage"]["prompt_tokens"]
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": messages}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        assert ask(port, path, body)[0] == 400


def numbers(port) -> dict[str, float]:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience.SECONDS)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return {name: float(value) for line in lines if line[0] != "#" for name, _, value in [line.rpartition(" ")]}


def test_metrics_count(port):
    before = numbers(port)
    said(port, ignore_eos=True)
    events(port, PLAIN, BODY | {"ignore_eos": True})
    ask(port, PLAIN, {"model": "base"})
    ask(port, "/no/such/path")

    def more(name: str) -> float:
        return now[name] - before.get(name, 0)

    now = numbers(port)
    assert more('jaxtune_answer_tokens_total{model="base"}') == 24
    assert (
        more('jaxtune_answer_seconds_count{model="base"}')
        == more('jaxtune_first_token_seconds_count{model="base"}')
        == 2
    )
    assert more('jaxtune_requests_total{path="/v1/completions",status="200"}') == 2
    assert more('jaxtune_requests_total{path="/v1/completions",status="400"}') == 1
    assert more('jaxtune_requests_total{path="other",status="404"}') == 1
    assert now['jaxtune_rows_decoding{model="base"}'] == now['jaxtune_rows_waiting{model="mine"}'] == 0


# ---- defaults and templates, without a server


class _Template:
    """A tokenizer whose chat template is another text, and that shows what it got."""

    def __init__(self, tokenizer, template: str):
        self._tokenizer, self.chat_template, self.options = tokenizer, template, {}

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments, **options):
        return self._tokenizer(*arguments, **options)

    def apply_chat_template(self, turns, **options):
        self.options = options
        return "asked"


def chat(tokenizer, template: str, **body):
    shown = _Template(tokenizer, template)
    asked = read_chat(
        {"model": "m", "messages": [{"role": "user", "content": "a"}], **body}, {"m": Readable("m", shown)}, {"m": 99}
    )
    return asked, shown.options


@pytest.mark.parametrize(
    ("template", "effort", "variables", "expected"),
    [
        ("{{ reasoning_effort }}", "high", {}, {"reasoning_effort": "high"}),
        ("{{ reasoning_effort }}{{ enable_thinking }}", "none", {}, {"reasoning_effort": "none"}),
        ("{{ reasoning_effort }}", "high", {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ("{{ enable_thinking }}", "none", {}, {"enable_thinking": False}),
        ("{{ enable_thinking }}", "low", {}, {"enable_thinking": True}),
        ("{{ enable_thinking }}", "low", {"enable_thinking": False}, {"enable_thinking": False}),
    ],
)
def test_an_effort_is_what_the_template_reads(tokenizer, template, effort, variables, expected):
    _, options = chat(tokenizer, template, reasoning_effort=effort, chat_template_kwargs=variables)
    assert {name: options[name] for name in expected} == expected
    with pytest.raises(ApiError, match="does not read it"):
        chat(tokenizer, "{{ messages }}", reasoning_effort=effort)


def test_one_call_where_a_client_wants_no_more(tokenizer):
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    served = stub_model("m", None, _Template(tokenizer, "tools"))
    ids = tokenizer('<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 3)["input_ids"]
    for value, count in ((None, 3), (True, 3), (False, 1)):
        asked, _ = chat(tokenizer, "tools", tools=[tool], parallel_tool_calls=value)
        answer = Answer(asked, served)
        answer.add(0, Piece(0, ids, [0.0] * len(ids), "stop"))
        [choice] = answer.whole()["choices"]  # type: ignore[misc]
        assert len(choice["message"]["tool_calls"]) == count and choice["finish_reason"] == "tool_calls"


def test_defaults_are_those_of_the_models_files(models, tokenizer):
    model = models["base"].model
    recorded = {"temperature": 0.6, "top_k": 20, "top_p": 1.0, "min_p": 7, "repetition_penalty": "x", "eos_token_id": 1}
    model = stub_model("m", _WithSource(json.dumps(recorded)), tokenizer)
    assert model.defaults == {"temperature": 0.6, "top_k": 20}
    body = {"model": "m", "prompt": "a"}

    def row(**settings):
        return read_completion(body | settings, {"m": model.readable}, {"m": 99}).rows[0]

    assert (row().temperature, row().top_k, row().top_p, row().min_p) == (0.6, 20, 1.0, 0.0)
    assert (row(temperature=1.5, top_k=-1).temperature, row(top_k=-1).top_k, row(temperature=0).top_k) == (1.5, 0, 0)


@dataclasses.dataclass
class _Source:
    generation_config: str


class _WithSource:
    def __init__(self, text: str):
        self.source = _Source(text)


# ---- turns


def test_clients_take_turns(models):
    """Of one that asks for many rows, and many requests, and of another."""
    with jaxtune.Sampler(models["base"].model, 1, 64) as sampler:
        clients = [("a", 1)] * 4 + [("a", 2)] * 2 + [("b", 3)] * 2
        order = {sampler.submit([5, index + 1], 1, client=client): client for index, client in enumerate(clients)}
        ended = []
        while sampler.pending:
            ended += [order[piece.request] for piece in sampler.step() if piece.finish_reason is not None]
    a, b, c = ("a", 1), ("a", 2), ("b", 3)
    assert ended == [a, c, b, c, a, b, a, a]


def test_requests_of_a_user_are_one_clients(tokenizer):
    readable = {"m": Readable("m", tokenizer)}
    for body, client in (({}, ""), ({"user": "u"}, "u"), ({"user": "u", "safety_identifier": "s"}, "s")):
        assert read_completion({"model": "m", "prompt": "a", **body}, readable, {"m": 99}).client == client


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_filters_that_programs_send_beside_temperature_0(temperature):
    """The server and lm-eval leave them out; in Python's calls they are errors."""
    sent = {"temperature": temperature, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.2}
    kept = that_count(sent)
    assert Sampling(**kept).repetition_penalty == 1.2 and (kept == sent) == (temperature > 0)
    if temperature == 0:
        with pytest.raises(ValueError, match="no effect"):
            Sampling(**sent)
