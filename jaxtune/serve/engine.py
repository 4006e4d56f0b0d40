"""One thread drives the samplers of all models, each of which decodes the answers of many clients in slots.

Each model (the base, and the base with each adapter) has a sampler, because rows of a batch multiply by the same
weights. Samplers with rows take turns, a round of tokens each.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import queue
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence

from jaxtune.models.generation.requests import Decodes, Piece
from jaxtune.models.generation.sampler import Sampler
from jaxtune.serve.errors import ApiError
from jaxtune.serve.requests import Row
from jaxtune.system import lifetimes
from jaxtune.system.terminal import say

_SCORING_SECONDS = 0.05  # between two looks whether a program that scores is ready
_MOST_ROWS = 1024  # that wait or decode; more are refused, as their clients would wait for minutes


@dataclasses.dataclass(frozen=True)
class PromptScores:
    """Comes before a row's first tokens if Row.scores_prompt."""

    logprobs: list[float]  # of each token of the prompt but the first, in nats
    # the likeliest tokens in the place of each and their log-probabilities, as many as Row.top_logprobs
    top_logprobs: list[list[tuple[int, float]]]


@dataclasses.dataclass(frozen=True)
class _Failed:
    """Takes the place of a row's tokens: the row ends with this error."""

    error: ApiError  # which `Answers.next` raises, so that the whole request ends


