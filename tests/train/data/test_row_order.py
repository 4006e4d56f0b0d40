"""Which rows a step has, over files, windows and batches of any size; which rows are held out. No tokenizer, no JAX."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.train.data.batches import Batch, Order
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.packing.packing import NothingUsable
from jaxtune.train.data.packing.pairs import PairDataset
from jaxtune.train.data.rows.feeds import FedBatches, PreparedSet, RowSet
from jaxtune.train.data.rows.reading import Window, open_sources
from jaxtune.train.data.rows.streamed import StreamedRows
from jaxtune.train.data.tokens.cache import Summary
from jaxtune.train.data.tokens.documents import Document, Documents

LENGTH = 24
FIELDS = ("tokens", "targets", "weights", "segment_ids", "positions")
NUMBER = st.integers(0, 20)


def tokenised(values: list[dict], packing: bool = True) -> TokenDataset:
    """Each row as a document whose first token is its number; every fifth cannot be trained on."""
    numbers = [int(value["n"]) for value in values]
    usable = [number for number in numbers if number % 5 != 4]
    if not usable:
        raise NothingUsable("no row is usable")
    made = [np.full(2 + number % 7, number, np.int32) for number in usable]
    documents = Documents.gather(Document(tokens, np.ones(len(tokens), bool)) for tokens in made)
    return TokenDataset(documents, Summary(rows=len(numbers), documents=len(made)), LENGTH, packing)


def write(folder: Path, sizes: list[int], blanks: list[int], offset: int = 0) -> tuple[list[Path], list[int]]:
    """Files of these many rows: lines of JSON with blank lines between, or CSV with line breaks in its cells."""
    numbers, files = itertools.count(offset), []
    for index, size in enumerate(sizes):
        csv = index % 2 == 1
        lines = ["n,text"] if csv else []
        for row, number in zip(range(size), numbers, strict=False):
            gap = blanks[(index + row) % len(blanks)]
            lines.append(f'{number},"a{chr(10) * gap}b"' if csv else json.dumps({"n": number}) + "\n" * gap)
        files.append(folder / f"{offset}-{index}.{'csv' if csv else 'jsonl'}")
        files[-1].write_text("\n".join(lines) + "\n")
    return files, list(range(offset, offset + sum(sizes)))


def stream(files: list[Path], window: int, packing: bool, seed: int, order: Order = "shuffled") -> StreamedRows:
    def prepare(rows: Window) -> TokenDataset:
        return tokenised([dict(row.value or {}) for row in rows.rows], packing)

    return StreamedRows("rows", open_sources([str(file) for file in files]), prepare, window, order, seed)


def numbers_of(batch) -> list[int]:
    starts = (batch.positions == 0) & (batch.segment_ids > 0)
    return batch.tokens[starts].tolist()


def same(one, other) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in FIELDS)


CASE = dict(
    sizes=st.lists(NUMBER, min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 5),
    blanks=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    window=st.integers(1, 30),
    batch=st.integers(1, 9),
    packing=st.booleans(),
    seed=st.integers(0, 2**31),
)


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(**CASE, order=st.sampled_from(["shuffled", "given"]), resumed=st.integers(0, 9))
def test_a_stream_has_every_usable_row_once_a_pass_and_goes_on_anywhere(
    sizes, blanks, window, batch, packing, seed, order, resumed
):
    with tempfile.TemporaryDirectory() as folder:
        files, every = write(Path(folder), sizes, blanks)
        try:
            made = FedBatches([stream(files, window, packing, seed, order)], [1.0], batch, seed)
        except NothingUsable:  # of the first window
            return
        usable = [number for number in every if number % 5 != 4]
        batches, positions, seen = [], [], []
        while len(seen) < 2 * len(usable) or len(batches) <= resumed:
            batches.append(made.batch_at(len(batches)))
            positions.append(json.loads(json.dumps(made.position(len(batches)))))
            seen += numbers_of(batches[-1])
        ours = seen if packing else seen[: 2 * len(usable)]
        assert sorted(ours[: len(usable)]) == usable
        assert sorted(ours[len(usable) : 2 * len(usable)]) == usable
        if order == "given" and not packing:
            assert ours == usable * 2
        other = FedBatches([stream(files, window, packing, seed, order)], [1.0], batch, seed)
        if resumed:
            other.resume(resumed, positions[resumed - 1])
        assert all(same(other.batch_at(step), batches[step]) for step in range(resumed, len(batches)))
        made.close()
        other.close()


@settings(max_examples=20, deadline=None)
@given(**CASE, streamed=st.booleans(), share=st.floats(0.05, 0.95), resumed=st.integers(1, 5))
def test_a_mixture_takes_each_set_in_its_order_and_goes_on_anywhere(
    sizes, blanks, window, batch, packing, seed, streamed, share, resumed
):
    """The second set has the rows of the first, with numbers from 1,000."""
    with tempfile.TemporaryDirectory() as folder:
        sets = []

        def made() -> FedBatches:
            alone = [one(seed + (number << 48)) for number, one in enumerate(sets)]
            return FedBatches(alone, [share, 1 - share], batch, seed)

        for offset in (0, 1000):
            files, every = write(Path(folder), sizes, blanks, offset)
            if streamed:
                sets.append(lambda seed, files=files: stream(files, window + 10, packing, seed))
            else:
                rows = [{"n": number} for number in every]
                sets.append(lambda seed, rows=rows: PreparedSet("rows", tokenised(rows, packing), seed))
        try:
            first = made()
        except NothingUsable:
            return
        batches, positions = [], []
        for step in range(resumed + 3):
            batches.append(first.batch_at(step))
            positions.append(json.loads(json.dumps(first.position(step + 1))))
        for number, offset in enumerate((0, 1000)):  # as if the set were alone
            alone = [n for one in batches for n in numbers_of(one) if (n >= 1000) == bool(offset)]
            row_set, want = sets[number](seed + (number << 48)).with_room(first.max_documents, 0), []
            for row in itertools.count():
                if len(want) >= len(alone):
                    break
                want += numbers_of(row_set.batch_at(row))
            assert want == alone
            row_set.close()
        other = made()
        other.resume(resumed, positions[resumed - 1])
        assert all(same(other.batch_at(step), batches[step]) for step in range(resumed, resumed + 3))
        first.close()
        other.close()


class Counted(RowSet):
    """A set of a user's own, whose rows are one token each, from `first` on."""

    name, length, max_documents = "counted", 4, 1

    def __init__(self, first: int):
        self.first = first

    def with_room(self, documents: int, patches: int) -> Counted:
        return self

    def batch_at(self, step, model=None):
        batch = Batch.empty(1, self.length)
        batch.tokens[0, 0], batch.segment_ids[0, 0] = self.first + step, 1
        return batch


