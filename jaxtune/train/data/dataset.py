"""Prepares rows for training: `prepare` reads, tokenises and caches a set of rows."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from jaxtune.conversations import dates
from jaxtune.system import terminal
from jaxtune.train.config.step_unit import Packing, StepUnit
from jaxtune.train.data.batches import Batches, Order
from jaxtune.train.data.packing.packing import OVERFLOW_POLICIES, NothingUsable, Overflow, PackedRows, PackingReport
from jaxtune.train.data.rendering.formats import LABELLED, PREFERENCE
from jaxtune.train.data.rendering.packaged import packaged_that_fit
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.data.rendering.templates import TrainOn, resolve_template, writes_today
from jaxtune.train.data.rows.reading import Source, open_sources, read_rows
from jaxtune.train.data.tokens.cache import Summary, cache_folder, cache_key, collect, identities, open_or_build
from jaxtune.train.data.tokens.chunks import Chunk
from jaxtune.train.data.tokens.documents import Documents
from jaxtune.train.data.tokens.pictures import DocumentPictures
from jaxtune.train.data.tokens.teacher_values import TaughtRows, TeacherValues
from jaxtune.train.data.tokens.workers import encode_rows

ON_BAD_ROW = ("error", "skip")  # the values of data.on_bad_row
# With data.overflow=truncate, tokenising a row stops after this many tokens, or after data.length rounded up to a
# power of two if that is more, so that a whole book costs no more than its beginning. For every data.length up to this
# number the tokens are the same, and so is the cache.
TRUNCATED_TOKENS = 65_536


@dataclasses.dataclass(frozen=True)
class TokenDataset:
    """Tokenised rows, ready to be packed and batched."""

    documents: Documents
    """One document for each usable row, two for each pair or labelled row."""
    summary: Summary
    """Counts of the rows read; both parts of a `split` have those of all rows."""
    length: int
    """Tokens of a packed row, padding included; with packing="step" the most of a document."""
    packing: Packing = True
    """Several documents a row (True) or one (False); "step": `rows` has one, and each step's are packed later."""
    overflow: Overflow = "truncate"
    """What happens to longer documents: "truncate", "split" into pieces, "drop" or "error"."""
    cached: bool = False
    mask_spans: tuple[tuple[str, str], ...] = ()
    """(opening, closing) texts of untrained spans; the masks show them already."""
    order: Order = "shuffled"
    """Of an epoch's rows: "shuffled", "torch" (as transformers' Trainer) or "given"."""
    max_documents: int | None = None
    """Most documents of a packed row; None sets no limit."""
    copies: int = 0
    """Rows that `split` left out because they equal a held-out one."""
    teacher: TeacherValues | None = None
    patches_per_row: int | None = None
    """Patches for which a packed row has room; None: as the documents need, none without pictures."""

    @functools.cached_property
    def rows(self) -> PackedRows:
        """The packed rows, planned on first access. Raises NothingUsable without a trained token, and ValueError for a
        longer document with overflow="error" or a `length` below 2.
        """
        rows = PackedRows(
            self.documents,
            self.length,
            overflow=self.overflow,
            packing=self.unit.shares_rows,
            max_documents=self.max_documents,
            patches_per_row=self.patches_per_row,
        )
        if not rows.report.trained_tokens:
            pictures = [] if rows.report.pictures is None else rows.report.pictures.warnings()
            raise NothingUsable(
                f"no document has a trained token within its first data.length={self.length} tokens; raise data.length"
                + "".join(f"; {sentence}" for sentence in pictures)
            )
        return rows if self.teacher is None else TaughtRows(rows, self.teacher)

    @property
    def unit(self) -> StepUnit:
        """What a step has a number of."""
        return StepUnit(self.packing)

    @property
    def report(self) -> PackingReport:
        return self.rows.report

    def warnings(self) -> list[str]:
        """Sentences to show before training. Packs the rows."""
        sentences, report = self.summary.warnings(), self.report
        pictures = report.pictures
        dropped = report.dropped - (0 if pictures is None else pictures.left_out)
        if dropped and self.overflow == "drop":
            sentences.append(
                f"{dropped:,} of {report.documents:,} documents left out: empty, or longer than data.length="
                f"{self.length} (data.overflow=drop)"
            )
        elif dropped:
            sentences.append(
                f"{dropped:,} of {report.documents:,} documents dropped: empty, or cut at data.length="
                f"{self.length} before their first trained token; raise data.length"
            )
        sentences += [] if pictures is None else pictures.warnings()
        if self.summary.cut:
            sentences.append(
                f"{self.summary.cut:,} documents are so long that their text beyond data.length was not tokenised"
            )
        if self.copies:
            sentences.append(f"{self.copies:,} rows are left out because they equal held-out ones (data.eval_rows)")
        if self.mask_spans and not self.summary.masked:
            sentences.append("data.mask_spans: no response holds such a span")
        return sentences

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError if a token id is not below `vocab_size`. Reads no tokens."""
        if self.summary.max_token >= vocab_size:
            raise ValueError(
                f"token id {self.summary.max_token} is beyond the model's vocabulary of {vocab_size}: these rows were "
                "prepared with the tokenizer of another model"
            )

    def batches(self, rows_per_step: int, *, seed: int = 0, shuffle: bool = True) -> Batches:
        """Batches of `rows_per_step` packed rows; without `shuffle` in the order of packing, else by `order`, with a
        new order each epoch. Raises ValueError if `rows_per_step` is below 1 or `seed` negative.
        """
        return Batches(self.rows, rows_per_step, seed=seed, order=self.order if shuffle else "given")

    def with_max_documents(self, documents: int) -> Self:
        """A copy that packs at most `documents` a row, with room for as many: sets that are mixed and windows of a
        stream need batches of equal shapes.
        """
        return dataclasses.replace(self, max_documents=documents)

    def with_patches(self, patches: int) -> Self:
        """A copy whose rows have room for this many patches, or none for 0."""
        return dataclasses.replace(self, patches_per_row=patches or None)

    @property
    def longest(self) -> int:
        """The most tokens that a document (or pair) can have in a row."""
        return self.length

    def in_rows(self, slots: int) -> TokenDataset:
        """The data set for evaluation. With packing="step" a copy in rows of `slots` tokens, as their length is known
        only after the training steps are packed; else itself.
        """
        return dataclasses.replace(self, packing=True, length=slots) if self.unit.counts_examples else self

    def split(self, eval_rows: float) -> tuple[TokenDataset, TokenDataset]:
        """(train, eval). eval_rows: number, or below 1 share, of distinct documents to hold out (`Documents.held_out`).
        Training rows that equal one are in neither. Raises ValueError if a set would be empty.
        """
        train, held_out, copies = self.documents.held_out(np.arange(len(self.documents)), eval_rows, "rows")
        return dataclasses.replace(self._of(train), copies=copies), self._of(held_out)

    def _of(self, documents: np.ndarray) -> TokenDataset:
        """A copy with the documents at these indices. `teacher` would no longer fit, so rows are split before."""
        return dataclasses.replace(self, documents=self.documents.select(documents))


def prepare(
    source: Any,
    tokenizer: Any,
    *,
    length: int,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
    today: str | None = None,
    train_on: TrainOn = "responses",
    instruction_part: str | None = None,
    response_part: str | None = None,
    last_response_only: bool = False,
    mask_spans: Sequence[tuple[str, str]] | None = None,
    packing: Packing = True,
    overflow: Overflow = "truncate",
    on_bad_row: Literal["error", "skip"] = "error",
    max_rows: int | None = None,
    cache_dir: str | Path | None = None,
    num_workers: int | None = None,
    vocab_size: int | None = None,
    pairs: bool = False,
    pictures: PictureOptions | None = None,
    patches_per_row: int | None = None,
    say: Callable[[str], None] = print,
    poll: Callable[[], None] = lambda: None,
) -> TokenDataset:
    """Reads rows and tokenises them, or opens the token cache of an earlier run.

    Raises ValueError for data that cannot be trained on (NothingUsable: no row or token) or that changed meanwhile, an
    unwritable cache or a wrong argument; OSError for an unreadable file.

      source: in any form of `reading.open_sources`.
      tokenizer: a fast Hugging Face tokenizer.
      length: tokens of a packed row.
      format: of `formats.FORMATS`; "auto" detects it by columns.
      columns: {name of a format's column: its name in these rows}.
      template: as `resolve_template` takes it. None: Alpaca rows get Alpaca's prompt, and plain text is followed by its
      completion; otherwise both become conversations.
      today: the day that templates write, such as 2026-11-28; None: the current one. Part of the cache's key.
      train_on: as RowEncoder takes it.
      instruction_part, response_part: markers of a user's turn and a response, both or neither. They find responses in
      place of the template, except in rows whose own text has one or a special token.
      mask_spans: (opening, closing) texts, such as ("<think>", "</think>"), of untrained spans in responses.
      packing: several documents a row (True), one (False), or packed for each "step".
      overflow: longer documents are cut ("truncate"), divided ("split"), left out ("drop") or refused ("error").
      on_bad_row: stop ("error"), or leave out and count ("skip").
      cache_dir: None: as `cache_folder`. A list of dicts is not cached.
      num_workers: processes; None chooses, 0 or 1: this process.
      vocab_size: all ids must be below it; None: unchecked.
      pairs: whether `format` is PREFERENCE or LABELLED: a row makes two documents, one empty for a labelled row.
      pictures: how those of rows are read; None refuses rows with pictures.
      patches_per_row: patches for which a packed row has room; None: as the documents need.
      say: takes lines about the token cache.
      poll: called several times a second; it may raise, which leaves no partial cache.
      last_response_only: of a conversation's responses only the last is trained on.
      max_rows: read at most this many rows; None: all.
    """
    _require_known(format, pairs, on_bad_row, overflow)
    if template is not None:
        resolve_template(tokenizer, template)
    options = {
        "template": template,
        "today": (today or dates.today()) if writes_today(tokenizer, template) else None,
        "train_on": train_on,
        "instruction_part": instruction_part,
        "response_part": response_part,
        "last_response_only": last_response_only,
        "mask_spans": None if mask_spans is None else tuple(tuple(pair) for pair in mask_spans),
        "max_tokens": None,
    }
    if overflow == "truncate":
        options["max_tokens"] = max(TRUNCATED_TOKENS, 1 << (length - 1).bit_length())
    if pictures is not None:
        options["pictures"] = pictures
    sources = open_sources(source, columns=columns)

    def chunks() -> Iterator[Chunk]:
        rows = read_rows(sources, format, max_rows)
        encoded = encode_rows(rows, tokenizer, options, num_workers, poll)
        encoded = _with_progress(encoded, sources, max_rows)
        yield from _stop_at_bad_rows(encoded) if on_bad_row == "error" else encoded
        if read() != content:  # the tokens stored under a key must come from the content that the key was computed of
            raise _changed_while_read(sources, template)

    def read() -> tuple[list[str], dict[str, Any]] | None:
        """What decides the tokens beside the tokenizer: rows and options; None for rows that cannot be cached. A
        template counts by its text, not its path.
        """
        key_options = {**options, "format": format, "max_rows": max_rows, "on_bad_row": on_bad_row}
        if template is not None:
            texts = {resolve_template(tokenizer, template, tools): None for tools in (None, True)}
            key_options["template_text"] = "\0".join(texts)
        if pictures is not None:  # the same relative paths name other pictures elsewhere
            folders = [folder for item in sources for folder in pictures.access(item.name).folders]
            key_options["folders"] = sorted({os.path.abspath(folder) for folder in folders})
        rows = identities(sources)
        return None if rows is None else (rows, key_options)

    content = read()
    if content is None:
        (documents, summary), cached = collect(chunks()), False
    else:
        rows, key_options = content
        folder = cache_folder(cache_dir) / cache_key(rows, tokenizer, key_options)
        documents, summary, cached = open_or_build(folder, chunks, say)
    _require_usable(documents, summary, tokenizer, options, vocab_size, sources)
    if pictures is not None:
        placed = documents.pictures or DocumentPictures.none(len(documents))
        placed = dataclasses.replace(placed, processor=pictures.processor)
        documents = dataclasses.replace(documents, pictures=placed)
    spans = options["mask_spans"] or ()
    return TokenDataset(documents, summary, length, packing, overflow, cached, spans, patches_per_row=patches_per_row)


def _changed_while_read(sources: list[Source], template: str | None) -> ValueError:
    names = ", ".join([*(source.name for source in sources), *([template] if template else [])])
    return ValueError(
        f"{names}: changed while the rows were tokenised, so the tokens may be of either version and were discarded. "
        "Wait until writing has finished, or name a copy, and run again"
    )


def _require_known(format: str, pairs: bool, on_bad_row: str, overflow: str) -> None:
    """Raises ValueError for values of these arguments that are unknown or do not fit each other."""
    if (format in (PREFERENCE, LABELLED)) != pairs:
        raise ValueError(
            f"data.format = {format!r}: "
            + (
                "rows of this form are for preference objectives: set objective=dpo, orpo, simpo or kto"
                if not pairs
                else "a preference objective takes rows with chosen and rejected: leave data.format out"
            )
        )
    if on_bad_row not in ON_BAD_ROW:
        raise ValueError(f"data.on_bad_row must be one of {', '.join(ON_BAD_ROW)}, got {on_bad_row!r}")
    if overflow not in OVERFLOW_POLICIES:
        raise ValueError(f"data.overflow must be one of {', '.join(OVERFLOW_POLICIES)}, got {overflow!r}")


def _stop_at_bad_rows(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    for chunk in chunks:
        if chunk.problems:
            place, reason = chunk.problems[0]
            raise ValueError(f"{place}: {reason} (data.on_bad_row: skip leaves such rows out and counts them)")
        yield chunk


def _with_progress(chunks: Iterable[Chunk], sources: list[Source], max_rows: int | None) -> Iterator[Chunk]:
    """The chunks, with a progress bar on a terminal; none in a stream's later windows, where the run has its own."""
    if any(source.is_later_window for source in sources):
        yield from chunks
        return
    counts = [source.count() if source.count is not None else None for source in sources]
    total = max_rows or 0 if None in counts else min(sum(count or 0 for count in counts), max_rows or sys.maxsize)
    with terminal.counted("tokenising rows", total, phase="rows", transient=True) as advance:
        for chunk in chunks:
            yield chunk
            advance(chunk.rows)


def _require_usable(
    documents: Documents,
    summary: Summary,
    tokenizer: Any,
    options: dict[str, Any],
    vocab_size: int | None,
    sources: list[Source],
) -> None:
    """NothingUsable without a usable row or trained token; ValueError if no response ends its turn or an id is too
    large.
    """
    name = ", ".join(dict.fromkeys(source.name for source in sources))
    if not summary.documents:
        if not summary.rows:
            raise NothingUsable(f"{name}: there are no rows")
        if summary.bad_rows:
            raise NothingUsable(f"{name}: none of {summary.rows:,} rows is usable; first {summary.offenders[0]}")
        if summary.excluded == summary.rows:
            raise NothingUsable(
                f"{name}: all {summary.rows:,} rows are left out by their marks, first {summary.excluded_first[0]}"
            )
        where = f"no token of any of {summary.rows:,} rows is trained on"
        if options["response_part"] is not None:
            raise NothingUsable(
                f"{name}: {where}: data.response_part={options['response_part']!r} begins no response in them; "
                "give the marker exactly as the text has it, or leave both markers out"
            )
        if summary.masked:
            raise NothingUsable(f"{name}: {where}: data.mask_spans takes out all of every response")
        if options["last_response_only"]:
            raise NothingUsable(
                f"{name}: {where}: data.last_response_only trains the last answer of a row alone, which marks leave "
                "out, or the template does not show; leave that key or such rows out"
            )
        raise NothingUsable(f"{name}: {where}: the template shows no response; set data.train_on: all, or give markers")
    if not summary.ended and not any(source.is_later_window for source in sources):
        tail = documents[0]
        ending = tokenizer.decode(tail.tokens[tail.mask.nonzero()[0][-12:]])
        raise ValueError(
            f"{name}: no response trains a token that ends the turn, so the model would never stop; the first one "
            f"ends with {ending!r}. Use a template that ends a response with a special token of this tokenizer "
            f"(data.template: {', '.join([*packaged_that_fit(tokenizer), 'or a .jinja file'])})"
        )
    if vocab_size is not None and summary.max_token >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(summary.max_token)
        raise ValueError(
            f"{name}: token id {summary.max_token} ({token!r}) is beyond the model's vocabulary of {vocab_size}; "
            "the tokenizer belongs to another model, or tokens were added without resizing the embedding"
        )
