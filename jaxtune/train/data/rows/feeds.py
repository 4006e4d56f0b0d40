"""Batches of rows from one stream, or from several sets mixed by weight.

Every process makes all rows of a batch, so they depend neither on devices nor on processes.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxtune.train.data.batches import Batch, Batches, BatchSource, Json

if TYPE_CHECKING:
    from jaxtune.models.decoder import Decoder
    from jaxtune.train.data.dataset import TokenDataset

_KEPT_STEPS = 4  # the steps whose positions and sources are kept: the loader is one or two steps ahead of the run
_CHOICE = 0x6D6978  # makes the draws of which set a row comes from independent of all other draws with the same seed


class RowSet(BatchSource):
    """A set of rows, one a step without end, of which `FedBatches` makes steps of several rows and mixtures.

    A position is no number: a set that needs none has given out as many rows as steps.
    """

    rows_per_step = 1
    name: str

    @property
    def max_documents(self) -> int:
        """Most documents that a row may have; batches have room for as many."""
        raise NotImplementedError

    def with_room(self, documents: int, patches: int) -> RowSet:
        """The set with room for `documents` and `patches` (neither below its own), as mixed sets need equal shapes. It
        may change in place: use only the result.
        """
        raise NotImplementedError

    @property
    def about(self) -> str:
        """The set in words, with its name."""
        raise NotImplementedError


class FedBatches(BatchSource):
    """Batches of rows from one stream or several weighted sets. There is no `steps_per_epoch`, so the config must set
    `steps`.

    Each row's set is drawn from (seed, step, row), the same in a resumed run. Raises ValueError if batches of two sets
    differ in `extra` arrays.

      weights: proportions of rows by set, on average; they need not sum to 1.
    """

    def __init__(self, sets: Sequence[RowSet], weights: Sequence[float], rows_per_step: int, seed: int = 0):
        most, patches = (max(row_set.max_documents for row_set in sets), max(row_set.patches for row_set in sets))
        self.sets = [row_set.with_room(most, patches) for row_set in sets]
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
        self._next = 0
        self._taken = [0] * len(sets)
        self._made: tuple[int, Batch] | None = None
        self._sources: collections.OrderedDict[int, list[str]] = collections.OrderedDict()
        self._positions: collections.OrderedDict[int, list[Json]] = collections.OrderedDict()

    @property
    def length(self) -> int:
        return self.sets[0].length

    @property
    def max_documents(self) -> int:
        return self._most

    @property
    def document_tokens(self) -> float | None:
        known = [mean for row_set in self.sets if (mean := row_set.document_tokens) is not None]
        shares = np.diff(self._bounds, prepend=0.0)
        return float(np.dot(shares, known)) if len(known) == len(self.sets) else None

    @property
    def patches(self) -> int:
        return self.sets[0].patches

    @property
    def max_pictures(self) -> int | None:
        known = [most for row_set in self.sets if (most := row_set.max_pictures) is not None]
        return max(known) if len(known) == len(self.sets) else None

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
        batch, sources = self.empty(self.rows_per_step), []
        for slot, number in enumerate(self._choices(step)):
            row_set, row = self.sets[number], self._taken[number]
            jax.tree.map(lambda rows, one, slot=slot: np.copyto(rows[slot], one[0]), batch, row_set.batch_at(row))
            sources += row_set.sources_at(row)
            self._taken[number] += 1
        self._made, self._next = (step, batch), step + 1
        self._sources[step] = sources
        self._positions[step + 1] = [
            taken if (position := row_set.position(taken)) is None else position
            for row_set, taken in zip(self.sets, self._taken, strict=True)
        ]
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

    def sources_at(self, step: int) -> list[str]:
        """`file:line` of the documents of `step`; [] unless one of the last 4 made."""
        return self._sources.get(step, [])

    def position(self, step: int) -> Json:
        """Positions of all sets before `step`. Raises KeyError unless `step` - 1 is one of the last 4 made."""
        return list(self._positions[step])

    def resume(self, step: int, position: Json) -> None:
        """Continues with `step` at `position(step)` of an earlier process. Raises ValueError for another number of
        sets.
        """
        if not isinstance(position, list) or len(position) != len(self.sets):
            raise ValueError(f"the checkpoint's position in the rows is not one of {len(self.sets)} sets: {position!r}")
        self._next, self._made = step, None
        self._taken = [begin if isinstance(begin, int) else 0 for begin in position]
        for row_set, taken, begin in zip(self.sets, self._taken, position, strict=True):
            row_set.resume(taken, None if isinstance(begin, int) else begin)

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
        words = [row_set.about for row_set in self.sets]
        if len(words) > 1:
            words = [f"{share:.1%} of the rows from {text}" for share, text in zip(shares, words, strict=True)]
        return [
            f"training rows: {'; '.join(words)}",
            f"{total_steps:,} steps of {self.rows_per_step:,} rows, which are made during the run",
        ]

    def warnings(self) -> list[str]:
        named_texts = [(row_set.name, text) for row_set in self.sets for text in row_set.warnings()]
        return [text if len(self.sets) == 1 else f"{name}: {text}" for name, text in named_texts]

    def columns(self) -> dict[str, str]:
        return {name: words for row_set in self.sets for name, words in row_set.columns().items()}

    def news(self) -> list[str]:
        return [text for row_set in self.sets for text in row_set.news()]

    def close(self) -> None:
        for row_set in self.sets:
            row_set.close()


class PreparedSet(RowSet):
    """A data set tokenised before the run, without end. `data.order` is ignored: epochs are shuffled."""

    def __init__(self, name: str, data: TokenDataset, seed: int = 0):
        self.name, self.data, self._seed = name, data, seed
        self._batches = Batches(data.rows, 1, seed=seed)

    @property
    def length(self) -> int:
        return self._batches.length

    @property
    def max_documents(self) -> int:
        return self._batches.max_documents

    @property
    def document_tokens(self) -> float:
        return self._batches.document_tokens

    @property
    def patches(self) -> int:
        return self.data.rows.patches

    @property
    def max_pictures(self) -> int:
        return self.data.rows.max_pictures

    def with_room(self, documents: int, patches: int) -> PreparedSet:
        """A copy, packed anew."""
        data = self.data.with_max_documents(documents)
        return PreparedSet(self.name, data.with_patches(patches) if patches else data, self._seed)

    def empty(self, rows: int) -> Batch:
        return self._batches.empty(rows)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        return self._batches.batch_at(step)

    def sources_at(self, step: int) -> list[str]:
        return self._batches.sources_at(step)

    def identity(self) -> dict[str, Json]:
        return self.data.batches(1).identity()

    @property
    def about(self) -> str:
        return f"{self.name}: {self.data.report}"

    def warnings(self) -> list[str]:
        return self.data.warnings()

    def columns(self) -> dict[str, str]:
        return {self.name: self.data.summary.columns}
