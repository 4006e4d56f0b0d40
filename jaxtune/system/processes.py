"""The processes of a run, and how they agree on what each sees alone.

Values go through the coordination service of `jax.distributed` in the first process, not through devices. A single
process exchanges nothing.

Every collective function must be called by all processes, in the same order and in the main thread; else the others
wait forever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from jaxtune.system import shared_errors

_ASKED = "jaxtune/asked/"
_MEETING_SECONDS = 0.2  # between two looks at signals while processes wait for each other
_SOON_SECONDS = 0.002  # between two looks of the first process, once it only waits for the others
_POLL_MILLISECONDS = 1000  # a wait is interrupted after this time, so that Python can handle signals


def service_client() -> Any:
    """The client of JAX's coordination service; None in a single process or before `join`. Does not import or start
    JAX.
    """
    if "jax" not in sys.modules:
        return None
    from jaxtune.system.private_jax import distributed

    return distributed.global_state.client


def count() -> int:
    """The number of processes; 1 before `join`. Unlike jax.process_count it starts no devices."""
    if service_client() is None:
        return 1
    from jaxtune.system.private_jax import distributed

    return distributed.global_state.num_processes


def index() -> int:
    """This process's index, from 0; 0 before `join`. Unlike jax.process_index it starts no devices."""
    if service_client() is None:
        return 0
    from jaxtune.system.private_jax import distributed

    return distributed.global_state.process_id


def first() -> bool:
    """Whether this is process 0, which alone writes metrics, results and console output."""
    return index() == 0


# Of the exchanges of each kind. A process that fails reports it (`all_within`) while others still meet or agree.
_calls, _points, _meetings = itertools.count(), itertools.count(), itertools.count()


@contextlib.contextmanager
def _exchange(kind: str, numbers: Iterator[int] = _calls) -> Iterator[str]:
    """With what the keys of an exchange begin; the service forgets them when every process has left the context."""
    from jax.errors import JaxRuntimeError

    client, keys = service_client(), f"jaxtune/{kind}/{next(numbers)}/"

    def leave() -> None:
        if client.key_value_increment(f"{keys}left", 1) == count():
            client.key_value_delete(keys)

    try:
        yield keys
    except BaseException:
        with contextlib.suppress(JaxRuntimeError):  # a service that is gone must not hide why the wait ended
            leave()
        raise
    leave()


def all_of(value: Any) -> list[Any]:
    """The `value` of every process, by index, sent as JSON (tuples become lists). Collective."""
    client = service_client()
    if client is None:
        return [value]
    with _exchange("all") as keys:
        client.key_value_set(f"{keys}{index()}", json.dumps(value))
        return [json.loads(_get(client, f"{keys}{process}")) for process in range(count())]


def all_within(value: object, seconds: float) -> list[Any] | None:
    """The values of all processes, in order, for a process that ends: None if not all call it within `seconds`, as they
    may wait for this one. value: this process's, as JSON.
    """
    client = service_client()
    if client is None:
        return [value]
    from jax.errors import JaxRuntimeError

    deadline, values = time.monotonic() + seconds, []
    with _exchange("all") as keys:
        client.key_value_set(f"{keys}{index()}", json.dumps(value))
        while len(values) < count():
            try:
                values.append(json.loads(client.blocking_key_value_get(f"{keys}{len(values)}", _POLL_MILLISECONDS)))
            except JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if time.monotonic() > deadline:
                    return None
    return values


def of_first(value: Callable[[], Any]) -> Any:
    """In all processes what `value()` returns in the first one, sent as JSON; the others do not call it. Its exception
    is raised in all, elsewhere as one of Python's own classes. Collective.
    """
    return _of_first("first", _calls, value)


def _of_first[T](kind: str, numbers: Iterator[int], value: Callable[[], T]) -> T:
    client = service_client()
    if client is None:
        return value()
    with _exchange(kind, numbers) as keys:
        if first():
            try:
                sent = json.dumps([None, value()])
            except Exception as error:
                client.key_value_set(f"{keys}0", json.dumps([shared_errors.described(error), None]))
                raise
            client.key_value_set(f"{keys}0", sent)
        failed, result = json.loads(_get(client, f"{keys}0"))
    if failed is not None:
        raise shared_errors.exception_of(failed)
    return result


def agree(signal_name: str | None, due: bool) -> tuple[str | None, bool]:
    """(A signal's name or None, whether a save is due), the same in all processes, between two steps. Collective.

    The first process decides: its `due` counts, and it may hear of another one's signal only at a later call.
    signal_name: a signal that came to this process.
    """
    client = service_client()
    if client is None:
        return signal_name, due
    if not first() and signal_name is not None:
        client.key_value_set(f"{_ASKED}{index()}", signal_name, allow_overwrite=True)

    def decided() -> tuple[str | None, bool]:
        signals = client.key_value_dir_get(_ASKED)
        return signal_name or (signals[0][1] if signals else None), due

    name, is_due = _of_first("agree", _points, decided)
    return name, is_due


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What all decided while they waited: that all are ready, or one of the other fields."""

    ready: bool
    signal_name: str | None = None
    due: bool = False
    failed: list | None = None
    """`shared_errors.described` of a process's error."""


