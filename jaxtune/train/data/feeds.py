"""Batches whose rows are taken one at a time from feeds: from a stream, or from several sets of rows mixed by weight.

A `RowSet` may be too large to be read before the run; a `Feed` takes its rows in order, and tells its position, so that
a resumed run continues with the next row. The rows of a step depend neither on the number of devices nor on that of
processes: each process makes all rows of a batch.
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
    """An endless iterator over the rows of one set."""

    def next(self) -> tuple[Rows, int]:
        """(rows, index): the next row is row `index` of `rows`. It may wait until rows are read and tokenised, and
        raises the errors of reading them."""
        ...

    def position(self) -> Json:
        """The position after the rows taken so far, for a checkpoint. FedBatches asks for it after each batch, because
        it makes batches a step or two before the run trains on them. A feed that `RowSet.feed` makes from it in a
        resumed run continues with the next row."""
        ...

    def close(self) -> None:
        """Releases threads and files. FedBatches calls it for all its feeds when the run ends, also by an error, or
        resumes at another step; no row is taken from the feed afterwards."""
        ...


class RowSet(Protocol):
    """A set of rows, read before or during the run: a stream, or one of several sets that are mixed.
    `with_max_documents` may change the set in place, so only the set that it returns is used afterwards."""

    @property
    def name(self) -> str:
        """The name of the set, such as its path, by which messages and warnings tell it from the other sets of a
        mixture."""
        ...

    @property
    def length(self) -> int:
        """The number of tokens in a row, padding included; sets that are mixed all have the same. FedBatches returns it
        as its own `length`, for which memory is planned and the steps are compiled."""
        ...

    @property
    def max_documents(self) -> int:
        """The most documents that any row has or may have; batches have room for this number, and attention's kernels
        are compiled for it."""
        ...

    def with_max_documents(self, documents: int) -> RowSet:
        """The set with batches that have room for `documents` documents in a row, a number not below `max_documents`.
        It is a copy, or this set itself, changed in place. FedBatches gives each set the largest `max_documents` of its
        sets by it, because sets that are mixed need batches of equal shapes."""
        ...

    def empty(self, rows: int) -> Batch:
        """A batch of `rows` rows of padding, as new numpy arrays. FedBatches writes the rows of all its sets into a
        batch of the first set, for whose shapes the train step is compiled; of the other sets it only compares the
        names of the `extra` arrays with those of the first."""
        ...

    def feed(self, seed: int, position: Json) -> Feed:
        """The rows from `position` on, which `Feed.position` returned in the run that is resumed; None: from the first
        row. seed: decides the order of the rows."""
        ...

    def identity(self) -> dict[str, Json]:
        """Values that identify the rows, such as checksums, by name. Checkpoints have them (`BatchSource.identity`), so
        that a run cannot resume with other rows. FedBatches puts them into its own `identity`."""
        ...

    def described(self) -> str:
        """A line about the set for the screen before the run: its name, and the counts that are known by then, such as
        those of documents and tokens. FedBatches puts it into its own `described`."""
        ...

    def warnings(self) -> list[str]:
        """Warnings about the rows to show before training, such as rows that were left out, one sentence each; [] if
        there are none. FedBatches adds the set's name if it mixes several."""
        ...

    def news(self) -> list[str]:
        """Sentences about what happened to the set since the last call, such as rows left out, which the run prints;
        called after each step. [] if nothing happened."""
        ...


