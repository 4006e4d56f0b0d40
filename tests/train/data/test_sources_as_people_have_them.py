"""Columns with other names, the first rows of a source, and a share of the rows held out."""

from __future__ import annotations

import json

import pytest

from jaxtune.train.config import ConfigError, DataConfig
from jaxtune.train.data import prepare
from jaxtune.train.data.rows.reading import open_sources, read_rows
from tests.train.data.conftest import make_tokenizer


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"id": i, "question": f"What is {i}?", "reply": f"It is {i}."}) for i in range(20)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


COLUMNS = {"prompt": "question", "completion": "reply"}


def test_columns_are_found_under_their_own_names(file, tmp_path):
    first = next(read_rows(open_sources(str(file), columns=COLUMNS)))
    assert first.value == {"id": 0, "prompt": "What is 0?", "completion": "It is 0."}
    assert first.format == "prompt_completion"
    swapped = next(read_rows(open_sources(str(file), columns={"prompt": "reply", "completion": "question"})))
    assert (swapped.value or {})["prompt"] == "It is 0."
    tokenizer = make_tokenizer()

    def prepared(columns):
        return prepare(str(file), tokenizer, columns=columns, length=64, cache_dir=tmp_path / "tokens", num_workers=1)

    made = prepared(COLUMNS)
    assert len(made.documents) == 20 and "id" in made.summary.unread
    assert not prepared({"prompt": "reply", "completion": "question"}).cached  # another set of tokens
    assert prepared(COLUMNS).cached


def test_a_column_that_is_not_there_costs_its_row(file):
    file.write_text(file.read_text() + '{"question": "a"}\n')
    rows = list(read_rows(open_sources(str(file), columns=COLUMNS)))
    assert rows[-1].value is None and "no column 'reply', which data.columns names, but question" in rows[-1].error
    with pytest.raises(ConfigError, match="data.columns = 'ask': is not a column of any format; there are messages"):
        DataConfig("rows.jsonl", columns={"ask": "question"})


def test_the_first_rows_of_a_source(file, tmp_path):
    [source] = open_sources(f"{file}[:3]")
    assert [row.number for row in source.read(0)] == [1, 2, 3] and source.count and source.count() == 3
    [whole] = open_sources(str(file))
    assert source.identity and whole.identity and source.identity() != whole.identity()
    assert len(list(read_rows(open_sources([f"{file}[:3]", str(file)])))) == 23
    odd = tmp_path / "odd[:3]"
    odd.mkdir()
    (odd / "rows.jsonl").write_text(file.read_text())
    assert len(list(read_rows(open_sources(str(odd))))) == 20  # a folder of that name
    with pytest.raises(ValueError, match="of a stream `steps` says how much is read"):
        open_sources(f"{file}[:3]", streaming=True)


def test_a_share_of_the_rows_is_held_out(file, tmp_path):
    made = prepare(
        str(file), make_tokenizer(), columns=COLUMNS, length=64, cache_dir=tmp_path / "tokens", num_workers=1
    )
    for share, rows in ((0.2, 4), (4, 4), (0.001, 1)):
        train, held_out = made.split(share)
        assert (len(held_out.documents), len(train.documents)) == (rows, 20 - rows)
    with pytest.raises(ConfigError, match="data.eval_rows = 1.5: must be a number of rows, or a share of them below 1"):
        DataConfig("rows.jsonl", eval_rows=1.5)
    assert DataConfig("rows.jsonl", eval_rows=0.1).eval_rows == 0.1
