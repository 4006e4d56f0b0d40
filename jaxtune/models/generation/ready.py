"""The programs that a sampler has, and threads that compile further ones while rows decode."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.generation import slots as device
from jaxtune.models.generation.prefixes import block_calls, which_are_caches
from jaxtune.models.generation.sampling import Kind
from jaxtune.models.generation.scores import scored
from jaxtune.models.generation.structure import Structure
from jaxtune.models.programs.kept import Call, Prepared, begin, prepare
from jaxtune.models.vision.pictures import Pictures
from jaxtune.models.vision.tower import TowerConfig
from jaxtune.system import lifetimes

logger = logging.getLogger(__name__)

# A program that a larger one serves is compiled so much later: a burst after a start is not disturbed.
LATER_SECONDS = 30.0
AGAIN_SECONDS = 60.0  # after which a program that failed, perhaps for lack of memory, is tried again
_THREADS = 2  # that compile, so that a program that takes long keeps only itself waiting
_AT_ONCE = 8  # programs for another model that are compiled together, before what is due


@dataclasses.dataclass(frozen=True)
class Prefill:
    rows: int
    width: int
    capacity: int


@dataclasses.dataclass(frozen=True)
class Look:
    """Prefills one prompt with pictures."""

    width: int
    patches: int

    def serves(self, other: Look) -> bool:
        """Whether it can take the place of `other`."""
        return self.width >= other.width and self.patches >= other.patches


@dataclasses.dataclass(frozen=True)
class Pack:
    size: int
    width: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Extend:
    tokens: int
    capacity: int


@dataclasses.dataclass(frozen=True)
class Insert:
    """Of `rows` rows with caches of `width` into slots of `capacity`."""

    capacity: int
    rows: int
    width: int


@dataclasses.dataclass(frozen=True)
class Grow:
    rows: int
    capacity: int
    longer: int


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Of `size` tokens, of beginnings of prompts whose states have room for `capacity`."""

    size: int
    capacity: int


@dataclasses.dataclass(frozen=True)
class Mark:
    pass


@dataclasses.dataclass(frozen=True)
class Score:
    width: int


@dataclasses.dataclass(frozen=True)
class Decode:
    kind: Kind
    steps: int
    capacity: int
    ends: int  # columns of Rows.ends
    biases: int  # of Adjustments; 0 without Kind.adjusts
    masks: bool

    def serves(self, other: Decode) -> bool:
        """Whether it can take the place of `other`."""
        alike = dataclasses.replace(self, kind=other.kind, biases=other.biases) == other
        return alike and self.kind | other.kind == self.kind and other.biases in (0, self.biases)


# What one program, or a few, are compiled for.
type Size = Prefill | Look | Pack | Extend | Insert | Grow | Blocks | Mark | Score | Decode


