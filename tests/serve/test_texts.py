"""The text of an answer: its pieces are the whole, whatever the tokens are."""

from __future__ import annotations

import functools
import json
import random

import pytest

from jaxtune.conversations.answers import AnswerReader
from jaxtune.conversations.texts import Text
from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.generation.requests import Piece, StopStrings
from jaxtune.serve.bodies import read_chat
from jaxtune.serve.errors import encoded
from jaxtune.serve.forms import Answer, ResponsesAnswer
from jaxtune.serve.responses import read_responses
from jaxtune.serve.served import Tokenizer
from tests.serve.running import BASE, stub_model

SENTENCE = "Grüße, 世界 🙂: aab abab aabab, twice 🙂🙂 and <tool_call> in the middle. "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(BASE)
    assert found is not None
    return found


def pieces(tokenizer, ids, stops, draw, tools=False):
    reader = AnswerReader(tokenizer, None)
    decode = functools.partial(reader.text, calls=tools)
    text, found, at = Text(decode, stops, reader.stream({} if tools else None)), [], 0
    while at < len(ids):
        size = draw.randint(0, 5)
        found.append(said(text.add(ids[at : at + size])))
        at += size
    return [*found, said(text.end())], text


def said(found) -> str:
    assert all(kind == "content" for kind, _ in found)
    return "".join(text for _, text in found)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_whole(tokenizer, seed):
    draw = random.Random(seed)
    ids = tokenizer(SENTENCE * 2)["input_ids"]
    if seed % 2:  # any tokens: parts of characters, special ones
        ids = [draw.randrange(640) for _ in range(60)]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    found, _ = pieces(tokenizer, ids, (), draw)
    assert "".join(found) == whole
    tokenizer.clean_up_tokenization_spaces = True  # as Llama 3's, which would leave out what was streamed
    try:
        spaced = tokenizer("go . on , and ' s")["input_ids"]
        found, _ = pieces(tokenizer, spaced, (), draw)
        ended = StopStrings(["go ."], tokenizer).end(spaced, 0)  # which is in the text that is shown
    finally:
        tokenizer.clean_up_tokenization_spaces = False
    assert "".join(found) == tokenizer.decode(spaced, skip_special_tokens=True)
    assert ended is not None and ended < len(spaced)
    stops = [stop for _ in range(2) if (stop := whole[(at := draw.randrange(len(whole))) : at + draw.randint(1, 6)])]
    found, _ = pieces(tokenizer, ids, stops, draw)
    assert "".join(found) == whole[: min(whole.index(stop) for stop in stops)]


def test_pieces_come_early(tokenizer):
    found, _ = pieces(tokenizer, tokenizer("Once upon a time there was a number. " * 5)["input_ids"], ["zz"], random)
    assert sum(bool(piece) for piece in found) > 10 and not found[-1]


CALLS = [
    ('{"name": "add", "arguments": {"a": 1, "b": "ü"}}', "add", {"a": 1, "b": "ü"}),
    ('{"name": "now"}', "now", {}),
]


@pytest.mark.parametrize("stream", [True, False])
def test_calls_of_tools_are_taken_out(tokenizer, stream):
    said = "I look.\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call, *_ in CALLS)
    ids = tokenizer(said)["input_ids"]
    found, text = pieces(tokenizer, ids, (), random.Random(3), tools=True)
    assert "".join(found) == "I look."
    functions = [call["function"] for call in text.calls]
    assert [(one["name"], json.loads(one["arguments"])) for one in functions] == [one[1:] for one in CALLS]
    for broken in (said.replace('"now"', "now"), f"<tool_call>[1]</tool_call>{said}"):
        found, text = pieces(tokenizer, tokenizer(broken)["input_ids"], (), random.Random(3), tools=True)
        assert "".join(found) == broken and not text.calls


class _Turns:
    """A tokenizer that shows what the chat template got."""

    chat_template = "tools have a place"

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.asked: list = []

    def __deepcopy__(self, memo):
        return self._tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, text, **options):
        return self._tokenizer(text, **options)

    def apply_chat_template(self, turns, **options):
        self.asked.append((turns, options["tools"]))
        return "asked"


