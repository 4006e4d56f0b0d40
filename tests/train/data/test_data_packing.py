"""Packing: every token once, in order, never across a row or a document; the rules of targets and weights."""

from __future__ import annotations

import collections
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.train.data.packing import packing
from jaxtune.train.data.packing.packing import PackedRows, pack, plan_rows
from jaxtune.train.data.tokens.documents import Document, Documents


@st.composite
def document_lists(draw):
    lengths = draw(st.lists(st.integers(0, 40), max_size=30))
    masks = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    starts = np.cumsum([0, *lengths])
    # Every token of the set is another number, so that a token out of place shows.
    return [
        Document(np.arange(start, start + n, dtype=np.int32) + 1, np.array(mask, bool))
        for start, n, mask in zip(starts, lengths, masks, strict=False)
    ]


def pieces_of(batch):
    """(tokens, targets, weights, positions) of every segment, row by row, and checks that the rest is padding."""
    pieces = []
    for row in range(batch.tokens.shape[0]):
        segments = batch.segment_ids[row]
        used = int(np.count_nonzero(segments))
        assert np.all(segments[used:] == 0)
        assert np.all(np.diff(segments[:used]) >= 0)
        for field in (batch.tokens, batch.targets, batch.weights, batch.positions):
            assert not field[row, used:].any()
        numbers = np.unique(segments[:used])
        assert numbers.tolist() == list(range(1, len(numbers) + 1))
        for number in numbers:
            at = segments == number
            pieces.append(tuple(f[row, at] for f in (batch.tokens, batch.targets, batch.weights, batch.positions)))
    return pieces


@given(document_lists(), st.integers(2, 24), st.sampled_from(["truncate", "split", "drop"]), st.booleans())
def test_every_token_once_and_the_rules_of_targets(documents, length, overflow, packing):
    batch, report = pack(documents, length, overflow, packing=packing)
    assert batch.tokens.dtype == batch.targets.dtype == batch.segment_ids.dtype == batch.positions.dtype == np.int32
    assert batch.weights.dtype == np.float32
    assert batch.tokens.shape == (report.rows, length)
    of_token = {int(t): (i, k) for i, d in enumerate(documents) for k, t in enumerate(d.tokens)}
    seen, trained = [], 0
    for tokens, targets, weights, positions in pieces_of(batch):
        document, first = of_token[int(tokens[0])]
        whole = documents[document]
        n = len(tokens)
        np.testing.assert_array_equal(tokens, whole.tokens[first : first + n])  # one document, in order
        np.testing.assert_array_equal(positions, np.arange(n))
        np.testing.assert_array_equal(targets[:-1], tokens[1:])
        np.testing.assert_array_equal(weights[:-1], whole.mask[first + 1 : first + n])
        assert targets[-1] == 0 and weights[-1] == 0
        assert n == min(length, len(whole.tokens) - first)
        seen += tokens.tolist()
        trained += int(weights.sum())
    assert len(seen) == len(set(seen)) == report.tokens
    whole = [d for d in documents if len(d.tokens)]
    if overflow == "truncate":
        kept = [d for d in whole if not lost_all_training(d, length)]
        expected, idle = [t for d in kept for t in d.tokens[:length].tolist()], 0
    elif overflow == "drop":
        kept = [d for d in whole if len(d.tokens) <= length]
        expected, idle = [t for d in kept for t in d.tokens.tolist()], 0
    else:
        cuts = [(d, range(0, len(d.tokens), length)) for d in whole]
        taught = [(d, [k for k in firsts if teaches(d, k, length)]) for d, firsts in cuts]
        kept = [d for d, firsts in taught if firsts]
        expected = [t for d, firsts in taught for k in firsts for t in d.tokens[k : k + length].tolist()]
        idle = sum(map(len, (firsts for _, firsts in cuts))) - sum(map(len, (firsts for _, firsts in taught)))
    dropped = [d for d in documents if not any(d is other for other in kept)]
    assert sorted(seen) == sorted(expected)
    assert report.untrained_pieces == idle
    assert report.documents == len(documents)
    assert report.trained_tokens == trained
    assert report.dropped == len(dropped)
    assert report.slots == report.rows * length
    assert report.truncated == (sum(len(d.tokens) > length for d in kept) if overflow == "truncate" else 0)
    assert report.cut_tokens == sum(max(len(d.tokens) - length, 0) for d in kept) * (overflow == "truncate")
    assert report.split == (sum(len(d.tokens) > length for d in documents) if overflow == "split" else 0)
    most = [len(np.unique(row[row > 0])) for row in batch.segment_ids]
    assert report.max_documents == max(most, default=0)
    if not packing:
        assert max(most, default=0) <= 1


def lost_all_training(document, length):
    return len(document.tokens) > length and document.mask[1:].any() and not document.mask[1:length].any()


def teaches(document, first, length):
    """Whether the piece is trained on, or nothing of the document is; a whole document has its place in any case."""
    always = len(document.tokens) <= length or not document.mask[1:].any()
    return always or document.mask[first + 1 : first + length].any()


def test_split_documents_leave_out_what_teaches_nothing():
    """Rows of a long prompt alone would be steps of loss 0, whose updates are momentum and weight decay."""
    asked = Document(np.arange(100), np.arange(100) >= 95)
    batch, report = pack([asked], 10, "split", packing=False)
    assert batch.tokens.tolist() == [list(range(90, 100))] and batch.weights.sum() == report.trained_tokens == 5
    assert "1 documents split, 9 of their pieces left out because none of their tokens is trained on" in str(report)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60), st.integers(8, 64))