@dataclasses.dataclass(frozen=True, eq=False)
class Shapes:
    """Makes the calls of a sampler's programs from their sizes.

    structure, arrays: the model without its arrays, and their shapes.
    gated: whether rows may have adapters.
    rows: of empty slots.
    """

    programs: device.Programs
    structure: Structure
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    gated: bool
    where: jax.sharding.SingleDeviceSharding
    rows: device.Rows
    tower: TowerConfig | None = None

    def of(self, structure: Structure, arrays: Sequence[jax.ShapeDtypeStruct], gated: bool) -> Shapes:
        """Those of another model; the same object for the same model."""
        if structure is self.structure and tuple(arrays) == self.arrays and gated == self.gated:
            return self
        return dataclasses.replace(self, structure=structure, arrays=tuple(arrays), gated=gated)

    def calls(self, size: Size) -> list[Call]:
        return [call for call in self._calls(size) if call is not None]

    def _calls(self, size: Size) -> Iterator[Call | None]:
        programs, leaves, count = self.programs, self._weights(), len(self.rows.start)
        match size:
            case Prefill(rows, width, capacity):
                tokens = self._ints(rows, width), self._ints(rows), self._ints(rows)
                adapters = (None, None, *self._adapters(rows)) if self.gated else ()
                yield programs.prefill.call(self.structure, capacity, leaves, *tokens, *adapters)
            case Look(width, patches):
                tokens = self._ints(1, width), self._ints(1), self._ints(1)
                arguments = *tokens, *self._pictures(width, patches), *self._adapters(1)
                yield programs.prefill.call(self.structure, width, leaves, *arguments)
            case Pack(length, width, rows):
                tokens = self._ints(1, length), self._ints(rows), self._ints(rows), self._ints(rows)
                yield programs.pack.call(self.structure, width, leaves, *tokens, *self._adapters(rows))
            case Extend(length, capacity):
                tokens = self._ints(1, length), self._ints(1), self._ints(1), self._ints(1)
                states = self._states(1, capacity)
                yield programs.extend.call(self.structure, leaves, states, *tokens, *self._adapters(1))
            case Insert(capacity, rows, width):
                states, staged = self._states(count, capacity), self._states(rows, width)
                if jax.tree.leaves(states):
                    yield programs.insert.call(states, staged, self._ints(rows), self._ints(rows))
            case Grow(rows, capacity, longer):
                pairs = zip(*(jax.tree.leaves(self._states(rows, c)) for c in (capacity, longer)), strict=True)
                for old, new in dict.fromkeys((old, new.shape) for old, new in pairs):
                    if old.shape != new:
                        yield programs.grow.call(new, old)
            case Blocks(tokens, capacity):
                states = self._states(1, capacity)
                yield from block_calls(tokens, which_are_caches(self.structure, self.arrays, states), states)
            case Mark():
                vocab = self.structure.config.vocab_size
                yield programs.mark.call(self._ints(count, vocab), self._ints(), self._ints(vocab))
            case Score(width):
                adapters = self._ints(1, width) if self.gated else None
                yield scored.call(self.structure, leaves, self._ints(1, width), self._ints(), adapters)
            case Decode(kind, steps, capacity):
                live = self._placed(device.Live(*(np.zeros(count, dtype) for dtype in (np.int32, np.int32, bool))))
                vocab = self.structure.config.vocab_size
                seen = self._ints(count, vocab) if kind.penalises else None
                rows = self._placed(self._rows_of(size))
                changed, states = self._array((count,), bool), self._states(count, capacity)
                if not size.masks:
                    arguments = leaves, states, live, seen, changed, live, rows
                    yield programs.decode.call(self.structure, kind, steps, *arguments)
                    return
                yield programs.logits.call(
                    self.structure, leaves, states, live, changed, live, rows.delta, rows.adapter
                )
                logits = self._placed(device.logits_shape(self.structure, self.arrays, count))
                rows = rows._replace(delta=None, adapter=None)
                yield programs.choose.call(self.structure, kind, logits, live, seen, rows)

    def _weights(self) -> list[jax.ShapeDtypeStruct]:
        return [array if array.sharding else self._array(array.shape, array.dtype) for array in self.arrays]

    def _rows_of(self, size: Decode) -> device.Rows:
        count, vocab = len(self.rows.start), self.structure.config.vocab_size
        ends = np.zeros((count, size.ends), np.int32)
        adjustments = device.empty_adjustments(count, size.biases) if size.kind.adjusts else None
        masks = np.zeros((count, (vocab + 31) // 32), np.uint32) if size.masks else None
        adapter = self.rows.adapter if self.gated else None
        return self.rows._replace(ends=ends, adjustments=adjustments, masks=masks, adapter=adapter)

    def _pictures(self, width: int, patches: int) -> tuple[jax.ShapeDtypeStruct, Pictures]:
        """(positions, pictures) as of PromptPictures.padded."""
        assert self.tower is not None
        axes, numbers = len(self.structure.config.rotary[0].sections), self.tower.patch_numbers

        def pictures() -> Pictures:
            ones, pairs = jnp.zeros((1, patches), jnp.int32), jnp.zeros((1, patches, 2), jnp.int32)
            values, features = jnp.zeros((1, patches, numbers), jnp.float32), jnp.zeros((1, width), jnp.int32)
            return Pictures(values, ones, pairs, pairs, features)

        return self._ints(1, width, *([axes] if axes else [])), self._placed(jax.eval_shape(pictures))

    def _adapters(self, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (self._ints(rows),) if self.gated else ()

    def _states(self, rows: int, capacity: int):
        return self._placed(device.states_shape(self.structure, self.arrays, rows, capacity))

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._array(shape, jnp.int32)

    def _array(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.where)

    def _placed(self, tree):
        return jax.tree.map(lambda leaf: self._array(leaf.shape, leaf.dtype), tree)


class Ready:
    """Which programs of a sampler are compiled.

    beside: further ones are compiled in threads; False: whoever calls them compiles them, so that all count as ready.
    """

    def __init__(self, shapes: Shapes, beside: bool):
        self.beside, self._queue = beside, _Queue(shapes)
        self.close = lifetimes.end_with(self, _end, self._queue)

    def use(self, structure: Structure, arrays: Sequence[jax.ShapeDtypeStruct], gated: bool) -> None:
        """Takes another model: what this process has for it stays ready."""
        shapes = self._queue.shapes.of(structure, arrays, gated)
        with self._queue.changed:
            self._queue.following = None
            if shapes is self._queue.shapes:
                return
            ready = {size for size in self._queue.ready if all(c.function.has(c) for c in shapes.calls(size))}
            self._queue.use(shapes, ready)

    def follows(self, structure: Structure, arrays: Sequence[jax.ShapeDtypeStruct], gated: bool) -> bool:
        """Whether what is ready is so for another model; otherwise that is being compiled. RuntimeError: in vain."""
        queue = self._queue
        shapes = queue.shapes.of(structure, arrays, gated)
        if not self.beside or shapes is queue.shapes:
            return True
        with queue.changed:
            following = queue.following
            if following is not None and following.error is not None and time.monotonic() >= following.again:
                following = None
            if following is None or following.shapes.of(structure, arrays, gated) is not following.shapes:
                queue.following = following = _Following(shapes)
                queue.changed.notify_all()
                self._start()
            if (error := following.error) is not None:
                raise RuntimeError(f"a program could not be compiled: {error}") from error
            return queue.ready <= following.ready

    def prepare(self, sizes: Sequence[Size]) -> Prepared:
        """Loads or compiles programs, all at the same time; the slowest should come first."""
        calls = [call for size in dict.fromkeys(sizes) for call in self._queue.shapes.calls(size)]
        prepared = prepare(calls)
        with self._queue.changed:
            self._queue.ready.update(sizes)
        return prepared

    def begin(self, *sizes: Size) -> None:
        """Begins to load or compile programs in threads, if programs are kept; the slowest should come first."""
        begin([call for size in sizes for call in self._queue.shapes.calls(size)])

    def choose(self, *options: Sequence[Size]) -> int | None:
        """The index of the first option whose programs are all ready; the first option's are compiled otherwise. None:
        no option's are. RuntimeError: they could not be compiled.
        """
        if not self.beside:
            return 0
        queue = self._queue
        with queue.changed:
            index = next((index for index, sizes in enumerate(options) if queue.ready.issuperset(sizes)), None)
            if index != 0:
                queue.want(options[0], 0.0 if index is None else LATER_SECONDS)
                self._start()
        return index

    def looks(self, size: Look) -> list[Look]:
        """The ready ones that serve `size`, the smallest first."""
        with self._queue.changed:
            looks = [other for other in self._queue.ready if isinstance(other, Look) and other.serves(size)]
        return sorted(looks, key=lambda other: (other.patches, other.width))

    def decode(self, size: Decode, biases: int) -> Decode | None:
        """The size, or a ready one that serves it, as cheap as there is; None: none does. biases: columns of the
        arrays, which a program with biases must have.
        """
        if not self.beside:
            return size
        with self._queue.changed:
            if size in self._queue.ready and size.biases in (0, biases):
                return size
            decodes = [other for other in self._queue.ready if isinstance(other, Decode)]
        serving = [other for other in decodes if other.serves(size) and other.biases in (0, biases)]
        return min(serving, key=lambda other: (sum(other.kind), other.kind), default=None)

    def forget_later(self) -> None:
        """Forgets what was wanted and has something that serves it meanwhile."""
        with self._queue.changed:
            self._queue.forget_later()

    def wait(self, seconds: float) -> None:
        """Until a program is ready that was not."""
        with self._queue.changed:
            self._queue.changed.wait(seconds)

    def _start(self) -> None:
        """With the lock of the queue."""
        if not self._queue.threads:
            self._queue.threads = [
                threading.Thread(target=self._queue.run, name="compiles beside", daemon=True) for _ in range(_THREADS)
            ]
            for thread in self._queue.threads:
                thread.start()


@dataclasses.dataclass
class _Following:
    """Another model, for which all is compiled that is ready."""

    shapes: Shapes
    ready: set[Size] = dataclasses.field(default_factory=set)
    error: Exception | None = None
    again: float = 0.0  # when it is tried again after an error


class _Queue:
    """What is ready, and what the threads compile until it is closed."""

    def __init__(self, shapes: Shapes):
        self.shapes, self.closed = shapes, False
        self.changed = threading.Condition()
        self.ready: set[Size] = set()
        self.threads: list[threading.Thread] = []
        self.following: _Following | None = None
        self._failed: dict[Size, tuple[Exception, float]] = {}  # and when each is tried again
        self._due: dict[Size, float] = {}  # when each begins
        self._begun: set[tuple[Shapes, Size]] = set()  # that a thread compiles

    def use(self, shapes: Shapes, ready: set[Size]) -> None:
        self.shapes, self.ready, self.following = shapes, ready, None
        self._failed.clear()
        self._due.clear()

    def forget_later(self) -> None:
        now = time.monotonic()
        self._due = {size: due for size, due in self._due.items() if due <= now}

    def want(self, sizes: Sequence[Size], seconds: float) -> None:
        now = time.monotonic()
        due, self._failed = now + seconds, {size: each for size, each in self._failed.items() if now < each[1]}
        for size in sizes:
            if size in self._failed and not seconds:
                error, _ = self._failed[size]
                raise RuntimeError(f"a program could not be compiled: {error}") from error
            if size not in self.ready and size not in self._failed and due < self._due.get(size, np.inf):
                self._due[size] = due
                self.changed.notify_all()

    def run(self) -> None:
        while (work := self._next()) is not None:
            (shapes, sizes), error = work, None
            try:
                prepare([call for size in sizes for call in shapes.calls(size)])
            except Exception as raised:  # of a device or a compiler
                error = raised
                logger.warning("a program was not compiled (%s): %s", ", ".join(map(str, sizes)), error)
            with self.changed:
                self._begun -= {(shapes, size) for size in sizes}
                again = time.monotonic() + AGAIN_SECONDS
                if shapes is self.shapes:
                    for size in sizes:
                        self._due.pop(size, None)
                    if error is None:
                        self.ready.update(sizes)
                    else:
                        self._failed |= dict.fromkeys(sizes, (error, again))
                elif self.following is not None and shapes is self.following.shapes:
                    self.following.ready.update(sizes)
                    if error is not None and self.following.error is None:
                        self.following.error, self.following.again = error, again
                self.changed.notify_all()

    def _next(self) -> tuple[Shapes, list[Size]] | None:
        """Waits for the size that is due first, else some of another model's; None: the end."""
        with self.changed:
            while not self.closed:
                waiting = [size for size in self._due if (self.shapes, size) not in self._begun]
                size = min(waiting, key=lambda size: self._due[size], default=None)
                seconds = None if size is None else self._due[size] - time.monotonic()
                if size is not None and seconds is not None and seconds <= 0:
                    return self._begin(self.shapes, [size])
                if (following := self.following) is not None and following.error is None:
                    missing = (size for size in self.ready - following.ready)
                    missing = (size for size in missing if (following.shapes, size) not in self._begun)
                    if sizes := list(itertools.islice(missing, _AT_ONCE)):
                        return self._begin(following.shapes, sizes)
                self.changed.wait(seconds)
            return None

    def _begin(self, shapes: Shapes, sizes: list[Size]) -> tuple[Shapes, list[Size]]:
        self._begun |= {(shapes, size) for size in sizes}
        return shapes, sizes


def _end(queue: _Queue) -> None:
    """Waits for programs that are being compiled."""
    with queue.changed:
        queue.closed = True
        queue.changed.notify_all()
    for thread in queue.threads:
        thread.join()
