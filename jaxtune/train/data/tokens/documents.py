"""Tokenised documents in flat arrays, which may be memory-mapped files, so that a data set need not fit in memory.

A document is a row of data, or the prompt with one answer of a preference pair.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from jaxtune.system.sealed import crc32
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.tokens.pictures import DocumentPictures, RowPictures


@dataclasses.dataclass(frozen=True)
class Document:
    """One document's tokens."""

    tokens: np.ndarray
    """int32[n]"""
    mask: np.ndarray
    """bool[n]: True where the token is trained on."""


@dataclasses.dataclass(frozen=True)
class Documents:
    """Many documents in flat arrays. A selection shares `tokens` and `mask` with its original."""

    tokens: np.ndarray
    """int32[total]: all documents' token ids in sequence; in a selection also those of documents left out."""
    mask: np.ndarray
    """bool or uint8 [total]: nonzero where the token is trained on."""
    starts: np.ndarray
    """int64[n]: index in `tokens` of each first token."""
    lengths: np.ndarray
    """int64[n]: tokens of each document; 0 for the answer that a labelled row lacks."""
    trained: np.ndarray
    """int64[n]: trained targets of each document; its first token is never one."""
    origins: np.ndarray | None = None
    """int64[n, 2]: index into `files`, and line or row number from 1. None: unknown."""
    files: tuple[str, ...] = ()
    """Names of the files or data sets; "rows" for a list of dicts."""
    pictures: DocumentPictures | None = None
    """None: rows are read without."""

    def __len__(self) -> int:
        return len(self.starts)

    @functools.cached_property
    def tokens_crc32(self) -> int:
        """The CRC-32 of `tokens` and pictures, by which checkpoints recognise rows; a selection has the same. Reads all
        tokens.
        """
        return crc32([np.ascontiguousarray(self.tokens), self.picture_fingerprint])

    @property
    def picture_fingerprint(self) -> bytes:
        """By which the pictures are known; empty without any. A selection has the same."""
        return b"" if self.pictures is None else self.pictures.fingerprint()

    @property
    def identity(self) -> str:
        """`tokens_crc32` as 8 hex digits. Two splits of one set have the same."""
        return f"{self.tokens_crc32:08x}"

    def __getitem__(self, index: int) -> Document:
        start, length = self.starts[index], self.lengths[index]
        return Document(self.tokens[start : start + length], self.mask[start : start + length].astype(bool))

    def source(self, index: int) -> str:
        """Where a document came from: `file:line`, or `document INDEX` if unknown."""
        if self.origins is None:
            return f"document {index}"
        file, line = self.origins[index]
        return f"{self.files[file]}:{line}"

    def select(self, indices: np.ndarray) -> Documents:
        return dataclasses.replace(
            self,
            starts=self.starts[indices],
            lengths=self.lengths[indices],
            trained=self.trained[indices],
            origins=None if self.origins is None else self.origins[indices],
            pictures=None if self.pictures is None else self.pictures.select(indices),
        )

    def joined(self, pieces: Sequence[Sequence[tuple[int, int, int]]]) -> Documents:
        """New documents, each of pieces (document, first, count) of these, with the origin of its first piece. No piece
        begins or ends within a picture.
        """
        arrays = (
            [array[self.starts[index] + first :][:count] for index, first, count in document]
            for document in pieces
            for array in (self.tokens, self.mask)
        )
        tokens = map(np.concatenate, arrays)
        gathered = Documents.gather(Document(ids, mask) for ids, mask in zip(tokens, tokens, strict=True))
        origins = None if self.origins is None else self.origins[[document[0][0] for document in pieces]]
        pictures = None if self.pictures is None else self.pictures.joined(pieces)
        return dataclasses.replace(gathered, origins=origins, files=self.files, pictures=pictures)

    def write(
        self,
        document: int,
        first: int,
        count: int,
        batch: Batch,
        slot: int,
        offset: int,
        segment: int,
        pictures: RowPictures,
    ) -> int:
        """Writes a document's tokens[first : first + count] (at least one) into a batch's row in place; the index after
        them. The last token gets no target; positions count from 0.

          slot, offset: the batch's row, and the index in it.
          segment: segment id, from 1.
          pictures: of the row, to be waited for.
        """
        start, end = int(self.starts[document]) + first, offset + count
        tokens = self.tokens[start : start + count]
        batch.tokens[slot, offset:end] = tokens
        batch.targets[slot, offset : end - 1] = tokens[1:]
        batch.weights[slot, offset : end - 1] = self.mask[start + 1 : start + count] != 0
        batch.segment_ids[slot, offset:end] = segment
        if self.pictures is not None and batch.pictures:
            self.pictures.write(batch, slot, offset, document, count, pictures)
        else:
            batch.positions[slot, offset:end] = np.arange(count)
        return end

    def held_out(self, firsts: np.ndarray, eval_rows: float, noun: str) -> tuple[np.ndarray, np.ndarray, int]:
        """(Training, held-out, copies): ascending int64 indices into `firsts`, and the number of rows in neither,
        because they equal a held-out one.

        Chooses the distinct texts with the smallest hashes, and each one's first row; order and seed do not matter.
        Raises ValueError unless between 1 and all but one are chosen.

          firsts: int[n], the document that identifies each row or pair.
          eval_rows: number of texts, or below 1 their share, rounded to at least 1.
          noun: plural noun for messages.
        """
        hashes = self._hashes(firsts)
        texts, first_rows = np.unique(hashes, return_index=True)
        count = max(1, round(eval_rows * len(texts))) if 0 < eval_rows < 1 else int(eval_rows)
        if not 0 < count < len(texts):
            distinct = "" if len(texts) == len(firsts) else "distinct "
            raise ValueError(
                f"data.eval_rows={count} must lie between 1 and {len(texts) - 1}, one less than the {distinct}{noun}"
            )
        training = np.flatnonzero(~np.isin(hashes, texts[:count]))
        return training, np.sort(first_rows[:count]), len(firsts) - len(training) - count

    def key(self, index: int, count: int) -> bytes:
        """By which a document's first `count` tokens, with their pictures, are known."""
        data = self.tokens[self.starts[index] : self.starts[index] + count].tobytes()
        return data if self.pictures is None else data + self.pictures.digests_of(index, count)

    def _hashes(self, indices: np.ndarray) -> np.ndarray:
        """uint64[n]: hashes of the documents' tokens and pictures, the same in every process; masks do not count."""
        hashes = np.empty(len(indices), np.uint64)
        for number, index in enumerate(indices.tolist()):
            data = self.key(index, int(self.lengths[index]))
            hashes[number] = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        return hashes

    def also_in(self, other: Documents) -> int:
        """How many non-empty documents of this set have exactly the tokens of one in `other`."""
        indices, candidates = np.flatnonzero(self.lengths), np.flatnonzero(other.lengths)
        for share in (0.5, 0.9, 0.99):  # single tokens exclude most documents, and cost far less than hashes of all
            own_keys, other_keys = self._cheap_keys(indices, share), other._cheap_keys(candidates, share)
            indices, candidates = indices[np.isin(own_keys, other_keys)], candidates[np.isin(other_keys, own_keys)]
        return int(np.isin(self._hashes(indices), other._hashes(candidates)).sum())

    def _cheap_keys(self, indices: np.ndarray, share: float) -> np.ndarray:
        """int64[n]: length (upper 32 bits) and token at int(share * length) (lower 32 bits) of non-empty documents."""
        lengths = self.lengths[indices]
        return lengths << 32 | self.tokens[self.starts[indices] + (share * lengths).astype(np.int64)]

    @classmethod
    def gather(cls, documents: Iterable[Document | Sequence[int]]) -> Documents:
        """A set in memory, without origins; in a plain sequence of ints every token is trained on. Raises ValueError
        for tokens that are not integers [n], or a mask of another shape.
        """
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


def identity(documents: Documents, lengths: np.ndarray, about: tuple[object, ...] | None = None) -> str:
    """32 hex digits by which what is kept of rows is found again: a hash of tokens, masks, places and pictures.

    lengths: int[n], of each document, or what of it is packed.
    about: what else the kept values follow from, such as the model.
    """
    digest = hashlib.blake2b(b"" if about is None else repr(about).encode(), digest_size=16)
    for array in (documents.tokens, documents.mask, documents.starts, lengths):
        digest.update(np.ascontiguousarray(array).tobytes())
    digest.update(documents.picture_fingerprint)
    return digest.hexdigest()
