"""Rows of which a picture, a video or a sound is a part are refused."""

from __future__ import annotations

import pytest

from jaxtune.train.data import prepare
from jaxtune.train.data.rendering.formats import normalize, normalize_labelled, normalize_pair
from jaxtune.train.data.rows.row_errors import RowError
from tests.train.data.conftest import make_tokenizer

PICTURE = {"bytes": b"PNG", "path": None}
TURNS = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat."}]
SAID = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]


@pytest.mark.parametrize(
    ("row", "format", "column"),
    [
        ({"messages": TURNS, "images": ["cat.png"]}, "messages", "images"),  # LLaMA-Factory
        ({"conversations": SAID, "image": "cat.png"}, "sharegpt", "image"),  # LLaVA
        ({"prompt": "What is it?", "completion": "A cat.", "image": PICTURE}, "prompt_completion", "image"),
        ({"instruction": "<video> What is it?", "output": "A cat.", "videos": ["cat.mp4"]}, "alpaca", "videos"),
        ({"text": "A cat.", "audio": {"array": [0.0], "sampling_rate": 16000}}, "text", "audio"),
        ({"text": "A cat.", "Images": [PICTURE]}, "text", "Images"),
    ],
)
def test_a_row_with_a_picture_is_refused(row, format, column):
    with pytest.raises(RowError, match=f"column {column} holds what the text is about.*only text can be trained on"):
        normalize(row, format)


def test_preferences_with_a_picture_are_refused():
    pair = {"prompt": "<image>What is it?", "chosen": "A cat.", "rejected": "A dog.", "images": ["cat.png"]}
    with pytest.raises(RowError, match="column images .*<image> represents it"):
        normalize_pair(pair)
    with pytest.raises(RowError, match="column images"):
        normalize_labelled({"prompt": "<image>What is it?", "completion": "A cat.", "label": True, "images": ["a"]})


@pytest.mark.parametrize(
    "row",
    [
        {"text": "A cat.", "images": []},
        {"text": "A cat.", "images": None},
        {"text": "A cat.", "image": "https://example.org/cat.png"},  # of the page, which the text is
        {"text": "In HTML of old, <image> was a tag."},
    ],
)
def test_text_alone_is_trained(row):
    assert normalize(row, "text").text == row["text"]


def test_they_are_named_or_left_out(write, tmp_path):
    rows = [{"messages": TURNS, "images": ["cat.png"]}, {"messages": [{"role": "user", "content": "?"}, TURNS[1]]}]
    path, options = write("a.jsonl", rows), dict(length=64, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"a.jsonl:1: column images holds what the text is about"):
        prepare(path, make_tokenizer(), **options)
    found = prepare(path, make_tokenizer(), on_bad_row="skip", **options).summary
    assert (found.documents, found.bad_rows) == (1, 1)
