"""One thread drives the samplers of all models, and many clients share their slots.

Each model (the base, and the base with each adapter) has a sampler of its own, because rows of one batch multiply by
the same weights. Samplers take turns: while several have rows, each makes a round of tokens, one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence

from jaxtune.models.generation.requests import Decodes
from jaxtune.models.generation.sampler import Piece, Sampler
from jaxtune.serve.errors import ApiError
from jaxtune.system.terminal import say

_MOST_ROWS = 1024  # that wait or decode; more are refused, as their clients would wait for minutes


@dataclasses.dataclass(frozen=True)
class Row:
    """One continuation that is asked for; the fields are those of Sampler.submit."""

    prompt: list[int]
    max_new_tokens: int | None
    temperature: float
    seed: int
    # Of the row among those of one request.
    index: int
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    stop_strings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Failed:
    """Ends a row that gets no further pieces."""

    error: ApiError


class Answers:
    """The rows of one request, as they are made. It is used in the event loop's thread.

    Attributes:
      model: its name. count: how many rows there are. left: how many of them have not ended.
    """

    def __init__(self, engine: Engine, model: str, count: int):
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self.model, self.count, self.left = model, count, count
        self.numbers: list[int] = []  # of the sampler's requests; the engine's thread sets them
        self._made: asyncio.Queue[tuple[int, Piece | _Failed]] = asyncio.Queue()
        self._closed = False

    async def next(self) -> tuple[int, Piece]:
        """(index of a row, what was made of it), while rows are left.

        Raises:
          ApiError: the rows cannot be continued.
        """
        index, made = await self._made.get()
        if isinstance(made, _Failed):
            raise made.error
        if made.finish_reason is not None:
            self.left -= 1
        return index, made

    def put(self, index: int, made: Piece | _Failed) -> None:
        """Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._made.put_nowait, (index, made))

    def close(self) -> None:
        """Cancels the rows that have not ended; their slots become free. It may be called twice."""
        if not self._closed:
            self._closed = True
            self._engine.forget(self)


class Engine:
    """The samplers of several models, and the thread that drives them.

    Args:
      samplers: for each model's name, what makes its sampler; called at once, and again after a failure.
      tokenizers: for each model's name, what turns tokens into text, for stop strings.
    Attributes:
      failure: what the last round ended with, if it failed; None: all is well.
    Raises:
      ValueError: slots that memory has no room for.
    """

    def __init__(self, samplers: Mapping[str, Callable[[], Sampler]], tokenizers: Mapping[str, Decodes]):
        self._make, self._tokenizers = samplers, tokenizers
        self._samplers = {name: make() for name, make in samplers.items()}
        self._of_request: dict[tuple[str, int], tuple[Answers, int]] = {}  # of the engine's thread
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._rows = 0  # that wait or decode, as the event loop counts
        self._ended: ApiError | None = None
        self.failure: str | None = None
        self.plans = {name: sampler.plan for name, sampler in self._samplers.items()}
        self._thread = threading.Thread(target=self._drive, name="jaxtune serve: engine", daemon=True)
        self._thread.start()

    # ---- called in the event loop's thread

    async def submit(self, model: str, rows: Sequence[Row]) -> Answers:
        """Puts rows at the end of the model's queue, all of them or none.

        Raises:
          ApiError: a prompt or a setting that the sampler refuses; too many rows are waiting; the server is stopping.
        """
        if self._rows + len(rows) > _MOST_ROWS:
            message = f"{self._rows} answers wait or are being made, and at most {_MOST_ROWS} may: ask again later"
            raise ApiError(429, message, code="rate_limit_exceeded")
        answers = Answers(self, model, len(rows))
        self._rows += len(rows)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commands.put(lambda: self._submit(answers, rows, done))
        try:
            await done
        except BaseException:
            answers.close()
            raise
        return answers

    def forget(self, answers: Answers) -> None:
        """Cancels what is left of a request."""
        self._rows -= answers.count
        self._commands.put(lambda: self._forget(answers))

    def end(self, why: ApiError) -> None:
        """Ends all rows with an error, those that are submitted later too."""
        self._commands.put(lambda: self._end(why))

    def close(self, seconds: float) -> bool:
        """Ends the thread; returns whether it has ended within this time, which it has not while it compiles."""
        self._commands.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # ---- called in the engine's thread

    def _drive(self) -> None:
        while self._obey():
            for name in list(self._samplers):
                if self._samplers[name].pending:
                    self._step(name)

    def _obey(self) -> bool:
        """Does what the event loop asked for, and waits for that while no row is left; False: the thread is to end."""
        waits = not any(sampler.pending for sampler in self._samplers.values())
        while True:
            try:
                command = self._commands.get(waits)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            waits = False

    def _submit(self, answers: Answers, rows: Sequence[Row], done: asyncio.Future[None]) -> None:
        error: ApiError | None = self._ended
        if error is None:
            try:
                self._place(answers, rows)
            except ValueError as refused:
                error = ApiError(400, str(refused).removeprefix("Sampler: "), code=_code(str(refused)))
            except Exception as failed:  # whatever a device or a compiler raises: the thread must not end
                error = self._failed(failed)

        def report() -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the event loop has ended
            done.get_loop().call_soon_threadsafe(report)

    def _place(self, answers: Answers, rows: Sequence[Row]) -> None:
        name = answers.model
        if name not in self._samplers:
            self._samplers[name] = self._make[name]()
        sampler = self._samplers[name]
        try:
            for index, row in enumerate(rows):
                number = sampler.submit(
                    row.prompt,
                    row.max_new_tokens,
                    row.temperature,
                    row.seed,
                    index=row.index,
                    top_k=row.top_k,
                    top_p=row.top_p,
                    min_p=row.min_p,
                    repetition_penalty=row.repetition_penalty,
                    stop_strings=row.stop_strings,
                    tokenizer=self._tokenizers[name],
                )
                answers.numbers.append(number)
                self._of_request[name, number] = answers, index
        except ValueError:
            self._forget(answers)
            raise

    def _forget(self, answers: Answers) -> None:
        sampler = self._samplers.get(answers.model)
        for number in answers.numbers:
            if self._of_request.pop((answers.model, number), None) is not None and sampler is not None:
                sampler.cancel(number)
        answers.numbers.clear()

    def _step(self, name: str) -> None:
        try:
            pieces = self._samplers[name].step()
        except Exception as failed:  # as in _submit; the sampler's arrays may be gone
            del self._samplers[name]
            error = self._failed(failed)
            for key in [key for key in self._of_request if key[0] == name]:
                answers, index = self._of_request.pop(key)
                answers.put(index, _Failed(error))
            return
        self.failure = None
        for piece in pieces:
            key = name, piece.request
            if key in self._of_request:
                answers, index = self._of_request[key]
                if piece.finish_reason is not None:
                    del self._of_request[key]
                answers.put(index, piece)

    def _end(self, why: ApiError) -> None:
        self._ended = why
        for (name, number), (answers, index) in list(self._of_request.items()):
            answers.put(index, _Failed(why))
            self._samplers[name].cancel(number)
        self._of_request.clear()

    def _failed(self, error: Exception) -> ApiError:
        say("jaxtune: the engine failed:\n" + "".join(traceback.format_exception(error)), file=sys.stderr)
        self.failure = f"{type(error).__name__}: {error}".split("\n")[0]
        return ApiError(500, f"the engine failed: {self.failure}")


def _code(refused: str) -> str | None:
    """OpenAI's word for what a sampler refuses, by which clients know that a conversation must become shorter."""
    return "context_length_exceeded" if "positions" in refused else None
