"""Runs of several processes: joining, agreeing on what each sees alone, and ending at the same time.

Values go through the coordination service of `jax.distributed` in the first process, not through devices. A single
process exchanges nothing.

Every collective function must be called by all processes, in the same order and in the main thread; else the others
wait forever.

A failing process reports it, and the others, perhaps in a collective that never ends, print its message and exit with
its code. A killed one is noticed after HEARTBEAT_SECONDS, and JAX ends the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from jaxtune.system import shared_errors, terminal
from jaxtune.system.loopback import host_name, is_loopback
from jaxtune.system.terminal import printable

HEARTBEAT_SECONDS = 30
_START_SECONDS = 300
_ENDED, _HEARD, _ASKED = "jaxtune/ended", "jaxtune/heard/", "jaxtune/asked/"
_READY = "jaxtune/ready/"
_MEETING_SECONDS = 0.2  # between two looks at signals while processes wait for each other
_SOON_SECONDS = 0.002  # between two looks of the first process, once it only waits for the others
_WORDS_SECONDS = 10.0  # how long a failing process and the first one wait for each other before they exit
# What the first process leaves the others between their report that they have heard and their exit: JAX aborts a
# process whose service ends, with another exit code.
_EXIT_SECONDS = 1.0
_POLL_MILLISECONDS = 1000  # a wait is interrupted after this time, so that Python can handle signals
_KEPT_DECISIONS = 64  # how many past decisions the service keeps; no process is that far behind


class _Run:
    """This process's state in its run; never instantiated."""

    watcher: threading.Thread | None = None  # runs `_watch`; None before `join` and in a run of one process
    leaving = False  # whether this process is ending by `leave`, so that the watcher must not end it
    last_words = ""  # the message that the others print if this process fails; "": they print its exit code


# ---- joining