def test_the_plan_is_best_fit_decreasing(lengths, length):
    """Against the definition: a search over all rows for the fullest with room (ties may go to any of them)."""
    sizes = np.minimum(lengths, length)
    left: list[int] = []
    for size in sorted(sizes.tolist(), reverse=True):
        fitting = [room for room in left if room >= size]
        if fitting:
            left.remove(min(fitting))
            left.append(min(fitting) - size)
        else:
            left.append(length - size)
    plan = plan_rows(np.array(lengths), length)
    used = [int(plan.count[a:b].sum()) for a, b in zip(plan.row_starts, plan.row_starts[1:], strict=False)]
    assert sorted(length - n for n in used) == sorted(left)


def test_order_does_not_depend_on_chance():
    lengths = np.random.default_rng(0).integers(1, 500, 2000)
    first, second = plan_rows(lengths, 512), plan_rows(lengths, 512)
    for name in ("row_starts", "document", "offset", "count"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    for a, b in zip(first.row_starts, first.row_starts[1:], strict=False):
        assert np.all(np.diff(first.document[a:b]) > 0)


def test_plain_integers_are_documents_with_all_tokens_trained():
    batch, report = pack([[5, 6, 7], np.array([8, 9])], 8)
    assert batch.tokens[0].tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert batch.targets[0].tolist() == [6, 7, 0, 9, 0, 0, 0, 0]
    assert batch.weights[0].tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    assert batch.segment_ids[0].tolist() == [1, 1, 1, 2, 2, 0, 0, 0]
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert (report.rows, report.tokens, report.trained_tokens, report.max_documents) == (1, 5, 3, 2)
    assert report.fill == 5 / 8


def test_no_documents_are_no_rows():
    batch, report = pack([], 16)
    assert batch.tokens.shape == (0, 16)
    assert (report.rows, report.fill) == (0, 0.0)


def test_a_document_cut_before_its_first_trained_token_is_dropped_and_counted():
    late = Document(np.arange(10), np.arange(10) >= 8)
    early = Document(np.arange(10), np.arange(10) >= 2)
    _, report = pack([late, early], 6)
    assert (report.rows, report.dropped, report.truncated, report.cut_tokens) == (1, 1, 1, 4)
    assert "1 documents truncated, 4 tokens cut" in str(report)


def test_overflow_error_names_the_document_and_the_fix():
    with pytest.raises(ValueError, match=r"1 documents are longer than data.length=4, first document 1 with 5 tokens"):
        pack([[1, 2], [1, 2, 3, 4, 5]], 4, "error")


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([[1.5, 2.0]], {"length": 8}, "document 0: tokens must be integers"),
        ([[[1], [2]]], {"length": 8}, "document 0: tokens must be integers"),
        ([Document(np.arange(3), np.ones(2, bool))], {"length": 8}, "3 tokens but a mask of shape"),
        ([[1, 2]], {"length": 1}, "length must be at least 2"),
        (
            [[1, 2]],
            {"length": 8, "overflow": "wrap"},
            "overflow must be one of truncate, split, drop, error, got 'wrap'",
        ),
    ],
)
def test_bad_arguments(documents, options, message):
    with pytest.raises(ValueError, match=message):
        pack(documents, **options)


def test_lengths_like_dollys_fill_97_percent_and_nothing_is_cut():
    """Dolly's rows are about log-normal, median near 110 tokens, with a long tail; none beyond the row here."""
    lengths = np.random.default_rng(1).lognormal(4.7, 0.9, 15_000).astype(int).clip(8, 2048)
    plan = plan_rows(lengths, 2048, overflow="error")
    assert sorted(plan.document.tolist()) == list(range(len(lengths)))
    assert plan.count.sum() == lengths.sum()
    assert lengths.sum() / (plan.rows * 2048) >= 0.97


def test_planning_costs_the_same_for_every_document():
    """A search over rows would cost more for each document the more there are; here the lines that run are counted."""

    def lines_run(documents: int) -> int:
        lengths = np.random.default_rng(2).lognormal(5.0, 1.0, documents).astype(int).clip(1, 8192)
        counts = collections.Counter()
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.PROFILER_ID, "lines")
        try:
            monitoring.register_callback(
                monitoring.PROFILER_ID, monitoring.events.LINE, lambda code, line: counts.update([code.co_filename])
            )
            monitoring.set_local_events(
                monitoring.PROFILER_ID, packing._best_fit_decreasing.__code__, monitoring.events.LINE
            )
            plan = plan_rows(lengths, 8192)
        finally:
            monitoring.set_local_events(monitoring.PROFILER_ID, packing._best_fit_decreasing.__code__, 0)
            monitoring.free_tool_id(monitoring.PROFILER_ID)
        assert lengths.sum() / (plan.rows * 8192) > 0.95
        return counts[packing.__file__]

    few, many = lines_run(1_000), lines_run(20_000)
    assert 1_000 < few <= 20 * 1_000 and many <= 20 * 20_000


def test_rows_know_where_their_documents_came_from():
    documents = Documents.gather([[1, 2, 3], [4, 5]])
    origins = np.array([[0, 7], [1, 3]])
    rows = PackedRows(Documents(**{**vars(documents), "origins": origins, "files": ("a.jsonl", "b.jsonl")}), 8)
    assert rows.sources(0) == ["a.jsonl:7", "b.jsonl:3"]
    with pytest.raises(ValueError, match=r"first a.jsonl:7 with 3 tokens"):
        PackedRows(rows.documents, 2, overflow="error")