class FedBatches(BatchSource):
    """The source of batches (`BatchSource`) whose rows come from feeds: from one stream, or from several sets that are
    mixed by weight. `run_rows.run_rows` makes it. It knows no `steps_per_epoch`, so the run's config must set `steps`.

    Which of several sets a row comes from is drawn at random from (seed, step, index of the row in the batch), so a
    resumed run draws the same.

    Args:
        sets: one or several sets with rows of the same length.
        weights: a number for each set: rows are taken from the sets in these proportions on average. They need not sum
            to 1.
        rows_per_step: the number of rows in a batch.
        seed: decides the choice of sets and the order within each.

    Raises:
        ValueError: the batches of two sets have different `extra` arrays.
    """

    def __init__(self, sets: Sequence[RowSet], weights: Sequence[float], rows_per_step: int, seed: int = 0):
        """Gives the batches of all sets room for the same number of documents. The feeds are opened only with the first
        batch. The class describes the arguments."""
        most = max(one.max_documents for one in sets)
        self.sets = [one.with_max_documents(most) for one in sets]
        for one in self.sets[1:]:
            if (found := {*one.empty(1).extra}) != (known := {*self.sets[0].empty(1).extra}):
                raise ValueError(
                    f"{self.sets[0].name} and {one.name} cannot be mixed: a batch of the first has {sorted(known)}, "
                    f"one of the second {sorted(found)}: give a column such as margin to all rows, or to none"
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
        """The number of tokens in a row of every batch, padding included, the same in all sets. Memory is planned and
        the steps are compiled for it."""
        return self.sets[0].length

    @property
    def max_documents(self) -> int:
        """The most documents in any row of any set, for which attention's kernels are compiled; the batches of all sets
        have room for as many."""
        return self._most

    def empty(self, rows: int) -> Batch:
        """A batch of `rows` rows of padding, as new numpy arrays, into which `batch_at` writes the rows that it takes
        from the feeds; the train step is compiled for its shapes. The batches of all sets have the same shapes, so it
        is that of the first one."""
        return self.sets[0].empty(rows)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """The batch of `step` (from 0). Raises ValueError unless `step` is the next one, or the one asked for last
        (which gives the same object again), because rows are read only once. It waits for rows that are not read yet,
        and raises the errors of reading them."""
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
        for known in (self._sources, self._positions):
            while len(known) > _KEPT_STEPS:
                known.popitem(last=False)
        return batch

    def _choices(self, step: int) -> list[int]:
        """For each row of the batch of `step`, the index in `sets` of the set that the row comes from: drawn at random
        with the weights of the sets as probabilities, from the seed and `step` alone, so that a resumed run and all
        processes draw the same."""
        if len(self.sets) == 1:
            return [0] * self.rows_per_step
        draws = np.random.Philox(key=np.array([self._seed | _CHOICE << 32, step], np.uint64))
        chosen = np.searchsorted(self._bounds, draws.random_raw(self.rows_per_step) / 2.0**64, side="right")
        return np.minimum(chosen, len(self.sets) - 1).tolist()

    def _open(self) -> list[Feed]:
        """The feed of each set, opened at the positions of `resume` on the first call after `close`, too."""
        if not self._feeds:
            self._feeds = [
                one.feed(self._seed + (number << 48), place)
                for number, (one, place) in enumerate(zip(self.sets, self._begin, strict=True))
            ]
        return self._feeds

    def sources_at(self, step: int) -> list[str]:
        """Where the documents of the rows of `step` came from, as `file:line`; [] unless it is one of the last 4 steps
        that were made (`_KEPT_STEPS`)."""
        return self._sources.get(step, [])

    def position(self, step: int) -> Json:
        """What a checkpoint before `step` records: the position of the feed of each set. Raises KeyError unless the
        batch of `step` - 1 is one of the last 4 (`_KEPT_STEPS`) that were made."""
        return list(self._positions[step])

    def resume(self, step: int, position: Json) -> None:
        """Continues with `step` as the next step, at what `position(step)` returned in an earlier process. Older
        versions recorded {"0": positions} for one device, whose rows were those that all runs have now."""
        known = position["0"] if isinstance(position, dict) and [*position] == ["0"] else position
        if not isinstance(known, list) or len(known) != len(self.sets):
            raise ValueError(f"the checkpoint's position in the rows is not one of {len(self.sets)} sets: {position!r}")
        self.close()
        self._next, self._begin, self._made = step, known, None

    def identity(self) -> dict[str, Json]:
        """What checkpoints record, so that a run is not resumed with other rows: the values of the only set, or of all
        sets with their shares ("sets"). Older versions divided the rows among as many "lanes" as there were devices;
        with one they had the rows that all runs have now."""
        known = self.sets[0].identity() if len(self.sets) == 1 else {"sets": self._mixed_identity()}
        return {**known, "lanes": 1}

    def _mixed_identity(self) -> dict[str, Json]:
        """{index of a set, as text: the set's `identity()`, with its share of the rows, 0 to 1, as "share"}: the part
        of `identity` for several sets. A run whose mixture has other sets, another order of them or other shares is not
        resumed."""
        shares = np.diff(self._bounds, prepend=0.0)
        return {
            str(number): {**one.identity(), "share": round(float(share), 9)}
            for number, (one, share) in enumerate(zip(self.sets, shares, strict=True))
        }

    def described(self, total_steps: int) -> list[str]:
        """Two lines for the screen before a run of `total_steps` steps: each set, with its share of the rows if there
        are several, and the numbers of steps and of rows in a step."""
        shares = np.diff(self._bounds, prepend=0.0)
        words = [one.described() for one in self.sets]
        if len(words) > 1:
            words = [f"{share:.1%} of the rows from {text}" for share, text in zip(shares, words, strict=True)]
        return [
            f"training rows: {'; '.join(words)}",
            f"{total_steps:,} steps of {self.rows_per_step:,} rows, which are made during the run",
        ]

    def warnings(self) -> list[str]:
        """The warnings of all sets, which the run shows before it begins, one sentence each, with the name of the set
        in front if there are several sets; [] if there are none."""
        found = [(one.name, text) for one in self.sets for text in one.warnings()]
        return [text if len(self.sets) == 1 else f"{name}: {text}" for name, text in found]

    def news(self) -> list[str]:
        """Sentences about what happened to any set since the last call, such as rows left out, in the order of the
        sets. The run calls it after each step and prints them; [] if nothing happened."""
        return [text for one in self.sets for text in one.news()]

    def close(self) -> None:
        """Closes the open feeds and with them their threads and files, when the run ends; the next batch would open new
        ones, so `resume` calls it too. Without open feeds it does nothing."""
        feeds, self._feeds = self._feeds, []
        for feed in feeds:
            feed.close()


class PreparedSet:
    """A data set that was tokenised before the run, as one set (`RowSet`) of a mixture. `run_rows.Reader.row_set` makes
    it. name: the set's name in messages. data: the tokenised rows, which are packed on first use. Their order in each
    epoch is always that of `epoch_order`; the field `order` of `data` does not change it."""

    def __init__(self, name: str, data: TokenDataset):
        self.name, self.data = name, data

    @property
    def length(self) -> int:
        """The number of tokens in a row, padding included, the data.length that the set was made with; all sets of a
        mixture have the same."""
        return self.data.length

    @property
    def max_documents(self) -> int:
        """The most documents in any row of this set; in a copy that `with_max_documents` made, the number that it was
        given. FedBatches takes the largest number of its sets, and gives all of them room for it."""
        return self.data.rows.max_documents

    def with_max_documents(self, documents: int) -> PreparedSet:
        """A copy whose rows have at most `documents` documents and whose batches have room for as many, because mixed
        sets need batches of equal shapes; FedBatches asks for it. The copy packs its rows anew."""
        return PreparedSet(self.name, self.data.with_max_documents(documents))

    def empty(self, rows: int) -> Batch:
        """A batch of `rows` rows of padding, as new numpy arrays. If this is the first set of the mixture, FedBatches
        writes the rows of a step, from all sets, into such a batch, and the train step is compiled for its shapes. If
        it is another, FedBatches only compares the names of its `extra` arrays with those of the first."""
        return self.data.rows.empty(rows)

    def feed(self, seed: int, position: Json) -> _PreparedFeed:
        """The rows of the set's epochs, one after another, each in an order of its own, after the first `position`
        rows (None: 0). seed: decides the orders."""
        return _PreparedFeed(self.data.rows, seed, position if isinstance(position, int) else 0)

    def identity(self) -> dict[str, Json]:
        """Values, by name, that identify the rows, as `Batches.identity` gives them: the number of packed rows, a
        checksum of all tokens, the number of trained tokens, and the field `order` of the data unless it is "shuffled"
        (only because `Batches.identity` has it: the order of this set's rows does not depend on it). FedBatches puts
        them into its own `identity`, and a run that resumes with other values is refused."""
        return self.data.batches(1).identity()

    def described(self) -> str:
        """The set's name and the counts of packing, in words, which FedBatches puts into the lines that are shown
        before the run."""
        return f"{self.name}: {self.data.report}"

    def warnings(self) -> list[str]:
        """Warnings about the rows to show before training, such as documents that packing dropped, one sentence each
        (`TokenDataset.warnings`); [] if there are none."""
        return self.data.warnings()

    def news(self) -> list[str]:
        """Returns []: nothing happens to these rows during a run, because they were all read before it. The method is
        there because every RowSet has one."""
        return []


class _PreparedFeed:
    """The packed `rows` in the order of an epoch (`epoch_order`, by `seed`), then in that of the next one, without end.
    taken: how many rows were taken in the run that is resumed."""

    def __init__(self, rows: Rows, seed: int, taken: int):
        self._rows, self._seed, self._taken = rows, seed, taken
        self._order: tuple[int, np.ndarray] | None = None

    def next(self) -> tuple[Rows, int]:
        """(rows, index): the next row is row `index` of the packed rows `rows`."""
        epoch, place = divmod(self._taken, len(self._rows))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(len(self._rows), self._seed, epoch)
        self._taken += 1
        return self._rows, int(self._order[1][place])

    def position(self) -> Json:
        """The number of rows taken."""
        return self._taken

    def close(self) -> None:
        """Does nothing: there is no thread or file."""
