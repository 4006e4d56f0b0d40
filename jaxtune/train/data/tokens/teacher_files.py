"""Files with a teacher's log-probabilities from another program (objective.teacher_logprobs).

A row (JSONL, JSON, Parquet, or a folder of such files) is a document:

- `input_ids` (or `prompt_token_ids`): token ids as the run makes them;
- `top_ids` and `top_logprobs`: for each token the most probable ones at its place, given the tokens before, and their
  log-probabilities in nats; null or [] for the first token and untrained ones;
- or `prompt_logprobs` as vLLM writes it: for each token null or {token id: {"logprob": number}}.

Rows may be in any order, and more than needed. They are found by token ids up to the length at which the run cuts
documents; of equal ones the first counts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxtune.train.config import ConfigError
from jaxtune.train.data.rows.reading import Source, open_sources
from jaxtune.train.data.rows.row_files import Row
from jaxtune.train.data.tokens.teacher_values import TeacherValues

_KEY = "objective.teacher_logprobs"
_FORMAT = "docs/distillation.md describes the format"
_SLACK = 1e-3  # by how much probabilities may add up to more than 1, because their logarithms are rounded


@dataclasses.dataclass(frozen=True)
class TeacherFile:
    """A file with a teacher's log-probabilities, read once for `digest` and `k`."""

    path: str
    sources: list[Source]
    digest: str
    """32 hex digits of content and paths; a run does not resume with another file."""
    k: int
    """Most tokens of any distribution."""

    def require_all(self, values: TeacherValues, rows_key: str) -> None:
        """Raises ConfigError if a document with trained tokens is missing, before the run. rows_key: the rows' key,
        such as data.train.
        """
        unmatched = _wanted(values)
        for row in _rows(self.sources):
            unmatched.pop(_key(_tokens(row), values.limit), None)
        if not unmatched:
            return
        missing = sorted(index for indices in unmatched.values() for index in indices)
        count, documents = int((values.counts > 0).sum()), values.documents
        first = documents[missing[0]].tokens[:8].tolist()
        fix = f"compute them for the tokens of this run: its tokenizer, template and data.length ({_FORMAT})"
        if len(missing) == count:
            fix = f"it is of other rows, or of another tokenizer or template; {fix}"
        raise ConfigError(
            f"{_KEY} = {self.path!r}: it lacks {len(missing):,} of {count:,} documents of {rows_key}, first "
            f"{documents.source(missing[0])}, whose token ids begin with {first}; {fix}"
        )

    def read(self, values: TeacherValues, vocab_size: int, array: np.ndarray) -> None:
        """Reads the distributions of all trained tokens; call `require_all` before. Raises ConfigError for a missing,
        unreadable or invalid one.

          array: [values.total] of `TeacherValues.entry(k)`, filled in place.
          vocab_size: token ids must be below it.
        """
        unmatched = _wanted(values)
        for row in _rows(self.sources):
            indices = unmatched.pop(_key(_tokens(row), values.limit), [])
            for index in indices:  # several documents may have the same tokens, of which others are trained on
                trained = values.documents[index].mask[: values.limit]
                token_indices = (np.flatnonzero(trained[1:]) + 1).tolist()
                ids, log_probs = _distributions(row, token_indices, self.k)
                _require_distributions(row, token_indices, ids, log_probs, vocab_size)
                array["ids"][values.of(index)], array["log_probs"][values.of(index)] = ids, log_probs


def open_file(path: str, say: Callable[[str], None]) -> TeacherFile:
    """Opens and reads a file or folder. Raises ConfigError if it is missing, a row has no token ids or not an entry for
    each, or none has a distribution; ValueError if it cannot be read. Distributions are checked by `TeacherFile.read`.
    """
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
    for source in sources:
        for row in source.read(0):
            if row.value is None:
                raise ConfigError(f"{_KEY}: {row.file}:{row.number}: {row.error}")
            yield row


def _bad(row: Row, reason: str) -> ConfigError:
    return ConfigError(f"{_KEY}: {row.file}:{row.number}: {reason}; {_FORMAT}")


def _columns(row: Row) -> Mapping[str, object]:
    assert row.value is not None
    return row.value


