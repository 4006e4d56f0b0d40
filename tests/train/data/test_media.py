"""Rows of which a picture, a video or a sound is a part are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.conversations.pictures import PICTURE as PICTURE_MARK
from jaxtune.conversations.pictures import PictureAccess
from jaxtune.train.data import prepare
from jaxtune.train.data.rendering.formats import (
    LABELLED,
    PREFERENCE,
    asked,
    normalize,
    normalize_labelled,
    normalize_pair,
)
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


TAGGED = {  # forms of a question with a tag
    "messages": lambda text: {"messages": [{"role": "user", "content": text}, TURNS[1]]},
    "sharegpt": lambda text: {"conversations": [{"from": "human", "value": text}, SAID[1]]},
    "alpaca": lambda text: {"instruction": text, "output": "A cat."},
    "prompt_completion": lambda text: {"prompt": text, "completion": "A cat."},
    "text": lambda text: {"text": text},
    PREFERENCE: lambda text: {"prompt": text, "chosen": "A cat.", "rejected": "A dog."},
    LABELLED: lambda text: {"prompt": text, "completion": "A cat.", "label": True},
    "": lambda text: {"prompt": text},
}
READ = {PREFERENCE: normalize_pair, LABELLED: normalize_labelled, "": asked}


@given(
    st.sampled_from([*TAGGED]),
    st.sampled_from(["image", "images", "Images", "video", "videos", "audio"]),
    st.sampled_from([None, [], "", {}, ()]),
    st.sampled_from([None, PictureAccess()]),
)
def test_a_tag_whose_picture_is_not_there_is_refused(form, column, empty, access):
    tag = f"<{column.lower().rstrip('s')}>"
    read = READ.get(form, lambda row, access: normalize(row, form, access))
    with pytest.raises(RowError, match=f"column {column} is empty .*{tag}"):
        read(TAGGED[form](f"{tag}What is it?") | {column: empty}, access)
    for row in (TAGGED[form](f"{tag}What is it?"), TAGGED[form]("What is it?") | {column: empty}):
        read(row, access)  # a word, or a row that is about none
    if form in ("messages", "text") and access is not None:  # the pictures are in the other column
        other = {"image": "images", "images": "image"}.get(column)
        if other and form == "messages":
            read(TAGGED[form](f"{tag}What is it?") | {column: empty, other: [b"PNG"]}, access)


@pytest.mark.parametrize("access", [None, PictureAccess()])
def test_a_turns_own_pictures_do_not_vanish(access):
    turn = {"role": "user", "content": "<image>What is it?"}
    for cell in (None, [], ""):
        with pytest.raises(RowError, match=r"messages\[0\].images: is empty, and <image>"):
            normalize({"messages": [turn | {"images": cell}, TURNS[1]]}, "messages", access)
    if access is None:
        with pytest.raises(RowError, match=r"messages\[0\].images: pictures, of which this model reads none"):
            normalize({"messages": [turn | {"images": [b"PNG"]}, TURNS[1]]}, "messages")


def test_a_tag_in_an_answer_is_a_word_where_a_question_has_the_pictures():
    turns = [TURNS[0], {"role": "assistant", "content": "Write <image> there."}]
    made = normalize({"messages": turns, "images": [b"PNG"]}, "messages", PictureAccess())
    assert made.messages[0]["content"] == f"{PICTURE_MARK}What is it?" and made.messages[1] == turns[1]
    assert normalize({"messages": [{**turns[0], "content": "What?"}, turns[1]], "images": []}, "messages").messages


def test_they_are_named_or_left_out(write, tmp_path):
    rows = [{"messages": TURNS, "images": ["cat.png"]}, {"messages": [{"role": "user", "content": "?"}, TURNS[1]]}]
    path, options = write("a.jsonl", rows), dict(length=64, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"a.jsonl:1: column images holds what the text is about"):
        prepare(path, make_tokenizer(), **options)
    found = prepare(path, make_tokenizer(), on_bad_row="skip", **options).summary
    assert (found.documents, found.bad_rows) == (1, 1)
