"""Rows with pictures, from every form that people have to packed patches."""

from __future__ import annotations

import base64
import dataclasses
import http.server
import json
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jaxtune.conversations.messages import read_messages
from jaxtune.conversations.picture_processors import PictureProcessor
from jaxtune.conversations.pictures import PictureAccess
from jaxtune.conversations.prompts import picture_prompt
from jaxtune.train.config import ConfigError
from jaxtune.train.data import prepare
from jaxtune.train.data.packing.answers import Answer, AnswerPictures, AnswerRows
from jaxtune.train.data.packing.packing import NothingUsable, plan_rows
from jaxtune.train.data.packing.pairs import PackedPairs
from jaxtune.train.data.packing.steps import StepBatches
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.data.rendering.preview import preview
from jaxtune.train.data.rows import row_files
from jaxtune.train.data.rows.feeds import FedBatches, PreparedSet
from jaxtune.train.data.rows.reading import open_sources
from jaxtune.train.data.rows.streamed import StreamedRows
from jaxtune.train.data.tokens.pictures import prompt_documents, rounded
from jaxtune.train.objectives.kto import with_mismatched_answers
from tests.train.data.conftest import PLAIN_TEMPLATE, spans
from tests.train.data.pictures import MARKS, SETTINGS, TEMPLATE, drawn, file_of, picture_options, picture_tokenizer

TOKENIZER = picture_tokenizer()
OPTIONS = picture_options(TOKENIZER)
PROCESSOR = OPTIONS.processor
CAT, DOG = file_of(drawn(20, 12)), file_of(drawn(17, 40, 1))


def chat(*question, answer="A cat."):
    return {"messages": [{"role": "user", "content": list(question)}, {"role": "assistant", "content": answer}]}


def part(data):
    return {"type": "image", "image": data}


def prepared(rows, length=256, **options):
    return prepare(rows, TOKENIZER, **{"length": length, "pictures": OPTIONS, **options})


def pieces_of(batch):
    """(row, slice) of every document of a batch."""
    for row, segments in enumerate(np.asarray(batch.segment_ids)):
        for segment in range(1, segments.max(initial=0) + 1):
            inside = np.flatnonzero(segments == segment)
            if len(inside):
                yield row, slice(inside[0], inside[-1] + 1)


