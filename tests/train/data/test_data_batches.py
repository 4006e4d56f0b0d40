"""Batches: an order of (seed, epoch), a cursor of one integer, one shape."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxtune.train.data.batches import Batch, Batches, epoch_order
from jaxtune.train.data.packing.packing import PackedRows
from jaxtune.train.data.tokens.documents import Documents


def make_rows(count=10, length=8):
    """`count` rows of one document each, which holds the row's number."""
    return PackedRows(Documents.gather([[i + 1] * 6 for i in range(count)]), length)


def rows_of(batch):
    return [int(row[0]) - 1 for row in batch.tokens if row[0]]


def test_an_epoch_holds_every_row_once_and_its_last_batch_is_padded():
    batches = Batches(make_rows(10), 4, seed=3)
    assert batches.steps_per_epoch == 3
    for epoch in range(3):
        steps = [batches.batch_at(epoch * 3 + index) for index in range(3)]
        assert {step.tokens.shape for step in steps} == {(4, 8)}
        assert sorted(row for step in steps for row in rows_of(step)) == list(range(10))
        last = steps[-1]
        assert not any(field[2:].any() for field in jax.tree.leaves(last))
        assert last.weights[:2].sum() > 0


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    rows = make_rows(50)
    through = Batches(rows, 4, seed=7)
    seen = [rows_of(through.batch_at(step)) for step in range(30)]
    # A run that begins at step 20, without having read anything before, sees the same.
    resumed = Batches(rows, 4, seed=7)
    assert [rows_of(resumed.batch_at(step)) for step in range(20, 30)] == seen[20:]
    assert rows_of(through.batch_at(3)) == seen[3]  # and backwards
    assert seen[:13] != [rows_of(Batches(rows, 4, seed=8).batch_at(step)) for step in range(13)]
    assert seen[0] != seen[13]  # the next epoch has another order


def test_the_order_is_fixed_for_good():
    """A changed order would break the resuming of every run in the world: this is Philox's raw stream."""
    assert epoch_order(12, seed=1, epoch=0).tolist() == [3, 5, 2, 9, 7, 10, 0, 8, 6, 11, 1, 4]
    assert sorted(epoch_order(1000, 5, 2).tolist()) == list(range(1000))


def test_without_shuffling_the_plans_order_stays():
    batches = Batches(make_rows(5), 2, order="given")
    assert [rows_of(batches.batch_at(step)) for step in range(6)] == [[0, 1], [2, 3], [4]] * 2


def test_a_step_names_its_rows():
    batches = Batches(make_rows(5), 2, seed=1)
    for step in range(3):
        expected = [f"document {row}" for row in rows_of(batches.batch_at(step))]
        assert batches.sources_at(step) == expected


def test_max_documents_is_of_the_whole_set():
    rows = PackedRows(Documents.gather([[1, 2]] * 4 + [[1, 2, 3, 4, 5, 6, 7, 8]]), 8)
    assert Batches(rows, 1).max_documents == 4


@pytest.mark.parametrize(
    ("sizes", "rows_per_step", "full"),
    [
        ([8, 8], 2, True),
        ([8, 8], 1, True),
        ([8, 9], 2, True),
        ([8, 7], 2, False),
        ([8, 4, 4], 2, False),
        ([8] * 3, 2, False),
    ],
    ids=["full", "one a step", "cut", "padding", "two documents", "an empty row fills the last step"],
)
def test_full_is_one_document_a_row_without_padding_at_every_step(sizes, rows_per_step, full):
    rows = PackedRows(Documents.gather([[1] * size for size in sizes]), 8)
    assert Batches(rows, rows_per_step).full == full


def test_a_batch_is_a_pytree_in_the_order_of_its_fields():
    batch = Batch.empty(2, 4)
    names = [path[0].name for path, _ in jax.tree_util.tree_flatten_with_path(batch)[0]]
    assert names == ["tokens", "targets", "weights", "segment_ids", "positions"]
    doubled = jax.jit(lambda b: jax.tree.map(lambda x: x + 1, b))(batch)
    assert isinstance(doubled, Batch) and doubled.weights.dtype == np.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Batches(make_rows(), 0), "rows_per_step must be at least 1, got 0"),
        (lambda: Batches(make_rows(), 2, seed=-1), "seed must not be negative, got -1"),
        (lambda: Batches(make_rows(0), 2), "there are no rows"),
        (lambda: Batches(make_rows(), 2).batch_at(-1), "step must not be negative, got -1"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
