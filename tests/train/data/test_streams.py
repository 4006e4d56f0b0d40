"""Streams and mixtures: every row once, and the same rows after a resume."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxtune.train.config import DataConfig, ModelConfig, ObjectiveConfig, TrainConfig
from jaxtune.train.config.file import load_config
from jaxtune.train.data import prepare
from jaxtune.train.data.rows.feeds import FedBatches
from jaxtune.train.data.rows.reading import open_sources
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.spec.run_rows import Reader, run_rows
from tests.train.data.conftest import make_tokenizer

TOKENIZER = make_tokenizer()
MODEL: Any = SimpleNamespace(vocab_size=len(TOKENIZER), context_length=512)
FIELDS = ("tokens", "targets", "weights", "segment_ids", "positions")


def row(number: int) -> dict[str, str]:
    return {"prompt": f"Add {number}: ", "completion": "It is 4. " * (1 + number % 3)}


def shards(folder: Path, sizes: list[int], suffix: str = ".jsonl") -> list[dict[str, str]]:
    """Shards of these many rows, each with its own number in its text; returns all rows."""
    folder.mkdir(exist_ok=True)
    numbers, made = itertools.count(), []
    for shard, size in enumerate(sizes):
        rows = [row(next(numbers)) for _ in range(size)]
        path = folder / f"part-{shard:02}{suffix}"
        if suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as parquet

            schema = pa.schema([("prompt", pa.string()), ("completion", pa.string())])
            parquet.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=4)
        elif suffix == ".csv":
            lines = ["prompt,completion", *(f'"{one["prompt"]}","{one["completion"]}"' for one in rows)]
            path.write_text("\n".join(lines) + "\n")
        else:
            path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        made += rows
    return made


def source(rows: object, rows_per_step: int = 4, **changes) -> FedBatches:
    """The source of a run over these rows."""
    objective = changes.pop("objective", "sft")
    data = DataConfig(**({"train": "given", "length": 48, "streaming": True, "buffer_size": 8} | changes))
    config = TrainConfig(
        model=ModelConfig(path="none"),
        data=data,
        steps=9,
        rows_per_step=rows_per_step,
        seed=3,
        objective=ObjectiveConfig(objective),
    )
    made, _ = run_rows(Reader(objective_of(config.objective), TOKENIZER, config, MODEL), rows)
    assert isinstance(made, FedBatches)
    return made


def numbers(batch) -> list[int]:
    """Which rows of `shards` a batch has, by the numbers in their texts."""
    found = []
    for tokens, segments in zip(batch.tokens, batch.segment_ids, strict=True):
        for segment in range(1, segments.max() + 1):
            text = TOKENIZER.decode(tokens[segments == segment])
            found.append(int(re.search(r"Add (\d+)", text)[1]))
    return found


def same(one, other) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in FIELDS)


def one_epoch(made: FedBatches, count: int) -> list[int]:
    """The numbers of the rows up to the one that completes `count`, which no row does twice."""
    seen: list[int] = []
    for step in itertools.count():
        seen += numbers(made.batch_at(step))
        if len(seen) >= count:
            return seen[:count]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_an_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path, suffix):
    """Of shards of any size, one of them empty."""
    rows = shards(tmp_path / "rows", [13, 0, 7, 21], suffix)
    made = source(tmp_path / "rows", rows_per_step=1, packing=False)
    first = one_epoch(made, len(rows))
    assert sorted(first) == list(range(41)) and first != sorted(first)
    second = [numbers(made.batch_at(step))[0] for step in range(41, 82)]
    assert sorted(second) == sorted(first) and second != first
    assert any("every row was read 1 times" in text for text in made.news()) and not made.news()
    assert source(tmp_path / "rows", rows_per_step=1, packing=False, buffer_size=100).batch_at(0) is not None


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_any_step_is_resumed_to_the_same_bits(tmp_path, suffix):
    shards(tmp_path / "rows", [13, 5, 9], suffix)
    whole = source(tmp_path / "rows")
    batches, positions = [], []
    for step in range(14):  # more than two epochs
        batches.append(whole.batch_at(step))
        positions.append(json.loads(json.dumps(whole.position(step + 1))))
    for step in range(1, 14):
        resumed = source(tmp_path / "rows")
        assert resumed.identity() == whole.identity()
        resumed.resume(step, positions[step - 1])
        for later in range(step, min(step + 3, 14)):
            assert same(resumed.batch_at(later), batches[later]), (step, later)
        assert resumed.sources_at(step) == whole.sources_at(step) or step < 10


def test_a_step_that_was_made_is_given_again_and_no_other(tmp_path):
    shards(tmp_path / "rows", [30])
    made = source(tmp_path / "rows")
    first, second = made.batch_at(0), made.batch_at(1)
    assert made.batch_at(1) is second and not same(first, second)
    with pytest.raises(ValueError, match="step 0 is asked for, but the next step of these rows is 2"):
        made.batch_at(0)


def test_shards_of_a_data_set_stream_as_files_do(tmp_path):
    """Without its length: `map` and `filter` of an IterableDataset run as its rows are read, and are not run ahead."""
    from datasets import Dataset, IterableDataset

    read = []

    def seen(one):
        read.append(one["prompt"])
        return one

    rows = [row(number) for number in range(60)]
    stream = Dataset.from_list(rows).to_iterable_dataset(num_shards=3).map(seen)
    made = source(stream, rows_per_step=1, streaming=False, packing=False)
    batches = [made.batch_at(step) for step in range(10)]
    assert len({*read}) < 60  # it was not read whole
    position = made.position(10)
    rest = [made.batch_at(step) for step in range(10, 60)]
    assert sorted(number for batch in batches + rest for number in numbers(batch)) == list(range(60))
    resumed = source(stream, rows_per_step=1, streaming=False, packing=False)
    resumed.resume(10, position)
    assert all(same(resumed.batch_at(10 + index), batch) for index, batch in enumerate(rest))

    def generated():
        yield from rows

    one = source(IterableDataset.from_generator(generated), rows_per_step=1, packing=False)
    assert sorted(one_epoch(one, 60)) == list(range(60))
    saved = tmp_path / "saved"
    Dataset.from_list(rows).save_to_disk(saved)
    assert sorted(one_epoch(source(saved, rows_per_step=1, packing=False), 60)) == list(range(60))


DERIVED = {
    "shuffled": lambda rows: rows,
    "mapped": lambda rows: rows.map(lambda one: one),
    "filtered": lambda rows: rows.filter(lambda one: int(one["text"]) % 3),
    "taken": lambda rows: rows.take(17),
    "skipped": lambda rows: rows.skip(3),
    "batched": lambda rows: rows.map(lambda one: one, batched=True, batch_size=4),
    "columns": lambda rows: rows.rename_column("text", "other").rename_column("other", "text"),
}


@pytest.mark.parametrize("with_pictures", [False, True])
@pytest.mark.parametrize("derived", DERIVED)
def test_each_pass_whole_and_resumed_is_the_streams_own(derived, with_pictures):
    """With pictures, which are left undecoded, the stream that is read is one that is made here."""
    from datasets import Dataset, Features, Image, Value

    features = Features({"text": Value("string")} | ({"image": Image()} if with_pictures else {}))
    table = [{"text": str(number)} | ({"image": None} if with_pictures else {}) for number in range(23)]

    def made():
        stream = Dataset.from_list(table, features=features).to_iterable_dataset(num_shards=3)
        return DERIVED[derived](stream.shuffle(seed=5, buffer_size=6))

    def read(epoch: int, after: int) -> list[str]:
        [one] = open_sources(made())
        for number in {0, epoch}:  # as of a stream that was read before
            one.set_epoch(number)
        return [row.value["text"] for row in one.read(after)]

    passes = []
    for epoch in range(3):
        own = made()
        own.set_epoch(epoch)
        passes.append([row["text"] for row in own])
        for after in (0, 1, 7, len(passes[-1]) - 1, len(passes[-1])):
            assert read(epoch, after) == passes[-1][after:]
    assert derived == "taken" or len({*map(tuple, passes)}) == 3  # each pass has an order of its own


def test_packed_rows_of_a_stream_keep_to_the_promise_of_documents(tmp_path):
    """Later windows have more and shorter documents than the first, whose most is doubled."""
    folder = tmp_path / "rows"
    shards(folder, [40])
    text = "".join(json.dumps({"prompt": "4", "completion": "4"}) + "\n" for _ in range(200))
    (folder / "part-01.jsonl").write_text(text)
    made = source(folder, length=96, buffer_size=40)
    most = max(int(made.batch_at(step).segment_ids.max()) for step in range(12))
    first = made.sets[0].first.report.max_documents
    assert first < most == made.max_documents == max(8, 2 * first)  # else there would be more


def test_pairs_stream_with_shapes_that_stay(tmp_path):
    rows = [{"prompt": f"Add {n}: ", "chosen": "It is 4." * (1 + n % 2), "rejected": "Who?"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    made = source(tmp_path / "pairs.jsonl", objective="orpo", length=96)
    shape = made.empty(4).extra["pairs"].shape
    batches = [made.batch_at(step) for step in range(6)]
    assert {batch.extra["pairs"].shape for batch in batches} == {shape}
    assert sum(batch.extra["pairs"].sum() for batch in batches) > 40


def test_a_column_that_some_rows_lack_is_refused_where_it_changes_batches(tmp_path):
    def pairs(count: int, **more) -> str:
        rows = [{"prompt": f"Add {n}: ", "chosen": "It is 4.", "rejected": "Who?", **more} for n in range(count)]
        return "".join(json.dumps(one) + "\n" for one in rows)

    (tmp_path / "rows.jsonl").write_text(pairs(8, margin=1.0) + pairs(8))
    made = source(tmp_path / "rows.jsonl", objective="reward", length=96)
    with pytest.raises(ValueError, match=r"rows.jsonl:9 and the rows after it.*margin to all rows, or to none"):
        for step in range(8):
            made.batch_at(step)
    (tmp_path / "with.jsonl").write_text(pairs(8, margin=1.0))
    (tmp_path / "without.jsonl").write_text(pairs(8))
    mixed = [(str(tmp_path / name), 1.0) for name in ("with.jsonl", "without.jsonl")]
    with pytest.raises(ValueError, match=r"with.jsonl and .*without.jsonl cannot be mixed"):
        source(mixed, objective="reward", length=96, streaming=False, cache_dir=str(tmp_path / "cache"))


# ---- mixtures


@pytest.mark.parametrize("streaming", [False, True])
def test_sets_are_mixed_by_weight_and_resumed_to_the_same_bits(tmp_path, streaming):
    for name, offset in (("a", 0), ("b", 1000)):
        rows = [row(offset + number) for number in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    wanted = ((str(tmp_path / "a.jsonl"), 3.0), (str(tmp_path / "b.jsonl"), 1.0))
    settings = dict(
        rows_per_step=2, packing=False, streaming=streaming, cache_dir=str(tmp_path / "cache"), num_workers=1
    )
    made = source(wanted, **settings)
    batches = [made.batch_at(step) for step in range(120)]
    found = [number for batch in batches for number in numbers(batch)]
    ours = [number for number in found if number < 1000]
    assert 0.68 < len(ours) / len(found) < 0.82
    assert sorted(ours[:30]) == list(range(30)) and sorted(ours[30:60]) == list(range(30))
    again = source(wanted, **settings)
    for step in range(50):
        again.batch_at(step)
    resumed = source(wanted, **settings)
    resumed.resume(50, json.loads(json.dumps(again.position(50))))
    assert all(same(resumed.batch_at(step), batches[step]) for step in range(50, 70))
    assert "75.0% of the rows from" in made.described(9)[0] and resumed.identity() == made.identity()


def test_a_mixture_has_every_prepared_row_once(tmp_path):
    rows = [row(number) for number in range(21)]
    wanted = [(prepare(rows, TOKENIZER, length=48, packing=False), 1.0), ([row(99)], 1e-9)]
    made = source(wanted, rows_per_step=3, streaming=False, packing=False)
    found = [number for step in range(14) for number in numbers(made.batch_at(step))]
    assert sorted(found[:21]) == sorted(found[21:]) == list(range(21)) and found[:21] != found[21:]


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), np.float32(0)])
def test_a_weight_that_is_no_share_is_refused_in_python_too(weight):
    with pytest.raises(ValueError, match=r"train_rows: the weight of a list = .*: must be greater than 0"):
        source([([row(0)], 1.0), ([row(1)], weight)], streaming=False)


# ---- what is refused, and what goes wrong


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.streaming=true"], "steps = None: data.streaming: the end of a stream is not known"),
        (["data.streaming=true", "epochs=2"], "steps = None: data.streaming"),
        (["data.streaming=true", "steps=2", "data.eval_rows=4"], "data.eval_rows = 4: data.train is a stream"),
        (["data.streaming=true", "steps=2", "data.packing=step"], "data.packing = 'step': data.train is a stream"),
        (["data.streaming=true", "steps=2", "data.max_rows=4"], "data.max_rows = 4: data.train is a stream"),
        (["data.train=[[a, 1], [b, 2]]"], "steps = None: data.train: the end of a mixture"),
        (["data.train=[[a, 1], [b, 0]]", "steps=2"], "the weight of b = 0.0: must be greater than 0"),
        (["data.train=[]", "steps=2"], "data.train = []: must name rows"),
        (["data.train=[[a, b]]", "steps=2"], r"list of [string, number] pairs"),
    ],
)
def test_what_a_stream_cannot_do_is_refused_with_its_key(overrides, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        load_config("lora-0.5b", ["data.train=rows.jsonl", "epochs=null", "steps=null", *overrides])
    load_config("lora-0.5b", ["data.train=[[a.jsonl, 1], [b, 0.5]]", "epochs=null", "steps=9", "data.streaming=true"])


def test_a_shard_that_vanishes_changes_or_breaks_is_named(tmp_path):
    folder = tmp_path / "rows"
    shards(folder, [12, 12, 12], ".parquet")

    def ends_with(words: str, break_it) -> None:
        made = source(folder)
        break_it()
        with pytest.raises(ValueError, match=words):
            for step in range(30):
                made.batch_at(step)

    last = folder / "part-02.parquet"
    kept = last.read_bytes()
    ends_with(r"part-02.parquet: a shard of the stream cannot be read \(No such file", last.unlink)
    last.write_bytes(kept)
    ends_with("part-02.parquet: the file has changed since the run began", lambda: last.write_bytes(kept + b"."))
    identity = source(folder).identity() if not last.write_bytes(kept) else None
    last.write_bytes(kept[: len(kept) // 2] + bytes(32) + kept[len(kept) // 2 + 32 :])
    assert identity is None or source(folder).identity() != identity
    ends_with("part-02.parquet: not a readable Parquet file", lambda: None)
    (tmp_path / "array.json").write_text(json.dumps([row(0)]))
    with pytest.raises(ValueError, match=r"array.json: a JSON array is read whole and cannot be streamed"):
        source(tmp_path / "array.json")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"empty.jsonl: there are no rows"):
        source(tmp_path / "empty.jsonl")


def test_bad_rows_stop_a_stream_or_are_counted(tmp_path):
    rows = [json.dumps(row(number)) for number in range(40)]
    rows[30] = "{broken"
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    made = source(tmp_path / "rows.jsonl", rows_per_step=1, packing=False)
    with pytest.raises(ValueError, match=r"rows.jsonl:31: bad JSON.*data.on_bad_row: skip"):
        for step in range(60):
            made.batch_at(step)
    skipping = source(tmp_path / "rows.jsonl", rows_per_step=1, packing=False, on_bad_row="skip")
    assert sorted(one_epoch(skipping, 39)) == [number for number in range(40) if number != 30]
    assert any("1 of 32 rows left out as bad so far, lately" in text for text in skipping.news())
    (tmp_path / "rows.jsonl").write_text("\n".join(rows[:30] + ["{broken"] * 40))
    few = source(tmp_path / "rows.jsonl", rows_per_step=1, packing=False, on_bad_row="skip")
    assert sorted(one_epoch(few, 30)) == list(range(30))  # whole windows without a usable row
    few.batch_at(30)  # of the next epoch, after those windows
    news = few.news()
    assert any("34 of 64 rows left out as bad so far, lately" in text for text in news), news
    assert any("40 of 70 rows left out" in text and "none of 6 rows is usable" in text for text in news), news


def test_fewer_rows_than_a_step_has_are_repeated(tmp_path):
    shards(tmp_path / "rows", [2])
    made = source(tmp_path / "rows", rows_per_step=4, packing=False)
    assert sorted(numbers(made.batch_at(0))) == [0, 0, 1, 1]


def test_sources_read_on_after_any_row(tmp_path):
    """As if the rows before had been read."""
    for suffix in (".jsonl", ".parquet", ".csv"):
        shards(tmp_path / suffix[1:], [11], suffix)
        [one] = open_sources(tmp_path / suffix[1:])
        rows = list(one.read(0))
        for index, before in enumerate(rows):
            assert list(one.read(before.number)) == rows[index + 1 :], suffix
    [one] = open_sources([row(number) for number in range(5)])
    assert [found.number for found in one.read(3)] == [4, 5]
