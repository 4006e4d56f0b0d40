"""Templates of families beside TRL's marked ones: the same conversations train, with the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
import trl

from jaxtune.train.data.formats import Example
from jaxtune.train.data.row_errors import RowError
from jaxtune.train.data.templates import RowEncoder
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