def test_tools_reach_the_template_and_their_calls_the_client(tokenizer):

    turns = _Turns(tokenizer)
    served = stub_model("m", None, turns)
    models, lengths = {"m": served.readable}, {"m": 1000}
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "1 "}, {"type": "text", "text": "+ 2"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    body = {"model": "m", "messages": messages, "tools": [tool]}
    asked = read_chat(body, models, lengths)
    [(given, tools)] = turns.asked
    assert tools == [tool] and asked.schemas == {"add": {}}
    assert given[0] == {"role": "system", "content": "Be short."} and given[1]["content"] == "1 + 2"
    assert given[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1} and given[2]["content"] == ""
    assert given[3] == {"role": "tool", "tool_call_id": "c", "content": "3"}
    assert read_chat(body | {"tool_choice": "none"}, models, lengths).schemas is None and turns.asked[1][1] is None

    ids = tokenizer(f"<tool_call>{CALLS[0][0]}</tool_call>")["input_ids"]
    answer = Answer(asked, served)
    answer.add(0, Piece(0, ids, [0.0] * len(ids), "stop"))
    [choice] = answer.whole()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"
    chunks = Answer(asked, served).chunks(0, Piece(0, ids, [0.0] * len(ids), "stop"))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["tool_calls"][0]["index"] == 0 and deltas[1] == {} and len(deltas) == 2


@pytest.mark.parametrize("form", ["chat", "responses"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("after", ["", "\n", " and", '<tool_call>{"name": "no"', None])
def test_length_wins_over_calls(tokenizer, form, stream, reason, after):
    """Calls that ended are handed out; one that max_tokens cut is text. after: None: the mark that ends it is cut."""
    served = stub_model("m", None, _Turns(tokenizer))
    models, lengths = {"m": served.readable}, {"m": 1000}
    text = f"<tool_call>{CALLS[0][0]}</tool_call>" + (after or "")
    text = text.removesuffix("call>") if after is None else text
    piece = Piece(0, ids := tokenizer(text)["input_ids"], [0.0] * len(ids), reason)
    if form == "responses":
        tool = {"type": "function", "name": "add", "parameters": {}}
        body = {"model": "m", "input": "x", "tools": [tool], "stream": stream}
        answer = ResponsesAnswer(read_responses(body, models, lengths), served)
        if stream:
            [*_, last] = [*answer.first_chunks(), *answer.chunks(0, piece), *answer.last_chunks()]
            whole = last["response"]
        else:
            answer.add(0, piece)
            whole = answer.whole()
        ended = whole["status"] == ("incomplete" if reason == "length" else "completed")
        count = sum(item["type"] == "function_call" for item in whole["output"])
    else:
        tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [tool], "stream": stream}
        answer = Answer(read_chat(body, models, lengths), served)
        if stream:
            choices = [chunk["choices"][0] for chunk in answer.chunks(0, piece)]
            count = sum(len(choice["delta"].get("tool_calls", ())) for choice in choices)
        else:
            answer.add(0, piece)
            choices = answer.whole()["choices"]
            count = len(choices[0]["message"].get("tool_calls", ()))
        ended = choices[-1]["finish_reason"] == ("length" if reason == "length" else "tool_calls" if count else "stop")
    is_whole = after is not None and (reason == "length" or "<" not in after)
    assert ended and count == is_whole


def test_numbers_that_json_has_no_words_for_are_null():
    """Clients' parsers fail at NaN, which Python writes; surrogates stay escapes."""

    def refused(word):
        raise AssertionError(f"{word} is no JSON")

    numbers = [1.5, float("nan"), float("inf"), -float("inf")]
    body = {"logprobs": numbers, "top": ({"a": numbers[1]},), "text": "\ud800ü", "n": 3, "yes": True, "none": None}
    found = json.loads(encoded(body), parse_constant=refused)
    want = {"logprobs": [1.5, None, None, None], "top": [{"a": None}]}
    assert found == {**body, **want}


def test_a_row_ends_where_the_client_reads_a_stop(tokenizer):
    """Also where special tokens are between its letters, or where it is one."""
    [user] = (number for number, token in tokenizer.added_tokens_decoder.items() if str(token) == "<|user|>")
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ST", "OP and on"))
    ids = [*first, user, *second]
    end = StopStrings(["STOP"], tokenizer).end(ids, 0)
    assert end is not None and tokenizer.decode(ids[:end], skip_special_tokens=True) == "STOP"
    found, _ = pieces(tokenizer, ids, ["STOP"], random.Random(0))
    assert "".join(found) == ""
    assert StopStrings(["<|user|>"], tokenizer).end(ids, 0) == len(first) + 1


THINKING = [("</think>", "<think>Hm, so.</think>", "Four."), ("</think>", "", "Four."), ("</think>", "<think>Hm", "")]
THINKING += [
    (
        "<|channel|> <|message|>",
        "<|channel|>analysis<|message|>Hm.<|end|>",
        "<|start|>assistant<|channel|>final<|message|>Four.",
    )
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("source", "thoughts", "answer"), THINKING)
def test_tokens_of_thoughts_are_counted(tokenizer, source, thoughts, answer, stream):
    reader = AnswerReader(tokenizer, source)
    counted, rest = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (thoughts, answer))
    text = Text(functools.partial(reader.text, calls=False), (), reader.stream(None))
    for token in [*counted, *rest]:
        (text.add if stream else text.keep)([token])
    text.end()
    heads = len(tokenizer(thoughts[: thoughts.find("Hm")], add_special_tokens=False)["input_ids"]) if thoughts else 0
    assert abs(text.thought_tokens - (len(counted) - heads)) <= (1 if thoughts else 0)
    opened = Text(functools.partial(reader.text, calls=False), (), reader.stream(None, "<think>"))
    if source == "</think>" and answer and thoughts:
        for token in [*counted[heads:], *rest]:
            opened.add([token])
        opened.end()
        assert abs(opened.thought_tokens - (len(counted) - heads)) <= 1


@pytest.mark.parametrize("count", [100, 400])
def test_bytes_that_are_no_character_take_a_few_decodes_of_a_few_tokens(tokenizer, count):
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return "\ufffd" * len(ids)

    text = Text(decode, ())
    shown = "".join(said(text.add([number])) for number in range(count))
    assert max(decoded) <= 40 and sum(decoded) <= 60 * count and count - 40 <= len(shown) <= count
    assert shown + said(text.end()) == "\ufffd" * count