def meet(
    future: Future,
    failure: Callable[[], list | None],
    signal_name: Callable[[], str | None],
    due: Callable[[], bool],
) -> Agreed:
    """Waits until every process's `future` is done, or one failed, got a signal, or the first one's save is due; the
    same in all. Collective: nobody returns before all have called it.

      future: the work that this process waits for.
      failure: `shared_errors.described` of this process's failure, or None; asked when the future is done.
      signal_name: a signal that came to this process; asked several times a second.
      due: whether a save is due; asked in the first process.
    """
    client, has_reported = service_client(), False
    with _exchange("meet", _meetings) as keys:
        while True:
            if not has_reported and future.done():
                has_reported = True
                client.key_value_set(f"{keys}ready/{index()}", json.dumps(failure()))
            if first():
                answers = {key: json.loads(value) for key, value in client.key_value_dir_get(f"{keys}ready/")}
                signals = client.key_value_dir_get(_ASKED)
                name = signal_name() or (signals[0][1] if signals else None)
                failed = next((value for value in answers.values() if value is not None), None)
                ready = len(answers) == count() and failed is None
                save = not ready and due()
                if ready or name or save or failed is not None:
                    agreed = Agreed(ready and not name, name, save, failed)
                    client.key_value_set(f"{keys}decided", json.dumps(dataclasses.asdict(agreed)))
                    return agreed
            else:
                if (name := signal_name()) is not None:
                    client.key_value_set(f"{_ASKED}{index()}", name, allow_overwrite=True)
                if (decided := _known(client, f"{keys}decided", has_reported)) is not None:
                    return Agreed(**json.loads(decided))
            if not has_reported:
                wait([future], _MEETING_SECONDS)
            elif first():
                time.sleep(_SOON_SECONDS)


def _known(client, key: str, is_soon: bool) -> str | None:
    """The value of a key if it is there or, with `is_soon`, comes within a fifth of a second; else None."""
    from jax.errors import JaxRuntimeError

    try:
        if is_soon:
            return client.blocking_key_value_get(key, int(1000 * _MEETING_SECONDS))
        return client.key_value_try_get(key)
    except JaxRuntimeError as error:
        if any(code in str(error) for code in ("DEADLINE_EXCEEDED", "NOT_FOUND")):
            return None
        raise


def smallest(value: float | None) -> float | None:
    """The smallest of all processes' numbers; None stands for no number. Collective."""
    numbers = [number for number in all_of(value) if number is not None]
    return min(numbers, default=None)


def require_same(values: dict[str, Any], fix: str) -> None:
    """Raises ValueError in all processes if one has other settings, versions, rows or weights than the first: each
    would silently compute another run. Collective.

      values: {name: JSON value}.
      fix: what to do, the end of the message.
    """
    if count() == 1:
        return
    own_values = json.loads(json.dumps(values))
    expected = of_first(lambda: own_values)
    names = (name for name in sorted(own_values.keys() | expected.keys()) if own_values.get(name) != expected.get(name))
    own_difference = next(([name, own_values.get(name), expected.get(name)] for name in names), None)
    for number, difference in enumerate(all_of(own_difference)):
        if difference is not None:
            name, value, first_value = difference
            raise ValueError(f"{name}: process {number} has {value!r}, the first process {first_value!r}; {fix}")


def hosts() -> int:
    """The number of machines of the run, by host name. Collective."""
    return len(set(all_of(socket.gethostname())))


@contextlib.contextmanager
def one_a_host() -> Iterator[None]:
    """A context that processes enter in turns: the first, the first of each other host, the rest, so that later ones
    read what earlier ones cached. Collective, with nothing collective within; exceptions are raised in all after their
    turn.
    """
    if count() == 1:
        yield
        return
    hosts = all_of(socket.gethostname())
    own_index = index()
    turn = 0 if own_index == 0 else 1 if hosts.index(hosts[own_index]) == own_index else 2
    for current_turn in range(3):
        failed = None
        if current_turn == turn:
            try:
                yield
            except Exception as error:
                failed = error
        failures = all_of(None if failed is None else shared_errors.described(failed))
        if failed is not None:
            raise failed
        if failure := next(filter(None, failures), None):
            raise shared_errors.exception_of(failure)


@contextlib.contextmanager
def written_by_first(path: Path) -> Iterator[Path]:
    """A context for writing a folder that all compute and one writes: `path` in the first process, elsewhere a
    temporary path. Its end waits for all; an exception within is raised in all. Collective.
    """
    client, failure = service_client(), None
    if client is None:
        yield path
        return
    with _exchange("written") as keys:
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield path if first() else Path(folder) / path.name
            except Exception as error:
                failure = shared_errors.described(error)
                raise
            finally:
                client.key_value_set(f"{keys}{index()}", json.dumps(failure))
        for process in range(count()):
            if failure := json.loads(_get(client, f"{keys}{process}")):
                raise shared_errors.exception_of(failure)


def _get(client: Any, key: str) -> str:
    """Waits without limit for a key; the watcher (ending.py), or JAX, ends this process if its writer dies. It wakes
    each second, so that Python can handle signals.
    """
    from jax.errors import JaxRuntimeError

    while True:
        try:
            return client.blocking_key_value_get(key, _POLL_MILLISECONDS)
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