def join(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Makes this process one of several, if the arguments or SLURM's or Open MPI's environment say so. Call it before
    JAX starts its devices.

    Afterwards only the first process prints, stdout is flushed by line, JAX leaves SIGTERM alone, and a thread ends
    this process if another one fails. The first process listens on a loopback address only if `coordinator` is one, or
    if a scheduler started all on one host; otherwise anybody who reaches its port can join or end the run.

    Raises ValueError for incomplete arguments, an unknown address, or no connection within five minutes.

      coordinator: "host:port" of the first process; alone for Open MPI 5 and later, which give no address.
      processes: their number.
      process: this one's index, from 0.
    """
    own_place = _place(coordinator, processes, process)
    if own_place is None or own_place.count == 1:
        return
    import jax

    _compile_alone()
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM in place of the run
    # All processes are on this host then: no other one can reach the address.
    of_this_host = is_loopback(host_name(f"//{own_place.coordinator}"))
    try:
        jax.distributed.initialize(
            own_place.coordinator,
            own_place.count,
            own_place.index,
            own_place.devices,
            cluster_detection_method="deactivate",
            initialization_timeout=_START_SECONDS,
            coordinator_bind_address=own_place.coordinator if of_this_host else None,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except RuntimeError as error:
        raise ValueError(
            f"process {own_place.index} of {own_place.count} could not join the others at "
            f"{own_place.coordinator}: {error}"
        ) from None
    if not first():
        terminal.be_silent()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a process that JAX ends loses what is still in a buffer
        sys.stdout.reconfigure(line_buffering=True)
    _Run.watcher = threading.Thread(target=_watch, name="others", daemon=True)
    _Run.watcher.start()


def _compile_alone() -> None:
    """Has XLA time algorithms in each process alone, unless XLA_FLAGS say otherwise: with shared work, one that finds
    its program in a cache has nothing to share, and the others wait forever.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_shard_autotuning" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false".strip()


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process is in a run of several."""

    coordinator: str  # "host:port" where the first process listens
    count: int  # number of processes
    index: int  # of this process
    devices: list[int] | None = None  # the GPUs it uses; None: all it sees


def _place(coordinator: str | None, processes: int | None, process: int | None) -> Place | None:
    """This process's Place by `join`'s arguments, else as SLURM or Open MPI started it; None if it is the only one. A
    scheduler's process gets one GPU, by its index on the host, unless it is alone there or sees at most one. Raises
    ValueError.
    """
    if processes is not None or process is not None:
        if coordinator is None or processes is None or process is None:
            raise ValueError("--coordinator, --processes and --process are incomplete: give all three")
        if not re.fullmatch(r".+:\d+", coordinator):
            raise ValueError(f"--coordinator = {coordinator!r}: must be host:port, such as node001:12345")
        if not 0 <= process < processes:
            raise ValueError(f"--process = {process}: must be from 0 to {processes - 1}, one less than --processes")
        return Place(coordinator, processes, process)
    scheduled = _by_surroundings(os.environ)
    if scheduled is None:
        if coordinator is not None:
            raise ValueError(f"--coordinator = {coordinator!r}: give --processes and --process too")
        return None
    count, index, local_index, local_count = scheduled
    given_coordinator = coordinator
    from jaxtune.system.private_jax import ClusterEnv

    try:
        coordinator, *_ = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, count, index, [local_index], None, _START_SECONDS
        )
    except RuntimeError as error:
        raise ValueError(f"{error} Or give the first process's address: --coordinator=HOST:PORT") from None
    if given_coordinator is None and coordinator is not None and local_count == count:
        coordinator = f"127.0.0.1:{coordinator.rpartition(':')[2]}"
    if coordinator is None:
        raise ValueError("the address of the first process is unknown: give --coordinator=HOST:PORT")
    # A scheduler may have assigned a GPU to each process already.
    sees_one = len(os.environ.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1
    return Place(coordinator, count, index, None if local_count == 1 or sees_one else [local_index])


def _by_surroundings(environment: Any) -> tuple[int, int, int, int] | None:
    """(Processes, index, index on this host, processes here) as srun or mpirun set them; None for one process. SLURM's
    variables of the job would count processes that were not started.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        tasks = []  # the number on each host, from "4(x2),3"
        for group in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
            number, _, times = group.rstrip(")").partition("(x")
            tasks += [int(number)] * int(times or 1)
        local_count = tasks[int(environment["SLURM_NODEID"])]
        index, local = int(environment["SLURM_PROCID"]), int(environment["SLURM_LOCALID"])
        return int(environment["SLURM_STEP_NUM_TASKS"]), index, local, local_count
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        names = ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
        count, index, local, local_count = (int(environment[f"OMPI_COMM_WORLD_{name}"]) for name in names)
        return count, index, local, local_count
    return None


# ---- the processes of the run


def _client() -> Any:
    """The client of JAX's coordination service; None in a single process or before `join`. Does not import or start
    JAX.
    """
    if "jax" not in sys.modules:
        return None
    from jaxtune.system.private_jax import distributed

    return distributed.global_state.client


def count() -> int:
    """The number of processes; 1 before `join`. Unlike jax.process_count it starts no devices."""
    if _client() is None:
        return 1
    from jaxtune.system.private_jax import distributed

    return distributed.global_state.num_processes


def index() -> int:
    """This process's index, from 0; 0 before `join`. Unlike jax.process_index it starts no devices."""
    if _client() is None:
        return 0
    from jaxtune.system.private_jax import distributed

    return distributed.global_state.process_id


def first() -> bool:
    """Whether this is process 0, which alone writes metrics, results and console output."""
    return index() == 0


# ---- agreeing

_calls = itertools.count()
_points = itertools.count()
_meetings = itertools.count()


def all_of(value: Any) -> list[Any]:
    """The `value` of every process, by index, sent as JSON (tuples become lists). Collective."""
    client, number = _client(), next(_calls)
    if client is None:
        return [value]
    client.key_value_set(f"jaxtune/all/{number}/{index()}", json.dumps(value))
    return [json.loads(_get(client, f"jaxtune/all/{number}/{process}")) for process in range(count())]


def all_within(value: object, seconds: float) -> list[Any] | None:
    """`all_of` for a process that ends: None if not all call it in time, as they may wait for this one."""
    client, number = _client(), next(_calls)
    if client is None:
        return [value]
    from jax.errors import JaxRuntimeError

    client.key_value_set(f"jaxtune/all/{number}/{index()}", json.dumps(value))
    deadline, values = time.monotonic() + seconds, []
    while len(values) < count():
        try:
            key = f"jaxtune/all/{number}/{len(values)}"
            values.append(json.loads(client.blocking_key_value_get(key, _POLL_MILLISECONDS)))
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
    client, key = _client(), f"jaxtune/first/{next(_calls)}"
    if client is None:
        return value()
    if first():
        try:
            sent = json.dumps([None, value()])
        except Exception as error:
            client.key_value_set(key, json.dumps([shared_errors.described(error), None]))
            raise
        client.key_value_set(key, sent)
    failed, result = json.loads(_get(client, key))
    if failed is not None:
        raise shared_errors.made(failed)
    return result


def agree(signal_name: str | None, due: bool) -> tuple[str | None, bool]:
    """(A signal's name or None, whether a save is due), the same in all processes, between two steps. Collective.

    The first process decides: its `due` counts, and it may hear of another one's signal only at a later call.
    signal_name: a signal that came to this process.
    """
    client = _client()
    if client is None:
        return signal_name, due
    point = next(_points)
    if first():
        signals = client.key_value_dir_get(_ASKED)
        signal_name = signal_name or (signals[0][1] if signals else None)
        client.key_value_set(f"jaxtune/point/{point}", json.dumps([signal_name, due]))
        if point >= _KEPT_DECISIONS:
            client.key_value_delete(f"jaxtune/point/{point - _KEPT_DECISIONS}")
    elif signal_name is not None:
        client.key_value_set(f"{_ASKED}{index()}", signal_name, allow_overwrite=True)
    name, due = json.loads(_get(client, f"jaxtune/point/{point}"))
    return name, due


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

      failure: `shared_errors.described` of this process's failure, or None; asked when the future is done.
      signal_name: a signal that came to this process; asked several times a second.
      due: whether a save is due; asked in the first process.
    """
    client, point, has_reported = _client(), next(_meetings), False
    ready_prefix = f"{_READY}{point}/"
    while True:
        if not has_reported and future.done():
            has_reported = True
            client.key_value_set(f"{ready_prefix}{index()}", json.dumps(failure()))
        if first():
            answers = {key: json.loads(value) for key, value in client.key_value_dir_get(ready_prefix)}
            signals = client.key_value_dir_get(_ASKED)
            name = signal_name() or (signals[0][1] if signals else None)
            failed = next((value for value in answers.values() if value is not None), None)
            ready = len(answers) == count() and failed is None
            save = not ready and due()
            if ready or name or save or failed is not None:
                agreed = Agreed(ready and not name, name, save, failed)
                client.key_value_set(f"{_READY}decided/{point}", json.dumps(dataclasses.asdict(agreed)))
                if point >= _KEPT_DECISIONS:
                    client.key_value_delete(f"{_READY}{point - _KEPT_DECISIONS}/")
                    client.key_value_delete(f"{_READY}decided/{point - _KEPT_DECISIONS}")
                return agreed
        else:
            if (name := signal_name()) is not None:
                client.key_value_set(f"{_ASKED}{index()}", name, allow_overwrite=True)
            if (decided := _known(client, f"{_READY}decided/{point}", has_reported)) is not None:
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


def require_same(what: dict[str, Any], fix: str) -> None:
    """Raises ValueError in all processes if one has other settings, versions, rows or weights than the first: each
    would silently compute another run. Collective.

      what: {name: JSON value}.
      fix: what to do, the end of the message.
    """
    if count() == 1:
        return
    own_values = json.loads(json.dumps(what))
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
            raise shared_errors.made(failure)


@contextlib.contextmanager
def written_by_first(path: Path) -> Iterator[Path]:
    """A context for writing a folder that all compute and one writes: `path` in the first process, elsewhere a
    temporary path. Its end waits for all; an exception within is raised in all. Collective.
    """
    client, key, failure = _client(), f"jaxtune/written/{next(_calls)}/", None
    if client is None:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield path if first() else Path(folder) / path.name
        except Exception as error:
            failure = shared_errors.described(error)
            raise
        finally:
            client.key_value_set(f"{key}{index()}", json.dumps(failure))
    for process in range(count()):
        if failure := json.loads(_get(client, f"{key}{process}")):
            raise shared_errors.made(failure)


def _get(client: Any, key: str) -> str:
    """Waits without limit for a key; `_watch`, or JAX, ends this process if its writer dies. It wakes each second, so
    that Python can handle signals.
    """
    from jax.errors import JaxRuntimeError

    while True:
        try:
            return client.blocking_key_value_get(key, _POLL_MILLISECONDS)
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


# ---- ending


def last_words(text: str) -> None:
    """An error's message or a signal, printed by the other processes if this one leaves with another code than 0."""
    _Run.last_words = text


def leave(code: int) -> None:
    """Ends this process's part in the run. With code 0 it waits for all and returns. Otherwise it reports the last
    words and exits at once, as an orderly shutdown would wait for the others; the first process, which has the service,
    first waits up to 11 seconds until all have read them.
    """
    if _Run.watcher is None:
        return
    client = _client()
    if code == 0:
        all_of(None)  # a barrier, as the first process may still be writing
        _Run.leaving = True
        if first():
            client.key_value_set(_ENDED, json.dumps({"process": 0, "code": 0}))
        _Run.watcher.join()
        return
    _Run.leaving = True
    words = _Run.last_words or f"exit code {code}"
    message = {"process": index(), "host": socket.gethostname(), "code": code, "words": words}
    with contextlib.suppress(Exception):  # another process reported first, or the service is gone
        client.key_value_set(_ENDED, json.dumps(message))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(Exception):
        _heard(client)
    if first():  # the service ends with this process
        deadline = time.monotonic() + _WORDS_SECONDS
        with contextlib.suppress(Exception):
            while len(client.key_value_dir_get(_HEARD)) < count() and time.monotonic() < deadline:
                time.sleep(0.05)
        time.sleep(_EXIT_SECONDS)
    os._exit(code)


def _heard(client: Any) -> None:
    client.key_value_set(f"{_HEARD}{index()}", "", allow_overwrite=True)


def _watch() -> None:
    """The thread that ends this process, with the same code, if another one fails, or with code 1 if the first one
    disappears: a collective would wait forever. The first process first gets 10 seconds to finish writing. JAX handles
    other ones that disappear.
    """
    from jax.errors import JaxRuntimeError

    client = _client()
    while not _Run.leaving:
        try:
            report = json.loads(client.blocking_key_value_get(_ENDED, 3_600_000))
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                continue
            if not _Run.leaving and not first():
                _end("the first process is gone. The same command continues from the last checkpoint.", 1)
            return
        if report["code"] == 0:
            return
        if first():  # it may be ending for the same reason, and still be writing to disk
            deadline = time.monotonic() + _WORDS_SECONDS
            while not _Run.leaving and time.monotonic() < deadline:
                time.sleep(0.05)
        if not _Run.leaving and report["process"] != index():
            with contextlib.suppress(JaxRuntimeError):
                _heard(client)
            _end(f"process {report['process']} on {report['host']} ended: {report['words']}", report["code"])


def _end(text: str, code: int) -> None:
    """Prints the reason and exits without the orderly shutdown, which would wait for the others."""
    with contextlib.suppress(OSError):
        os.write(2, f"jaxtune: process {index()} ends, because {printable(text)}\n".encode())
    os._exit(code)
