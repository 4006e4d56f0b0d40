"""The engine of the server: one thread drives the samplers of all models. A sampler decodes the answers of many clients
at once, each answer in one of the sampler's slots. Requests submit each answer as a `Row` to the `Engine` and read the
tokens from their `Answers`, in which a `_Failed` takes the place of tokens if an error ends a row. If a sampler refuses
a row, `_code` gives OpenAI's error code for the reason.

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
from collections.abc import Awaitable, Callable, Mapping, Sequence

from jaxtune.models.generation.requests import Decodes, Piece
from jaxtune.models.generation.sampler import Sampler
from jaxtune.serve.errors import ApiError
from jaxtune.system import lifetimes
from jaxtune.system.terminal import say

_MOST_ROWS = 1024  # that wait or decode; more are refused, as their clients would wait for minutes


@dataclasses.dataclass(frozen=True)
class Row:
    """One answer that is asked for: a prompt with the settings of its continuation, which a sampler decodes as one row
    of its batch. A request with n=3 has three rows."""

    prompt: list[int]  # token ids
    max_new_tokens: int | None  # the most tokens of the answer; None: as many as the row has room for
    temperature: float  # 0: the most likely token is always taken
    seed: int  # of the request; what a row draws depends on this (its low 32 bits) and `index`
    index: int  # the row's number among those of its request, from 0
    top_k: int  # tokens are drawn from the k most likely ones; 0: from all
    top_p: float  # tokens are drawn from the most likely ones that have this much probability in sum; 1: from all
    min_p: float  # tokens less likely than this times the most likely one are not drawn; 0: all are
    repetition_penalty: float  # above 1: tokens that occurred before become less likely; 1: it does nothing
    stop_strings: tuple[str, ...]  # the answer ends with the token that completes one of them
    # how many of the most likely tokens at the position of each sampled one are returned with log-probabilities
    top_logprobs: int = 0


@dataclasses.dataclass(frozen=True)
class _Failed:
    """Put into a request's queue in place of a Piece (the next tokens of a row) if a round of the sampler fails or the
    server stops: the row ends with this error and gets no further pieces."""

    error: ApiError  # which `Answers.next` raises, so that the whole request ends


class Answers:
    """The queue through which the engine's thread hands the tokens of one request's rows (answers that are being
    generated) to the request's handler.

    `Engine.submit` makes it, in the event loop that awaits it. The engine's thread calls `put` with new tokens of a
    row, or with an error that ends it. The request's handler awaits `next` in the event loop's thread until no rows are
    left, and must call `close` whatever happens, so that no slot decodes for a client that is gone.

    Args:
      engine: the engine that makes the rows.
      model: the name of the model that is asked.
      count: the number of rows.
    Attributes:
      model: the model's name.
      count: the number of rows.
      left: the number of rows whose last tokens `next` has not returned.
      numbers: the numbers that Sampler.submit gave the rows, by which `close` has them cancelled. Only the engine's
        thread uses them. That new tokens find these Answers does not depend on them (Engine._place).
    """

    def __init__(self, engine: Engine, model: str, count: int):
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self.model, self.count, self.left = model, count, count
        self.numbers: list[int] = []  # of the sampler's requests; the engine's thread sets them
        self._made: asyncio.Queue[tuple[int, Piece | _Failed]] = asyncio.Queue()
        self._closed = False

    async def next(self) -> tuple[int, Piece]:
        """Waits for the next tokens of any row, for the request's handler (app._whole or app._events); it must only be
        awaited while `left` is not 0. With the last tokens of a row (finish_reason is set) `left` becomes one less; an
        error does not change it.

        Returns:
          (index of the row in the request, its new tokens).
        Raises:
          ApiError: the engine failed, or the server stops.
        """
        index, made = await self._made.get()
        if isinstance(made, _Failed):
            raise made.error
        if made.finish_reason is not None:
            self.left -= 1
        return index, made

    def put(self, index: int, made: Piece | _Failed) -> None:
        """Queues `made`, the new tokens of a row or the error that ends it, for `next`; called by the engine's thread.
        If the event loop has ended, nothing happens. index: the row's index in its request."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._made.put_nowait, (index, made))

    def fail(self, why: ApiError) -> None:
        """Ends the rows with an error; called in the event loop."""
        self._made.put_nowait((0, _Failed(why)))

    def close(self) -> None:
        """Cancels the rows that have not ended, so that their slots (places in the sampler's batch) become free, and
        takes all rows off the number of those that wait or decode, which Engine.submit limits (Engine.forget). The
        request's handler calls it when the answer is complete (a stream: sent), has failed, or the client left, and
        Engine.submit if it raises; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._engine.forget(self)


class Engine:
    """The samplers of several models, and the thread that drives them, which begins when the Engine is made: by
    `jaxtune serve`, after the models are loaded. Server and app.py get it as an argument.

    Samplers are used in that thread alone. The event loop's thread sends it functions to call (`_commands`), and gets
    the results through each request's `Answers`. It calls `submit` to start a request's rows, `forget` to cancel them,
    and, when the server stops, `end` to end all rows with an error. `close` ends the thread, and so does Python's end.

    Args:
      samplers: for each model's name, a function that makes its sampler. It is called at once, and again for the next
        request after a failed round of this sampler, in which its arrays may have been lost.
      tokenizers: for each model's name, the tokenizer with which the sampler finds stop strings.
    Attributes:
      failure: the type and the first line of the message of the error with which the last round (of any model), or a
        later start of a request, failed; None if neither did.
      plans: for each model's name the SlotPlan of its sampler: the number of slots and the tokens that a row may have.
    Raises:
      ValueError: there is too little memory for the slots. Other errors of `samplers` are raised too.
    """

    def __init__(self, samplers: Mapping[str, Callable[[], Sampler]], tokenizers: Mapping[str, Decodes]):
        self._make, self._tokenizers = samplers, tokenizers
        self._samplers = {name: make() for name, make in samplers.items()}
        self._of_request: dict[tuple[str, int], tuple[Answers, int]] = {}  # of the engine's thread
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._rows = 0  # that wait or decode, as the event loop counts
        self._ended: ApiError | None = None
        self._open: set[Answers] = set()
        self._awaited: set[asyncio.Future[None]] = set()  # each gets the error of `end`
        self.failure: str | None = None
        self.plans = {name: sampler.plan for name, sampler in self._samplers.items()}
        self._thread = threading.Thread(target=self._drive, name="jaxtune serve: engine", daemon=True)
        self._thread.start()
        lifetimes.ends(self, _end_thread, self._commands, self._thread)

    # ---- called in the event loop's thread

    async def submit(self, model: str, rows: Sequence[Row]) -> Answers:
        """Puts rows at the end of the queue of the model with this name, all of them or none, and returns the Answers
        from which their tokens are read. It waits until the engine's thread has done so, after the pass that this
        thread is in (a round of each model that has rows). If this is cancelled, the rows are too. _Api._answer calls
        it.

        Raises:
          ApiError: 400 if the sampler refuses a prompt or a setting; 429 if more than 1,024 rows of all models would
            wait or be decoded; 500 for any other failure, also if there is too little memory to make a sampler anew;
            the error given to `end`, if the server is stopping.
        """
        if self._ended is not None:
            raise self._ended
        if self._rows + len(rows) > _MOST_ROWS:
            message = f"{self._rows} answers wait or are being made, and at most {_MOST_ROWS} may: ask again later"
            raise ApiError(429, message, code="rate_limit_exceeded")
        answers = Answers(self, model, len(rows))
        self._rows += len(rows)
        self._open.add(answers)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.add(done)
        self._commands.put(lambda: self._submit(answers, rows, done))
        try:
            await done
        except BaseException:
            answers.close()
            raise
        finally:
            self._awaited.discard(done)
        return answers

    async def unless_ended[T](self, work: Awaitable[T]) -> T:
        """What `work` returns; or the error of `end`, which cancels it."""
        task = asyncio.ensure_future(work)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.add(ended)
        if self._ended is not None:
            ended.set_exception(self._ended)
        try:
            await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                ended.result()
            return task.result()
        finally:
            self._awaited.discard(ended)
            for one in (task, ended):
                one.cancel()
            if ended.done() and not ended.cancelled():
                ended.exception()  # or asyncio says that nobody looked at it

    def forget(self, answers: Answers) -> None:
        """Takes a request's rows (`answers`) off the count that `submit` limits, and has the engine's thread cancel
        those that have not ended, which frees their slots in the batch. Only Answers.close calls it, in the event
        loop's thread, exactly once for each request that has Answers, also for a complete one."""
        self._rows -= answers.count
        self._open.discard(answers)
        self._commands.put(lambda: self._forget(answers))

    def end(self, why: ApiError) -> None:
        """Ends all answers with an error at once, whatever the engine's thread does, and refuses later ones with it."""
        self._ended = why
        for answers in self._open:
            answers.fail(why)
        for done in self._awaited:
            if not done.done():
                done.set_exception(why)
        self._commands.put(self._cancel_all)

    def close(self, seconds: float) -> bool:
        """Asks the thread to end, and says whether it has within `seconds`: a pass in which it compiles may take
        minutes. Rows that have not ended get no error."""
        _end_thread(self._commands, self._thread, seconds)
        return not self._thread.is_alive()

    # ---- called in the engine's thread

    def _drive(self) -> None:
        """The thread's main loop, which ends after `close`. Each pass first calls the functions that the event loop's
        thread has queued (`_obey`, which waits while no sampler has rows). Then every sampler that has rows makes one
        round, a few tokens of each row (`_step`), one model after another."""
        while self._obey():
            for name in list(self._samplers):
                if self._samplers[name].pending:
                    self._step(name)
        for sampler in self._samplers.values():
            sampler.close()

    def _obey(self) -> bool:
        """Calls the functions that the event loop's thread has queued (`_commands`), in order. If no sampler has rows
        to decode, it first waits until a function is queued. Returns False if `close` was called, so that the thread
        ends; else True. Functions that were queued after `close` are not called."""
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
        """Submits a request's rows to the sampler of its model, on behalf of `submit`. No error is raised in this
        thread.

        Args:
          answers: the queue for the rows' tokens, which has the model's name.
          rows: the rows.
          done: the future that `submit` awaits. In the event loop it gets None as its result, or as its exception the
            ApiError that says why no row was taken.
        """
        error: ApiError | None = self._ended
        if error is None:
            try:
                self._place(answers, rows)
            except ValueError as refused:
                error = ApiError(400, str(refused).removeprefix("Sampler: "), code=_code(str(refused)))
            except Exception as failed:  # whatever a device or a compiler raises: the thread must not end
                error = self._failed(failed)

        def report() -> None:
            """Sets the future's result or exception, in the event loop's thread."""
            if done.done():  # cancelled, or the server stops
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the event loop has ended
            done.get_loop().call_soon_threadsafe(report)

    def _place(self, answers: Answers, rows: Sequence[Row]) -> None:
        """For `_submit`: submits rows to the sampler of their model, which is made anew if the last one failed.
        `_of_request` gets (answers, index of the row) for each row, by which `_step` finds where its tokens go;
        answers.numbers gets its number in the sampler, by which `_forget` cancels it. answers: the queue for the rows'
        tokens.

        Raises:
          ValueError: the sampler refuses a row; those submitted before it are cancelled.
          Exception: what a device or a compiler raises when a sampler is made anew; RuntimeError if there is too little
            memory for it.
        """
        name = answers.model
        if name not in self._samplers:
            try:
                self._samplers[name] = self._make[name]()
            except ValueError as error:  # which is no fault of the request
                raise RuntimeError(str(error)) from error
            self.plans[name] = self._samplers[name].plan
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
                    top_logprobs=row.top_logprobs,
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
        """Cancels the rows of a request (`answers`) that have not ended, whether they wait or decode. It runs in the
        engine's thread, on behalf of `forget`, and of `_place` if the sampler refuses one of the rows."""
        sampler = self._samplers.get(answers.model)
        for number in answers.numbers:
            owner, _ = self._of_request.get((answers.model, number), (None, 0))
            if owner is answers and sampler is not None:  # a sampler that was made anew numbers from 0 again
                del self._of_request[answers.model, number]
                sampler.cancel(number)
        answers.numbers.clear()

    def _step(self, name: str) -> None:
        """Runs one round of the sampler of the model of this name, which makes a few tokens in every slot, and puts
        each row's new tokens (a Piece) into the Answers of its request; those of cancelled rows are dropped. If the
        round raises, the sampler is dropped and all its rows end with the error, because its arrays may have been
        donated to the call that failed. Otherwise `failure` becomes None, also if it was of another model."""
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

    def _cancel_all(self) -> None:
        for name, number in self._of_request:
            self._samplers[name].cancel(number)
        self._of_request.clear()

    def _failed(self, error: Exception) -> ApiError:
        """Prints the traceback of an unexpected error on stderr, such as one of the device, and returns the ApiError
        (500), with the error's type and the first line of its message, for those whose work failed: the request that
        could not be submitted, or all requests with rows in the sampler whose round failed. It also stores these words
        in `failure`, which /health reports until a round, of any model, succeeds. The engine continues."""
        say("jaxtune: the engine failed:\n" + "".join(traceback.format_exception(error)), file=sys.stderr)
        self.failure = f"{type(error).__name__}: {error}".split("\n")[0]
        return ApiError(500, f"the engine failed: {self.failure}")


def _end_thread(commands: queue.SimpleQueue, thread: threading.Thread, seconds: float | None = None) -> None:
    """Without a limit the wait may be as long as a compile; Ctrl-C ends it."""
    commands.put(None)
    thread.join(seconds)


def _code(refused: str) -> str | None:
    """OpenAI's error code for `refused`, the message with which a sampler refused a row: context_length_exceeded, by
    which clients know that a conversation, or the answer that they ask for, must become shorter; or None for any other
    reason."""
    return "context_length_exceeded" if "positions" in refused else None
