"""Packaged templates write what the families' own templates write, and mark every response with its end."""

from __future__ import annotations

import functools
import html
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from jaxtune.train.data.rendering.formats import Example
from jaxtune.train.data.rendering.packaged import PACKAGED, packaged_that_fit
from jaxtune.train.data.rendering.templates import RowEncoder, resolve_template
from jaxtune.train.data.rows.row_errors import RowError
from tests.train.data.conftest import make_tokenizer, spans

DATA_PAGE = Path(__file__).parents[3] / "docs" / "data.md"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]


def call(*numbers, name="add"):
    function = {"name": name, "arguments": dict(zip("ab", numbers))}
    return {"id": "abcdef123", "type": "function", "function": function}


def user(text):
    return {"role": "user", "content": text}


def answer(text, *calls):
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def result(text):
    return {"role": "tool", "content": text, "tool_call_id": "abcdef123"}


SYSTEM = {"role": "system", "content": "Be brief, über alles.\n"}
TWO = [user(" Who are you? "), answer("A bot."), user("Really?\n"), answer("Yes,\n\nreally. ")]
USE = [user("Add 1 and 2."), answer("", call(1, 2)), result("3"), answer("It is 3.")]
CHATS = {
    "one turn": ([user("Hi"), answer("Hello")], None),
    "two turns": (TWO, None),
    "system": ([SYSTEM, *TWO], None),
    "empty system": ([{"role": "system", "content": ""}, *TWO], None),
    "question": (TWO[:3], None),
    "tools that are not used": ([SYSTEM, *TWO], TOOLS),
    "a tool": (USE, TOOLS),
    "a tool, then more": (
        [SYSTEM, *USE, user("And 0.5 and 1?"), answer("", call(0.5, 1)), result("1.5"), answer("1.5")],
        TOOLS,
    ),
    "two calls with text": (
        [user("Add."), answer("Now:", call(1, 2), call(3, 4)), result("3"), result("7"), answer("3 and 7")],
        TOOLS,
    ),
    "thoughts": (
        [user("A?"), answer("<think>\nhm\n</think>\n\nB"), user("C?"), answer("<think>\nso\n</think>\n\nD")],
        None,
    ),
    "thoughts between tools": (
        [
            user("Add."),
            answer("<think>\nI add.\n</think>\n\n", call(1, 2)),
            result("3"),
            answer("<think>\nDone.\n</think>\n\n3"),
        ],
        TOOLS,
    ),
}
# name -> (reference, the tokenizer's folder, chats that are left out, with the reason)
REFERENCES = {
    "llama-3": ("llama3", "llama-3.2", "tool|calls"),  # it has no place for tools; the reference leaves them out
    "llama-3.1": ("llama3_1", "llama-3.2", ""),
    "qwen-2.5": ("qwen2_5", "qwen2.5", ""),
    "qwen-3": ("qwen3", "qwen3", ""),
    "qwen-3-instruct": ("qwen3_instruct_2507", "qwen3", ""),
    "gemma": ("gemma", None, "tool|calls"),
    "gemma-3": ("gemma3", None, "tool|calls"),
    "phi-3": ("phi3_5", None, "tool|calls"),
    # The reference is of Phi-4-reasoning, which has a system message of its own where there is none.
    "phi-4": ("phi_4", "phi-4", "tool|calls|turn|question|thoughts"),
    "mistral": ("mistral_v3_spm", "mistral-7b-v0.3", ""),
    "gpt-oss": ("gptoss", "gpt-oss", "tool|calls"),
}


OF_NO_FAMILY = {"chatml", "alpaca"}


@functools.lru_cache(maxsize=1)  # to read one takes longer than a test of it; several take a gigabyte
def real_tokenizer(folder):
    return PreTrainedTokenizerFast.from_pretrained(folder)


def tokenizer_of(name, folder, test_data):
    if folder is not None:
        return real_tokenizer(test_data / "tokenizers" / folder)
    return make_tokenizer(None, additional_special_tokens=list(PACKAGED[name].marks or ()))


@pytest.fixture(scope="module", params=REFERENCES)  # of the module: the tests of a name follow one another
def name(request):
    return request.param