@given(share=st.floats(0.05, 0.95), batch=st.integers(1, 9), seed=st.integers(0, 2**31), resumed=st.integers(0, 6))
def test_a_set_whose_row_depends_on_its_number_alone_needs_no_position(share, batch, seed, resumed):
    def made() -> FedBatches:
        return FedBatches([Counted(0), Counted(1000)], [share, 1 - share], batch, seed)

    source, other = made(), made()
    batches, positions = [], []
    for step in range(resumed + 2):
        batches.append(source.batch_at(step))
        positions.append(json.loads(json.dumps(source.position(step + 1))))
    seen = [number for one in batches for number in numbers_of(one)]
    for first in (0, 1000):
        ours = [number for number in seen if first <= number < first + 1000]
        assert ours == list(range(first, first + len(ours)))
    if resumed:
        other.resume(resumed, positions[resumed - 1])
    assert all(same(other.batch_at(step), batches[step]) for step in range(resumed, resumed + 2))


# ---- rows that are held out


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.integers(0, 12), min_size=2, max_size=60), wanted=st.integers(1, 14), pairs=st.booleans())
def test_held_out_rows_are_distinct_texts_and_none_is_trained_on(texts, wanted, pairs):
    documents = [Document(np.array([text, text, 7], np.int32), np.ones(3, bool)) for text in texts]
    if pairs:
        documents = [side for one in documents for side in (one, Document(np.array([99, 98]), np.ones(2, bool)))]
    kind = PairDataset if pairs else TokenDataset
    rows = kind(Documents.gather(documents), Summary(rows=len(texts), documents=len(documents)), 32)
    distinct = len(set(texts))
    if wanted >= distinct:
        with pytest.raises(ValueError, match=rf"data.eval_rows={wanted} must lie between 1 and {distinct - 1}, one"):
            rows.split(wanted)
        return

    def of(part: TokenDataset) -> list[int]:
        return [int(part.documents[index].tokens[0]) for index in range(0, len(part.documents), 1 + pairs)]

    train, held_out = rows.split(wanted)
    assert len(of(held_out)) == len({*of(held_out)}) == wanted and not {*of(held_out)} & {*of(train)}
    assert {*of(held_out)} | {*of(train)} == {*texts}
    copies = len(texts) - len(of(train)) - wanted
    assert train.copies == copies == sum(texts.count(text) - 1 for text in of(held_out))
    said = [line for line in train.warnings() if "equal held-out ones" in line]
    assert said == (
        [f"{copies:,} rows are left out because they equal held-out ones (data.eval_rows)"] if copies else []
    )
    turned = kind(rows.documents.select(np.arange(len(documents))), rows.summary, 32).split(wanted / distinct)
    assert {*of(turned[1])} == {*of(held_out)}  # a share is one of the distinct texts


def test_repeated_rows_are_held_out_as_one():
    """1,400 rows of 14 texts, as a template makes them."""
    texts = [number % 14 for number in range(1400)]
    rows = TokenDataset(Documents.gather([[text, 7] for text in texts]), Summary(rows=1400, documents=1400), 32)
    train, held_out = rows.split(10)
    assert (len(held_out.documents), len(train.documents), train.copies) == (10, 400, 990)
    assert len(rows.split(0.1)[1].documents) == 1
    with pytest.raises(
        ValueError, match="data.eval_rows=14 must lie between 1 and 13, one less than the distinct rows"
    ):
        rows.split(14)
