"""The data room: rows to tokens, tokens to packed rows, packed rows to batches.

`prepare` does it all for one set of rows. The files, in the order in which data flows through them:
`reading.py` (files and data sets), `formats.py` (the five forms of rows), `templates.py`, `tokenizing.py`,
`markers.py` and `spans.py` (text, tokens, and which of them are trained on), `workers.py` and `cache.py` (many rows,
once), `packing.py` (documents into rows of fixed length), `batches.py` (a step's number to its batch), `steps.py`
(steps of so many documents), `preview.py` (to look at). `streamed.py` does all of that for a window of rows at a time,
during the run, and `feeds.py` takes the rows of a step from streams and from mixed sets.

One rule holds everywhere: whatever one row can do costs that row (`formats.attempt`), and `on_bad_row` says whether
the run goes on without it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from jaxtune.system import terminal
from jaxtune.train.data.batches import Batch, Batches, Order
from jaxtune.train.data.cache import Summary, cache_key, collect, default_folder, open_or_build
from jaxtune.train.data.formats import LABELLED, PREFERENCE
from jaxtune.train.data.packaged import packaged_that_fit
from jaxtune.train.data.packing import (
    OVERFLOW_POLICIES,
    Documents,
    NothingUsable,
    Overflow,
    PackedRows,
    PackingReport,
)
from jaxtune.train.data.reading import Source, open_sources, read_rows
from jaxtune.train.data.templates import resolve_template
from jaxtune.train.data.workers import Chunk, encode_rows

__all__ = ["Batch", "Batches", "PackedRows", "PackingReport", "Summary", "TokenDataset", "prepare"]

Packing = bool | Literal["step"]
ON_BAD_ROW = ("error", "skip")
# Longer rows are cut before they are tokenised whole, where they are cut anyway: a book costs no more than its
# beginning. Up to here the tokens, and so the cache, are the same for every data.length.
TRUNCATED_TOKENS = 65_536


@dataclasses.dataclass(frozen=True)
class TokenDataset:
    """Tokenised rows, ready to be packed and batched.

    documents: one for each usable row. summary: what became of the rows. cached: whether they came from the
    token cache. length, packing, overflow: how they are packed; with "step", `rows` are of one document each, and are
    laid out by steps (steps.py). order: of an epoch's rows. most_documents: in a packed row, where others share its
    shapes; None sets no limit.
    """

    documents: Documents
    summary: Summary
    length: int
    packing: Packing = True
    overflow: Overflow = "truncate"
    cached: bool = False
    mask_spans: tuple[tuple[str, str], ...] = ()
    order: Order = "shuffled"
    most_documents: int | None = None

    @functools.cached_property
    def rows(self) -> PackedRows:
        """The packed rows, planned when first asked for."""
        rows = PackedRows(
            self.documents,
            self.length,
            overflow=self.overflow,
            packing=self.packing is True,
            most=self.most_documents,
        )
        if not rows.report.trained_tokens:
            raise NothingUsable(
                f"no trained token lies within data.length={self.length} of any document; raise data.length"
            )
        return rows

    @property
    def report(self) -> PackingReport:
        """What packing did."""
        return self.rows.report

    def warnings(self) -> list[str]:
        """What somebody who gave these rows should know before training, a sentence each; see `Summary.warnings`."""
        found, report = self.summary.warnings(), self.report
        if report.dropped:
            found.append(
                f"{report.dropped:,} of {report.documents:,} documents dropped: empty, or cut at data.length="
                f"{self.length} before their first trained token; raise data.length"
            )
        if self.summary.cut:
            found.append(f"{self.summary.cut:,} rows are so long that what lies beyond data.length was not tokenised")
        if self.mask_spans and not self.summary.masked:
            found.append("data.mask_spans: no response holds such a span")
        return found

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError where a token has no row in an embedding of that size."""
        if self.summary.max_token >= vocab_size:
            raise ValueError(
                f"token id {self.summary.max_token} is beyond the model's vocabulary of {vocab_size}: these rows were "
                "prepared with the tokenizer of another model"
            )

    def batches(self, rows_per_step: int, *, seed: int = 0, shuffle: bool = True) -> Batches:
        """Batches of `rows_per_step` packed rows; see `batches.Batches`."""
        return Batches(self.rows, rows_per_step, seed=seed, order=self.order if shuffle else "given")

    def with_most(self, documents: int) -> Self:
        """The same, in packed rows of that number of documents at most, whose shapes have room for them."""
        return dataclasses.replace(self, most_documents=documents)

    @property
    def longest(self) -> int:
        """The most slots that a document or pair can fill."""
        return self.length

    def in_rows(self, slots: int) -> TokenDataset:
        """Where each step lays out its own documents, the same in packed rows of so many slots, for which no document
        is too long: what an evaluation computes on."""
        return self if self.packing != "step" else dataclasses.replace(self, packing=True, length=slots)

    def split(self, eval_rows: int) -> tuple[TokenDataset, TokenDataset]:
        """(train, eval), with `eval_rows` documents for evaluation; see Documents.held_out."""
        train, held_out = self.documents.held_out(np.arange(len(self.documents)), eval_rows, "rows")
        return self._of(train), self._of(held_out)

    def _of(self, documents: np.ndarray) -> TokenDataset:
        return dataclasses.replace(self, documents=self.documents.select(documents))


