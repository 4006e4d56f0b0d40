"""Files with a teacher's log-probabilities that another program wrote (objective.teacher_logprobs).

A row of the file (JSONL, JSON or Parquet; or a folder of such files) is a document:

- `input_ids`: its token ids, as the run makes them (`prompt_token_ids` is read too);
- `top_ids` and `top_logprobs`: for each of these tokens, the most probable tokens at its place, given the tokens before
  it, and their natural logarithms of probabilities; null or an empty list for the first token, and for tokens that are
  not trained on;
- or, in place of both, `prompt_logprobs`: for each token null or {token id: {"logprob": number}}, as vLLM writes it.

Rows may be in any order, and more than needed. They are found by their token ids; if the run cuts documents at a row's
length, the ids behind it do not count. Of rows with the same ids the first is used. `open_file` opens such a file and
returns a `TeacherFile`, which reads the values for `objectives.stored_teachers`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxtune.train.config import ConfigError
from jaxtune.train.data.reading import Source, open_sources
from jaxtune.train.data.row_files import Row
from jaxtune.train.data.teacher_values import TeacherValues

_KEY = "objective.teacher_logprobs"
_FORMAT = "docs/distillation.md describes the format"
_SLACK = 1e-3  # by how much probabilities may add up to more than 1, because their logarithms are rounded


@dataclasses.dataclass(frozen=True)
class TeacherFile:
    """A file with a teacher's log-probabilities, which `open_file` has read once. `require_all` reads it again when the
    run's rows are known, and `read` before the first step or evaluation, unless the values are stored from an earlier
    run."""

    path: str
    """The file or folder, as the config names it."""
    sources: list[Source]
    """Its files."""
    digest: str
    """A hash of the content and the paths of the files, 32 hex digits: a run is not resumed with another file."""
    k: int
    """The most tokens that any distribution of the file has, by which the arrays for its values are made."""

    def require_all(self, values: TeacherValues, what: str) -> None:
        """Raises ConfigError if a document with trained tokens is not in the file, so that a run does not find this out
        later; whether each of these tokens has a distribution is checked by `read`. values: the documents, with the
        places for their values. what: the key of their rows, such as data.train, for messages."""
        wanted = _wanted(values)
        for row in _rows(self.sources):
            wanted.pop(_key(_tokens(row), values.limit), None)
        if not wanted:
            return
        missing = sorted(index for indices in wanted.values() for index in indices)
        count, documents = int((values.counts > 0).sum()), values.documents
        first = documents[missing[0]].tokens[:8].tolist()
        fix = f"compute them for the tokens of this run: its tokenizer, template and data.length ({_FORMAT})"
        if len(missing) == count:
            fix = f"it is of other rows, or of another tokenizer or template; {fix}"
        raise ConfigError(
            f"{_KEY} = {self.path!r}: it lacks {len(missing):,} of {count:,} documents of {what}, first "
            f"{documents.source(missing[0])}, whose token ids begin with {first}; {fix}"
        )

    def read(self, values: TeacherValues, vocab_size: int, into: np.ndarray) -> None:
        """Reads the file's distributions for the trained tokens of the documents of `values`, all of which the file
        has: `require_all` was called before. Documents without trained tokens are not looked for.

        Args:
          values: the documents, and the places of their tokens.
          vocab_size: the number of the model's token ids.
          into: `[values.total]` of the dtype `TeacherValues.entry(k)`, filled in place, as `TeacherValues.stored` has
            the values.
        Raises:
          ConfigError: a trained token has no distribution, or one that cannot be read, or what it has is none
            (`_require_distributions` has the rules).
        """
        wanted = _wanted(values)
        for row in _rows(self.sources):
            indices = wanted.pop(_key(_tokens(row), values.limit), [])
            for index in indices:  # several documents may have the same tokens, of which others are trained on
                trained = values.documents[index].mask[: values.limit]
                places = (np.flatnonzero(trained[1:]) + 1).tolist()
                ids, log_probs = _distributions(row, places, self.k)
                _require_distributions(row, places, ids, log_probs, vocab_size)
                into["ids"][values.of(index)], into["log_probs"][values.of(index)] = ids, log_probs


def open_file(path: str, say: Callable[[str], None]) -> TeacherFile:
    """Opens a file or folder, `path` (objective.teacher_logprobs), by `reading.open_sources`, and reads it: for its
    digest, and to find out how many tokens its distributions have. `objectives.stored_teachers` calls it when a run is
    set up. say: shows a line to the user. Raises ConfigError if it is not there, a row has no token ids or not an entry
    for each, or no row has a distribution, and ValueError as `_rows`. The distributions themselves are checked only by
    `TeacherFile.read`."""
    try:
        sources = open_sources(path)
        digest = hashlib.blake2b(digest_size=16)
        for source in sources:
            digest.update((source.identity() if source.identity is not None else source.name).encode())
    except (ValueError, OSError) as error:
        raise ConfigError(f"{_KEY} = {path!r}: {error}") from None
    say(f"log-probabilities of the teacher: reading {path}")
    widest, rows = 0, 0
    for row in _rows(sources):
        rows += 1
        _tokens(row)
        widest = max([widest, *(len(entry) for entry in _entries(row) if entry is not None)])
    if not widest:
        raise ConfigError(f"{_KEY} = {path!r}: none of its {rows:,} rows has a log-probability; {_FORMAT}")
    return TeacherFile(path, sources, digest.hexdigest(), widest)


def _rows(sources: Sequence[Source]) -> Iterator[Row]:
    """Yields the rows of all sources, in order: `open_file` and both methods of `TeacherFile` read the file by it.
    Raises ConfigError for a row that cannot be read, and a plain ValueError for a file that cannot be read at all, such
    as damaged Parquet."""
    for source in sources:
        for row in source.read(0):
            if row.value is None:
                raise ConfigError(f"{_KEY}: {row.file}:{row.number}: {row.error}")
            yield row


def _bad(row: Row, reason: str) -> ConfigError:
    """Returns the error, for the caller to raise, that names a row of the file by its file and line, and the
    `reason`."""
    return ConfigError(f"{_KEY}: {row.file}:{row.number}: {reason}; {_FORMAT}")


def _columns(row: Row) -> Mapping[str, object]:
    """The columns by name of a row from `_rows`. They are never None, because `_rows` refuses a row that cannot be
    read."""
    assert row.value is not None
    return row.value


def _tokens(row: Row) -> np.ndarray:
    """The token ids of a row, int32[n], from the column input_ids or else prompt_token_ids; a row is matched with a
    document of the run by them. `open_file` calls it only to check every row. Raises ConfigError if it has none, or
    they are not whole numbers."""
    columns = _columns(row)
    name = next((name for name in ("input_ids", "prompt_token_ids") if columns.get(name) is not None), None)
    if name is None:
        raise _bad(row, f"it has no input_ids, but {', '.join(columns) or 'nothing'}")
    try:
        found = np.asarray(columns[name])
    except ValueError:  # lists of different lengths
        found = np.empty((0, 0))
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise _bad(row, f"{name} must be a list of token ids")
    return found.astype(np.int32)


def _entries(row: Row) -> Sequence[Sequence[int] | Mapping[str, object] | None]:
    """For each token of a row, its entry in top_ids (token ids) or else in prompt_logprobs ({token id as text:
    log-probability, or a dict with it}), which is None or empty if the token has no distribution. Raises ConfigError if
    there is neither column, or it is no list with as many such entries as the row has tokens. `open_file` counts the
    tokens of the entries, and `_distributions` reads them."""
    columns = _columns(row)
    for name in ("top_ids", "prompt_logprobs"):
        found = columns.get(name)
        if found is not None:
            if not isinstance(found, Sequence) or len(found) != len(_tokens(row)):
                raise _bad(row, f"{name} must be a list with an entry for each of the {len(_tokens(row)):,} input_ids")
            if wrong := [entry for entry in found if not isinstance(entry, Sequence | Mapping | None)]:
                raise _bad(row, f"{name}: the entry of a token is {wrong[0]!r}, and must be a list, an object or null")
            return found
    raise _bad(row, f"it has no top_ids with top_logprobs, but {', '.join(columns)}")


def _distributions(row: Row, places: list[int], k: int) -> tuple[np.ndarray, np.ndarray]:
    """The stored distributions of the tokens at the indices `places` of a row, which are trained on: (ids int32[n, k],
    -1 in places that are not used; log-probabilities float32[n, k], 0 there). k: the most tokens of a distribution.
    Raises ConfigError if one is missing or cannot be read; `TeacherFile.read` has `_require_distributions` check their
    values, and then writes them into the run's array."""
    entries = _entries(row)
    logs = _columns(row).get("top_logprobs")
    ids, log_probs = np.full((len(places), k), -1, np.int32), np.zeros((len(places), k), np.float32)
    for index, place in enumerate(places):
        entry = entries[place]
        if not entry:
            raise _bad(row, f"token {place} is trained on, and has no log-probabilities")
        try:
            if isinstance(entry, Mapping):
                of_token = [one["logprob"] if isinstance(one, Mapping) else one for one in entry.values()]
                tokens = [int(token) for token in entry]
            else:
                tokens, of_token = list(entry), logs[place] if isinstance(logs, Sequence) else []
            if len(tokens) != len(of_token):
                raise ValueError(f"there are {len(tokens)} token ids and {len(of_token)} log-probabilities")
            log_probs[index, : len(tokens)] = np.asarray(of_token, np.float64)
            ids[index, : len(tokens)] = tokens
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            raise _bad(row, f"the log-probabilities of token {place} cannot be read ({error})") from None
    log_probs[ids == -1] = 0.0  # also if the file has the id -1
    return ids, log_probs