def rendered(tokenizer, template, chat, tools):
    """The text, or None where the template refuses the conversation."""
    asks = chat[-1]["role"] == "user"
    try:
        return tokenizer.apply_chat_template(
            chat, tools=tools, chat_template=template, add_generation_prompt=asks, tokenize=False
        )
    except Exception:
        return None


def test_it_writes_what_the_familys_template_writes(test_data, name):
    reference, folder, left_out = REFERENCES[name]
    tokenizer = tokenizer_of(name, folder, test_data)
    theirs = (test_data / "chat_templates" / f"{reference}.jinja").read_text(encoding="utf-8")
    theirs = theirs.replace('strftime_now("%Y-%m-%d")', "'2025-08-05'")
    ours = resolve_template(tokenizer, name)
    compared = 0
    for title, (chat, tools) in CHATS.items():
        if any(word and word in title for word in left_out.split("|")):
            continue
        expected = rendered(tokenizer, theirs, chat, tools)
        if name == "mistral" and expected is not None:  # its filter "safe" has transformers' engine escape quotes
            expected = html.unescape(expected)
        assert rendered(tokenizer, ours, chat, tools) == expected, title
        compared += expected is not None
    assert compared >= 2


def test_every_familys_template_is_compared_and_listed():
    assert REFERENCES.keys() | OF_NO_FAMILY == PACKAGED.keys(), "REFERENCES needs a line for each"
    section = DATA_PAGE.read_text(encoding="utf-8").partition("## Templates")[2]
    assert [name for name in PACKAGED if f"`{name}`" not in section] == []


def test_every_response_is_found_with_its_end(test_data, name):
    tokenizer = tokenizer_of(name, REFERENCES[name][1], test_data)
    assert name in packaged_that_fit(tokenizer)
    chat = [*([] if name == "gemma" else [SYSTEM]), *TWO]
    encoded = RowEncoder(tokenizer, template=name).encode([Example(messages=chat)])[0]
    assert not isinstance(encoded, RowError), encoded
    end = PACKAGED[name].marks[-1]
    first, last = f"Abot.{end}", f"Yes,\n\nreally.{end}"
    if name == "qwen-3":
        last = f"<think>\n\n</think>\n\n{last}"
    if name == "gpt-oss":
        first, last = "<|channel|>final<|message|>Abot.<|end|>", f"<|channel|>final<|message|>{last}"
    assert [text.replace(" ", "") for text in spans(tokenizer, encoded.tokens, encoded.mask)] == [first, last]
    assert (encoded.responses, encoded.ended) == (2, 2)
    bos = tokenizer.bos_token_id
    wrote = "bos_token" in PACKAGED[name].text
    assert [int(token) for token in encoded.tokens].count(bos) == (1 if wrote and bos is not None else 0)


def test_what_gpt_oss_thought_and_its_tools(test_data):
    """A thought is trained with the answer that it led to, where that is the last; tools are its own template's."""
    tokenizer = tokenizer_of("gpt-oss", "gpt-oss", test_data)
    theirs = (test_data / "chat_templates/gptoss.jinja").read_text(encoding="utf-8")
    ours = resolve_template(tokenizer, "gpt-oss")
    chat = [user("A?"), answer("B") | {"thinking": "hm"}, user("C?"), answer("D") | {"thinking": "so"}]
    expected = rendered(tokenizer, theirs.replace('strftime_now("%Y-%m-%d")', "'2025-08-05'"), chat, None)
    assert rendered(tokenizer, ours, chat, None) == expected and "so" in expected and "hm" not in expected
    assert rendered(tokenizer, ours, USE, TOOLS) is rendered(tokenizer, ours, USE, None) is None
    thought = [user("A?"), answer("<|channel|>analysis<|message|>hm")]
    assert rendered(tokenizer, ours, thought, None) is None


def test_a_tokenizer_without_the_marks_is_told_which_it_lacks():
    tokenizer = make_tokenizer(None)
    assert packaged_that_fit(tokenizer) == ["chatml", "alpaca", "qwen-2.5", "qwen-3", "qwen-3-instruct"]
    with pytest.raises(ValueError, match=r"data.template=phi-4: it writes '<\|im_sep\|>', no special token of this"):
        resolve_template(tokenizer, "phi-4")