def _tokens(row: Row) -> np.ndarray:
    columns = _columns(row)
    name = next((name for name in ("input_ids", "prompt_token_ids") if columns.get(name) is not None), None)
    if name is None:
        raise _bad(row, f"it has no input_ids, but {', '.join(columns) or 'nothing'}")
    try:
        ids = np.asarray(columns[name])
    except ValueError:  # lists of different lengths
        ids = np.empty((0, 0))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise _bad(row, f"{name} must be a list of token ids")
    return ids.astype(np.int32)


def _entries(row: Row) -> Sequence[Sequence[int] | Mapping[str, object] | None]:
    """For each token its entry in top_ids, or in prompt_logprobs; None or empty without a distribution. ConfigError."""
    columns = _columns(row)
    for name in ("top_ids", "prompt_logprobs"):
        entries = columns.get(name)
        if entries is not None:
            if not isinstance(entries, Sequence) or len(entries) != len(_tokens(row)):
                raise _bad(row, f"{name} must be a list with an entry for each of the {len(_tokens(row)):,} input_ids")
            if wrong := [entry for entry in entries if not isinstance(entry, Sequence | Mapping | None)]:
                raise _bad(row, f"{name}: the entry of a token is {wrong[0]!r}, and must be a list, an object or null")
            return entries
    raise _bad(row, f"it has no top_ids with top_logprobs, but {', '.join(columns)}")


def _distributions(row: Row, token_indices: list[int], k: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32[n, k], -1 where unused; log-probabilities float32[n, k], 0 there) of these tokens. ConfigError."""
    entries = _entries(row)
    logs = _columns(row).get("top_logprobs")
    ids, log_probs = np.full((len(token_indices), k), -1, np.int32), np.zeros((len(token_indices), k), np.float32)
    for index, token_index in enumerate(token_indices):
        entry = entries[token_index]
        if not entry:
            raise _bad(row, f"token {token_index} is trained on, and has no log-probabilities")
        try:
            if isinstance(entry, Mapping):
                of_token = [
                    log_prob["logprob"] if isinstance(log_prob, Mapping) else log_prob for log_prob in entry.values()
                ]
                tokens = [int(token) for token in entry]
            else:
                tokens, of_token = list(entry), logs[token_index] if isinstance(logs, Sequence) else []
            if len(tokens) != len(of_token):
                raise ValueError(f"there are {len(tokens)} token ids and {len(of_token)} log-probabilities")
            log_probs[index, : len(tokens)] = np.asarray(of_token, np.float64)
            ids[index, : len(tokens)] = tokens
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            raise _bad(row, f"the log-probabilities of token {token_index} cannot be read ({error})") from None
    log_probs[ids == -1] = 0.0  # also if the file has the id -1
    return ids, log_probs


def _require_distributions(
    row: Row, token_indices: list[int], ids: np.ndarray, log_probs: np.ndarray, vocab_size: int
) -> None:
    """ConfigError for a distribution that is none; ids, log_probs: [len(token_indices), k]."""
    is_used, token_counts = ids != -1, (ids != -1).sum(1)
    ordered = np.sort(np.where(is_used, ids, -1 - np.arange(ids.shape[1])), 1)
    total = np.where(is_used, np.exp(log_probs), 0.0).sum(1)
    for wrong, reason in (
        ((ids < -1) | (ids >= vocab_size), f"has a token id beyond the model's vocabulary of {vocab_size:,}"),
        ((ordered[:, 1:] == ordered[:, :-1]), "has a token id twice"),
        (~np.isfinite(log_probs), "has a log-probability that is not finite; leave such tokens out"),
        (is_used & (log_probs > math.log1p(_SLACK)), "has a log-probability above 0: logits are not log-probabilities"),
        ((total > 1.0 + _SLACK)[:, None], "has probabilities that add up to more than 1"),
        ((token_counts == 0)[:, None], "has no token"),
    ):
        bad = np.flatnonzero(wrong.any(1))
        if bad.size:
            raise _bad(row, f"the distribution of token {token_indices[int(bad[0])]} {reason}")


def _key(tokens: np.ndarray, limit: int | None) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens[:limit], np.int32).tobytes(), digest_size=16).digest()


def _wanted(values: TeacherValues) -> dict[bytes, list[int]]:
    """{hash: indices of documents} of those with trained tokens."""
    documents_of: dict[bytes, list[int]] = {}
    for index in np.flatnonzero(values.counts).tolist():
        documents_of.setdefault(_key(values.documents[index].tokens, values.limit), []).append(index)
    return documents_of
