"""Tokenised documents. `Documents` has the token ids and the mask (which tokens are trained on) of all documents in two
flat arrays, with each document's start and length; `Document` is one document of it: one row of data, or the prompt
with one answer of a preference pair. The arrays may be memory-mapped files of the token cache, so that a data set need
not fit in memory. Documents are selected, written into rows of batches, and divided into training and held-out
ones."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from jaxtune.train.data.batches import Batch


@dataclasses.dataclass(frozen=True)
class Document:
    """The tokens of one document: an entry of `Documents`, or an argument of `Documents.gather`. It is for code that
    looks at one document, such as kto's, which joins prompts with other rows' answers. Batches are written from the
    flat arrays without it (`Documents.write`)."""

    tokens: np.ndarray
    """int32[n]: token ids."""
    mask: np.ndarray
    """bool[n]: True where the token is trained on."""


@dataclasses.dataclass(frozen=True)
class Documents:
    """Many documents in flat arrays, which may be memory-mapped files. The token cache opens them, and `gather` makes
    them of arrays in memory. A selection of documents (`select`) shares `tokens` and `mask` with the set that it was
    made of. `write` puts a document or a piece of it into a row of a batch, `held_out` chooses the rows that
    data.eval_rows takes out of data.train, and `also_in` counts documents that two sets have in common."""

    tokens: np.ndarray
    """int32[total]: the token ids of all documents, one document after another; in a selection, also those of the
    documents that were not selected."""
    mask: np.ndarray
    """bool or uint8 [total]: nonzero where the token of `tokens` is trained on."""
    starts: np.ndarray
    """int64[n]: the index in `tokens` of each document's first token."""
    lengths: np.ndarray
    """int64[n]: the number of tokens of each document; 0 for the answer that a labelled row does not have."""
    trained: np.ndarray
    """int64[n]: the number of trained targets of each document. Its first token is never a target."""
    origins: np.ndarray | None = None
    """int64[n, 2]: for each document, an index into `files` and the number of its line or row there, from 1. None if it
    is not known, as in a set that `gather` made."""
    files: tuple[str, ...] = ()
    """The names of the files or data sets that the documents came from; "rows" for a list of dicts."""

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.starts)

    @functools.cached_property
    def tokens_crc32(self) -> int:
        """The CRC-32 of the flat array `tokens`, by which checkpoints and metrics recognise the rows, and which the
        processes of a run compare. It reads all tokens on first access. A selection has the same CRC-32 as the set that
        it was made of, whose flat array it shares."""
        return zlib.crc32(np.ascontiguousarray(self.tokens))

    @property
    def identity(self) -> str:
        """`tokens_crc32` as 8 hex digits. The metrics of an evaluation have it, so that a resumed run counts only
        evaluations of the same held-out rows as its own. For rows that `TokenDataset.split` held out, it is that of the
        undivided set, so it does not show another choice of them."""
        return f"{self.tokens_crc32:08x}"

    def __getitem__(self, index: int) -> Document:
        """Document number `index`: a view of its tokens, and a bool copy of its mask."""
        start, length = self.starts[index], self.lengths[index]
        return Document(self.tokens[start : start + length], self.mask[start : start + length].astype(bool))

    def source(self, index: int) -> str:
        """Where document number `index` came from, for messages: `file:line` (or the data set's name and the number of
        the row), or `document INDEX` if that is not known. The objective reward also finds the rows of its pairs by it,
        to read their margins."""
        if self.origins is None:
            return f"document {index}"
        file, line = self.origins[index]
        return f"{self.files[file]}:{line}"

    def select(self, indices: np.ndarray) -> Documents:
        """The documents at `indices` (int[n]), in that order. The tokens are not copied. `TokenDataset.split` and
        `PairDataset.split` make the training and the held-out documents by it."""
        return dataclasses.replace(
            self,
            starts=self.starts[indices],
            lengths=self.lengths[indices],
            trained=self.trained[indices],
            origins=None if self.origins is None else self.origins[indices],
        )

    def write(self, start: int, count: int, batch: Batch, slot: int, at: int, segment: int) -> int:
        """Writes a run of the flat tokens into a row of a batch, in place, with their targets, weights, segment ids and
        positions. The last token of the run gets no target, and positions count from 0 at its first token. Packed rows
        fill batches by it (`PackedRows.fill`, `PackedPairs.fill`); answers that are sampled during a run are not
        Documents, and are written without it.

        Args:
            start, count: the run is `tokens[start : start + count]`, a document or a piece of one; at least 1 token.
            batch: a batch of numpy arrays.
            slot: the index of the batch's row that is written into.
            at: the index in that row at which the first token is written.
            segment: the segment id of the run, from 1 on, which tells it from the other documents of the row.

        Returns:
            The index in the row after the last token.
        """
        end, tokens = at + count, self.tokens[start : start + count]
        batch.tokens[slot, at:end] = tokens
        batch.targets[slot, at : end - 1] = tokens[1:]
        batch.weights[slot, at : end - 1] = self.mask[start + 1 : start + count] != 0
        batch.segment_ids[slot, at:end] = segment
        batch.positions[slot, at:end] = np.arange(count)
        return end

    def held_out(self, firsts: np.ndarray, eval_rows: float, what: str) -> tuple[np.ndarray, np.ndarray, int]:
        """Chooses rows to hold out (data.eval_rows): of the distinct texts those with the smallest hashes, and of each
        of them its first row. The choice of texts depends neither on the order of the rows nor on a seed.

        Args:
            firsts: int[n], the index of the document that identifies each row (or each pair); others are not compared.
            eval_rows: how many texts to choose, or below 1 which share of them, rounded to at least 1.
            what: what is chosen, in plural ("rows" or "pairs"), for error messages.

        Returns:
            (training, held-out, copies): indices into `firsts`, int64, both ascending, and the number of rows in
                neither, because they equal a held-out one.

        Raises:
            ValueError: the number to choose is not between 1 and one less than the texts.
        """
        hashes = self._hashes(firsts)
        texts, first_rows = np.unique(hashes, return_index=True)
        count = max(1, round(eval_rows * len(texts))) if 0 < eval_rows < 1 else int(eval_rows)
        if not 0 < count < len(texts):
            distinct = "" if len(texts) == len(firsts) else "distinct "
            raise ValueError(
                f"data.eval_rows={count} must lie between 1 and {len(texts) - 1}, one less than the {distinct}{what}"
            )
        training = np.flatnonzero(~np.isin(hashes, texts[:count]))
        return training, np.sort(first_rows[:count]), len(firsts) - len(training) - count

    def _hashes(self, indices: np.ndarray) -> np.ndarray:
        """uint64[n]: a hash of the tokens of each of the documents at `indices` (int[n]), in that order, by which
        `held_out` and `also_in` compare documents. Equal documents have equal hashes, in every run and process; their
        masks do not matter."""
        hashes = np.empty(len(indices), np.uint64)
        for place, index in enumerate(indices.tolist()):
            data = self.tokens[self.starts[index] : self.starts[index] + self.lengths[index]].tobytes()
            hashes[place] = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        return hashes

    def also_in(self, other: Documents) -> int:
        """The number of non-empty documents of this set that the set `other` also has, with exactly the same tokens (by
        their hashes). A run warns by it if held-out documents are also training documents."""
        own, candidates = np.flatnonzero(self.lengths), np.flatnonzero(other.lengths)
        for share in (0.5, 0.9, 0.99):  # single tokens exclude most documents, and cost far less than hashes of all
            own_keys, other_keys = self._cheap_keys(own, share), other._cheap_keys(candidates, share)
            own, candidates = own[np.isin(own_keys, other_keys)], candidates[np.isin(other_keys, own_keys)]
        return int(np.isin(self._hashes(own), other._hashes(candidates)).sum())

    def _cheap_keys(self, indices: np.ndarray, share: float) -> np.ndarray:
        """int64[n]: a key of each of the documents at `indices` (int[n]; none is empty): its length in the upper 32
        bits, and its token at index int(share * length), with 0 <= share < 1, in the lower 32 bits. Equal documents
        have equal keys. `also_in` first compares the keys of three shares, so that it needs `_hashes` of few documents
        only."""
        lengths = self.lengths[indices]
        return lengths << 32 | self.tokens[self.starts[indices] + (share * lengths).astype(np.int64)]

    @classmethod
    def gather(cls, documents: Iterable[Document | Sequence[int]]) -> Documents:
        """The set of these documents, copied into flat arrays, for documents that are in memory and not in the token
        cache, as in `packing.pack` and in KTO. Without any, it is an empty set, as for rows of which none is usable. It
        has no `origins` and no `files`. A plain sequence of ints is a document of which every token is trained on.
        Raises ValueError for tokens that are not a one-dimensional sequence of integers, or a mask of another
        length."""
        tokens, masks = [], []
        for index, document in enumerate(documents):
            if isinstance(document, Document):
                ids, mask = np.asarray(document.tokens), np.asarray(document.mask).astype(bool)
            else:
                ids = np.asarray(document)
                mask = np.ones(ids.shape, bool)
            if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
                raise ValueError(f"document {index}: tokens must be integers [n], got {ids.dtype} {list(ids.shape)}")
            if mask.shape != ids.shape:
                raise ValueError(f"document {index}: {ids.size} tokens but a mask of shape {list(mask.shape)}")
            tokens.append(ids.astype(np.int32))
            masks.append(mask)
        lengths = np.array([ids.size for ids in tokens], np.int64)
        return cls(
            tokens=np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            mask=np.concatenate(masks) if masks else np.zeros(0, bool),
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            trained=np.array([mask[1:].sum() for mask in masks], np.int64),
        )