def prepare(
    source: Any,
    tokenizer: Any,
    *,
    length: int,
    format: str = "auto",
    template: str | None = None,
    train_on: Literal["responses", "all"] = "responses",
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
    say: Callable[[str], None] = print,
    poll: Callable[[], None] = lambda: None,
) -> TokenDataset:
    """Reads, templates and tokenises rows, or opens what an earlier run made of them.

    Args:
        source: a path, a data set's name, a list of them, a `datasets.Dataset`, or a list of dicts; see
            `reading.open_sources`.
        tokenizer: a fast Hugging Face tokenizer.
        length: slots in a packed row.
        format: the form of the rows, "auto" by their columns; see `formats.COLUMNS`.
        template: the chat template: None or "tokenizer" (its own), a name of packaged.py, or the path of a .jinja
            file. With None, Alpaca rows get Alpaca's prompt, and a prompt is followed by its completion.
        train_on: "responses", or "all" tokens.
        instruction_part, response_part: marker strings that find responses where structure does not; see `markers`.
        last_response_only: of a conversation, train the last response alone.
        mask_spans: (opening, closing) pairs of texts, such as ("<think>", "</think>"): a span of a response from one
            to the other, both included, is not trained on.
        packing: False gives every document a row of its own; "step" makes rows of the documents of a step.
        overflow: documents longer than a row are cut ("truncate"), laid out in pieces ("split"), or refused
            ("error").
        on_bad_row: "error" stops at the first bad row, "skip" leaves bad rows out and counts them.
        max_rows: read no more rows than these.
        cache_dir: where token caches are kept; None is JAXTUNE_CACHE or ~/.cache/jaxtune/tokens. Rows given as
            a list are not cached.
        num_workers: processes that tokenise; None decides, 0 or 1 works in this one.
        vocab_size: rows of the model's embedding; a token id beyond it is refused.
        pairs: rows are preferences (`formats.PREFERENCE`), of which each makes two documents: the chosen answer after
            its prompt, then the rejected one; or of the form `formats.LABELLED`, where one of the two is empty.
        say: is given the few lines worth telling.
        poll: called several times a second while rows are tokenised; what it raises ends that at once, and nothing
            half done is left.

    Raises:
        ValueError: the data cannot be trained on; the message names the key, the place or the token, and the fix.
    """
    _require_known(format, pairs, on_bad_row, overflow)
    if template is not None:
        resolve_template(tokenizer, template)
    options = {
        "template": template,
        "train_on": train_on,
        "instruction_part": instruction_part,
        "response_part": response_part,
        "last_response_only": last_response_only,
        "mask_spans": None if mask_spans is None else tuple(tuple(pair) for pair in mask_spans),
        "max_tokens": None,
    }
    if overflow == "truncate":
        options["max_tokens"] = max(TRUNCATED_TOKENS, 1 << (length - 1).bit_length())
    sources = open_sources(source)

    def chunks() -> Iterator[Chunk]:
        rows = read_rows(sources, format, max_rows)
        encoded = encode_rows(rows, tokenizer, options, num_workers, poll)
        encoded = _with_progress(encoded, sources, max_rows)
        yield from _stop_at_bad_rows(encoded) if on_bad_row == "error" else encoded
        if identity() != key:  # what stands in the cache under a key must be of what the key was made of
            names = ", ".join([*(source.name for source in sources), *([template] if template else [])])
            raise ValueError(
                f"{names}: changed while the rows were tokenised, so that nobody knows what was read; nothing is kept. "
                "Let what writes there finish, or name a copy, and run again"
            )

    def identity() -> str | None:
        # A template's text, not its path, decides what becomes of the rows.
        key_options = {**options, "format": format, "max_rows": max_rows, "on_bad_row": on_bad_row}
        if template is not None:
            key_options["template_text"] = resolve_template(tokenizer, template)
        return cache_key(sources, tokenizer, key_options)

    key = identity()
    if key is None:
        documents, summary = collect(chunks())
        cached = False
    else:
        folder = Path(cache_dir).expanduser() if cache_dir is not None else default_folder()
        documents, summary, cached = open_or_build(folder / key, chunks, say)
    _refuse_unusable(documents, summary, tokenizer, options, vocab_size, sources)
    return TokenDataset(documents, summary, length, packing, overflow, cached, options["mask_spans"] or ())


