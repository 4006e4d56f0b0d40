"""Batches whose rows are taken one at a time from feeds: from a stream, or from several sets of rows mixed by weight.

A `RowSet` is a set of rows that may be too large to be read before the run. It makes one `Feed` for each lane, that is
for each device that computes on rows of its own. In one epoch no two feeds of a set take the same row, and each feed
can report its position, so that a resumed run continues with the next row. `FedBatches`, which `run_rows.run_rows`
makes, takes the rows of each step from the feeds. `PreparedSet` is the RowSet of rows that were tokenised before the
run, for mixtures, with `_PreparedFeed`; the RowSet of a stream is `streamed.StreamedRows`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jaxtune.system import processes
from jaxtune.train.data.batches import Batch, BatchSource, Json, Rows, epoch_order

if TYPE_CHECKING:
    from jaxtune.models.decoder import Decoder
    from jaxtune.train.data.dataset import TokenDataset

_KEPT_STEPS = 4  # the steps whose positions and sources are kept: the loader is one or two steps ahead of the run
_CHOICE = 0x6D6978  # makes the draws of which set a row comes from independent of all other draws with the same seed


class Feed(Protocol):
    """An endless iterator over the rows that one lane takes from one set. A lane is the block of a batch's rows that
    one device computes on. `next` takes a row, `position` says for a checkpoint which one is next, and `close` ends the
    feed. `RowSet.feed` makes feeds, and only FedBatches takes rows from them."""

    def next(self) -> tuple[Rows, int]:
        """Returns (rows, index): the next row is row `index` of `rows`. `rows.fill(batch, slot, index)` writes it into
        row `slot` of a batch. It may wait until rows are read and tokenised, and raises the errors of reading them."""
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
    """The interface of a set of rows, read before or during the run: a stream, or one of several sets that are mixed.
    `FedBatches` makes one feed by `feed` for each lane, that is for each device, takes rows from these feeds, and
    writes them into a batch that `empty` makes. `with_max_documents` may change the set in place, so only the set that
    it returns is used afterwards. `identity` goes into checkpoints, so that a run cannot resume with other rows;
    `described`, `warnings` and `news` are texts for the screen."""

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

    def feed(self, lane: int, lanes: int, seed: int, position: Json) -> Feed:
        """The feed of one lane, from which FedBatches takes the rows of that lane's part of each batch.

        Args:
            lane: its number, from 0.
            lanes: the number of lanes that divide the set among them.
            seed: decides the order of the rows.
            position: what `Feed.position` returned in the run that is resumed; None begins with the first row.
        """
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
        rows_per_step: the number of rows in a batch, a multiple of the number of lanes (`divide`).
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
        self._own: tuple[int, ...] = (0,)
        self._feeds: dict[int, list[Feed]] = {}
        self._next = 0
        self._begin: dict[str, Json] = {}
        self._made: tuple[int, Batch] | None = None
        self._sources: collections.OrderedDict[int, list[str]] = collections.OrderedDict()
        self._positions: collections.OrderedDict[int, dict[str, Json]] = collections.OrderedDict()

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

    def divide(self, lanes: int, own: Sequence[int]) -> None:
        """Divides the rows of a batch into `lanes` blocks of consecutive rows (one for each device with rows of its
        own). This process will open feeds, and so read rows, only for the blocks with the indices `own`. Called once,
        before the first batch; without it, there is one block, which this process reads."""
        self.lanes, self._own = lanes, tuple(own)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """The batch of `step` (from 0). It has the rows of the lanes of this process, the blocks of a batch's rows that
        its devices compute on, and padding in the others. `model` is not used. Raises ValueError unless `step` is the
        next one, or the one asked for last (which gives the same object again), because rows are read only once. It
        waits for rows that are not read yet, and raises the errors of reading them."""
        if self._made is not None and self._made[0] == step:
            return self._made[1]
        if step != self._next:
            raise ValueError(f"step {step} is asked for, but the next step of these rows is {self._next}")
        feeds = self._open()
        batch, sources, each = self.empty(self.rows_per_step), [], self.rows_per_step // self.lanes
        chosen = self._choices(step)
        for lane in self._own:
            for slot in range(lane * each, (lane + 1) * each):
                rows, row = feeds[lane][chosen[slot]].next()
                rows.fill(batch, slot, row)
                sources += rows.sources(row)
        self._made, self._next = (step, batch), step + 1
        self._sources[step] = sources
        self._positions[step + 1] = {str(lane): [feed.position() for feed in feeds[lane]] for lane in self._own}
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

    def _open(self) -> dict[int, list[Feed]]:
        """The feeds of the lanes of this process, the blocks of a batch's rows that its devices compute on: {lane: [a
        feed for each set]}. They are opened on the first call and on the first after `close`, at the positions that
        `resume` was given, or with the first rows in a new run. `batch_at` takes all its rows from them."""
        if not self._feeds:
            for lane in self._own:
                known = self._begin.get(str(lane))
                places = known if isinstance(known, list) else [None] * len(self.sets)
                self._feeds[lane] = [
                    one.feed(lane, self.lanes, self._seed + (number << 48), place)
                    for number, (one, place) in enumerate(zip(self.sets, places, strict=True))
                ]
        return self._feeds

    def sources_at(self, step: int) -> list[str]:
        """Where the documents of the rows of `step` came from, as `file:line`, for the lanes of this process; the run
        prints it if the loss or gradient of the step is not finite. It is known of the last 4 steps that were made
        (`_KEPT_STEPS`), because batches are made a step or two ahead; [] for other steps."""
        return self._sources.get(step, [])

    def position(self, step: int) -> Json:
        """What a checkpoint before `step` records: {index of a lane, as text: [the position of its feed of each set]}
        for all lanes. All processes call it, because each knows only the positions of its own lanes. The batch of
        `step` - 1 must be one of the last 4 (`_KEPT_STEPS`) that were made; otherwise it raises KeyError. So it cannot
        be asked before the first batch; a run saves nothing then."""
        own = self._positions[step]
        return {lane: place for found in processes.all_of(own) for lane, place in found.items()}

    def resume(self, step: int, position: Json) -> None:
        """Continues with `step` as the next step, at the `position` that an earlier process recorded before that step
        (what the method `position` returned). The trainer calls it when a run continues from a checkpoint. Open feeds
        are closed, and new ones are opened with the next batch."""
        assert isinstance(position, dict), "a checkpoint of these rows has a position"
        self.close()
        self._next, self._begin, self._made = step, position, None

    def identity(self) -> dict[str, Json]:
        """What checkpoints record, so that a run is not resumed with other rows: the values of the only set, or of all
        sets with their shares ("sets"), and the number of lanes ("lanes"), since other lanes would get other rows: a
        run with another number of devices cannot resume."""
        known = self.sets[0].identity() if len(self.sets) == 1 else {"sets": self._mixed_identity()}
        return {**known, "lanes": self.lanes}

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
        are several, and the numbers of steps, of rows in a step and, if there are several lanes, of these (as
        devices)."""
        shares = np.diff(self._bounds, prepend=0.0)
        words = [one.described() for one in self.sets]
        if len(words) > 1:
            words = [f"{share:.1%} of the rows from {text}" for share, text in zip(shares, words, strict=True)]
        divided = "" if self.lanes == 1 else f", divided over {self.lanes} devices"
        return [
            f"training rows: {'; '.join(words)}",
            f"{total_steps:,} steps of {self.rows_per_step:,} rows, which are made during the run{divided}",
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
        feeds, self._feeds = self._feeds, {}
        for feed in (feed for several in feeds.values() for feed in several):
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

    def feed(self, lane: int, lanes: int, seed: int, position: Json) -> _PreparedFeed:
        """The feed of one lane, that is of one device. It begins with row `lane` and takes every `lanes`-th row of the
        set's epochs, one epoch after another, each in an order of its own.

        Args:
            lane: the number of the lane, from 0.
            lanes: how many lanes there are.
            seed: decides the order of the rows.
            position: the number of rows that the lane took in the run that is resumed; None is 0.
        """
        return _PreparedFeed(self.data.rows, lane, lanes, seed, position if isinstance(position, int) else 0)

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
    """The feed of a PreparedSet: the packed `rows` in the order of an epoch (`epoch_order`, by `seed`), then in that of
    the next epoch, and so on without end. Of this sequence lane number `lane` of `lanes` takes every `lanes`-th row,
    beginning with row `lane`, so in one epoch no two lanes take the same row. taken: how many rows the lane took in the
    run that is resumed, 0 in a new one. `PreparedSet.feed` makes it."""

    def __init__(self, rows: Rows, lane: int, lanes: int, seed: int, taken: int):
        self._rows, self._lane, self._lanes, self._seed, self._taken = rows, lane, lanes, seed, taken
        self._order: tuple[int, np.ndarray] | None = None

    def next(self) -> tuple[Rows, int]:
        """Takes the next row of this lane, and returns (rows, index): it is row `index` of the packed rows `rows`,
        which FedBatches writes into the lane's part of a batch. It never waits and never ends."""
        epoch, place = divmod(self._taken * self._lanes + self._lane, len(self._rows))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(len(self._rows), self._seed, epoch)
        self._taken += 1
        return self._rows, int(self._order[1][place])

    def position(self) -> Json:
        """The number of rows taken so far, which a checkpoint records; it is the `taken` of the resumed run."""
        return self._taken

    def close(self) -> None:
        """Does nothing: this feed has no thread or file to release. The method is there because every feed has one."""
