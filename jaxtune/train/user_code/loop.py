"""The run's one event loop of asynchronous functions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future

from jaxtune.system import waiting
from jaxtune.train.user_code import errors

logger = logging.getLogger(__name__)
_GRACE_SECONDS = 2.0  # by which a limit may pass before the loop counts as blocked
_END_SECONDS = 5.0  # for tasks and generators to end in


class TooLong(errors.UserCodeError):
    """A call took longer than its limit. detail: a clause of the text."""

    def __init__(self, name: str, seconds: float | None, detail: str = ""):
        super().__init__(f"{name} took longer than {seconds or 0:g} s{detail}")
        self.detail = detail


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call returned or raised: any BaseException, or TooLong."""

    value: object = None
    error: BaseException | None = None


@dataclasses.dataclass(frozen=True)
class Pending:
    """A call in the event loop. limit: seconds; None: none."""

    name: str
    limit: float | None
    loop: EventLoop
    future: Future[Outcome]
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float | None:
        """Until the call counts as blocking the loop; None: never."""
        return None if self.limit is None else max(0.0, self.began + self.limit + _GRACE_SECONDS - time.monotonic())

    @property
    def done(self) -> bool:
        return self.future.done() or self.seconds_left == 0

    def outcome(self) -> Outcome:
        """Waits. A loop that is blocked beyond the limit is given up, and the next call has a new one."""
        try:
            return waiting.result(self.future, self.name, self.seconds_left)
        except CancelledError:
            return Outcome(error=TooLong(self.name, self.limit, ", as its event loop was blocked, and has ended"))
        except TimeoutError:
            where = self.loop.where()
            self.loop.give_up()
            detail = f": the event loop was blocked{where}, where code must `await` or run in asyncio.to_thread"
            return Outcome(error=TooLong(self.name, self.limit, detail))

    def cancel(self) -> None:
        if not self.future.done():
            self.future.cancel()


class EventLoop:
    """An asyncio event loop in a daemon thread. Nothing that runs in it ends the thread; `close` does."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._loop, self._ends = asyncio.new_event_loop(), False
        self._thread = threading.Thread(target=self._run, name="user's async functions", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return not self._ends and self.process == os.getpid()

    def start(self, awaited: Callable[[], Awaitable[object]], name: str, limit: float | None) -> Pending:
        """Awaits what the function returns; cancels after `limit` seconds."""
        return Pending(name, limit, self, asyncio.run_coroutine_threadsafe(_limited(awaited, name, limit), self._loop))

    def where(self) -> str:
        """Gives " at file.py, line 7, in fetch", the user's line that the loop is at, or ""."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        frames = traceback.extract_stack(frame) if frame is not None else []
        user_frames = [
            frame_summary
            for frame_summary in frames
            if errors.is_users(frame_summary.filename) and not errors.is_library(frame_summary.filename)
        ]
        return (
            f" at {user_frames[-1].filename}, line {user_frames[-1].lineno}, in {user_frames[-1].name}"
            if user_frames
            else ""
        )

    def give_up(self) -> None:
        """Ends the loop once nothing blocks it, without a wait."""
        self._ends = True
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)

    def close(self) -> None:
        if self.process != os.getpid():
            return
        self.give_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _END_SECONDS)
            if self._thread.is_alive():
                logger.warning("an async function still blocks its event loop%s", self.where())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._ends:
            # A task that raises KeyboardInterrupt or SystemExit ends run_forever; whoever awaits it gets the exception.
            with contextlib.suppress(BaseException):
                self._loop.run_forever()
        for end in (self._cancel_all, self._loop.shutdown_asyncgens, self._end_threads):
            with contextlib.suppress(BaseException):
                self._loop.run_until_complete(end())
        self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_SECONDS)

    async def _end_threads(self) -> None:
        await asyncio.wait_for(self._loop.shutdown_default_executor(), _END_SECONDS)


async def outcome_of(awaited: Callable[[], Awaitable[object]]) -> Outcome:
    """Never raises."""
    try:
        return Outcome(await awaited())
    except BaseException as error:
        return Outcome(error=error)


async def _limited(awaited: Callable[[], Awaitable[object]], name: str, limit: float | None) -> Outcome:
    task = asyncio.ensure_future(outcome_of(awaited))
    try:
        finished, _ = await asyncio.wait({task}, timeout=limit)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if finished:
        return task.result()
    task.cancel()
    return Outcome(error=TooLong(name, limit))


def wait_for_any(calls: Sequence[Pending], what: str) -> None:
    """Waits until one call is done. what: for the line about the wait."""
    first: Future[None] = Future()
    first.set_running_or_notify_cancel()
    lock = threading.Lock()

    def done(_: object) -> None:
        with lock:
            if not first.done():
                first.set_result(None)

    if any(call.done for call in calls):
        return
    for call in calls:
        call.future.add_done_callback(done)
    limits = [seconds_left for call in calls if (seconds_left := call.seconds_left) is not None]
    with contextlib.suppress(TimeoutError):
        waiting.result(first, what, min(limits, default=None))
