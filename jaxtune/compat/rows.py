"""Data sets as TRL accepts them, and tokenised rows as scripts read them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtune.train.data.rows.reading import open_sources, read_rows
from jaxtune.train.data.rows.streamed import is_stream

IGNORE = -100  # the label of a token that is not trained on, as in PyTorch's cross entropy


class Tokenised(Sequence):
    """Rows {"input_ids": token ids, "labels": the same, -100 where a token is not trained on}, converted on access.

    documents: a sequence of documents with arrays `tokens` and `mask` (whether a token is trained on).
    """

    def __init__(self, documents):
        self._documents = documents
        self.column_names = ["input_ids", "labels"]

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index):
        if isinstance(index, str):  # a column
            return [row[index] for row in self]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        document = self._documents[range(len(self))[index]]
        tokens = np.asarray(document.tokens)
        labels = np.where(np.asarray(document.mask, bool), tokens, IGNORE)
        return {"input_ids": tokens.tolist(), "labels": labels.tolist()}


def columns_of(dataset: Any, trainer: str) -> list[str]:
    """The columns of a data set, or of the first row of a list or stream; ValueError without rows.

    trainer: the trainer's class, for the message.
    """
    columns = getattr(dataset, "column_names", None)
    if columns is not None:
        return columns
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError(f"{trainer}: the data set has no rows")
    return list(first)


def require_one_set(dataset: object, argument: str) -> None:
    """ValueError for several data sets by name, such as all splits of one. argument: with the class that has it."""
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, dataset))
        raise ValueError(f"{argument} is a dict of data sets, with the keys {names}: give one of them")


def rows_and_format(dataset: Any, text_field: str, formatting_func) -> tuple[Any, str]:
    """(rows as jaxtune reads them, the name of their format), by TRL's rules: formatting_func decides first, then a
    column of texts, then columns of a known format; else ValueError. A path has the format of its first usable row.

      text_field: the column of texts (dataset_text_field).
      formatting_func: maps a row to a text, or the columns of a batch to texts; None for a path.
      dataset: a datasets object, a list of dicts, or a path.
    """
    if is_stream(dataset):
        return _streamed(dataset, text_field, formatting_func)
    is_path = isinstance(dataset, str | os.PathLike)
    if formatting_func is not None:
        if is_path:
            raise ValueError(
                f"SFTTrainer: {os.fspath(dataset)!r} is a path, which does not go with a formatting_func: give the "
                "rows, which datasets.load_dataset reads"
            )
        return [{"text": text} for text in _formatted(formatting_func, list(dataset))], "text"
    if is_path:  # the first row's columns decide, also which tokens are trained on
        row_formats = (row.format for row in read_rows(open_sources(dataset)) if row.value is not None)
        return dataset, next(row_formats, "auto")
    if not hasattr(dataset, "column_names"):
        dataset = list(dataset)
    columns = columns_of(dataset, "SFTTrainer")
    if text_field in columns:
        return (dataset, "text") if text_field == "text" else ([{"text": row[text_field]} for row in dataset], "text")
    return dataset, _known_form(columns, text_field)


def _streamed(dataset: Any, text_field: str, formatting_func: Callable[..., Any] | None) -> tuple[Any, str]:
    """rows_and_format of an IterableDataset: reads at most its first row; formatting_func gets one row at a time."""
    columns = columns_of(dataset, "SFTTrainer")
    if formatting_func is not None:
        function = formatting_func
        return dataset.map(lambda row: {"text": _formatted(function, [row])[0]}, remove_columns=columns), "text"
    if text_field in columns:
        named = text_field != "text"
        return dataset.map(lambda row: {"text": row[text_field]}, remove_columns=columns) if named else dataset, "text"
    return dataset, _known_form(columns, text_field)


def _known_form(columns: Sequence[str], text_field: str) -> str:
    """The format of rows with these columns and no column of texts; ValueError for others."""
    for names, form in (
        (["messages"], "messages"),
        (["prompt", "completion"], "prompt_completion"),
        (["conversations"], "sharegpt"),
    ):
        if all(name in columns for name in names):
            return form
    raise ValueError(
        f"SFTTrainer: dataset_text_field = {text_field!r} is not a column of the data set, nor are messages, or prompt "
        f"and completion; it has {', '.join(map(str, columns))}. Name its text column, or give a formatting_func"
    )


def _formatted(formatting_func, dataset: Sequence[Mapping[str, Any]]) -> list[str]:
    """A text for each row, of a formatting_func that takes one row or a batch."""
    if not dataset:
        return []
    try:
        first = formatting_func(dataset[0])
    except Exception as error:  # a function for batches may fail on a single row in any way
        first = error
    if isinstance(first, str) or (isinstance(first, list) and len(first) == 1 and isinstance(first[0], str)):
        texts = [formatting_func(row) for row in dataset]
        texts = [text[0] if isinstance(text, list) and len(text) == 1 else text for text in texts]
    elif isinstance(first, list | Exception):
        columns = {name: [row[name] for row in dataset] for name in dataset[0]}
        texts = formatting_func(columns)
        if isinstance(texts, Mapping) and "text" in texts:
            texts = texts["text"]
    else:
        texts = [first]
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None or len(texts) != len(dataset):
        fault = f"{type(wrong).__name__}" if wrong is not None else f"{len(texts)} texts for {len(dataset)} rows"
        raise ValueError(
            f"SFTTrainer: formatting_func returned {fault}; it gets one row and returns its text, or gets the columns "
            "of a batch and returns a text for each row"
        )
    return [str(text) for text in texts]
