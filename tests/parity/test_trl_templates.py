"""Templates of families beside TRL's marked ones: the same conversations train, with the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
import trl

from jaxtune.train.config import ConfigError
from jaxtune.train.data.rendering.formats import Example
from jaxtune.train.data.rendering.templates import RowEncoder
from jaxtune.train.data.rows.row_errors import RowError
from jaxtune.train.sampled.tool_formats import Call, ToolFormat
from tests.train.data.conftest import spans
from tests.train.data.test_conversations import TOOLS, answer, rounds, user

FOLDER = Path(trl.__file__).parent / "chat_templates"
THOUGHTS = ("hm", "so", "again", "done")
CHATS = {
    "thoughts": ([user("A?"), answer("Blue", "hm"), user("C?"), answer("Red", "so")], None, ["Blue", "Red"]),
    "a first thought": ([user("A?"), answer("Blue", "hm"), user("C?"), answer("Red")], None, ["Blue", "Red"]),
    "two rounds": (rounds(None, None, None, None), TOOLS, ["add", "It is 2.", "add", "It is 4."]),
    "two rounds with thoughts": (rounds(*THOUGHTS), TOOLS, ["add", "It is 2.", "add", "It is 4."]),
    "a round, then a turn": (
        [*rounds(*THOUGHTS)[:4], user("?"), answer("Yes", "fine")],
        TOOLS,
        ["add", "It is 2.", "Yes"],
    ),
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("qwen3_5_think", "qwen3"),
        ("qwen3_5_nothink", "qwen3"),
        ("qwen3_6", "qwen3"),
        ("qwen3", "qwen3"),
        ("gptoss", "gpt-oss"),
    ],
)
def test_what_trains_there_trains_here(name, folder, chat, test_data):
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(test_data / "tokenizers" / folder)
    messages, tools, expected = CHATS[chat]
    found = []
    for kind in ("", "_training"):
        template = (FOLDER / f"{name}{kind}.jinja").read_text(encoding="utf-8")
        (encoded,) = RowEncoder(tokenizer, template=template).encode([Example(messages=messages, tools=tools)])
        assert not isinstance(encoded, RowError), encoded
        found.append((encoded, spans(tokenizer, encoded.tokens, encoded.mask)))
    (ours, texts), (_, theirs) = found
    assert len(texts) == len(theirs) == len(expected) == ours.ended
    for text, other, wanted in zip(texts, theirs, expected, strict=True):
        assert wanted in text and wanted in other
        # Ours has the answer and its end as TRL's has them; its thought, where the template writes it.
        assert text[text.index(wanted) :] == other[other.index(wanted) :]
    kept = [thought for thought in THOUGHTS if any(thought in text for text in texts)]
    assert bool(ours.left_out) == ("thought" in chat or "then" in chat) or kept


# Special tokens of Gemma 4's template; the tokenizer itself is not among the test data.
GEMMA_4 = ("turn", "channel", "tool", "tool_call", "tool_response")
CALL, SECOND = (f"<|tool_call>call:add{{a:{number}}}<tool_call|><|tool_response>" for number in (1, 3))
HM, SO, AGAIN, DONE = (f"<|channel>thought\n{thought}\n<channel|>" for thought in THOUGHTS)


def gemma_4(test_data):
    """Qwen's tokenizer with Gemma 4's marks."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(test_data / "tokenizers" / "qwen3")
    marks = [f"<{side}>" for name in GEMMA_4 for side in (f"|{name}", f"{name}|")]
    tokenizer.add_special_tokens({"additional_special_tokens": [*marks, '<|"|>', "<|think|>"]})
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    return tokenizer


@pytest.mark.parametrize(
    ("chat", "trained"),
    [
        ("thoughts", ["Blue<turn|>", f"{SO}Red<turn|>"]),
        ("two rounds", [CALL, "It is 2.<turn|>", SECOND, "It is 4.<turn|>"]),
        ("two rounds with thoughts", [CALL, "It is 2.<turn|>", AGAIN + SECOND, f"{DONE}It is 4.<turn|>"]),
        ("a round, then a turn", [CALL, "It is 2.<turn|>", "<|channel>thought\nfine\n<channel|>Yes<turn|>"]),
    ],
)
def test_what_trains_of_gemma_4s_template(chat, trained, test_data):
    """Google's template of July 2026, without marks: calls train with the token at which the model stops for a result,
    results never, thoughts where the template writes them, and rows that lost a thought say so. An answer goes on in
    the turn of the tool's result, so that nothing stands before it."""
    tokenizer, (messages, tools, _) = gemma_4(test_data), CHATS[chat]
    template = (FOLDER / "gemma4_v5.jinja").read_text(encoding="utf-8")
    (encoded,) = RowEncoder(tokenizer, template=template).encode([Example(messages=messages, tools=tools)])
    assert not isinstance(encoded, RowError), encoded
    assert spans(tokenizer, encoded.tokens, encoded.mask) == trained and encoded.ended == len(trained)
    text = tokenizer.decode(encoded.tokens)
    assert text == tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
    assert tools is None or text.count("<|tool>declaration:add{") == 1
    lost = {"two rounds": 0, "thoughts": 1}.get(chat, 2)
    assert encoded.left_out.count("reasoning_content") == lost


def test_sampling_with_tools_in_gemma_4s_form(test_data):
    """What its template writes of a call is parsed as that call; what a tool answers follows within the same turn; and
    a model that does not end its turn where the answer belongs is refused."""
    tokenizer = gemma_4(test_data)
    tokenizer.chat_template = (FOLDER / "gemma4_v5.jinja").read_text(encoding="utf-8")
    stop, end = tokenizer.convert_tokens_to_ids(["<|tool_response>", "<turn|>"])
    form = ToolFormat(tokenizer, None, [end, stop])
    arguments = {"a": -1.5, "list": ["x", {"deep": None}], "text": 'two {words}: "so"', "yes": True}
    asked = [user("Add."), answer("", "hm") | {"tool_calls": [Call("add", arguments).message]}]
    text = tokenizer.apply_chat_template(asked, tokenize=False).removesuffix("<|tool_response>")
    written = text[text.index("<|channel>") :]
    message, calls = form.parsed(form._ids(written), {})
    assert calls == [Call("add", arguments)] and message["content"] == ""
    told = form.decode(form.suffix([{"role": "tool", "name": "add", "content": "2"}]))
    assert told == 'response:add{value:<|"|>2<|"|>}<tool_response|>'
    with pytest.raises(ConfigError, match="no token that ends an answer"):
        ToolFormat(tokenizer, None, [end])