def _require_distributions(
    row: Row, places: list[int], ids: np.ndarray, log_probs: np.ndarray, vocab_size: int
) -> None:
    """Raises ConfigError, with the index of the token, if a stored distribution is none: it has no token, a token id
    twice, below -1 or not below `vocab_size`, a log-probability above 0 or not finite, or probabilities that add up to
    more than 1 (rounding allowed, `_SLACK`). The id -1 is taken for a place that is not used, also if the file has it.
    `TeacherFile.read` calls it for each row that it uses.

    Args:
      row: the row, for the message.
      places: the indices of its tokens that have these distributions, for the message.
      ids, log_probs: the distributions, `[len(places), k]`, as `_distributions` returns them.
      vocab_size: the number of the model's token ids.
    """
    used, given = ids != -1, (ids != -1).sum(1)
    ordered = np.sort(np.where(used, ids, -1 - np.arange(ids.shape[1])), 1)
    total = np.where(used, np.exp(log_probs), 0.0).sum(1)
    for wrong, reason in (
        ((ids < -1) | (ids >= vocab_size), f"has a token id beyond the model's vocabulary of {vocab_size:,}"),
        ((ordered[:, 1:] == ordered[:, :-1]), "has a token id twice"),
        (~np.isfinite(log_probs), "has a log-probability that is not finite; leave such tokens out"),
        (used & (log_probs > math.log1p(_SLACK)), "has a log-probability above 0: logits are not log-probabilities"),
        ((total > 1.0 + _SLACK)[:, None], "has probabilities that add up to more than 1"),
        ((given == 0)[:, None], "has no token"),
    ):
        bad = np.flatnonzero(wrong.any(1))
        if bad.size:
            raise _bad(row, f"the distribution of token {places[int(bad[0])]} {reason}")


def _key(tokens: np.ndarray, limit: int | None) -> bytes:
    """A hash of the first `limit` tokens of a document (None: of all), by which a row of the teacher's file is matched
    with the documents of the run that have the same tokens."""
    return hashlib.blake2b(np.ascontiguousarray(tokens[:limit], np.int32).tobytes(), digest_size=16).digest()


def _wanted(values: TeacherValues) -> dict[bytes, list[int]]:
    """Returns {hash of a document's first `values.limit` tokens (`_key`): the indices of the documents with this hash},
    for all documents of `values` that have trained tokens. `TeacherFile.require_all` finds by it the documents that the
    file lacks, and `read` those that a row's values are for."""
    found: dict[bytes, list[int]] = {}
    for index in np.flatnonzero(values.counts).tolist():
        found.setdefault(_key(values.documents[index].tokens, values.limit), []).append(index)
    return found
