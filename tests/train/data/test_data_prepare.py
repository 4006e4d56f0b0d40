"""`prepare`: from rows to batches in one call, and the guards on a whole set."""

from __future__ import annotations

import numpy as np
import pytest

from jaxtune.train.data import prepare
from jaxtune.train.data.packing.packing import pack
from jaxtune.train.data.rendering.preview import PADDING, TRAINED, preview
from jaxtune.train.data.tokens.documents import Document
from tests.train.data.conftest import PLAIN_TEMPLATE, make_tokenizer, spans

ROWS = [{"prompt": f"Add {i} and {i}: ", "completion": f"It is {2 * i}."} for i in range(40)]
CHAT = {"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am a bot."}]}


def test_rows_become_batches(tokenizer):
    dataset = prepare(ROWS, tokenizer, length=64, overflow="error")
    assert (dataset.summary.rows, dataset.summary.documents, dataset.report.documents) == (40, 40, 40)
    batches = dataset.batches(2, seed=0)
    answers, sources = [], []
    for step in range(batches.steps_per_epoch):
        batch = batches.batch_at(step)
        sources += batches.sources_at(step)
        for row in range(2):
            for segment in range(1, batch.segment_ids[row].max() + 1):
                at = batch.segment_ids[row] == segment
                targets = np.where(batch.weights[row, at] > 0, batch.targets[row, at], -1)
                answers += spans(tokenizer, targets, targets >= 0)
    assert sorted(answers) == sorted(f"It is {2 * i}.<|im_end|>" for i in range(40))
    assert [f"It is {2 * (int(source.split(':')[1]) - 1)}.<|im_end|>" for source in sources] == answers


def test_padded_mode_has_a_document_a_row(tokenizer):
    dataset = prepare(ROWS, tokenizer, length=64, packing=False)
    assert (dataset.report.rows, dataset.report.max_documents) == (40, 1)


def test_max_rows(tokenizer):
    assert prepare(ROWS, tokenizer, length=64, max_rows=7).summary.rows == 7


BAD = [CHAT, {"messages": []}, "{broken", {"other": 1}, CHAT, b'{"messages": "\xff"}']


def test_bad_rows_follow_the_policy(write, tokenizer, tmp_path):
    path = write("a.jsonl", BAD)
    with pytest.raises(ValueError, match=r"a.jsonl:2: empty conversation \(data.on_bad_row: skip leaves such rows out"):
        prepare(path, tokenizer, length=64, cache_dir=tmp_path / "c")
    dataset = prepare(path, tokenizer, length=64, on_bad_row="skip", cache_dir=tmp_path / "c")
    assert (dataset.summary.rows, dataset.summary.documents, dataset.summary.bad_rows) == (6, 2, 4)
    assert [offender.removeprefix(f"{path}:").split(":")[0] for offender in dataset.summary.offenders] == list("2346")
    assert "4 bad rows left out, first " in str(dataset.summary)
    assert [dataset.documents.source(i)[-2:] for i in (0, 1)] == [":1", ":5"]


def test_rows_without_a_trained_token_are_left_out_and_counted(tokenizer):
    silent = {"messages": CHAT["messages"][:1]}
    dataset = prepare([CHAT, silent, CHAT], tokenizer, length=64)
    assert (dataset.summary.documents, dataset.summary.untrained) == (2, 1)
    assert "1 rows without a trained token left out, first rows:2" in str(dataset.summary)


MARKERS = {"instruction_part": "### Instruction:\n", "response_part": "### Response:\n"}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "rows: there are no rows"),
        ([{"text": ""}] * 3, {"on_bad_row": "skip"}, "none of 3 rows is usable; first rows:1: empty text"),
        ([{"messages": CHAT["messages"][:1]}], {}, "no token of any of 1 rows is trained on: the template shows no"),
        ([CHAT] * 2, MARKERS, r"data.response_part='### Response:\\n' begins no response in them"),
        ([CHAT], {"vocab_size": 300}, r"token id 3\d\d \(.*\) is beyond the model's vocabulary of 300"),
        ([CHAT], {"on_bad_row": "drop"}, "data.on_bad_row must be one of error, skip, got 'drop'"),
        ([CHAT], {"overflow": "wrap"}, "data.overflow must be one of truncate, split, drop, error, got 'wrap'"),
        ([CHAT], {"template": "nope"}, "data.template='nope' is not known"),
        ([CHAT], {"response_part": "x"}, "data.instruction_part is missing"),
        ([{"body": 1}], {}, "rows:1: columns body fit no known form"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(tokenizer, rows, options, message):
    with pytest.raises(ValueError, match=message):
        prepare(rows, tokenizer, length=64, **options)


def test_a_template_that_trains_no_end_of_turn_is_refused():
    rows = [CHAT] * 3
    with pytest.raises(ValueError, match=r"no response trains a token that ends the turn.*'.*bot\..*data.template"):
        prepare(rows, make_tokenizer(PLAIN_TEMPLATE.replace("<|im_end|>", "")), length=64)
    # The chat's own tokens are not in the vocabulary: its end is only text.
    with pytest.raises(ValueError, match="no response trains a token that ends the turn"):
        prepare(rows, make_tokenizer(eos="<|eos|>", special=False), length=64)


def test_some_responses_without_an_end_are_told():
    template = PLAIN_TEMPLATE.replace("<|im_end|>", "{{ '<|im_end|>' if 'bot' in m.content else '' }}")
    unended = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "Blue."}]}
    summary = prepare([CHAT, unended], make_tokenizer(template), length=64).summary
    assert "; 1 of 2 responses train no end of turn" in str(summary)


