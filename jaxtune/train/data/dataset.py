"""Prepares rows for training: `prepare` reads, tokenises and caches one set of rows, and returns it as a
`TokenDataset`, which packs it and makes its batches. The other functions are steps of `prepare`: they check its
arguments and its result, stop at bad rows, and show progress."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from jaxtune.conversations import dates
from jaxtune.system import terminal
from jaxtune.train.data.batches import Batches, Order
from jaxtune.train.data.cache import Summary, cache_folder, cache_key, collect, open_or_build
from jaxtune.train.data.documents import Documents
from jaxtune.train.data.formats import LABELLED, PREFERENCE
from jaxtune.train.data.packaged import packaged_that_fit
from jaxtune.train.data.packing import OVERFLOW_POLICIES, NothingUsable, Overflow, PackedRows, PackingReport
from jaxtune.train.data.reading import Source, open_sources, read_rows
from jaxtune.train.data.teacher_values import TaughtRows, TeacherValues
from jaxtune.train.data.templates import TrainOn, resolve_template, writes_today
from jaxtune.train.data.workers import Chunk, encode_rows

# The values of data.packing: True packs several documents into a row, False gives each a row of its own, and "step"
# packs the documents of each step separately (see steps.py).
Packing = bool | Literal["step"]
ON_BAD_ROW = ("error", "skip")  # the values of data.on_bad_row
# With data.overflow=truncate, tokenising a row stops after this many tokens, or after data.length rounded up to a
# power of two if that is more, so that a whole book costs no more than its beginning. For every data.length up to this
# number the tokens are the same, and so is the cache.
TRUNCATED_TOKENS = 65_536


@dataclasses.dataclass(frozen=True)
class TokenDataset:
    """Tokenised rows, ready to be packed and batched. `prepare` makes it from rows to train or to evaluate on, and a
    run may add a teacher's values to it with `dataclasses.replace`; preference objectives make a `pairs.PairDataset`, a
    subclass, of it. `rows` packs the documents, `batches` makes batches of them, and `split` takes some out for
    evaluation; `report` and `warnings` are for the screen."""

    documents: Documents
    """The tokens: one document for each usable row (two for each preference pair or labelled row)."""
    summary: Summary
    """How many rows were read, used and left out, and why; both parts of a `split` have that of all rows."""
    length: int
    """The number of tokens in a packed row, padding included; with packing="step" the most tokens of a document."""
    packing: Packing = True
    """Whether several documents share a packed row (True) or each has a row of its own (False). With "step", `rows` has
    one document a row, and steps.py packs the documents of each step."""
    overflow: Overflow = "truncate"
    """What happens to documents that are longer than `length`: "truncate" cuts them, "split" divides them into several
    pieces, and "error" refuses them."""
    cached: bool = False
    """Whether the tokens were read from the token cache instead of being made; a run does not read this."""
    mask_spans: tuple[tuple[str, str], ...] = ()
    """The (opening, closing) texts between which tokens of responses are not trained on. The masks of `documents` show
    it already; the field only lets `warnings` say if no response has such a span."""
    order: Order = "shuffled"
    """How the rows of an epoch are ordered, a key of `batches.ORDERS`: "shuffled", "torch" (as transformers' Trainer
    does) or "given" (as they were packed)."""
    max_documents: int | None = None
    """The most documents that a packed row may have, and for which its batches have room; None sets no limit."""
    copies: int = 0
    """Rows that `split` left out of training because they equal one that it held out."""
    teacher: TeacherValues | None = None
    """A teacher's log-probabilities, which the batches of the rows then have too, for distillation from stored values;
    None without."""

    @functools.cached_property
    def rows(self) -> PackedRows:
        """The packed rows, with a teacher's values (`TaughtRows`) if `teacher` is set. With packing="step" each row is
        one document, and `steps.pack_steps` packs them. Packing is planned on first access, and kept. Batches, passes
        of reference models, and counts for the screen are made of these rows.

        Raises:
            NothingUsable: no token that is trained on is left within `length`.
            ValueError: `overflow` is "error", and a document is longer than `length`; or `length` is below 2.
        """
        rows = PackedRows(
            self.documents,
            self.length,
            overflow=self.overflow,
            packing=self.packing is True,
            max_documents=self.max_documents,
        )
        if not rows.report.trained_tokens:
            raise NothingUsable(
                f"no document has a trained token within its first data.length={self.length} tokens; raise data.length"
            )
        return rows if self.teacher is None else TaughtRows(rows, self.teacher)

    @property
    def report(self) -> PackingReport:
        """The counts of packing: documents, rows, tokens, and how many were cut or dropped. The lines before a run, and
        --check, show it, and jaxtune.compat makes notes of it. Packing is planned on first access, with the errors of
        `rows`."""
        return self.rows.report

    def warnings(self) -> list[str]:
        """Warnings about these rows to show before training, one sentence each: those of `Summary.warnings`, and, where
        there are any, the number of documents that packing dropped, the number of documents whose text beyond
        data.length was not tokenised, and that no response has a span that data.mask_spans masks. The rows are packed
        for it, with the errors of `rows`."""
        found, report = self.summary.warnings(), self.report
        if report.dropped and self.overflow == "drop":
            found.append(
                f"{report.dropped:,} of {report.documents:,} documents left out: empty, or longer than data.length="
                f"{self.length} (data.overflow=drop)"
            )
        elif report.dropped:
            found.append(
                f"{report.dropped:,} of {report.documents:,} documents dropped: empty, or cut at data.length="
                f"{self.length} before their first trained token; raise data.length"
            )
        if self.summary.cut:
            found.append(
                f"{self.summary.cut:,} documents are so long that their text beyond data.length was not tokenised"
            )
        if self.copies:
            found.append(f"{self.copies:,} rows are left out because they equal held-out ones (data.eval_rows)")
        if self.mask_spans and not self.summary.masked:
            found.append("data.mask_spans: no response holds such a span")
        return found

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError if a token id is not below `vocab_size`, the number of rows of the model's embedding. It
        compares the largest id, which was recorded when the rows were tokenised (summary.max_token), and reads no
        tokens. Objectives call it for a data set that was prepared before, maybe with another model's tokenizer;
        `prepare` itself checks the ids of the rows that it reads."""
        if self.summary.max_token >= vocab_size:
            raise ValueError(
                f"token id {self.summary.max_token} is beyond the model's vocabulary of {vocab_size}: these rows were "
                "prepared with the tokenizer of another model"
            )

    def batches(self, rows_per_step: int, *, seed: int = 0, shuffle: bool = True) -> Batches:
        """The source of batches of `rows_per_step` packed rows (`batches.Batches`), for the steps of a run and for
        evaluations. The field `order` says how the rows of an epoch are ordered: unless it is "given", each epoch has
        an order of its own, which depends on `seed`. With shuffle=False, as in evaluations, the rows keep the order in
        which they were packed. With packing="step" a run only counts its steps by this source, and `steps.pack_steps`
        makes the source of their batches. Raises what `rows` raises, and ValueError if `rows_per_step` is below 1 or
        `seed` is negative."""
        return Batches(self.rows, rows_per_step, seed=seed, order=self.order if shuffle else "given")

    def with_max_documents(self, documents: int) -> Self:
        """A copy whose packed rows have at most `documents` documents, and whose batches have room for as many. The
        copy plans its packing anew, on first access to `rows`.

        The sets that are mixed in one run, and the windows of a stream, need batches of equal shapes, so each is given
        the largest number that any of them needs or may need.
        """
        return dataclasses.replace(self, max_documents=documents)

    @property
    def longest(self) -> int:
        """The most tokens that one document (or one preference pair) can have in a row, here `length`. `pack_steps`
        makes the rows of data.packing=step no longer than this, because such a row must have room for any document, not
        for more."""
        return self.length

    def in_rows(self, slots: int) -> TokenDataset:
        """The data set as it is evaluated, or passed once to a reference model. With packing="step" it is a copy that
        is packed into rows of `slots` tokens, because the length of rows is known only when the training steps are
        packed (`steps.pack_steps`). A document that is longer than `slots` (not `length`) is treated as `overflow`
        says; callers give the length of the training rows or more. Otherwise it is `self`, and `slots` is not used."""
        return self if self.packing != "step" else dataclasses.replace(self, packing=True, length=slots)

    def split(self, eval_rows: float) -> tuple[TokenDataset, TokenDataset]:
        """(train, eval), as data.eval_rows asks. eval_rows: the number of distinct documents for evaluation, or below 1
        the share of them, chosen by `Documents.held_out`. Training rows that equal one are in neither set, and are
        counted as `copies` of the first. Raises ValueError if either set would be empty."""
        train, held_out, copies = self.documents.held_out(np.arange(len(self.documents)), eval_rows, "rows")
        return dataclasses.replace(self._of(train), copies=copies), self._of(held_out)

    def _of(self, documents: np.ndarray) -> TokenDataset:
        """A copy of this data set with only the documents at the indices `documents` (int[n]), in that order; `split`
        makes both of its parts by it. `summary` stays that of all rows, and so would `teacher`, whose values belong to
        documents by their index: a run splits the rows before it adds a teacher's values."""
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
    say: Callable[[str], None] = print,
    poll: Callable[[], None] = lambda: None,
) -> TokenDataset:
    """Reads rows and tokenises them by a chat template, or opens the token cache of an earlier run.

    Args:
        source: the rows, in any of the forms that `reading.open_sources` takes.
        tokenizer: a fast Hugging Face tokenizer.
        length: the number of tokens in a packed row; with "truncate" very long texts are not tokenised whole.
        format: the format of the rows, one of `formats.FORMATS`; "auto" detects it by their columns. See `pairs`.
        columns: {name of a format's column: its name in these rows}, where they differ.
        template: as `resolve_template` takes it. With None, Alpaca rows get Alpaca's prompt, and a prompt that is plain
            text is followed directly by its completion; with any other value both become a conversation.
        today: the day that the template writes, such as 2026-11-28; None: the current one. Tokens are cached by it.
        train_on: as RowEncoder takes it.
        instruction_part, response_part: markers, the texts that begin a user's turn and a response, both or neither.
            They find the responses instead of the template, except in rows whose own text has one or a special token.
        last_response_only: train only on the last response of a conversation (True) or on all of them (False).
        mask_spans: (opening, closing) pairs of texts, such as ("<think>", "</think>"): the tokens of a response from
            an opening to its closing, both included, or to the end of the response, are not trained on.
        packing: True puts several documents into a row, False one; "step" packs the documents of each step separately.
        overflow: longer documents are cut ("truncate"), divided ("split"), left out ("drop"), or refused ("error").
        on_bad_row: "error" stops at the first bad row, "skip" leaves bad rows out and counts them.
        max_rows: the largest number of rows to read; None reads all.
        cache_dir: the folder of token caches; None: as `cache_folder` says. A list of dicts is not cached.
        num_workers: the number of tokenising processes; None chooses it, 0 or 1 tokenises in this process.
        vocab_size: the number of rows of the model's embedding, below which all ids must be; None: they are unchecked.
        pairs: whether `format` is `formats.PREFERENCE` or LABELLED. Each row then makes two documents, the prompt with
            the chosen answer and that with the rejected one; of a labelled row, which has one answer, one is empty.
        say: called with a line for the user if a folder of the token cache is damaged or cannot be read.
        poll: called several times a second while rows are tokenised; it may raise, and then no partial cache is left.

    Raises:
        ValueError: the data cannot be trained on (NothingUsable: no row or token) or changed while it was read, the
            cache cannot be written, or an argument is wrong.
        OSError: a file of rows cannot be read.
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
    sources = open_sources(source, columns=columns)

    def chunks() -> Iterator[Chunk]:
        """Yields the tokenised rows in chunks. Raises ValueError at a bad row (on_bad_row), or if the rows changed."""
        rows = read_rows(sources, format, max_rows)
        encoded = encode_rows(rows, tokenizer, options, num_workers, poll)
        encoded = _with_progress(encoded, sources, max_rows)
        yield from _stop_at_bad_rows(encoded) if on_bad_row == "error" else encoded
        if identity() != key:  # the tokens stored under a key must come from the content that the key was computed of
            raise _changed_while_read(sources, template)

    def identity() -> str | None:
        """The `cache_key` of these tokens, None if they are not cached; of a template the text counts, not the path."""
        key_options = {**options, "format": format, "max_rows": max_rows, "on_bad_row": on_bad_row}
        if template is not None:
            texts = {resolve_template(tokenizer, template, tools): None for tools in (None, True)}
            key_options["template_text"] = "\0".join(texts)
        return cache_key(sources, tokenizer, key_options)

    key = identity()
    if key is None:
        (documents, summary), cached = collect(chunks()), False
    else:
        documents, summary, cached = open_or_build(cache_folder(cache_dir) / key, chunks, say)
    _require_usable(documents, summary, tokenizer, options, vocab_size, sources)
    return TokenDataset(documents, summary, length, packing, overflow, cached, options["mask_spans"] or ())


def _changed_while_read(sources: list[Source], template: str | None) -> ValueError:
    """Returns the error that `prepare` raises if the rows or the template file changed while they were tokenised. A
    token cache is named by a hash of their content, which is computed before they are read; after a change, the cache
    would store the tokens of other content under that name.

    Args:
        sources: the sources of the rows, whose names the message has.
        template: data.template, or None.
    """
    names = ", ".join([*(source.name for source in sources), *([template] if template else [])])
    return ValueError(
        f"{names}: changed while the rows were tokenised, so the tokens may be of either version and were discarded. "
        "Wait until writing has finished, or name a copy, and run again"
    )


def _require_known(format: str, pairs: bool, on_bad_row: str, overflow: str) -> None:
    """Raises ValueError if one of these arguments of `prepare` has a value that is not allowed: on_bad_row (not
    "error" or "skip"), overflow, or a `format` that does not fit `pairs`. A
    preference or labelled format needs pairs=True, and pairs=True needs one of them. It is called before any row is
    read; a `format` that is not known at all is refused by `read_rows`."""
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
    """Yields the chunks of tokenised rows unchanged, and raises ValueError, with the place of the row and the reason,
    at the first one that has a bad row. `prepare` uses it with on_bad_row="error"; otherwise bad rows are left out and
    counted."""
    for chunk in chunks:
        if chunk.problems:
            place, reason = chunk.problems[0]
            raise ValueError(f"{place}: {reason} (data.on_bad_row: skip leaves such rows out and counts them)")
        yield chunk


def _with_progress(chunks: Iterable[Chunk], sources: list[Source], max_rows: int | None) -> Iterator[Chunk]:
    """Yields the chunks unchanged, and shows a progress bar of rows on stderr meanwhile, if stderr is a terminal.
    Windows of a stream after the first get no bar, because they are tokenised during the run, which shows a bar of its
    own. `prepare` uses it.

    Args:
        chunks: the tokenised chunks, in order.
        sources: the sources of the rows. The sum of their counts is the bar's total, if all are known.
        max_rows: the largest number of rows that are read, which limits the total, and is the total if a count is not
            known; None: there is no limit, and then perhaps no total.
    """
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


def _require_usable(
    documents: Documents,
    summary: Summary,
    tokenizer: Any,
    options: dict[str, Any],
    vocab_size: int | None,
    sources: list[Source],
) -> None:
    """Raises a ValueError that says why a set of rows cannot be trained on: it has no usable row, no trained token, no
    response that ends its turn, or a token id of `vocab_size` or more. `prepare` calls it, also for cached rows.

    A stream is tokenised in windows of rows during the run; one after the first may have no response that ends its
    turn.

    Args:
        documents, summary: what tokenising the rows gave.
        tokenizer: their tokenizer, to show tokens in messages.
        options: the keyword arguments of `RowEncoder` that they were tokenised with, for messages.
        vocab_size: the number of rows of the model's embedding; None leaves the ids unchecked.
        sources: the sources of the rows, for messages.

    Raises:
        NothingUsable: there is no usable row, or no trained token; a run may leave out a window of a stream then.
        ValueError: one of the other two faults.
    """
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
                "give the marker exactly as the text has it, or leave both markers out"
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
