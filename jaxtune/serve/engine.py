"""One thread drives the sampler, which decodes the answers of many clients in slots, each by the base or an adapter."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence

from jaxtune.models.generation.adapters import Adapter
from jaxtune.models.generation.requests import Piece, PromptPictures
from jaxtune.models.generation.sampler import Sampler
from jaxtune.serve.errors import ApiError
from jaxtune.serve.requests import Row
from jaxtune.serve.served import ServedModel
from jaxtune.serve.shares import Shares
from jaxtune.system import lifetimes
from jaxtune.system.terminal import say

_SCORING_SECONDS = 0.05  # between two looks whether a program that scores is ready
# Prompts that come together are prefilled together: what is being read for so long is waited for, but so long at most
# after the first that no round has seen.
_ARRIVING_SECONDS, _GATHERING_SECONDS = 0.05, 0.003
# After a row, others are likely; rounds of one step cost little while at most this share of the slots decodes.
_FOLLOWING_SECONDS, _FEW = 0.01, 1 / 4
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

    error: ApiError  # which `Answers.ready` raises, so that the whole request ends


class Answers:
    """The queue of one request's tokens, from the engine's thread to the event loop.

    The request's handler awaits `ready` until `left` is 0, and must `close` whatever happens, so that no slot decodes
    for a client that is gone.

      served: the model that is asked. count: rows of the request. client: who asks.

    Attributes:
      left: rows whose last tokens `ready` has not returned.
      numbers: of the rows in the sampler; only the engine's thread uses them.
    """

    def __init__(self, engine: Engine, served: ServedModel, count: int, client: Hashable = None):
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self.served, self.count, self.left, self.client = served, count, count, client
        self.numbers: list[int] = []  # of the sampler's requests; the engine's thread sets them
        self._made: asyncio.Queue[tuple[int, Piece | PromptScores | _Failed]] = asyncio.Queue()
        self._failed: tuple[int, _Failed] | None = None
        self._closed = False

    async def ready(self) -> list[tuple[int, Piece | PromptScores]]:
        """Waits for (index of a row, its new tokens or its prompt's scores), and returns all that is there; only while
        `left` is not 0.

        ApiError: the engine failed, or the server stops.
        """
        found: list[tuple[int, Piece | PromptScores]] = []
        while not found or not self._made.empty():
            index, piece = self._failed or await self._made.get()
            if isinstance(piece, _Failed):
                if not found:
                    raise piece.error
                self._failed = index, piece  # of the next call
                break
            if isinstance(piece, Piece) and piece.finish_reason is not None:
                self.left -= 1
            found.append((index, piece))
        return found

    def put(self, index: int, piece: Piece | PromptScores | _Failed) -> None:
        """Queues a row's tokens or its error, from the engine's thread; nothing happens after the event loop's end.
        index: the row's among those of the request.
        """
        self.put_all([(self, index, piece)])

    @staticmethod
    def put_all(new: Sequence[tuple[Answers, int, Piece | PromptScores | _Failed]]) -> None:
        """As `put` for each, of one event loop, which is woken once: it would take the GIL each time."""

        def queue_all() -> None:
            for answers, index, piece in new:
                answers._made.put_nowait((index, piece))

        with contextlib.suppress(RuntimeError):  # the event loop has ended
            if new:
                new[0][0]._loop.call_soon_threadsafe(queue_all)

    def fail(self, error: ApiError) -> None:
        """Ends the rows with an error; in the event loop."""
        self._made.put_nowait((0, _Failed(error)))

    def close(self) -> None:
        """Cancels the rows that have not ended and frees their slots; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._engine.forget(self)


class Engine:
    """The sampler of a base and its adapters, and the thread that drives it, which begins at once.

    The sampler is used in that thread alone: the event loop queues functions for it (`_commands`) and gets results
    through `Answers`. ValueError: too little memory for the slots, or an adapter that rows of one batch cannot have.

    Args:
      make: makes the sampler of {name: adapter}; called at once, and again after a failed round, whose arrays may be
        lost.
      models: {name: model}, those without a `base` first.
    Attributes:
      models: as they are now, in a dict that does not change.
      failure: the error of the last round, or of a later start of a request; None: neither failed.
      plan: the SlotPlan, of the slots and the tokens of a row.
    """

    def __init__(self, make: Callable[[Mapping[str, Adapter]], Sampler], models: Mapping[str, ServedModel]):
        self._make, self.models = make, dict(models)
        sampler = make(self._adapters())
        self._sampler: Sampler | None = sampler  # None after a failure
        self._of_request: dict[int, tuple[Answers, int]] = {}  # of the engine's thread
        self._scoring: collections.deque[tuple[Answers, int, Row, Hashable]] = collections.deque()
        self._scores = False  # whether the last pass scored a prompt
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._rows = Shares(_MOST_ROWS)  # that wait or decode, as the event loop counts
        self._arriving: dict[object, float] = {}  # requests that are being read, and since when
        self._first_placed: float | None = None  # when the first row came since the last round
        self._last_placed = -math.inf
        self._ended: ApiError | None = None
        self._open: set[Answers] = set()
        self._awaited: set[asyncio.Future[None]] = set()  # each gets the error of `end`
        self.failure: str | None = None
        self.plan = sampler.plan
        self._counts: dict[str, tuple[int, int]] = dict.fromkeys(self.models, (0, 0))
        self._thread = threading.Thread(target=self._drive, name="jaxtune serve: engine", daemon=True)
        self._thread.start()
        lifetimes.end_with(self, _end_thread, self._commands, self._thread)

    # ---- called in the event loop's thread

    @contextlib.contextmanager
    def arrival(self) -> Iterator[None]:
        """While a request is read, whose rows are then submitted."""
        request = object()
        self._arriving[request] = time.monotonic()
        try:
            yield
        finally:
            del self._arriving[request]

    async def submit(self, model: str, rows: Sequence[Row], client: Hashable = None) -> Answers:
        """Queues all rows or none, after the current pass of the engine's thread; a cancelled call cancels the rows.
        Rows of clients take turns, and so do a client's requests.

        ApiError: 400: the sampler refuses a row; 404: no such model; 429: of 1,024 rows that may wait or decode, fewer
        would stay free than the client has; 500: any other failure; or the error of `end`.
        """
        served = self.served(model)
        if self._ended is not None:
            raise self._ended
        if not self._rows.take(client, len(rows)):
            message = (
                f"{self._rows.total} answers wait or are being made, {self._rows.amount(client)} of them for this "
                f"client, and of {self._rows.most:,} may, a client as many as stay free: ask again later"
            )
            raise ApiError(429, message, code="rate_limit_exceeded")
        answers = Answers(self, served, len(rows), client)
        self._open.add(answers)
        try:
            await self._done(lambda: self._place_rows(answers, rows, client))
        except BaseException:
            answers.close()
            raise
        return answers

    def served(self, name: str) -> ServedModel:
        """The model of a name; ApiError 404 for an unknown one."""
        if name not in self.models:
            raise ApiError(404, f"model {name!r}: there are {', '.join(self.models)}", "model", "model_not_found")
        return self.models[name]

    async def load(self, served: ServedModel, adapter: Adapter) -> None:
        """Adds a model with an adapter. ApiError: 400: its name is taken, or the sampler refuses it; as `submit`."""
        await self._done(lambda: self._load(served, adapter))

    async def unload(self, name: str) -> None:
        """Takes a model with an adapter away; rows that were submitted are answered. ApiError: 400: it has none; 404:
        no such model; as `submit`.
        """
        await self._done(lambda: self._unload(name))

    async def _done(self, command: Callable[[], None]) -> None:
        """Waits until the engine's thread has called `command`. ApiError: 400 for a ValueError, 500 for another."""
        if self._ended is not None:
            raise self._ended
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.add(done)
        self._commands.put(lambda: self._reported(command, done))
        try:
            await done
        finally:
            self._awaited.discard(done)

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
        self._rows.give_back(answers.client, answers.count)
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
        return self._counts

    def close(self, seconds: float) -> bool:
        """Asks the thread to end; False if it has not within `seconds`: a pass that compiles may take minutes."""
        _end_thread(self._commands, self._thread, seconds)
        return not self._thread.is_alive()

    # ---- called in the engine's thread

    def _drive(self) -> None:
        while self._obey():
            self._scores = self._score_one()
            if self._sampler is not None and self._sampler.pending:
                self._step(self._sampler)
            self._count()
        if self._sampler is not None:
            self._sampler.close()

    def _count(self) -> None:
        counts = {name: [0, 0] for name in self.models}
        waiting = set() if self._sampler is None else self._sampler.waiting_requests
        for number, (answers, _) in self._of_request.items():
            counts.setdefault(answers.served.name, [0, 0])[number in waiting] += 1
        for answers, *_ in self._scoring:
            counts.setdefault(answers.served.name, [0, 0])[1] += 1
        self._counts = {name: (decoding, waiting) for name, (decoding, waiting) in counts.items()}

    def _obey(self) -> bool:
        """Calls the queued functions, and waits for one while there are no rows; False after `close`."""
        waits = not self._scores and (self._sampler is None or not self._sampler.pending)
        seconds = _SCORING_SECONDS if self._scoring else None
        while True:
            try:
                command = self._commands.get(waits, seconds)
            except queue.Empty:
                if not self._gathers():
                    return True
                waits, seconds = True, _GATHERING_SECONDS / 8
                continue
            if command is None:
                return False
            command()
            waits = False

    def _more_come(self) -> bool:
        """Whether requests are being read, in the usual time."""
        return any(time.monotonic() - began < _ARRIVING_SECONDS for began in [*self._arriving.values()])

    def _gathers(self) -> bool:
        first = self._first_placed
        return first is not None and time.monotonic() - first < _GATHERING_SECONDS and self._more_come()

    def _reported(self, command: Callable[[], None], done: asyncio.Future[None]) -> None:
        """Calls `command`; `done` gets None or the ApiError, in the event loop. Raises nothing."""
        error: ApiError | None = self._ended
        if error is None:
            try:
                command()
            except ApiError as refused:
                error = refused
            except ValueError as refused:
                error = _refusal(refused)
            except BaseException as failed:  # whatever a device, compiler or tokenizer raises: the thread must not end
                error = self._failed(failed)

        def report() -> None:
            if done.done():  # cancelled, or the server stops
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the event loop has ended
            done.get_loop().call_soon_threadsafe(report)

    def _adapters(self) -> dict[str, Adapter]:
        return {
            name: Adapter.of(served.model, name) for name, served in self.models.items() if served.adapter is not None
        }

    def _live_sampler(self) -> Sampler:
        """The sampler, made anew after a failure. RuntimeError: too little memory for it."""
        if self._sampler is None:
            try:
                self._sampler = self._make(self._adapters())
            except ValueError as error:  # which is no fault of the request
                raise RuntimeError(str(error)) from error
            self.plan = self._sampler.plan
        return self._sampler

    def _load(self, served: ServedModel, adapter: Adapter) -> None:
        if served.name in self.models:
            raise ApiError(400, f"model {served.name!r} is there already: unload it first, or take another name")
        self._live_sampler().load_adapter(served.name, adapter)
        self.models = {**self.models, served.name: served}

    def _unload(self, name: str) -> None:
        if self.served(name).adapter is None:
            raise ApiError(400, f"model {name!r} is no adapter: it stays as long as the server")
        while any(is_its := [answers.served.name == name for answers, *_ in self._scoring]):
            self._score(is_its.index(True))
        if self._sampler is not None:
            self._sampler.drop_adapter(name)
        self.models = {other: served for other, served in self.models.items() if other != name}

    def _place_rows(self, answers: Answers, rows: Sequence[Row], client: Hashable) -> None:
        """Submits rows to the sampler, or queues them to be scored. ValueError: it refuses one, and all
        are cancelled.
        """
        self._live_sampler()
        pictures = PromptPictures.of(rows[0].pictures)  # which all rows of a request share
        try:
            for index, row in enumerate(rows):
                if row.scores_prompt:
                    self._scoring.append((answers, index, row, client))
                else:
                    self._place(answers, index, row, client, pictures)
        except ValueError:
            self._forget(answers)
            raise

    def _place(
        self, answers: Answers, index: int, row: Row, client: Hashable, pictures: PromptPictures | None = None
    ) -> None:
        served, sampler = answers.served, self._live_sampler()
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
            tokenizer=served.tokenizer,
            eos_token_ids=[*([] if row.ignore_eos else served.ends), *row.stop_token_ids],
            presence_penalty=row.presence_penalty,
            frequency_penalty=row.frequency_penalty,
            logit_bias=row.logit_bias,
            min_new_tokens=row.min_tokens,
            client=(client, id(answers)),
            constraint=row.constraint,
            pictures=pictures,
            adapter=served.adapter,
        )
        answers.numbers.append(number)
        self._of_request[number] = answers, index
        self._last_placed = time.monotonic()
        self._first_placed = self._last_placed if self._first_placed is None else self._first_placed

    def _score_one(self) -> bool:
        """Scores the prompt of the ready row that waits longest, and submits it; whether there was one."""
        for place, (answers, _, row, _) in enumerate(self._scoring):
            if self._can_score(answers, row):
                self._score(place)
                return True
        return False

    def _score(self, place: int) -> None:
        """Scores a row's prompt, by programs that may have to be compiled first, and submits it."""
        answers, index, row, client = self._scoring[place]
        del self._scoring[place]
        try:
            scores = self._live_sampler().score(row.prompt, row.top_logprobs, answers.served.adapter)
            answers.put(index, PromptScores(*scores))
            self._place(answers, index, row, client)
        except ValueError as refused:
            answers.put(index, _Failed(_refusal(refused)))
        except BaseException as failed:  # as in _reported
            answers.put(index, _Failed(self._failed(failed)))

    def _can_score(self, answers: Answers, row: Row) -> bool:
        try:
            return self._live_sampler().can_score(len(row.prompt), answers.served.adapter)
        except Exception:  # which scoring raises again
            return True

    def _forget(self, answers: Answers) -> None:
        for number in answers.numbers:
            owner, _ = self._of_request.get(number, (None, 0))
            if owner is answers and self._sampler is not None:  # a sampler that was made anew numbers from 0 again
                del self._of_request[number]
                self._sampler.cancel(number)
        answers.numbers.clear()
        self._scoring = collections.deque(waiting for waiting in self._scoring if waiting[0] is not answers)

    def _step(self, sampler: Sampler) -> None:
        """One round. If it raises, the sampler is dropped and all its rows end with the error."""
        follow = time.monotonic() - self._last_placed < _FOLLOWING_SECONDS
        rows, slots = len(self._of_request), sampler.plan.slots
        sampler.more_come = rows < slots and (self._more_come() or (follow and rows <= _FEW * slots))
        self._first_placed = None
        try:
            pieces = sampler.step()
        except BaseException as failed:  # as in _reported; the sampler's arrays may be gone
            self._sampler, error = None, self._failed(failed)
            for answers, index in self._of_request.values():
                answers.put(index, _Failed(error))
            self._of_request.clear()
            return
        self.failure, new = None, list[tuple[Answers, int, Piece | PromptScores | _Failed]]()
        for piece in pieces:
            if piece.request in self._of_request:
                answers, index = self._of_request[piece.request]
                if piece.finish_reason is not None:
                    del self._of_request[piece.request]
                failed = piece.finish_reason == "failed"
                new.append((answers, index, _Failed(ApiError(400, piece.error)) if failed else piece))
        Answers.put_all(new)

    def _cancel_all(self) -> None:
        for number in self._of_request:
            if self._sampler is not None:
                self._sampler.cancel(number)
        self._of_request.clear()
        self._scoring.clear()

    def _failed(self, error: BaseException) -> ApiError:
        """Prints an unexpected error's traceback and sets `failure`; an ApiError with the error's first line."""
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