def _require_known(format: str, pairs: bool, on_bad_row: str, overflow: str) -> None:
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
    """A progress bar where somebody watches a terminal."""
    console = terminal.console(stderr=True)
    if not console.is_terminal or any(source.part for source in sources):
        yield from chunks
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    counts = [source.count() if source.count is not None else None for source in sources]
    total = None if None in counts else sum(count or 0 for count in counts)
    if max_rows is not None:
        total = max_rows if total is None else min(total, max_rows)
    columns = (TextColumn("tokenising"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        for chunk in chunks:
            yield chunk
            progress.advance(task, chunk.rows)


def _refuse_unusable(
    documents: Documents,
    summary: Summary,
    tokenizer: Any,
    options: dict[str, Any],
    vocab_size: int | None,
    sources: list[Source],
) -> None:
    """The guards on a whole set of rows; a part of a stream may have no response that ends."""
    name = ", ".join(dict.fromkeys(source.name for source in sources))
    if not summary.documents:
        if not summary.rows:
            raise NothingUsable(f"{name}: there are no rows")
        if summary.bad_rows:
            raise NothingUsable(f"{name}: none of {summary.rows:,} rows is usable; first {summary.offenders[0]}")
        where = f"no token of any of {summary.rows:,} rows is trained on"
        if options["response_part"] is not None:
            raise NothingUsable(
                f"{name}: {where}: data.response_part={options['response_part']!r} begins no response in them; "
                "give the marker as it stands in the text, or leave both markers out"
            )
        if summary.masked:
            raise NothingUsable(f"{name}: {where}: data.mask_spans takes out all of every response")
        raise NothingUsable(f"{name}: {where}: the template shows no response; set data.train_on: all, or give markers")
    if not summary.ended and not any(source.part for source in sources):
        tail = documents[0]
        shown = tokenizer.decode(tail.tokens[tail.mask.nonzero()[0][-12:]])
        raise ValueError(
            f"{name}: no response trains a token that ends the turn, so the model would never stop; the first one "
            f"ends with {shown!r}. Use a template that ends a response with a special token of this tokenizer "
            f"(data.template: {', '.join([*packaged_that_fit(tokenizer), 'or a .jinja file'])})"
        )
    if vocab_size is not None and summary.max_token >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(summary.max_token)
        raise ValueError(
            f"{name}: token id {summary.max_token} ({token!r}) is beyond the model's vocabulary of {vocab_size}; "
            "the tokenizer belongs to another model, or tokens were added without resizing the embedding"
        )
