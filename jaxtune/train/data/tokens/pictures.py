"""The pictures of tokenised documents: where they stand, and their files, from which patches are made when a batch is.

A picture that several documents have is stored once. Of a file on disk only its name is, with its size and time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from jaxtune.conversations.picture_processors import Grid, PictureProcessor, PlacedPicture
from jaxtune.conversations.pictures import Picture, PictureError
from jaxtune.system.files import writing
from jaxtune.train.data.batches import Batch

# The files picture_NAME.bin of a cache folder: dtype and shape of an entry. `files` has the rest.
FIELDS = {
    "counts": (np.int64, ()),
    "starts": (np.int64, ()),
    "grids": (np.int32, (2,)),
    "entries": (np.int64, ()),
    "digests": (np.uint8, (16,)),
    "ends": (np.int64, ()),
    "named": (np.uint8, ()),
}
type Stamp = tuple[int, int]

_MOST_THREADS = 16  # that decode the pictures of a row
_BUDGET_STEP = 64  # blocks, of which a row's room for patches is a multiple
_BUDGET_SPARE = 1.1  # of the average of full rows


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    """Decoding and resizing hold no lock of Python's."""
    return concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS), "pictures")


class RowPictures:
    """The pictures that are written into a row of a batch."""

    def __init__(self) -> None:
        self.features: dict[int, int] = {}
        """{entry: its first feature in the row} of pictures that later documents share."""
        self.patches: list[concurrent.futures.Future[None]] = []

    def next_group(self) -> None:
        """Later documents share no pictures with those before."""
        self.features.clear()

    def wait(self) -> None:
        """Until all patches are written. Raises ValueError for a picture that is not what it was."""
        for future in self.patches:
            future.result()


