"""Batches from feeds of rows: of a stream, or of several sets mixed by weight.

A feed tells its position, so that a resumed run continues with the next row. Every process makes all rows of a batch,
so they depend neither on devices nor on processes.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jaxtune.train.data.batches import Batch, BatchSource, Json, Rows, epoch_order

if TYPE_CHECKING:
    from jaxtune.models.decoder import Decoder
    from jaxtune.train.data.dataset import TokenDataset

_KEPT_STEPS = 4  # the steps whose positions and sources are kept: the loader is one or two steps ahead of the run
_CHOICE = 0x6D6978  # makes the draws of which set a row comes from independent of all other draws with the same seed


class Feed(Protocol):
    """An endless iterator over the rows of a set."""

    def next(self) -> tuple[Rows, int]:
        """(rows, index) of the next row. May wait for it, and raises errors of reading."""
        ...

    def position(self) -> Json:
        """The position after the rows taken, for a checkpoint."""
        ...

    def close(self) -> None:
        """Releases threads and files; no row is taken afterwards."""
        ...


class RowSet(Protocol):
    """A set of rows, read before or during the run."""

    @property
    def name(self) -> str: ...

    @property
    def length(self) -> int:
        """Tokens of a row, padding included; equal in mixed sets."""
        ...

    @property
    def max_documents(self) -> int:
        """Most documents that a row may have; batches have room for as many."""
        ...

    def with_max_documents(self, documents: int) -> RowSet:
        """The set with room for `documents` (not below `max_documents`), as mixed sets need equal shapes. It may change
        in place: use only the result.
        """
        ...

    def empty(self, rows: int) -> Batch:
        """A batch of `rows` rows of padding, numpy arrays."""
        ...

    def feed(self, seed: int, position: Json) -> Feed:
        """The rows from `position` on (`Feed.position`; None: the first). seed: decides their order."""
        ...

    def identity(self) -> dict[str, Json]:
        """Values, such as checksums, by which a resumed run recognises the rows."""
        ...

    def described(self) -> str: ...

    def warnings(self) -> list[str]: ...

    def news(self) -> list[str]:
        """Sentences on what happened since the last call, such as rows left out."""
        ...


class FedBatches(BatchSource):
    """Batches of rows from one stream or several weighted sets. There is no `steps_per_epoch`, so the config must set
    `steps`.

    Each row's set is drawn from (seed, step, row), the same in a resumed run. Raises ValueError if batches of two sets
    differ in `extra` arrays.

      weights: proportions of rows by set, on average; they need not sum to 1.
    """

    def __init__(self, sets: Sequence[RowSet], weights: Sequence[float], rows_per_step: int, seed: int = 0):
        most = max(row_set.max_documents for row_set in sets)
        self.sets = [row_set.with_max_documents(most) for row_set in sets]
        for row_set in self.sets[1:]:
            if (extra := {*row_set.empty(1).extra}) != (first_extra := {*self.sets[0].empty(1).extra}):
                raise ValueError(
                    f"{self.sets[0].name} and {row_set.name} cannot be mixed: a batch of the first has "
                    f"{sorted(first_extra)}, one of the second {sorted(extra)}: give a column such as "
                    "margin to all rows, or to none"
                )
        self.rows_per_step = rows_per_step
        self._most, self._seed = most, seed
        self._bounds = np.cumsum(weights) / np.sum(weights)
        self._feeds: list[Feed] = []
        self._next = 0
        self._begin: list[Json] = [None] * len(sets)
        self._made: tuple[int, Batch] | None = None
        self._sources: collections.OrderedDict[int, list[str]] = collections.OrderedDict()
        self._positions: collections.OrderedDict[int, list[Json]] = collections.OrderedDict()

    @property
    def length(self) -> int:
        return self.sets[0].length

    @property
    def max_documents(self) -> int:
        return self._most

    def empty(self, rows: int) -> Batch:
        return self.sets[0].empty(rows)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """The batch of `step`, which must be the next one, or the last one again (the same object): rows are read once.
        Waits, and raises errors of reading; ValueError for another step.
        """
        if self._made is not None and self._made[0] == step:
            return self._made[1]
        if step != self._next:
            raise ValueError(f"step {step} is asked for, but the next step of these rows is {self._next}")
        feeds, batch, sources = self._open(), self.empty(self.rows_per_step), []
        for slot, number in enumerate(self._choices(step)):
            rows, row = feeds[number].next()
            rows.fill(batch, slot, row)
            sources += rows.sources(row)
        self._made, self._next = (step, batch), step + 1
        self._sources[step] = sources
        self._positions[step + 1] = [feed.position() for feed in feeds]
        for history in (self._sources, self._positions):
            while len(history) > _KEPT_STEPS:
                history.popitem(last=False)
        return batch

    def _choices(self, step: int) -> list[int]:
        """The index of each row's set, from the seed and `step` alone."""
        if len(self.sets) == 1:
            return [0] * self.rows_per_step
        draws = np.random.Philox(key=np.array([self._seed | _CHOICE << 32, step], np.uint64))
        set_numbers = np.searchsorted(self._bounds, draws.random_raw(self.rows_per_step) / 2.0**64, side="right")
        return np.minimum(set_numbers, len(self.sets) - 1).tolist()

    def _open(self) -> list[Feed]:
        """The feeds, opened at the positions of `resume` if they are closed."""
        if not self._feeds:
            self._feeds = [
                row_set.feed(self._seed + (number << 48), position)
                for number, (row_set, position) in enumerate(zip(self.sets, self._begin, strict=True))
            ]
        return self._feeds

    def sources_at(self, step: int) -> list[str]:
        """`file:line` of the documents of `step`; [] unless one of the last 4 made."""
        return self._sources.get(step, [])

    def position(self, step: int) -> Json:
        """Positions of all feeds before `step`. Raises KeyError unless `step` - 1 is one of the last 4 made."""
        return list(self._positions[step])

    def resume(self, step: int, position: Json) -> None:
        """Continues with `step` at `position(step)` of an earlier process. Raises ValueError for another number of
        sets.
        """
        if not isinstance(position, list) or len(position) != len(self.sets):
            raise ValueError(f"the checkpoint's position in the rows is not one of {len(self.sets)} sets: {position!r}")
        self.close()
        self._next, self._begin, self._made = step, position, None

    def identity(self) -> dict[str, Json]:
        """Of the only set, or of all sets with their shares. "lanes" is for checkpoints of older versions, which
        divided rows among devices.
        """
        values = self.sets[0].identity() if len(self.sets) == 1 else {"sets": self._mixed_identity()}
        return {**values, "lanes": 1}

    def _mixed_identity(self) -> dict[str, Json]:
        """{index as text: identity with "share"}: a mixture with other sets, order or shares is not resumed."""
        shares = np.diff(self._bounds, prepend=0.0)
        return {
            str(number): {**row_set.identity(), "share": round(float(share), 9)}
            for number, (row_set, share) in enumerate(zip(self.sets, shares, strict=True))
        }

    def described(self, total_steps: int) -> list[str]:
        shares = np.diff(self._bounds, prepend=0.0)
        words = [row_set.described() for row_set in self.sets]
        if len(words) > 1:
            words = [f"{share:.1%} of the rows from {text}" for share, text in zip(shares, words, strict=True)]
        return [
            f"training rows: {'; '.join(words)}",
            f"{total_steps:,} steps of {self.rows_per_step:,} rows, which are made during the run",
        ]

    def warnings(self) -> list[str]:
        named_texts = [(row_set.name, text) for row_set in self.sets for text in row_set.warnings()]
        return [text if len(self.sets) == 1 else f"{name}: {text}" for name, text in named_texts]

    def news(self) -> list[str]:
        return [text for row_set in self.sets for text in row_set.news()]

    def close(self) -> None:
        """Closes the feeds; the next batch opens new ones."""
        feeds, self._feeds = self._feeds, []
        for feed in feeds:
            feed.close()


