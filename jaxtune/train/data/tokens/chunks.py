"""The documents of a chunk of rows: rendered, tokenised and counted."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxtune.conversations.picture_processors import PlacedPicture
from jaxtune.conversations.pictures import PictureAccess
from jaxtune.conversations.reads import Reads, noted
from jaxtune.system.terminal import printable
from jaxtune.train.data.rendering.formats import (
    LABELLED,
    PREFERENCE,
    Example,
    normalize,
    normalize_labelled,
    normalize_pair,
    of_row,
    refuse_excluded,
)
from jaxtune.train.data.rendering.templates import Encoded, RowEncoder
from jaxtune.train.data.rows.row_errors import Excluded, RowError, attempt
from jaxtune.train.data.rows.row_files import Row

REASON_CHARACTERS = 500  # the most of a bad row's reason that is kept; a message may quote columns of any length


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The documents of a chunk of rows in flat arrays, and rows without documents or with warnings. A place is a row's
    `file:line`.
    """

    rows: int
    tokens: np.ndarray
    """int32[total]"""
    mask: np.ndarray
    """uint8[total]: 1 where the token is trained on."""
    lengths: np.ndarray
    """int64[n]"""
    trained: np.ndarray
    """int64[n]: trained targets."""
    origins: list[tuple[str, int]]
    """(file, line) of each document."""
    problems: list[tuple[str, str]]
    """(place, reason) of each unusable row."""
    untrained: list[str]
    """Places of rows without a trained target, of pairs in either document; they give no document."""
    responses: int
    ended: int
    """As in Summary."""
    special: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """(place, text) of rows whose messages contain a special token or marker."""
    left_out: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """(place, what) of rows that the template does not write completely."""
    stray_thoughts: list[str] = dataclasses.field(default_factory=list)
    """Places of rows whose answers have thoughts among their words."""
    masked: int = 0
    cut: int = 0
    excluded: list[str] = dataclasses.field(default_factory=list)
    """"PLACE: weight = 0" of rows that a mark leaves out."""
    implied: int = 0
    unread: list[str] = dataclasses.field(default_factory=list)
    """Columns with values that the format does not use, and message keys that only a template may read."""
    reads: Reads = dataclasses.field(default_factory=dict)
    pictures: list[tuple[PlacedPicture, ...]] = dataclasses.field(default_factory=list)
    """Of each document; empty without any."""
    asked: list[str] = dataclasses.field(default_factory=list)
    """Paths at which pictures of unusable rows were looked for."""


# The document of the answer that a labelled row does not have.
_NO_ANSWER = Encoded(np.zeros(0, np.int32), np.zeros(0, bool), 0, 0)


def encode_chunk(encoder: RowEncoder, rows: list[Row]) -> Chunk:
    """Renders and tokenises rows. Raises SetupError as `encode`.

    A row that is bad, untrained or excluded gives no document and is listed. One of a preference format gives two:
    chosen and rejected, or for a labelled row its answer and an empty one.
    """
    options = encoder.pictures
    accesses = [None if options is None else dataclasses.replace(options.access(row.file), asked=[]) for row in rows]
    outcome: list[list[Example | None] | RowError] = []
    noted_reads: list[Reads] = []
    for row, access in zip(rows, accesses, strict=True):
        with noted() as row_reads:
            outcome.append(attempt(examples_of, row, access))
        noted_reads.append(row_reads)
    examples = [
        answer_example
        for row_outcome in outcome
        if not isinstance(row_outcome, RowError)
        for answer_example in row_outcome
        if answer_example
    ]
    encoded = iter(encoder.encode(examples))
    documents: list[Encoded] = []
    asked: list[str] = []
    origins, problems, untrained, excluded, special, left_out, stray, masked = [], [], [], [], [], [], [], 0
    for row, access, row_outcome in zip(rows, accesses, outcome, strict=True):
        outcomes = (
            [row_outcome]
            if isinstance(row_outcome, RowError)
            else [next(encoded) if answer_example else None for answer_example in row_outcome]
        )
        location = printable(row.place)
        results = [result for result in outcomes if isinstance(result, Encoded)]
        if error := next((result for result in outcomes if isinstance(result, RowError)), None):
            reason = printable(error)
            if isinstance(error, Excluded):
                excluded.append(f"{location}: {reason}")
                continue
            asked += (access and access.asked) or []
            problems.append((location, reason[:REASON_CHARACTERS] + " ..." * (len(reason) > REASON_CHARACTERS)))
            continue
        if row.format == PREFERENCE and encoder.train_on == "completion":
            results = outcomes = _from_one_start(results)
        masked += sum(result.masked for result in results)
        if whose := next((result.special for result in results if result.special), ""):
            special.append((location, printable(whose)))
        if missing := next((result.left_out for result in results if result.left_out), ""):
            left_out.append((location, printable(missing)))
        if any(result.has_stray_thought for result in results):
            stray.append(location)
        if not all(result.mask[1:].any() for result in results):
            untrained.append(location)
        else:
            documents += [result if isinstance(result, Encoded) else _NO_ANSWER for result in outcomes]
            origins += [(row.file, row.number)] * len(outcomes)
    reads: Reads = {}
    columns: list[str] = []
    for row, made, row_reads in zip(rows, outcome, noted_reads, strict=True):
        if row.value and not isinstance(made, RowError):
            used, others = of_row(row.value, row_reads, any(map(encoder.is_plain, filter(None, made))))
            reads = used | reads
            columns += others
    keys = [name for example in examples for name in example.unknown]
    return Chunk(
        rows=len(rows),
        tokens=np.concatenate([d.tokens for d in documents]) if documents else np.zeros(0, np.int32),
        mask=np.concatenate([d.mask for d in documents]).astype(np.uint8) if documents else np.zeros(0, np.uint8),
        lengths=np.array([len(d.tokens) for d in documents], np.int64),
        trained=np.array([np.count_nonzero(d.mask[1:]) for d in documents], np.int64),
        origins=origins,
        problems=problems,
        untrained=untrained,
        excluded=excluded,
        responses=sum(d.responses for d in documents),
        ended=sum(d.ended for d in documents),
        special=special,
        left_out=left_out,
        stray_thoughts=stray,
        masked=masked,
        cut=sum(d.is_cut for d in documents),
        implied=sum(answer_example.implied for answer_example in examples) // 2,
        unread=list(dict.fromkeys([*columns, *keys])),
        reads=reads,
        pictures=[document.pictures for document in documents] if any(d.pictures for d in documents) else [],
        asked=asked,
    )


def _from_one_start(pair: list[Encoded]) -> list[Encoded]:
    """Both answers of a pair, with completions that begin where the earlier one does, as in TRL."""
    firsts = [int(np.argmax(answer.mask)) for answer in pair if answer.mask.any()]
    alike = []
    for answer in pair:
        mask = answer.mask.copy()
        if mask.any():
            mask[min(firsts) : int(np.argmax(mask))] = True
        alike.append(dataclasses.replace(answer, mask=mask))
    return alike


def examples_of(row: Row, access: PictureAccess | None) -> list[Example | None]:
    """[example], or [chosen, rejected] with None for a labelled row's missing answer. Raises RowError."""
    if row.value is None:
        raise RowError(row.error)
    refuse_excluded(row.value)
    if row.format in (PREFERENCE, LABELLED):
        pair = (normalize_pair if row.format == PREFERENCE else normalize_labelled)(row.value, access)
        return [pair.chosen, pair.rejected]
    return [normalize(row.value, row.format, access)]