class Answers:
    """The queue of one request's tokens, from the engine's thread to the event loop.

    The request's handler awaits `next` until `left` is 0, and must `close` whatever happens, so that no slot decodes
    for a client that is gone.

      model: its name in requests. count: rows of the request.

    Attributes:
      left: rows whose last tokens `next` has not returned.
      numbers: of the rows in the sampler; only the engine's thread uses them.
    """

    def __init__(self, engine: Engine, model: str, count: int):
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self.model, self.count, self.left = model, count, count
        self.numbers: list[int] = []  # of the sampler's requests; the engine's thread sets them
        self._made: asyncio.Queue[tuple[int, Piece | PromptScores | _Failed]] = asyncio.Queue()
        self._closed = False

    async def next(self) -> tuple[int, Piece | PromptScores]:
        """Waits for (index of a row, its new tokens or its prompt's scores); only while `left` is not 0.

        ApiError: the engine failed, or the server stops.
        """
        index, piece = await self._made.get()
        if isinstance(piece, _Failed):
            raise piece.error
        if isinstance(piece, Piece) and piece.finish_reason is not None:
            self.left -= 1
        return index, piece

    def put(self, index: int, piece: Piece | PromptScores | _Failed) -> None:
        """Queues a row's tokens or its error, from the engine's thread; nothing happens after the event loop's end.
        index: the row's among those of the request.
        """
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._made.put_nowait, (index, piece))

    def fail(self, error: ApiError) -> None:
        """Ends the rows with an error; in the event loop."""
        self._made.put_nowait((0, _Failed(error)))

    def close(self) -> None:
        """Cancels the rows that have not ended and frees their slots; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._engine.forget(self)


class Engine:
    """The samplers of several models, and the thread that drives them, which begins at once.

    Samplers are used in that thread alone: the event loop queues functions for it (`_commands`) and gets results
    through `Answers`. ValueError: too little memory for the slots.

    Args:
      samplers: {model: makes its sampler}, called at once, and again after a failed round, whose arrays may be lost.
      tokenizers: {model: finds stop strings}.
    Attributes:
      failure: the error of the last round of any model, or of a later start of a request; None: neither failed.
      plans: {model: SlotPlan}, the slots and the tokens of a row.
    """

    def __init__(self, samplers: Mapping[str, Callable[[], Sampler]], tokenizers: Mapping[str, Decodes]):
        self._make, self._tokenizers = samplers, tokenizers
        self._samplers = {name: make() for name, make in samplers.items()}
        self._of_request: dict[tuple[str, int], tuple[Answers, int]] = {}  # of the engine's thread
        self._scoring: collections.deque[tuple[Answers, int, Row, Hashable]] = collections.deque()
        self._scores = False  # whether the last pass scored a prompt
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._rows = 0  # that wait or decode, as the event loop counts
        self._ended: ApiError | None = None
        self._open: set[Answers] = set()
        self._awaited: set[asyncio.Future[None]] = set()  # each gets the error of `end`
        self.failure: str | None = None
        self.plans = {name: sampler.plan for name, sampler in self._samplers.items()}
        self._thread = threading.Thread(target=self._drive, name="jaxtune serve: engine", daemon=True)
        self._thread.start()
        lifetimes.end_with(self, _end_thread, self._commands, self._thread)

    # ---- called in the event loop's thread

    async def submit(self, model: str, rows: Sequence[Row], client: Hashable = None) -> Answers:
        """Queues all rows or none, after the current pass of the engine's thread; a cancelled call cancels the rows.
        Rows of clients take turns, and so do a client's requests.

        ApiError: 400: the sampler refuses a row; 429: more than 1,024 rows would wait or decode; 500: any other
        failure; or the error of `end`.
        """
        if self._ended is not None:
            raise self._ended
        if self._rows + len(rows) > _MOST_ROWS:
            message = f"{self._rows} answers wait or are being made, and at most {_MOST_ROWS} may: ask again later"
            raise ApiError(429, message, code="rate_limit_exceeded")
        answers = Answers(self, model, len(rows))
        self._rows += len(rows)
        self._open.add(answers)
        submitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.add(submitted)
        self._commands.put(lambda: self._submit(answers, rows, submitted, client))
        try:
            await submitted
        except BaseException:
            answers.close()
            raise
        finally:
            self._awaited.discard(submitted)
        return answers

    async def unless_ended[T](self, work: Awaitable[T]) -> T:
        """The result of `work`, or the error of `end`, which cancels it."""
        task = asyncio.ensure_future(work)
        end_signal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.add(end_signal)
        if self._ended is not None:
            end_signal.set_exception(self._ended)
        try:
            await asyncio.wait((task, end_signal), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                end_signal.result()
            return task.result()
        finally:
            self._awaited.discard(end_signal)
            for future in (task, end_signal):
                future.cancel()
            if end_signal.done() and not end_signal.cancelled():
                end_signal.exception()  # or asyncio says that nobody looked at it

    def forget(self, answers: Answers) -> None:
        """Takes the rows off the count that `submit` limits, and cancels those that have not ended. Once for each
        Answers, in the event loop.
        """
        self._rows -= answers.count
        self._open.discard(answers)
        self._commands.put(lambda: self._forget(answers))

    def end(self, error: ApiError) -> None:
        """Ends all answers at once, whatever the engine's thread does, and refuses later ones."""
        self._ended = error
        for answers in self._open:
            answers.fail(error)
        for future in self._awaited:
            if not future.done():
                future.set_exception(error)
        self._commands.put(self._cancel_all)

    def counts(self) -> dict[str, tuple[int, int]]:
        """{model: (rows that decode, rows that wait)}, of about now."""
        samplers = self._samplers.copy()
        return {name: (sampler.pending - sampler.waiting, sampler.waiting) for name, sampler in samplers.items()}

    def close(self, seconds: float) -> bool:
        """Asks the thread to end; False if it has not within `seconds`: a pass that compiles may take minutes."""
        _end_thread(self._commands, self._thread, seconds)
        return not self._thread.is_alive()

    # ---- called in the engine's thread

    def _drive(self) -> None:
        while self._obey():
            self._scores = self._score_one()
            for name in list(self._samplers):
                if self._samplers[name].pending:
                    self._step(name)
        for sampler in self._samplers.values():
            sampler.close()

    def _obey(self) -> bool:
        """Calls the queued functions, and waits for one while there are no rows; False after `close`."""
        waits = not self._scores and not any(sampler.pending for sampler in self._samplers.values())
        while True:
            try:
                command = self._commands.get(waits, _SCORING_SECONDS if self._scoring else None)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            waits = False

    def _submit(self, answers: Answers, rows: Sequence[Row], submitted: asyncio.Future[None], client: Hashable) -> None:
        """Submits rows to their sampler; `submitted` gets None or the ApiError, in the event loop. Raises nothing."""
        error: ApiError | None = self._ended
        if error is None:
            try:
                self._place_rows(answers, rows, client)
            except ValueError as refused:
                error = _refusal(refused)
            except BaseException as failed:  # whatever a device, compiler or tokenizer raises: the thread must not end
                error = self._failed(failed)

        def report() -> None:
            if submitted.done():  # cancelled, or the server stops
                return
            if error is None:
                submitted.set_result(None)
            else:
                submitted.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the event loop has ended
            submitted.get_loop().call_soon_threadsafe(report)

    def _sampler(self, name: str) -> Sampler:
        """A model's sampler, made anew after a failure. RuntimeError: too little memory for it."""
        if name not in self._samplers:
            try:
                self._samplers[name] = self._make[name]()
            except ValueError as error:  # which is no fault of the request
                raise RuntimeError(str(error)) from error
            self.plans[name] = self._samplers[name].plan
        return self._samplers[name]

    def _place_rows(self, answers: Answers, rows: Sequence[Row], client: Hashable) -> None:
        """Submits rows to their model's sampler, or queues them to be scored before. ValueError: it refuses a row, and
        the others are cancelled.
        """
        self._sampler(answers.model)
        try:
            for index, row in enumerate(rows):
                if row.scores_prompt:
                    self._scoring.append((answers, index, row, client))
                else:
                    self._place(answers, index, row, client)
        except ValueError:
            self._forget(answers)
            raise

    def _place(self, answers: Answers, index: int, row: Row, client: Hashable) -> None:
        name, sampler = answers.model, self._sampler(answers.model)
        if row.max_new_tokens == 0:
            answers.put(index, Piece(-1, [], [], "length"))
            return
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
            eos_token_ids=[*([] if row.ignore_eos else sampler.ends), *row.stop_token_ids],
            presence_penalty=row.presence_penalty,
            frequency_penalty=row.frequency_penalty,
            logit_bias=row.logit_bias,
            min_new_tokens=row.min_tokens,
            client=(client, id(answers)),
            constraint=row.constraint,
        )
        answers.numbers.append(number)
        self._of_request[name, number] = answers, index

    def _score_one(self) -> bool:
        """Scores the prompt of the row that waits longest, of those whose programs are ready, and submits the row.
        Returns whether there was one.
        """
        place = next(
            (place for place, (answers, _, row, _) in enumerate(self._scoring) if self._can_score(answers, row)), None
        )
        if place is None:
            return False
        answers, index, row, client = self._scoring[place]
        del self._scoring[place]
        try:
            answers.put(index, PromptScores(*self._sampler(answers.model).score(row.prompt, row.top_logprobs)))
            self._place(answers, index, row, client)
        except ValueError as refused:
            answers.put(index, _Failed(_refusal(refused)))
        except BaseException as failed:  # as in _submit
            answers.put(index, _Failed(self._failed(failed)))
        return True

    def _can_score(self, answers: Answers, row: Row) -> bool:
        try:
            return self._sampler(answers.model).can_score(len(row.prompt))
        except Exception:  # which scoring raises again
            return True

    def _forget(self, answers: Answers) -> None:
        sampler = self._samplers.get(answers.model)
        for number in answers.numbers:
            owner, _ = self._of_request.get((answers.model, number), (None, 0))
            if owner is answers and sampler is not None:  # a sampler that was made anew numbers from 0 again
                del self._of_request[answers.model, number]
                sampler.cancel(number)
        answers.numbers.clear()
        self._scoring = collections.deque(waiting for waiting in self._scoring if waiting[0] is not answers)

    def _step(self, name: str) -> None:
        """One round of a model's sampler. If it raises, the sampler is dropped and all its rows end with the error,
        because its arrays may have been donated to the call that failed.
        """
        try:
            pieces = self._samplers[name].step()
        except BaseException as failed:  # as in _submit; the sampler's arrays may be gone
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
                answers.put(index, _Failed(ApiError(400, piece.error)) if piece.finish_reason == "failed" else piece)

    def _cancel_all(self) -> None:
        for name, number in self._of_request:
            self._samplers[name].cancel(number)
        self._of_request.clear()
        self._scoring.clear()

    def _failed(self, error: BaseException) -> ApiError:
        """Prints an unexpected error's traceback, sets `failure`, and returns an ApiError for the caller to raise,
        whose text, the error's first line, reaches the client; the engine continues.
        """
        say("jaxtune: the engine failed:\n" + "".join(traceback.format_exception(error)), file=sys.stderr)
        self.failure = f"{type(error).__name__}: {error}".split("\n")[0]
        return ApiError(500, f"the engine failed: {self.failure}")


def _end_thread(commands: queue.SimpleQueue, thread: threading.Thread, seconds: float | None = None) -> None:
    """Without a limit the wait may be as long as a compile; Ctrl-C ends it."""
    commands.put(None)
    thread.join(seconds)


def _refusal(refused: ValueError) -> ApiError:
    """With OpenAI's code for too long a row, at which clients shorten a conversation."""
    code = "context_length_exceeded" if "positions" in str(refused) else None
    return ApiError(400, str(refused).removeprefix("Sampler: "), code=code)
