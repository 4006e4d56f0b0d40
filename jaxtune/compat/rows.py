"""Data sets as TRL accepts them, and tokenised rows as scripts read them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtune.train.config import DataConfig
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.packing.pairs import PairDataset
from jaxtune.train.data.rows.reading import open_sources, read_rows
from jaxtune.train.data.rows.streamed import is_stream
from jaxtune.train.data.tokens.cache import Summary
from jaxtune.train.data.tokens.documents import Document, Documents

IGNORE = -100  # the label of a token that is not trained on, as in PyTorch's cross entropy


class Tokenised(Sequence):
    """Tokenised rows with TRL's columns, as they train: cut, and without those of which nothing trains. Converted on
    access.

    columns: the names, such as "input_ids" and "labels" (-100 where a token is not trained on).
    rows: a function that maps a row's index to its values, in the order of `columns`. count: the number of rows.
    """

    def __init__(self, columns: Sequence[str], rows: Callable[[int], Sequence[object]], count: int):
        self.column_names, self._rows, self._count = list(columns), rows, count

    def __len__(self) -> int:
        return self._count

    def __contains__(self, value: object) -> bool:
        return value in self.column_names  # of a datasets.Dataset, too, only its columns are asked for by `in`

    def __getitem__(self, index):
        if isinstance(index, str):  # a column
            return [self._row(number)[index] for number in range(len(self))]
        if isinstance(index, slice):  # as of a datasets.Dataset, the columns of these rows
            rows = [self._row(number) for number in range(*index.indices(len(self)))]
            return {name: [row[name] for row in rows] for name in self.column_names}
        return self._row(range(len(self))[index])

    def _row(self, number: int) -> dict[str, object]:
        return dict(zip(self.column_names, self._rows(number), strict=True))

    @classmethod
    def of(cls, data: TokenDataset) -> Tokenised:
        """The rows of a data set, each a document's part in it; with packing the packed rows, whose documents have
        `seq_lengths` tokens each.
        """
        if isinstance(data, PairDataset):
            return _of_pairs(data)
        plan, documents = data.rows.plan, data.documents

        def pieces(row: int) -> list[tuple[np.ndarray, np.ndarray]]:
            bounds = range(plan.row_starts[row], plan.row_starts[row + 1])
            return [_piece(documents[plan.document[i]], plan.offset[i], plan.count[i]) for i in bounds]

        def values(row: int) -> list[list[int]]:
            tokens, labels = (np.concatenate(parts).tolist() for parts in zip(*pieces(row), strict=True))
            return [tokens, labels, [len(tokens) for tokens, _ in pieces(row)]]

        if data.packing is True:
            return cls(("input_ids", "labels", "seq_lengths"), values, len(data.rows))
        return cls(("input_ids", "labels"), lambda row: values(row)[:2], len(data.rows))


def _piece(document: Document, offset: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, labels) of a part of a document, the labels -100 where a token is not trained on."""
    tokens, mask = (np.asarray(values)[offset : offset + count] for values in (document.tokens, document.mask))
    return tokens, np.where(mask.astype(bool), tokens, IGNORE)


def _of_pairs(data: PairDataset) -> Tokenised:
    """Of pairs: prompt_ids, chosen_ids and rejected_ids; of labelled rows prompt_ids, completion_ids and label; of a
    reward model's, whose texts are trained on whole, chosen_ids and rejected_ids.
    """
    rows, documents = data.rows, data.documents
    kept = np.flatnonzero(rows.kept_lengths[:, 0])

    def sides(pair: int) -> list[tuple[list[int], list[int]]]:
        """(tokens before the answer, its tokens) of both documents."""
        cut = []
        for side, count in enumerate(rows.kept_lengths[pair].tolist()):
            document = documents[2 * pair + side]
            tokens, begin = np.asarray(document.tokens)[:count].tolist(), int(np.argmax(document.mask))
            cut.append((tokens[:begin], tokens[begin:]))
        return cut

    def of_pair(row: int) -> list[object]:
        (prompt, chosen), (_, rejected) = sides(int(kept[row]))
        return [prompt, chosen, rejected]

    def of_labelled(row: int) -> list[object]:
        assert data.labels is not None
        prompt, answer = sides(int(kept[row]))[0]
        return [prompt, answer, bool(data.labels[kept[row]])]

    def of_reward(row: int) -> list[object]:
        return [before + answer for before, answer in sides(int(kept[row]))]

    if data.second_yields:
        return Tokenised(("prompt_ids", "completion_ids", "label"), of_labelled, len(kept))
    if data.drops_cut_pairs:
        return Tokenised(("chosen_ids", "rejected_ids"), of_reward, len(kept))
    return Tokenised(("prompt_ids", "chosen_ids", "rejected_ids"), of_pair, len(kept))