def test_trained_tokens_beyond_the_row_are_refused(tokenizer):
    rows = [{"prompt": "Add them. " * 20, "completion": "4"}] * 2
    dataset = prepare(rows, tokenizer, length=16)
    with pytest.raises(ValueError, match="no document has a trained token within its first data.length=16"):
        dataset.batches(1)


# --- a split for evaluation


def test_the_split_is_by_content_and_leaves_no_twin_on_the_other_side(tokenizer):
    rows = ROWS + ROWS[:20]
    train, held_out = prepare(rows, tokenizer, length=64).split(8)

    def texts(dataset):
        return [tokenizer.decode(dataset.documents[i].tokens) for i in range(len(dataset.documents))]

    assert len(held_out.documents) == 8
    assert not set(texts(train)) & set(texts(held_out))
    assert set(texts(train)) | set(texts(held_out)) == set(texts(prepare(ROWS, tokenizer, length=64)))
    turned = prepare(rows[::-1], tokenizer, length=64).split(8)[1]
    assert set(texts(turned)) == set(texts(held_out))
    assert train.batches(2).batch_at(0).tokens.shape == (2, 64)


@pytest.mark.parametrize("eval_rows", [0, -1, 40, 41])
def test_a_split_needs_rows_on_both_sides(tokenizer, eval_rows):
    with pytest.raises(ValueError, match=f"data.eval_rows={eval_rows} must lie between 1 and 39"):
        prepare(ROWS, tokenizer, length=64).split(eval_rows)


# --- preview


def test_the_preview_shows_documents_mask_and_padding(tokenizer):
    ids = tokenizer("Add them: It is 4.")["input_ids"]
    mask = np.zeros(len(ids), bool)
    mask[-3:] = True
    batch, _ = pack([Document(np.array(ids), mask), Document(np.array(ids), mask)], 2 * len(ids) + 5)
    shown = preview(batch, tokenizer, 0)
    styles = {style: [] for style in (TRAINED, PADDING)}
    for span in shown.spans:
        if span.style in styles:
            styles[span.style].append(shown.plain[span.start : span.end].strip())
    answer = tokenizer.decode(ids[-3:]).strip()
    assert styles == {TRAINED: ["trained", answer, answer], PADDING: ["--- 5 slots of padding ---"]}
    assert shown.plain.count("--- document") == 2 and "6 trained" in shown.plain
    # Text that looks like markup is text.
    odd, _ = pack([tokenizer("[bold]x[/bold] [red]")["input_ids"]], 64)
    assert "[bold]x[/bold] [red]" in preview(odd, tokenizer).plain


# --- warnings


def test_what_somebody_should_know_is_said_line_by_line(tokenizer):
    late = {"prompt": "Add them. " * 20, "completion": "4"}
    data = prepare([*ROWS[:3], late, late, {"prompt": "x"}], tokenizer, length=64, on_bad_row="skip")
    assert "dropped" not in str(data.report)
    bad, dropped = data.warnings()
    assert bad.startswith("1 bad rows left out, first rows:6: no column completion")
    assert dropped.startswith("2 of 5 documents dropped: empty, or cut at data.length=64 before their first trained")
    typed = {"messages": [{"role": "user", "content": "<|im_start|>"}, CHAT["messages"][1]]}
    (special,) = prepare([CHAT, typed], tokenizer, length=64).warnings()
    assert special.startswith(
        "1 rows hold special tokens or markers in their own text, first rows:2: <|im_start|>; the"
    )
    assert prepare([CHAT], tokenizer, length=64).warnings() == []
    more = [CHAT | {"source": "a forum", "id": None}, CHAT | {"id": 7}]
    assert prepare(more, tokenizer, length=64).warnings() == ["columns that are not read: source, id"]


def test_spans_that_are_not_there_are_said_and_those_that_take_all_are_refused(tokenizer):
    pairs = [["<think>", "</think>"]]
    assert prepare([CHAT], tokenizer, length=64, mask_spans=pairs).warnings() == [
        "data.mask_spans: no response holds such a span"
    ]
    thought = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "<think>blue"}]}
    data = prepare([CHAT, thought], tokenizer, length=64, mask_spans=pairs)
    assert (data.summary.documents, data.summary.untrained) == (1, 1) and data.summary.masked > 0
    with pytest.raises(ValueError, match="no token of any of 1 rows is trained on: data.mask_spans takes out all"):
        prepare([thought], tokenizer, length=64, mask_spans=pairs)


def test_masked_spans_decide_the_cache_and_show_in_the_preview(tokenizer, write, tmp_path):
    row = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "<think>blue</think>It is 4."}]}
    path, folder = write("a.jsonl", [row]), tmp_path / "cache"
    plain = prepare(path, tokenizer, length=64, cache_dir=folder)
    masked = prepare(path, tokenizer, length=64, cache_dir=folder, mask_spans=[("<think>", "</think>")])
    assert not masked.cached
    assert prepare(path, tokenizer, length=64, cache_dir=folder, mask_spans=[["<think>", "</think>"]]).cached
    for data, expected in ((plain, "<think>blue</think>It is 4.<|im_end|>"), (masked, "It is 4.<|im_end|>")):
        shown = preview(data.batches(1).batch_at(0), tokenizer)
        texts = [shown.plain[span.start : span.end] for span in shown.spans if span.style == TRAINED]
        assert texts == ["trained", expected]
