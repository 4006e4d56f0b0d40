"""Data sets as TRL accepts them: `rows_and_format` finds the rows of SFTTrainer and GKDTrainer and their format.
`columns_of` finds the names of the columns, for it and for the checks in preference.py and distilled.py. `Tokenised`
shows tokenised rows as scripts read them from a trainer's train_dataset, with IGNORE, which measures.py uses too, as
the label of tokens that are not trained on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtune.train.data.reading import open_sources, read_rows
from jaxtune.train.folder.run_rows import is_stream

IGNORE = -100  # the label of a token that is not trained on, as in PyTorch's cross entropy


class Tokenised(Sequence):
    """A sequence of rows {"input_ids": token ids, "labels": the same, -100 where a token is not trained on}, as scripts
    read them from trainer.train_dataset. documents: a sequence of tokenised documents with arrays `tokens` (ids) and
    `mask` (whether a token is trained on). One is converted when its row is accessed, so that no second copy of the
    rows is kept in memory. A slice is a list of rows."""

    def __init__(self, documents):
        self._documents = documents

    def __len__(self) -> int:
        """The number of documents, each of which is one row."""
        return len(self._documents)

    def __getitem__(self, index):
        """Returns the row of this index (it may be negative), {"input_ids": token ids, "labels": the same, -100 where a
        token is not trained on}, or for a slice a list of rows. Raises IndexError for an index out of range."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        document = self._documents[range(len(self))[index]]
        tokens = np.asarray(document.tokens)
        labels = np.where(np.asarray(document.mask, bool), tokens, IGNORE)
        return {"input_ids": tokens.tolist(), "labels": labels.tolist()}


def columns_of(dataset: Any, trainer: str) -> list[str]:
    """Returns the names of the columns of `dataset`, a data set of datasets, a list or a stream of rows (dicts), by
    which the trainers know the format of a script's rows; for a list or a stream without such names, those of its first
    row. trainer: the class of the script's trainer, for the message.

    Raises:
      ValueError: a data set without such names has no rows.
    """
    columns = getattr(dataset, "column_names", None)
    if columns is not None:
        return columns
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError(f"{trainer}: the data set has no rows")
    return list(first)


def rows_and_format(dataset: Any, text_field: str, formatting_func) -> tuple[Any, str]:
    """Finds out what a script's rows are, by TRL's rules: a formatting function decides first, then a column of texts,
    then columns of a known format.

    Args:
      dataset: a datasets.Dataset or IterableDataset, a list of dicts, or the path of a file.
      text_field: the name of the column of texts (dataset_text_field).
      formatting_func: maps a row to a text, or the columns of a batch to texts; None: there is none, which it must be
        for a path.
    Returns:
      (rows as jaxtune reads them, the name of their format: "text", "messages", "prompt_completion" or "sharegpt"). For
        a path the first is the path, and the second is the format of the file's first usable row, which may also be
        another one; "auto" if it has none. With a formatting_func the rows are {"text": its text} ([] if there are
        none), and the format is "text". A column of texts of another name is renamed to "text".
    Raises:
      ValueError: none of the rules fits the columns; a list (without a formatting_func) or a stream that does not name
        its columns has no rows; there is a formatting_func for a path; or formatting_func returns something else than a
        text for each row, which of a stream is noticed only when the row is read.
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
        known = (row.format for row in read_rows(open_sources(dataset)) if row.value is not None)
        return dataset, next(known, "auto")
    if not hasattr(dataset, "column_names"):
        dataset = list(dataset)
    columns = columns_of(dataset, "SFTTrainer")
    if text_field in columns:
        return (dataset, "text") if text_field == "text" else ([{"text": row[text_field]} for row in dataset], "text")
    return dataset, _known_form(columns, text_field)


def _streamed(dataset: Any, text_field: str, formatting_func: Callable[..., Any] | None) -> tuple[Any, str]:
    """Does what rows_and_format does, for an IterableDataset, `dataset`: returns (its rows, the name of their format).
    text_field: the name of the column of texts. formatting_func: as in rows_and_format, but it gets one row at a time;
    None: there is none. Raises ValueError for columns of no known format, and for a stream without names of columns and
    without rows. It reads at most the first row; all rows are converted while the run reads them."""
    columns = columns_of(dataset, "SFTTrainer")
    if formatting_func is not None:
        function = formatting_func
        return dataset.map(lambda row: {"text": _formatted(function, [row])[0]}, remove_columns=columns), "text"
    if text_field in columns:
        named = text_field != "text"
        return dataset.map(lambda row: {"text": row[text_field]}, remove_columns=columns) if named else dataset, "text"
    return dataset, _known_form(columns, text_field)


def _known_form(columns: Sequence[str], text_field: str) -> str:
    """Returns the format that jaxtune has for rows with these columns and without a column of texts: "messages",
    "prompt_completion" or "sharegpt". Raises ValueError for other columns; the message names `text_field`, the column
    of texts that is missing."""
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
    """Returns the texts that a script's formatting_func makes of the rows of `dataset`, one for each row; [] without
    rows. A first call with the first row shows what the function takes. If it returns a text, or a list of one text,
    the function is called with each row. If it raises any exception or returns another list, the function (as Unsloth's
    do) is called with {column: values} of all rows and returns a list of texts, or a mapping with such a list under
    "text". Raises ValueError if a result is anything else, such as a mapping for the first row or another number of
    texts than rows; what that second call raises is passed on."""
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
        found = f"{type(wrong).__name__}" if wrong is not None else f"{len(texts)} texts for {len(dataset)} rows"
        raise ValueError(
            f"SFTTrainer: formatting_func returned {found}; it gets one row and returns its text, or gets the columns "
            "of a batch and returns a text for each row"
        )
    return [str(text) for text in texts]