def grids_in(batch, row, piece):
    """(index of the first token, grid, patches) of every picture of a document, by its tokens."""
    arrays = {name: np.asarray(array)[row] for name, array in batch.pictures.items()}
    features = np.concatenate([[-1], arrays["picture_features"][piece], [-1]])
    for start, end in np.flatnonzero(np.diff(features >= 0)).reshape(-1, 2):
        mine = arrays["patch_segments"] == arrays["patch_segments"][features[start + 1] * PROCESSOR.block]
        where = np.flatnonzero(mine)
        grid = arrays["patch_grids"][mine]
        assert (grid == grid[0]).all() and len(where) == grid[0].prod() == where[-1] - where[0] + 1
        assert np.array_equal(features[start + 1 : end + 1], where[:: PROCESSOR.block] // PROCESSOR.block)
        grid = tuple(grid[0].tolist())
        assert np.array_equal(arrays["patch_coordinates"][mine], PROCESSOR.coordinates(grid))
        yield int(start), grid, arrays["patches"][mine]


# --- tokens

# {family: (config.json, settings, the template's text of a picture, what transformers' processor writes for a grid)}
FAMILIES = {
    "qwen": (
        {"image_token_id": "<|image_pad|>"},
        SETTINGS,
        "<|vision_start|><|image_pad|><|vision_end|>",
        lambda rows, columns: "<|vision_start|>" + "<|image_pad|>" * (rows * columns) + "<|vision_end|>",
    ),
    "gemma3": (
        {
            "image_token_index": "<img>",
            "boi_token_index": "<boi>",
            "eoi_token_index": "<eoi>",
            "mm_tokens_per_image": 4,
            "vision_config": {"patch_size": 4},
        },
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}},
        "<boi>",
        lambda rows, columns: "\n\n<boi>" + "<img>" * (rows * columns) + "<eoi>\n\n",
    ),
    "gemma4": (
        {"image_token_id": "<img>", "boi_token_id": "<boi>", "eoi_token_id": "<eoi>"},
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 2,
            "pooling_kernel_size": 3,
            "max_soft_tokens": 70,
        },
        "<img>",
        lambda rows, columns: "<boi>" + "<img>" * (rows * columns) + "<eoi>",
    ),
    "mistral": (
        {"image_token_index": "[IMG]", "spatial_merge_size": 2},
        {
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": 4, "width": 4},
            "size": {"longest_edge": 64},
        },
        "[IMG]",
        lambda rows, columns: ("[IMG]" * columns + "[IMG_BREAK]") * (rows - 1) + "[IMG]" * columns + "[IMG_END]",
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_processors_are_alike_whose_patches_are(name):
    config, written, *_ = FAMILIES[name]
    ids = {key: 1 if isinstance(text, str) else text for key, text in config.items()}

    def alike(**changes):
        ours, theirs = (PictureProcessor.of(ids, each, lambda _: 2) for each in (written, written | changes))
        return ours.reads_like(theirs) and theirs.reads_like(ours)

    assert alike() and not alike(image_mean=[0.4, 0.4, 0.4]) and not alike(resample=0)
    assert not alike(rescale_factor=0.5)
    other_size = {
        "qwen": {"size": {"shortest_edge": 2048, "longest_edge": 4096}},
        "gemma3": {"size": {"height": 34, "width": 34}},  # which each picture has
        "gemma4": {"max_soft_tokens": 140},
        "mistral": {"size": {"longest_edge": 32}},
    }
    assert alike(**other_size[name]) == (name != "gemma3")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("train_on", ["responses", "turns", "completion", "all"])
def test_tokens_are_those_of_the_text_that_transformers_writes(name, train_on):
    """The processor repeats tokens in the text before it is tokenised; here it is done among the tokens."""
    config, written, shown, text_of = FAMILIES[name]
    tokenizer = picture_tokenizer(TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", shown))
    specials = ["<boi>", "<img>", "<eoi>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *MARKS, *specials]})
    ids = {
        key: tokenizer.convert_tokens_to_ids(text) if isinstance(text, str) else text for key, text in config.items()
    }
    processor = PictureProcessor.of(ids, written, tokenizer.convert_tokens_to_ids)
    options = PictureOptions(processor)

    @settings(max_examples=12, deadline=None, database=None)
    @given(st.lists(st.sampled_from(["What?", "\n", "\n\n", "two words", (20, 12), (9, 30)]), min_size=1, max_size=6))
    def check(words):
        pictures = [drawn(*word) for word in words if isinstance(word, tuple)]
        waiting, content = iter(pictures), []
        for word in words:
            content.append(word if isinstance(word, str) else part(next(waiting)))
        turns = [*chat(*content)["messages"], *chat("And?", answer="A dog.")["messages"]]
        data = prepare([{"messages": turns}], tokenizer, length=4096, pictures=options, train_on=train_on)
        texts = [text_of(*(side // processor.merge for side in processor.grid(image))) for image in pictures]
        waiting = iter(texts)
        said = "".join(word if isinstance(word, str) else next(waiting) for word in words)
        turn = "<|im_start|>{}\n{}<|im_end|>\n".format
        pieces = [turn("user", said), turn("assistant", "A cat."), turn("user", "And?"), turn("assistant", "A dog.")]
        text = "".join(pieces)
        tokens, mask = _documents(data)[0]
        assert tokens.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        seen = data.documents.pictures
        assert [tokens[start] for start in seen.starts] == [
            processor.tokens(processor.grid(image))[0] for image in pictures
        ]
        answers = ["A cat.<|im_end|>", "A dog.<|im_end|>"]
        if train_on == "responses":
            assert spans(tokenizer, tokens, mask) == answers
        elif train_on != "all":
            answers = answers[-1:] if train_on == "completion" else answers
            assert "".join(spans(tokenizer, tokens, mask)).replace("\n", "") == "".join(answers)
        assert not mask[np.isin(tokens, [processor.token, *processor.around, *processor.row_ends])].any()
        messages = read_messages(turns[:3], pictures=PictureAccess())
        asked, placed = picture_prompt(tokenizer, messages, processor)
        begin = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
        assert [*asked] == [*tokens[: len(asked) - len(begin)], *begin]
        assert [picture.start for picture in placed] == seen.starts.tolist()

    check()


# --- packing

SIZES = st.tuples(st.integers(1, 70), st.integers(1, 70)).filter(lambda size: max(size) <= 150 * min(size))
CONTENTS = st.lists(st.one_of(SIZES, st.sampled_from(["What?", " and ", "\n"])), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(CONTENTS, min_size=1, max_size=7),
    st.integers(300, 700),
    st.booleans(),
    st.sampled_from(["all", "responses"]),
)
def test_packed_pictures_are_the_processors_own(rows, length, packing, train_on):
    """Whatever the numbers, sizes and orders of pictures and texts: each document of a packed row has the patches,
    features and positions that it would have alone, and no picture is trained on or cut.
    """
    import transformers

    kind = transformers.Qwen2VLImageProcessorPil(**json.loads(PROCESSOR.settings))
    pictures = [
        [drawn(*word, seed=number) for word in row if isinstance(word, tuple)] for number, row in enumerate(rows)
    ]
    contents = []
    for row, drawings in zip(rows, pictures, strict=True):
        waiting = iter(drawings)
        contents.append([word if isinstance(word, str) else part(next(waiting)) for word in row])
    try:
        data = prepared([chat(*content) for content in contents], length, packing=packing, train_on=train_on)
        batch = data.rows.batch()
    except NothingUsable:
        return
    if not any(pictures):
        assert not batch.pictures and batch.positions.shape == batch.tokens.shape
        return
    assert batch.pictures["patches"].shape[1] == data.rows.patches
    assert data.rows.patches % (PROCESSOR.block * 64) == 0
    used = (batch.pictures["patch_segments"] > 0).sum(1)
    assert np.array_equal(used, data.rows.patch_counts)
    for row in range(len(used)):
        assert (batch.pictures["patch_segments"][row, : used[row]] > 0).all()  # padding comes last
        assert not batch.pictures["patches"][row, used[row] :].any()
    seen = []
    for row, piece in pieces_of(batch):
        tokens = batch.tokens[row, piece]
        features = batch.pictures["picture_features"][row, piece]
        assert np.array_equal(features >= 0, tokens == PROCESSOR.token)
        assert not batch.weights[row, piece][:-1][tokens[1:] == PROCESSOR.token].any()
        found = list(grids_in(batch, row, piece))
        starts = [start for start, _, _ in found]
        assert (tokens[np.array(starts, int) - 1] == TOKENIZER.convert_tokens_to_ids(MARKS[0])).all()
        positions = PROCESSOR.positions(len(tokens), starts, [grid for _, grid, _ in found])
        assert np.array_equal(batch.positions[row, piece], positions)
        seen.append([(grid, patches.tobytes()) for _, grid, patches in found])
    expected = []
    for drawings in pictures:
        outputs = [kind([image]) for image in drawings]
        grids = [tuple(output["image_grid_thw"][0, 1:].tolist()) for output in outputs]
        values = [np.asarray(output["pixel_values"], np.float32).tobytes() for output in outputs]
        expected.append(list(zip(grids, values, strict=True)))
    for document in seen:
        expected.remove(document)
    report = data.report.pictures
    assert report.pictures == sum(map(len, seen)) and len(expected) == data.report.dropped
    assert report.cut + report.too_large <= len(expected)
    numbers = batch.pictures["patch_segments"].max()
    assert data.rows.max_pictures == data.batches(1).max_pictures == numbers
    assert data.batches(1).patches == data.rows.patches


@pytest.mark.parametrize(("length", "room"), [(128, 256), (128, 128), (600, 128)])
def test_rows_are_full_of_what_is_scarce(length, room):
    """Of tokens, of patches, or of both: no other limit leaves documents with rows of their own."""
    draws = np.random.default_rng(0)
    tokens, patches = draws.integers(14, 20, 2000), draws.choice([16, 24], 2000)
    plan = plan_rows(tokens, length, patches=patches, room=room)
    assert plan.rows <= 1.12 * max(tokens.sum() / length, patches.sum() / room)


@settings(deadline=None, database=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=60),
    st.integers(40, 60),
    st.integers(5, 9),
    st.integers(1, 5) | st.none(),
)
def test_rows_exceed_neither_tokens_nor_patches(sizes, length, room, most):
    counts, patches = (np.array([size[axis] for size in sizes], np.int64) for axis in (0, 1))
    plan = plan_rows(counts, length, patches=patches, room=room, max_documents=most)
    assert sorted(plan.document.tolist()) == list(range(len(sizes)))
    assert (plan.lengths <= length).all() and plan.max_documents <= (most or 99)
    sums = np.concatenate([[0], np.cumsum(patches[plan.document])])
    assert (np.diff(sums[plan.row_starts]) <= room).all()
    without = plan_rows(counts, length, patches=np.zeros_like(patches), room=room, max_documents=most)
    plain = plan_rows(counts, length, max_documents=most)
    assert all(
        np.array_equal(getattr(without, name), getattr(plain, name)) for name in ("row_starts", "document", "count")
    )


def test_a_look_at_a_row_names_its_pictures():
    text = str(preview(prepared([chat(part(CAT), "What?")]).rows.batch(), TOKENIZER))
    assert "<|vision_start|>[4 tokens of a picture]<|vision_end|>What?" in text and MARKS[1] not in text


def test_text_rows_have_the_batches_they_had():
    rows = [chat("Hi", answer="Hello"), chat("What?", answer="That.")]
    plain, read = prepare(rows, TOKENIZER, length=64), prepared(rows, 64)
    ours, theirs = read.rows.batch(), plain.rows.batch()
    assert ours.pictures == {} and str(read.report) == str(plain.report)
    for name in ("tokens", "targets", "weights", "segment_ids", "positions"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name))
    assert read.documents.tokens_crc32 == plain.documents.tokens_crc32


# --- forms

DATA_URL = f"data:image/png;base64,{base64.b64encode(CAT).decode()}"
SAID = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}]
TOLD = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}]
FORMS = {
    "parts": chat(part(CAT), "What?"),
    "openai": chat({"type": "image_url", "image_url": {"url": DATA_URL}}, {"type": "text", "text": "What?"}),
    "trl": {"prompt": [{"role": "user", "content": "What?"}], "completion": [TOLD[1]], "images": [CAT]},
    "trl parts": {**chat({"type": "image"}, "What?"), "images": [CAT]},
    "unsloth": chat({"type": "image", "image": drawn(20, 12)}, {"type": "text", "text": "What?"}),
    "llama-factory": {"messages": TOLD, "images": ["cat.png"]},
    "sharegpt": {"conversations": SAID, "images": ["cat.png"]},
    "llava": {"conversations": SAID, "image": "cat.png"},
    "alpaca": {"instruction": "<image>What?", "output": "A cat.", "images": [{"bytes": CAT}]},
    "prompt": {"prompt": "What?", "completion": "A cat.", "image": {"bytes": CAT, "path": None}},
    "ollama": {"messages": [{"role": "user", "content": "What?", "images": [base64.b64encode(CAT).decode()]}, TOLD[1]]},
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_document(name, tmp_path):
    (tmp_path / "cat.png").write_bytes(CAT)
    options = picture_options(TOKENIZER, folder=str(tmp_path))
    data = prepared([FORMS[name]], pictures=options)
    [document] = _documents(data)
    apart = {"images", "image"} & {*FORMS[name], *FORMS[name].get("messages", [{}])[0]}
    assert data.summary.columns.count(" as pictures") == len(apart) and "not read" not in data.summary.columns
    [expected] = _documents(prepared([FORMS["parts"]]))
    assert np.array_equal(document[0], expected[0]) and np.array_equal(document[1], expected[1])
    assert spans(TOKENIZER, *document) == ["A cat.<|im_end|>"]


def _documents(data):
    return [(data.documents[index].tokens, data.documents[index].mask) for index in range(len(data.documents))]


def test_paths_are_beside_the_rows(write, tmp_path):
    (tmp_path / "cat.png").write_bytes(CAT)
    path = write("rows.jsonl", [FORMS["llama-factory"], chat("Hi")])
    data = prepared(path, cache_dir=tmp_path / "cache")
    assert len(data.documents) == 2 and data.documents.pictures.counts.tolist() == [1, 0]


@pytest.mark.parametrize("streaming", [False, True])
def test_data_sets_with_columns_of_pictures(streaming, tmp_path):
    import datasets

    features = datasets.Features(
        {"prompt": datasets.Value("string"), "completion": datasets.Value("string"), "image": datasets.Image()}
    )
    broken = {"bytes": b"broken", "path": None}
    made_of = {"bytes": CAT, "path": "cat.png"}  # which was where the set was made
    rows = {"prompt": ["What?"] * 2, "completion": ["A cat."] * 2, "image": [made_of, broken]}
    made = datasets.Dataset.from_dict(rows, features=features)
    made = made.to_iterable_dataset() if streaming else made
    data = prepared(made, on_bad_row="skip", cache_dir=tmp_path)
    assert data.summary.bad_rows == 1 and "dataset:2: picture 1:" in data.summary.offenders[0]
    assert np.array_equal(_documents(data)[0][0], _documents(prepared([FORMS["parts"]]))[0][0])
    parquet = tmp_path / "rows.parquet"
    if not streaming:
        made.to_parquet(parquet)
        again = prepared(parquet, on_bad_row="skip", cache_dir=tmp_path)
        assert np.array_equal(_documents(again)[0][0], _documents(data)[0][0])


def test_a_parquet_file_of_pictures_is_read_in_batches_that_fit(tmp_path, monkeypatch):
    """A thousand rows of photographs are gigabytes, which Arrow holds at once."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    rows = [{"prompt": "What?", "image": {"bytes": bytes([number]) * 4000, "path": "a.png"}} for number in range(40)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet", use_dictionary=False)
    numbers, iterate = [], parquet.ParquetFile.iter_batches

    def batches(*arguments, **options):
        for batch in iterate(*arguments, **options):
            numbers.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", batches)
    for size, most in ((row_files._BATCH_SIZE, 40), (20_000, 4), (1, 1)):
        monkeypatch.setattr(row_files, "_BATCH_SIZE", size)
        assert [row.value for row in row_files.read_parquet(tmp_path / "rows.parquet", 0)] == rows
        assert max(numbers) == most
        numbers.clear()


@pytest.mark.parametrize("streaming", [False, True])
def test_data_sets_with_lists_of_pictures(streaming, tmp_path):
    import datasets

    turn = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    features = datasets.Features({"messages": datasets.List(turn), "images": datasets.List(datasets.Image())})
    rows = {"messages": [TOLD] * 2, "images": [[CAT], [b"broken"]]}
    made = datasets.Dataset.from_dict(
        rows | {"images": [[{"bytes": data, "path": None} for data in cell] for cell in rows["images"]]},
        features=features,
    )
    made = made.to_iterable_dataset() if streaming else made
    data = prepared(made, on_bad_row="skip", cache_dir=tmp_path)
    assert data.summary.bad_rows == 1 and "dataset:2: picture 1:" in data.summary.offenders[0]
    assert np.array_equal(_documents(data)[0][0], _documents(prepared([FORMS["parts"]]))[0][0])
    assert data.documents.pictures.pictures[0].data == CAT  # not encoded anew


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (chat(part(b"broken"), "What?"), "rows:2: picture 1: the picture is no picture of a known kind"),
        (chat(part(CAT[:-30]), "What?"), "rows:2: picture 1: the picture cannot be decoded"),
        (chat(part("nowhere.png")), r"rows:2: messages\[0\].content\[0\]: there is no file 'nowhere.png'"),
        (chat(part("https://example.org/cat.png")), "fetched only with data.remote_images: true"),
        (chat(part(file_of(drawn(1, 300)))), "rows:2: picture 1: a picture of 1 x 300 pixels: absolute aspect ratio"),
        (chat({"type": "image"}), "there are 0 pictures for 1 parts"),
        ({"messages": TOLD, "images": [CAT, DOG]}, "there are 2 pictures for 0 parts .* and 1 tags"),
        ({"messages": TOLD, "images": [CAT], "image": CAT}, "columns images and image both have pictures"),
        ({"messages": TOLD, "videos": ["cat.mp4"]}, "column videos holds what the text is about"),
        (chat(part(CAT), MARKS[1]), "writes 2 tokens of pictures for 1 pictures"),
    ],
)
def test_rows_whose_pictures_cannot_be_used_are_told(row, why):
    rows = [chat(part(CAT), "What?"), row, chat("Hi")]
    with pytest.raises(ValueError, match=why):
        prepared(rows)
    data = prepared(rows, on_bad_row="skip")
    assert data.summary.bad_rows == 1 and len(data.documents) == 2


def test_a_text_has_no_place_for_pictures():
    for row in ({"text": "A cat.", "images": [CAT]}, {"text": "<image> is a cat.", "image": "cat.png"}):
        with pytest.raises(ValueError, match="a text has no place for them"):
            prepared([row])
    page = {"text": "A cat.", "image": "https://example.org"}
    assert len(prepared([page]).documents) == 1


def test_a_template_of_text_is_named():
    with pytest.raises(ValueError, match="writes 0 tokens of pictures for 1 pictures: it may be for text alone"):
        prepared([chat(part(CAT), "What?")], template=PLAIN_TEMPLATE)


def test_without_options_pictures_are_refused():
    for row in (FORMS["parts"], FORMS["trl"]):
        with pytest.raises(ValueError, match="only text can be"):
            prepare([row], TOKENIZER, length=64)


def test_workers_make_the_same_documents():
    rows = [chat(part(drawn(9 + number, 20)), "What?", part(CAT)) for number in range(3)] + [chat("Hi")]
    one, two = prepared(rows), prepared(rows, num_workers=2)
    assert np.array_equal(one.documents.tokens, two.documents.tokens)
    ours, theirs = one.rows.batch(), two.rows.batch()
    assert all(np.array_equal(ours.pictures[name], theirs.pictures[name]) for name in ours.pictures)


# --- limits


def _sizes(data):
    return data.documents.lengths.tolist()


def test_a_picture_is_never_cut():
    rows = [chat("Hi " * 9, part(drawn(60, 60)), "What?"), chat("Hi", part(CAT), "What?", answer="A cat. " * 40)]
    whole = prepared(rows, 2000)
    inside = int(whole.documents.pictures.starts[0]) + 20
    for overflow, kept in (("truncate", [1, 2]), ("split", [2])):  # the answer alone may be shortened
        data = prepared([*rows, chat("Hi")], inside, overflow=overflow)
        assert sorted(data.rows.plan.document.tolist()) == kept
        assert data.report.pictures.cut == 3 - len(kept) and data.report.truncated == (overflow == "truncate")
        assert any("which is never cut" in sentence for sentence in data.warnings())
    with pytest.raises(NothingUsable, match="1 rows left out, because data.length ends within"):
        prepared(rows[:1], inside).rows  # noqa: B018
    dropped = prepared([*rows, chat("Hi")], inside, overflow="drop")
    assert dropped.report.dropped == 2 and dropped.report.pictures.pictures == 0
    with pytest.raises(ValueError, match="2 documents are longer"):
        prepared(rows, inside, overflow="error").rows  # noqa: B018


def test_a_row_of_too_many_patches_is_told():
    rows = [chat(part(drawn(64, 64)), "What?"), chat(part(CAT), "What?")]
    data = prepared(rows, 400, patches_per_row=100)
    assert data.rows.patches == 256 == data.report.pictures.patches[1]
    big = prepared([chat(part(drawn(64, 64)), part(drawn(64, 64, 1)), "What?"), rows[1]], 400, patches_per_row=100)
    assert big.report.pictures.too_large == 1 and big.rows.plan.document.tolist() == [1]
    assert any("more patches than the 256 of a packed row" in sentence for sentence in big.warnings())
    with pytest.raises(ValueError, match="more patches than the 256 of a packed row.*first rows:1"):
        prepared([chat(part(drawn(64, 64)), part(drawn(64, 64, 1)))], 400, patches_per_row=9, overflow="error").rows  # noqa: B018


def test_room_without_pictures():
    data = prepared([chat("Hi")], 64, patches_per_row=1000)
    batch = data.rows.batch()
    assert (
        batch.pictures["patches"].shape == (1, 1024, PROCESSOR.size)
        and (batch.pictures["picture_features"] == -1).all()
    )


# --- cache, resuming


def test_the_cache_has_files_of_rows_and_names_of_files(write, tmp_path):
    (tmp_path / "cat.png").write_bytes(CAT)
    rows = [{**FORMS["llama-factory"]}, chat({"type": "image_url", "image_url": DATA_URL}, "What?"), chat("Hi")] * 3
    path = write("rows.jsonl", rows)
    first, again = (prepared(path, cache_dir=tmp_path / "cache") for _ in range(2))
    assert not first.cached and again.cached
    assert len(again.documents.pictures.pictures) == 1  # the same picture in six rows
    fresh, stored = first.rows.batch(), again.rows.batch()
    assert all(np.array_equal(fresh.pictures[name], stored.pictures[name]) for name in fresh.pictures)
    key = prepared(path, cache_dir=tmp_path / "cache", pictures=dataclasses.replace(OPTIONS, folder=str(tmp_path)))
    assert not key.cached  # other options, other tokens


def test_a_cache_is_of_the_folders_of_its_pictures(write, tmp_path, monkeypatch):
    """A relative path names another picture in another working directory."""
    path = write("rows.jsonl", [chat(part("cat.png"), "What?")])
    digests = []
    for name, data in {"here": CAT, "there": DOG}.items():
        folder = tmp_path / name / "pictures"
        folder.mkdir(parents=True)
        (folder / "cat.png").write_bytes(data)
        monkeypatch.chdir(folder.parent)
        options = dataclasses.replace(OPTIONS, folder="pictures")
        again = [prepared(path, cache_dir=tmp_path / "cache", pictures=options) for _ in range(2)]
        assert [each.cached for each in again] == [False, True]
        digests.append(again[1].documents.tokens_crc32)
    assert digests[0] != digests[1]


def test_a_file_that_changes_is_noticed(write, tmp_path):
    cat = tmp_path / "cat.png"
    cat.write_bytes(CAT)
    path = write("rows.jsonl", [FORMS["llama-factory"], chat("Hi")])
    data = prepared(path, cache_dir=tmp_path / "cache")
    data.rows.batch()
    cat.write_bytes(DOG)
    with pytest.raises(ValueError, match=r"cat.png is not what it was.*put the old one back"):
        data.rows.batch()
    lines = []
    anew = prepared(path, cache_dir=tmp_path / "cache", say=lines.append)
    assert not anew.cached and any("cat.png has changed" in line for line in lines)
    assert anew.documents.tokens_crc32 != data.documents.tokens_crc32
    cat.unlink()
    with pytest.raises(ValueError, match="there is no file 'cat.png'"):
        prepared(path, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("before", [None, b"broken", CAT[:-30]], ids=["missing", "unknown", "cut"])
@pytest.mark.parametrize("form", ["llama-factory", "parts"])
def test_rows_that_were_left_out_come_back_with_their_pictures(write, tmp_path, before, form):
    cat = tmp_path / "cat.png"
    if before is not None:
        cat.write_bytes(before)
    row = FORMS["llama-factory"] if form == "llama-factory" else chat(part("cat.png"), "What?")
    path = write("rows.jsonl", [row, chat("Hi"), chat({"type": "image_url", "image_url": DATA_URL})])

    def read():
        return prepared(path, cache_dir=tmp_path / "cache", on_bad_row="skip")

    first, again = read(), read()
    assert (first.cached, again.cached) == (False, True) and again.summary.bad_rows == 1
    cat.write_bytes(CAT)
    mended = read()
    assert not mended.cached and mended.summary.bad_rows == 0 and len(mended.documents) == 3
    assert read().cached


def test_rows_are_known_by_their_pictures():
    rows = [chat(part(drawn(20, 12, seed)), "What?") for seed in range(6)]
    data = prepared([*rows, rows[0]])
    train, held_out = data.split(2)
    assert len(held_out.documents) == 2 and len(train.documents) + train.copies == 5
    assert data.documents.tokens_crc32 != prepared([*rows[1:], rows[0], rows[1]]).documents.tokens_crc32
    assert held_out.documents.also_in(train.documents) == 0
    assert data.documents.also_in(prepared(rows[:2]).documents) == 3
    for half in (train, held_out):
        for row, piece in pieces_of(batch := half.rows.batch()):
            assert len(list(grids_in(batch, row, piece))) == 1


# --- pairs, steps, streams


def _pair(question, chosen="A cat.", rejected="A dog."):
    turn = {"role": "user", "content": list(question)}
    answers = {"chosen": chosen, "rejected": rejected}
    return {"prompt": [turn]} | {side: [{"role": "assistant", "content": text}] for side, text in answers.items()}


def test_both_answers_of_a_pair_see_one_picture():
    rows = [_pair([part(CAT), "What?", part(DOG)]), _pair(["Hi"]), _pair([part(CAT), "Who?"])]
    data = prepared(rows, pairs=True, format="preference")
    packed = PackedPairs(data.documents, 256)
    batch = packed.empty(len(packed))
    for row in range(len(packed)):
        packed.fill(batch, row, row)
    sizes = data.documents.pictures.grids.prod(1)
    assert packed.max_pictures == batch.pictures["patch_segments"].max()
    assert packed.patch_counts.sum() == sizes[0] + sizes[1] + sizes[4] and len(sizes) == 6
    assert (batch.pictures["patch_segments"] > 0).sum() == packed.patch_counts.sum()
    pieces = list(pieces_of(batch))
    assert len(pieces) == 6
    for (row, chosen), (other, rejected) in zip(pieces[::2], pieces[1::2], strict=True):
        ours, theirs = (batch.pictures["picture_features"][row, piece] for piece in (chosen, rejected))
        assert row == other and np.array_equal(ours[ours >= 0], theirs[theirs >= 0])
        assert np.array_equal(batch.positions[row, chosen][:5], batch.positions[row, rejected][:5])
    column = {"prompt": "<image>What?", "chosen": "A cat.", "rejected": "A dog.", "images": [CAT]}
    assert prepared([column], pairs=True, format="preference").documents.pictures.counts.tolist() == [1, 1]


@settings(max_examples=15, deadline=None, database=None)
@given(st.lists(st.tuples(CONTENTS, st.booleans(), st.integers(1, 30)), min_size=2, max_size=5), st.integers(150, 500))
def test_mismatched_answers_follow_the_pictures_of_their_prompts(rows, length):
    """Prompts of one text and other pictures are other prompts. Both documents of a row share their pictures, and a
    mismatched answer without room takes the row's own with it only if that has none either.
    """

    def parts(words, seed):
        return [word if isinstance(word, str) else part(drawn(*word, seed=seed)) for word in words]

    labelled = []
    for number, (question, label, answer) in enumerate(rows):
        turns = [{"role": "user", "content": parts(question, number % 2)}]
        turns.append({"role": "assistant", "content": "Yes. " * answer})
        labelled.append({"prompt": turns[:1], "completion": turns[1:], "label": label})
    data = prepared(labelled, pairs=True, format="labelled", last_response_only=True)
    documents, labels = with_mismatched_answers(data.documents)
    assert labels.tolist() == [label for _, label, _ in rows] and len(documents) == 2 * len(rows)

    def told(index, begin, end):
        """Tokens with the pictures that begin there, of one of the documents before or after."""
        source = documents if index < 0 else data.documents
        pictures, tokens = source.pictures, source[abs(index) - (index < 0)].tokens
        seen = [i for i in pictures.of(abs(index) - (index < 0), end) if pictures.starts[i] >= begin]
        digests = [pictures.digests[pictures.entries[i]].tobytes() for i in seen]
        return tokens[begin:end].tolist(), [int(pictures.starts[i]) - begin for i in seen], digests

    own = [2 * row + int(not label) for row, (_, label, _) in enumerate(rows)]
    begins = [int(np.argmax(data.documents[index].mask)) for index in own]
    prompts = [told(index, 0, begin) for index, begin in zip(own, begins, strict=True)]
    for row, (index, begin) in enumerate(zip(own, begins, strict=True)):
        size = int(data.documents.lengths[index])
        assert told(-(2 * row) - 1, 0, size) == told(index, 0, size)
        others = [(row - back) % len(rows) for back in range(1, len(rows) + 1)]
        other = next((o for o in others if prompts[o] != prompts[row]), others[0])
        end = int(documents.lengths[2 * row + 1])
        assert told(-(2 * row) - 2, 0, begin) == prompts[row]
        assert told(-(2 * row) - 2, begin, end) == told(
            own[other], begins[other], int(data.documents.lengths[own[other]])
        )
    rows_of = PackedPairs(documents, length, second_yields=True)
    batch = rows_of.empty(len(rows_of))
    for row in range(len(rows_of)):
        rows_of.fill(batch, row, row)
    if batch.pictures:
        assert np.array_equal((batch.pictures["patch_segments"] > 0).sum(1), rows_of.patch_counts)
    alone = [documents[2 * row].mask[1:length].any() for row in range(len(rows))]
    cut = documents.pictures.cut(np.minimum(documents.lengths, length))[::2]
    assert np.array_equal(rows_of.kept_lengths[:, 0] > 0, alone & ~cut)


@settings(max_examples=15, deadline=None, database=None)
@given(
    st.lists(st.lists(SIZES, max_size=3), min_size=2, max_size=4),
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from([None, 1, 300, 5000]),
    st.data(),
)
def test_answers_share_the_pictures_of_their_prompt(prompts, group, most, budget, data):
    """In rows with room for them, at the positions that follow the pictures."""
    assume(any(prompts) or budget)
    placed, ids = [], []
    for number, sizes in enumerate(prompts):
        content = [part(drawn(*size, seed=number)) for size in sizes] or ["Hi"]
        messages = read_messages([{"role": "user", "content": [*content, "What?"]}], pictures=PictureAccess())
        tokens, pictures = picture_prompt(TOKENIZER, messages, PROCESSOR)
        ids.append(tuple(tokens.tolist()))
        placed.append(pictures)
    documents = prompt_documents(placed, PROCESSOR)
    lengths = np.array([len(tokens) for tokens in ids])
    largest = int(documents.sizes(lengths)[0].max())
    if budget is not None and largest > rounded(budget, 4):
        with pytest.raises(ConfigError, match=f"patches_per_row = {budget:,}: the pictures of a prompt have"):
            AnswerPictures.of(documents, lengths, most, group, budget)
        return
    shape = AnswerPictures.of(documents, lengths, most, group, budget)
    longest, answers = int(lengths.max()) + 6, []
    for prompt in range(len(prompts)):
        for _ in range(group):
            new = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)))
            answers.append(Answer(prompt, ids[prompt], new, (0.0,) * len(new), "stop"))
    count = -(-len(answers) // shape.answers)
    rows = AnswerRows(count, longest * shape.answers, shape.answers, pictures=shape)
    batch = rows.packed(answers, 1.0)
    assert batch.pictures["patches"].shape[1] == shape.patches
    assert shape.answers <= most and (budget is None or shape.patches == rounded(budget, 4))
    assert batch.pictures["patch_segments"].max() <= shape.most
    for answer, (row, begin, _) in zip(answers, rows.places_of(answers), strict=True):
        piece = slice(begin, begin + len(answer.prompt_ids) + len(answer.ids))
        assert batch.tokens[row, piece].tolist() == [*answer.prompt_ids, *answer.ids]
        seen = list(grids_in(batch, row, piece)) if placed[answer.prompt] else []
        starts, grids = ([each.start for each in placed[answer.prompt]], [each.grid for each in placed[answer.prompt]])
        assert [(start, grid) for start, grid, _ in seen] == list(zip(starts, grids, strict=True))
        for (_, _, patches), each in zip(seen, placed[answer.prompt], strict=True):
            assert np.array_equal(patches, PROCESSOR.patches(each.picture.decoded()))
        positions = PROCESSOR.positions(len(answer.prompt_ids) + len(answer.ids), starts, grids)
        assert np.array_equal(batch.positions[row, piece], positions)


def test_steps_have_room_for_patches():
    rows = [chat(part(drawn(60, 60, number)), "What?") for number in range(5)] + [chat("Hi")] * 4
    data = prepared(rows, 1000, packing="step")
    steps = StepBatches(data.rows, 3, 6, 1024)
    room = data.rows.patches
    for step in range(6):
        batch = steps.batch_at(step)
        used = (batch.pictures["patch_segments"] > 0).sum(1)
        assert batch.pictures["patches"].shape == (steps.rows_per_step, room, PROCESSOR.size)
        assert used.sum() == data.rows.patch_counts[steps.rows_at(step)].sum()
        assert batch.pictures["patch_segments"].max() <= steps.max_pictures and steps.patches == room
        for row, piece in pieces_of(batch):
            for _, grid, patches in grids_in(batch, row, piece):
                assert len(patches) == grid[0] * grid[1]


def _stream(path, patches=None, buffer_size=4):
    def tokenised(window):
        return prepared(window, 128, patches_per_row=patches)

    return StreamedRows("rows", open_sources(path, streaming=True), tokenised, buffer_size, "given")


def test_streams_have_pictures_and_resume(write):
    urls = [f"data:image/png;base64,{base64.b64encode(file_of(drawn(20, 12, n))).decode()}" for n in range(12)]
    rows = [chat(part(url), "What?") if number % 3 else chat("Hi") for number, url in enumerate(urls)]
    path = write("rows.jsonl", rows)
    source = FedBatches([_stream(path)], [1.0], 2)
    batches, positions = [], []
    for step in range(4):
        batches.append(source.batch_at(step))
        positions.append(json.loads(json.dumps(source.position(step + 1))))
    other = FedBatches([_stream(path)], [1.0], 2)
    other.resume(2, positions[1])
    for step in (2, 3):
        again = other.batch_at(step)
        assert all(np.array_equal(again.pictures[name], batches[step].pictures[name]) for name in again.pictures)
        assert again.pictures["patches"].any()
    mixed = FedBatches([PreparedSet("text", prepared([chat("Hi")], 128)), _stream(path)], [1, 1], 2)
    assert mixed.batch_at(0).pictures["patches"].shape == batches[0].pictures["patches"].shape
    for feed in (source, other, mixed):
        feed.close()


def test_remote_pictures_are_fetched_if_asked(tmp_path):
    class Pictures(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/cat.png" else 404)
            self.end_headers()
            self.wfile.write(CAT)

        def log_message(self, *arguments):
            """Says nothing, as pytest shows what tests print."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    rows = [chat(part(f"{url}/cat.png"), "What?"), chat(part(f"{url}/dog.png"), "What?")]
    data = prepared(rows, on_bad_row="skip", pictures=dataclasses.replace(OPTIONS, remote=True))
    server.shutdown()
    server.server_close()
    assert data.summary.bad_rows == 1 and "cannot be fetched: HTTP Error 404" in data.summary.offenders[0]
    assert np.array_equal(_documents(data)[0][0], _documents(prepared([FORMS["parts"]]))[0][0])
    assert np.array_equal(
        data.rows.batch().pictures["patches"], prepared([FORMS["parts"]]).rows.batch().pictures["patches"]
    )


def test_a_stream_that_begins_without_pictures_is_told(write):
    rows = [chat("Hi")] * 4 + [chat(part(DATA_URL), "What?")] * 4
    path = write("rows.jsonl", rows)
    source = FedBatches([_stream(path)], [1.0], 1)
    with pytest.raises(ValueError, match="set data.patches_per_row"):
        for step in range(9):
            source.batch_at(step)
    source.close()
    roomy = FedBatches([_stream(path, patches=256)], [1.0], 1)
    assert any(roomy.batch_at(step).pictures["patches"].any() for step in range(4))
    roomy.close()