class PreparedSet:
    """A data set tokenised before the run as a RowSet. `data.order` is ignored: epochs are shuffled."""

    def __init__(self, name: str, data: TokenDataset):
        self.name, self.data = name, data

    @property
    def length(self) -> int:
        return self.data.length

    @property
    def max_documents(self) -> int:
        return self.data.rows.max_documents

    def with_max_documents(self, documents: int) -> PreparedSet:
        """A copy, packed anew."""
        return PreparedSet(self.name, self.data.with_max_documents(documents))

    def empty(self, rows: int) -> Batch:
        return self.data.rows.empty(rows)

    def feed(self, seed: int, position: Json) -> _PreparedFeed:
        """The rows of endless epochs after the first `position` (None: 0)."""
        return _PreparedFeed(self.data.rows, seed, position if isinstance(position, int) else 0)

    def identity(self) -> dict[str, Json]:
        return self.data.batches(1).identity()

    def described(self) -> str:
        return f"{self.name}: {self.data.report}"

    def warnings(self) -> list[str]:
        return self.data.warnings()

    def news(self) -> list[str]:
        return []


class _PreparedFeed:
    """Packed rows in each epoch's order, without end. rows_taken: rows taken before resuming."""

    def __init__(self, rows: Rows, seed: int, rows_taken: int):
        self._rows, self._seed, self._taken = rows, seed, rows_taken
        self._order: tuple[int, np.ndarray] | None = None

    def next(self) -> tuple[Rows, int]:
        epoch, offset = divmod(self._taken, len(self._rows))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(len(self._rows), self._seed, epoch)
        self._taken += 1
        return self._rows, int(self._order[1][offset])

    def position(self) -> Json:
        return self._taken

    def close(self) -> None:
        """Nothing to close."""