TOKENS = "tokens"  # the format of rows with a column input_ids


def given_tokens(dataset: Iterable[Mapping[str, object]], completion_only: bool | None) -> Documents:
    """Rows that are tokenised already, by TRL's rules: `labels` say what trains; else `assistant_masks`, with
    completion_only also `completion_mask`; else all tokens do. ValueError for labels that are other tokens.
    """
    columns = columns_of(dataset, "SFTTrainer")
    masks = ["completion_mask"] * bool(completion_only) + ["assistant_masks"]
    masks = [] if "labels" in columns else [name for name in masks if name in columns]

    def document(index: int, row: Mapping[str, object]) -> Document:
        tokens = np.asarray(row["input_ids"], np.int32)
        trained = np.ones(len(tokens), bool)
        for name in masks:
            trained &= np.asarray(row[name]) == 1
        if "labels" in columns:
            labels = np.asarray(row["labels"], np.int32)
            trained = labels != IGNORE
            if labels.shape != tokens.shape or (labels != tokens)[trained].any():
                raise ValueError(
                    f"SFTTrainer: rows:{index + 1}: labels are neither input_ids nor {IGNORE}: what trains here is the "
                    "next token; give input_ids, with masks or such labels"
                )
        return Document(tokens, trained)

    return Documents.gather(document(index, row) for index, row in enumerate(dataset))


def token_dataset(documents: Documents, data: DataConfig) -> TokenDataset:
    """Tokenised rows as a run reads them."""
    summary = Summary(
        rows=len(documents),
        documents=len(documents),
        tokens=int(documents.lengths.sum()),
        trained_tokens=int(documents.trained.sum()),
        max_token=int(documents.tokens.max(initial=-1)),
    )
    return TokenDataset(documents, summary, data.length, data.packing, data.overflow)


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


def require_one_set(dataset: object, trainer: str, argument: str) -> None:
    """ValueError without a data set, TypeError for several by name, such as all splits of one. trainer: its class."""
    if dataset is None:
        raise ValueError(f"{trainer}: `{argument}` is required: a datasets.Dataset, a list of dicts, or a path")
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, dataset))
        raise TypeError(
            f"{trainer}: `{argument}` must be a `Dataset` or `IterableDataset`, a list of dicts or a path, and is a "
            f"dict of data sets, with the keys {names}: give one of them"
        )


def rows_and_format(
    dataset: Any, text_field: str, formatting_func, completion_only: bool | None = None
) -> tuple[Any, str]:
    """(rows as jaxtune reads them, the name of their format), by TRL's rules: a column input_ids decides first, whose
    rows are Documents; then formatting_func, then a column of texts, then columns of a known format; else ValueError.
    A path has the format of its first usable row.

      text_field: the column of texts (dataset_text_field).
      formatting_func: maps a row to a text, or the columns of a batch to texts; None for a path.
      dataset: a datasets object, a list of dicts, or a path.
    """
    if is_stream(dataset):
        return _streamed(dataset, text_field, formatting_func)
    is_path = isinstance(dataset, str | os.PathLike)
    dataset = dataset if is_path or hasattr(dataset, "column_names") else list(dataset)
    if not is_path and "input_ids" in columns_of(dataset, "SFTTrainer"):
        return given_tokens(dataset, completion_only), TOKENS
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
