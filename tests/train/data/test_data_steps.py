"""Steps of so many documents, which share rows: data.packing: step."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.train.data import TokenDataset
from jaxtune.train.data.batches import BatchSource, torch_order
from jaxtune.train.data.packing.pairs import LABELS, PAIRS, PairDataset
from jaxtune.train.data.packing.steps import StepBatches
from jaxtune.train.data.rows.feeds import FedBatches, PreparedSet
from jaxtune.train.data.tokens.cache import Summary
from jaxtune.train.data.tokens.documents import Document, Documents
from jaxtune.train.objectives.kto import mismatched_in_groups, with_mismatched_answers

LENGTH = 40


def some_documents(count: int, longest: int = LENGTH, prompt: int = 1) -> Documents:
    """Of each, all tokens are its number, so that a batch shows which documents it holds."""
    draw = np.random.default_rng(count)
    lengths = draw.integers(prompt + 1, longest + 1, count)
    return Documents.gather(
        Document(np.full(n, index + 1, np.int32), np.arange(n) >= prompt) for index, n in enumerate(lengths)
    )


def dataset(documents: Documents, kind=TokenDataset, **more):
    return kind(documents, Summary(rows=len(documents), documents=len(documents)), LENGTH, "step", **more)


def held(batch) -> list[tuple[int, int]]:
    """(number, tokens) of each document in a batch, by its segments, sorted."""
    found = []
    for tokens, segments, positions in zip(batch.tokens, batch.segment_ids, batch.positions, strict=True):
        for segment in range(1, int(segments.max(initial=0)) + 1):
            at = np.flatnonzero(segments == segment)
            if at.size:
                [number] = set(tokens[at].tolist())
                assert (np.diff(at) == 1).all() and positions[at].tolist() == list(range(at.size))
                found.append((number, at.size))
        assert (tokens[segments == 0] == 0).all()
    return sorted(found)


def mean_document_in(source: BatchSource, steps: int) -> float:
    """Tokens of a token's document, by the segments of an epoch's batches, padding counted as 0."""
    batches = [source.batch_at(step) for step in range(steps)]
    tokens = [np.bincount(row)[1:] for batch in batches for row in batch.segment_ids]
    return sum(float((row.astype(float) ** 2).sum()) for row in tokens) / sum(b.tokens.size for b in batches)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, LENGTH), st.booleans(), st.floats(0.1, 9.0))
@settings(max_examples=25, deadline=None)
def test_sources_know_how_long_a_tokens_document_is(per_step, steps, longest, packing, weight):
    """Rows of one document, packed rows, pairs, steps that share rows, and mixtures: as their batches show it."""
    documents = some_documents(2 * per_step * steps, longest)
    kinds = [TokenDataset] + [PairDataset] * (longest <= LENGTH // 2)
    sets = [kind(documents, Summary(), LENGTH, packing=packing) for kind in kinds]
    for data in sets:
        batches = data.batches(1)
        assert batches.document_tokens == pytest.approx(mean_document_in(batches, batches.steps_per_epoch))
    shared = StepBatches(dataset(documents).rows, per_step, 2 * steps, LENGTH)
    assert shared.document_tokens == pytest.approx(mean_document_in(shared, 2 * steps))
    means = [sets[0].rows.document_tokens, shared.rows.document_tokens]
    prepared = [PreparedSet(name, data) for name, data in (("a", sets[0]), ("b", dataset(documents)))]
    mixed = FedBatches(prepared, [weight, 1.0], 2)
    assert mixed.document_tokens == pytest.approx(np.average(means, weights=[weight, 1.0]))


@pytest.mark.parametrize(("per_step", "parts", "multiple"), [(6, None, 1), (6, 3, 1), (5, None, 4), (1, None, 1)])
@pytest.mark.parametrize("order", ["shuffled", "torch", "given"])
def test_every_step_has_its_documents(per_step, parts, multiple, order):
    """As many as asked for, the epoch's last step fewer, each whole and once an epoch, whatever rows they share; and
    the documents of a micro-batch are those that follow each other."""
    documents = some_documents(40)
    data = dataset(documents, order=order)
    batches = StepBatches(
        data.rows, per_step, 2 * -(-40 // per_step), LENGTH, micro_batches=parts, multiple=multiple, seed=3, order=order
    )
    plain = data.batches(per_step, seed=3)
    assert batches.steps_per_epoch == plain.steps_per_epoch == -(-40 // per_step)
    rows = batches.rows_per_step // (parts or 1)
    assert rows % multiple == 0 and rows <= -(-per_step // (parts or 1) // multiple) * multiple
    most = 0
    for epoch in range(2):
        seen = []
        for index in range(batches.steps_per_epoch):
            step = epoch * batches.steps_per_epoch + index
            batch, numbers = batches.batch_at(step), plain.rows_at(step)
            assert batch.tokens.shape == (batches.rows_per_step, LENGTH)
            wanted = sorted((int(n) + 1, int(documents.lengths[n])) for n in numbers)
            assert held(batch) == wanted
            assert batch.weights.sum() == documents.trained[numbers].sum()
            size = per_step // (parts or 1)
            for part in range(parts or 1):
                in_part = sorted((int(n) + 1, int(documents.lengths[n])) for n in numbers[part * size :][:size])
                piece = type(batch)(
                    *(
                        getattr(batch, name)[part * rows : (part + 1) * rows]
                        for name in ("tokens", "targets", "weights", "segment_ids", "positions")
                    )
                )
                assert held(piece) == in_part
            most = max(most, int(batch.segment_ids.max()))
            seen += [number for number, _ in wanted]
        assert sorted(seen) == list(range(1, 41))
    assert most <= batches.max_documents
    if per_step == 6 and parts is None:
        assert batches.rows_per_step < 6 and batches.max_documents > 1  # rows are shared
    if order == "torch":
        assert plain.rows_at(0).tolist() == torch_order(40, 3, 0)[:per_step].tolist()
    if order == "given":
        assert plain.rows_at(plain.steps_per_epoch).tolist() == list(range(per_step))


def test_each_document_of_a_pair_is_cut_by_itself():
    """At data.length, not where a row of both would end; packed rows of the same length cut at less."""
    lengths = [(60, 5), (30, 35), (60, 60), (8, 8), (41, 39)]
    documents = Documents.gather(
        Document(np.full(n, index + 1, np.int32), np.arange(n) >= 3)
        for index, n in enumerate(n for pair in lengths for n in pair)
    )
    data = dataset(documents, PairDataset, labels=np.arange(5, dtype=np.float32))
    assert data.rows.kept_lengths.tolist() == [[min(a, LENGTH), min(b, LENGTH)] for a, b in lengths]
    batches = StepBatches(data.rows, 3, 4, 2 * LENGTH, seed=1, order="torch")
    seen = collections.Counter()
    for step in range(2):
        batch = batches.batch_at(step)
        seen.update(held(batch))
        assert batch.extra[PAIRS].sum() == len(batches.rows_at(step))
        for row in range(len(batch.tokens)):  # a pair's label stands in the place of its segments
            for place in np.flatnonzero(batch.extra[PAIRS][row]):
                chosen = batch.tokens[row][batch.segment_ids[row] == 2 * place + 1]
                assert (chosen[0] - 1) // 2 == batch.extra[LABELS][row, place]
    assert seen == collections.Counter(
        (2 * pair + side + 1, min(n, LENGTH)) for pair, both in enumerate(lengths) for side, n in enumerate(both)
    )
    packed = data.in_rows(128)
    assert packed.rows.kept_lengths.tolist() == data.rows.kept_lengths.tolist() and packed.rows.length == 128
    with pytest.raises(ValueError, match="documents are longer than data.length=40, first document 0 with 60 tokens"):
        _ = dataset(documents, PairDataset, overflow="error").rows


def test_mismatched_answers_within_groups():
    """Of groups of rows that follow each other, as TRL has them; a row whose prompt fills it is left out before."""
    lengths = [10, 12, 50, 14, 16, 18]
    prompts = [2, 3, LENGTH, 4, 5, 6]
    made = []
    for index, (n, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        document = Document(np.full(n, index + 1, np.int32), np.arange(n) >= prompt)
        empty = Document(np.zeros(0, np.int32), np.zeros(0, bool))
        made += [document, empty] if index % 2 else [empty, document]
    documents, labels = with_mismatched_answers(Documents.gather(made))
    rows = mismatched_in_groups(dataset(documents, PairDataset, labels=labels), 2)
    assert rows.labels is not None and rows.labels.tolist() == [0, 1, 1, 0, 1]
    strangers = [rows.documents[2 * row + 1].tokens.tolist() for row in range(5)]
    own = [1, 2, 4, 5, 6]
    for row, other in enumerate([1, 0, 3, 2, 4]):
        first, second = own[row] - 1, own[other] - 1
        answer = lengths[second] - prompts[second]
        assert strangers[row] == [own[row]] * prompts[first] + [own[other]] * answer