class Files(Protocol):
    """Pictures by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Picture: ...


@dataclasses.dataclass(frozen=True)
class DocumentPictures:
    """The pictures of many documents. A selection shares all but `firsts` and `counts` with its original."""

    firsts: np.ndarray
    """int64[n]: index in `starts`, `grids` and `entries` of each document's first picture."""
    counts: np.ndarray
    """int64[n]: pictures of each document."""
    starts: np.ndarray
    """int64[m]: index in the document of each picture's first token."""
    grids: np.ndarray
    """int32[m, 2]: (height, width) in patches."""
    entries: np.ndarray
    """int64[m]: index in `pictures`."""
    digests: np.ndarray
    """uint8[k, 16]: of each entry."""
    pictures: Files
    """[k], without repetitions."""
    processor: PictureProcessor | None = None
    """Set before rows are packed."""

    @classmethod
    def none(cls, documents: int) -> DocumentPictures:
        """Of documents without pictures."""
        store = PictureStore(None)
        store.add(documents, [])
        return store.all()

    @property
    def made_by(self) -> PictureProcessor:
        assert self.processor is not None
        return self.processor

    def select(self, indices: np.ndarray) -> DocumentPictures:
        return dataclasses.replace(self, firsts=self.firsts[indices], counts=self.counts[indices])

    def placed(self) -> tuple[np.ndarray, np.ndarray]:
        """(Document, index in `starts`) of every picture, int64[total] each, in order."""
        documents = np.repeat(np.arange(len(self.counts)), self.counts)
        offsets = np.arange(len(documents)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        return documents, self.firsts[documents] + offsets

    def of(self, document: int, count: int) -> range:
        """Indices in `starts` of the pictures in a document's first `count` tokens."""
        first = int(self.firsts[document])
        return range(first, first + int(np.count_nonzero(self.starts[first:][: self.counts[document]] < count)))

    def fingerprint(self) -> bytes:
        return b"".join([self.digests[self.entries].tobytes(), np.ascontiguousarray(self.grids).tobytes()])

    def digests_of(self, document: int, count: int) -> bytes:
        """Of the pictures in a document's first `count` tokens."""
        inside = self.of(document, count)
        return self.digests[self.entries[inside.start : inside.stop]].tobytes()

    def joined(self, pieces: Sequence[Sequence[tuple[int, int, int]]]) -> DocumentPictures:
        """As Documents.joined."""
        placed, starts, counts = list[int](), list[int](), list[int]()
        for document in pieces:
            before, offset = len(placed), 0
            for index, first, count in document:
                inside = [picture for picture in self.of(index, first + count) if self.starts[picture] >= first]
                placed += inside
                starts += (self.starts[inside] - first + offset).tolist()
                offset += count
            counts.append(len(placed) - before)
        indices, numbers = np.array(placed, np.int64), np.array(counts, np.int64)
        return dataclasses.replace(
            self,
            firsts=np.cumsum(numbers) - numbers,
            counts=numbers,
            starts=np.array(starts, np.int64),
            grids=self.grids[indices],
            entries=self.entries[indices],
        )

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """int64[m]: index in the document after each picture's last token."""
        grids, kinds = np.unique(self.grids, axis=0, return_inverse=True)
        return (
            self.starts + np.array([len(self.made_by.tokens(_grid(grid))) for grid in grids], np.int64)[kinds.ravel()]
        )

    def cut(self, lengths: np.ndarray) -> np.ndarray:
        """bool[n]: documents of which a cut to these lengths, int[n], would cut a picture."""
        documents, placed = self.placed()
        inside = (self.starts[placed] < lengths[documents]) & (lengths[documents] < self.ends[placed])
        return np.bincount(documents[inside], minlength=len(self.counts)) > 0

    def sizes(self, lengths: np.ndarray, group: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(Patches, pictures) of each document, or of groups of consecutive ones, which share equal pictures: int64[n /
        group].

        lengths: int[n], tokens that are left of each document.
        """
        documents, placed = self.placed()
        inside = self.starts[placed] < lengths[documents]
        groups, placed = documents[inside] // group, placed[inside]
        _, first = np.unique(groups * max(len(self.pictures), 1) + self.entries[placed], return_index=True)
        pictures = np.bincount(groups[first], minlength=len(self.counts) // group)
        patches = np.zeros_like(pictures)
        np.add.at(patches, groups[first], self.grids[placed[first]].astype(np.int64).prod(1))
        return patches, pictures

    def write(self, batch: Batch, slot: int, offset: int, document: int, count: int, row: RowPictures) -> None:
        """Writes the positions and pictures of a document's first `count` tokens, which begin at `offset` of a batch's
        row, in place; the patches are there after `row.wait`.
        """
        processor, inside = self.made_by, self.of(document, count)
        arrays = {name: np.asarray(array) for name, array in batch.pictures.items()}  # no copies
        starts, grids = self.starts[inside.start : inside.stop].tolist(), [_grid(self.grids[i]) for i in inside]
        batch.positions[slot, offset : offset + count] = processor.positions(count, starts, grids)
        segments = arrays["patch_segments"][slot]
        for index, start, grid in zip(inside, starts, grids, strict=True):
            entry, size = int(self.entries[index]), grid[0] * grid[1]
            if entry not in row.features:
                patches_before = int(np.count_nonzero(segments))
                where = slice(patches_before, patches_before + size)
                row.patches.append(_threads().submit(self._patches, entry, arrays["patches"][slot, where]))
                arrays["patch_grids"][slot, where] = grid
                arrays["patch_coordinates"][slot, where] = processor.coordinates(grid)
                segments[where] = segments.max(initial=0) + 1
                row.features[entry] = patches_before // processor.block
            tokens = offset + start + np.flatnonzero(processor.tokens(grid) == processor.token)
            arrays["picture_features"][slot, tokens] = row.features[entry] + np.arange(len(tokens))

    def _patches(self, entry: int, into: np.ndarray) -> None:
        """Writes float32[patches, F]. Raises ValueError for a file that is not what it was."""
        picture = self.pictures[entry]
        try:
            if picture.path is not None and picture.digest() != self.digests[entry].tobytes():
                raise PictureError(f"{picture.path} is not what it was when its rows were tokenised")
            into[:] = self.made_by.patches(picture.decoded())
        except PictureError as error:
            raise ValueError(f"{error}; put the old one back, or begin a new run") from None


def _grid(sides: np.ndarray) -> Grid:
    return int(sides[0]), int(sides[1])


def with_room(batch: Batch, processor: PictureProcessor, patches: int) -> Batch:
    """A batch of padding with room for this many patches a row, and positions of the processor's axes."""
    rows, length = batch.tokens.shape
    shape = (rows, patches)
    arrays: dict[str, np.ndarray] = {
        "patches": np.zeros((*shape, processor.size), np.float32),
        "patch_segments": np.zeros(shape, np.int32),
        "patch_grids": np.zeros((*shape, 2), np.int32),
        "patch_coordinates": np.zeros((*shape, 2), np.int32),
        "picture_features": np.full((rows, length), -1, np.int32),
    }
    positions = batch.positions if processor.axes == 1 else np.zeros((rows, length, processor.axes), np.int32)
    return dataclasses.replace(batch, positions=positions, pictures=arrays)


def patch_budget(patches: np.ndarray, tokens: int, length: int, block: int) -> int:
    """Patches for which a row has room, if the config does not say: those of the largest document, and somewhat more
    than the average of full rows.

      patches: int64[n], of each document.
      tokens: of all documents; length: of a row; block: patches of a feature.
    """
    average = _BUDGET_SPARE * int(patches.sum()) * length / max(tokens, 1)
    return rounded(max(int(patches.max(initial=0)), min(int(average), length * block)), block)


def rounded(patches: int, block: int) -> int:
    """A number of patches rounded up to what rows have room for."""
    step = _BUDGET_STEP * block
    return -(-patches // step) * step


# --- storing


class PictureStore:
    """Collects the pictures of documents: their files in picture_files.bin of `folder`, or in memory (None)."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.stream: BinaryIO | None = None
        self.counts: list[int] = []
        self.starts: list[int] = []
        self.grids: list[Grid] = []
        self.entries: list[int] = []
        self.ends: list[int] = []
        self.named: list[bool] = []
        self.known: dict[bytes, int] = {}
        self.pictures: list[Picture] = []

    def add(self, documents: int, pictures: Sequence[Sequence[PlacedPicture]]) -> None:
        """Appends a chunk's. Raises OSError. pictures: of each document; empty without any."""
        self.counts += [len(placed) for placed in pictures] if pictures else [0] * documents
        for picture in itertools.chain.from_iterable(pictures):
            self.starts.append(picture.start)
            self.grids.append(picture.grid)
            if picture.digest not in self.known:
                self.known[picture.digest] = len(self.known)
                self._keep(picture.picture)
            self.entries.append(self.known[picture.digest])

    def _keep(self, picture: Picture) -> None:
        if self.folder is None:
            self.pictures.append(picture)
            return
        if self.stream is None:
            self.stream = open(self.folder / "picture_files.bin", "wb")  # noqa: SIM115 (closed in `close`)
        data = (
            picture.file_bytes()
            if picture.path is None
            else json.dumps([picture.path, stamp_of(picture.path)]).encode()
        )
        with writing(self.stream.name, len(data)):
            self.stream.write(data)
        self.ends.append((self.ends[-1] if self.ends else 0) + len(data))
        self.named.append(picture.path is not None)

    def finish(self) -> None:
        """Writes what is not yet written. Raises OSError."""
        if self.stream is None or self.folder is None:
            return
        with writing(self.stream.name, self.stream.tell()):
            self.stream.close()
        for name, array in self._arrays().items():
            path = self.folder / f"picture_{name}.bin"
            with writing(str(path), array.nbytes):
                path.write_bytes(array.tobytes())

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()

    def documents(self) -> DocumentPictures | None:
        """Those in memory; None without any picture."""
        return self.all() if self.starts else None

    def all(self) -> DocumentPictures:
        return _documents(self._arrays(), self.pictures)

    def _arrays(self) -> dict[str, np.ndarray]:
        digests = np.frombuffer(b"".join(self.known), np.uint8)
        values = {name: getattr(self, name) for name in FIELDS if name != "digests"} | {"digests": digests}
        return {name: np.asarray(values[name], dtype).reshape(-1, *shape) for name, (dtype, shape) in FIELDS.items()}


def prompt_documents(pictures: Sequence[Sequence[PlacedPicture]], processor: PictureProcessor) -> DocumentPictures:
    """Of documents in memory, with the pictures of each."""
    store = PictureStore(None)
    store.add(len(pictures), pictures)
    return dataclasses.replace(store.all(), processor=processor)


def _documents(arrays: dict[str, np.ndarray], pictures: Files) -> DocumentPictures:
    counts, *fields = (arrays[name] for name in ("counts", "starts", "grids", "entries", "digests"))
    firsts = np.cumsum(counts) - counts
    return DocumentPictures(firsts, counts, fields[0], fields[1], fields[2], fields[3], pictures)


def stamp_of(path: str) -> Stamp | None:
    """(Bytes, nanoseconds of the last change) of a file; None: there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns


def stored_pictures(folder: Path, documents: int) -> DocumentPictures | None:
    """The pictures of a cache folder, whose files are sound; None without any. Raises ValueError if its parts
    contradict each other, or a picture's file was changed since or is gone.
    """
    if not (folder / "picture_files.bin").is_file():
        return None
    arrays = {
        name: np.fromfile(folder / f"picture_{name}.bin", dtype).reshape(-1, *shape)
        for name, (dtype, shape) in FIELDS.items()
    }
    files = np.memmap(folder / "picture_files.bin", np.uint8, mode="r")
    pictures = _StoredFiles(files, arrays["ends"], arrays["named"])
    number, ends = len(arrays["starts"]), arrays["ends"]
    sound = len(arrays["counts"]) == documents and arrays["counts"].min(initial=0) >= 0
    sound &= arrays["counts"].sum() == number == len(arrays["grids"]) == len(arrays["entries"])
    sound &= len(ends) == len(arrays["digests"]) == len(arrays["named"]) and (np.diff(ends, prepend=0) > 0).all()
    sound &= bool(number) and int(ends[-1]) == len(files) and arrays["grids"].min() > 0
    if not sound or arrays["entries"].min() < 0 or arrays["entries"].max() >= len(ends):
        raise ValueError("its pictures do not add up")
    for index in np.flatnonzero(arrays["named"]).tolist():
        path, stamp = json.loads(pictures.data(index))
        if stamp is None or stamp_of(path) != tuple(stamp):
            raise ValueError(f"the picture {path} has changed")
    return _documents(arrays, pictures)


class _StoredFiles:
    def __init__(self, files: np.ndarray, ends: np.ndarray, named: np.ndarray):
        self.files, self.bounds, self.named = files, np.concatenate([[0], ends]), named

    def __len__(self) -> int:
        return len(self.named)

    def data(self, index: int) -> bytes:
        return self.files[self.bounds[index] : self.bounds[index + 1]].tobytes()

    def __getitem__(self, index: int) -> Picture:
        data = self.data(index)
        return Picture(path=json.loads(data)[0]) if self.named[index] else Picture(data=data)
