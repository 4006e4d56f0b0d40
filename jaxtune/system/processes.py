"""Runs of several processes: how the processes find each other (`join`), agree on what each of them sees alone, and end
at the same time (`last_words`, `leave`).

`count`, `index` and `first` say how many there are and which one this is. `all_of` gives all of them the values of
each, `of_first` what the first one computes, `smallest` the least number, `hosts` the number of machines.
`require_same` refuses values that differ, and `agree` decides between two steps on signals and saves. `one_a_host` and
`written_by_first` are contexts for files that one process fills or writes for others.

What all of them compute from the same numbers needs no communication. What a process sees alone (a signal, a clock, a
folder, its memory) they exchange through the coordination service of `jax.distributed`, which runs in the first
process. None of this touches a device, so no step waits for it. In a run of one process nothing is exchanged, and each
function returns at once, with what this process gives.

A process that fails reports it to the service. The others, which may be waiting for it in a collective that never ends,
print its message and end with its exit code (`_watch`). A process that is killed reports nothing; the service notices
after HEARTBEAT_SECONDS, and JAX ends the others. If the first process dies, the others end at once.
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
    """State of this process within its run of several processes; a class that is never instantiated."""

    watcher: threading.Thread | None = None  # runs `_watch`; None before `join` and in a run of one process
    leaving = False  # whether this process is ending by `leave`, so that the watcher must not end it
    last_words = ""  # the message that the others print if this process fails; "": they print its exit code


# ---- joining


def join(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Makes this process one of several, if the arguments or the environment say so, else does nothing. `jaxtune train`
    and `jaxtune evaluate` call it; it must be called before JAX starts its devices. All but the first process are
    silent from then on (be_silent), stdout is flushed after each line, JAX does not handle SIGTERM, XLA times
    algorithms in each process alone (`_compile_alone`), and a thread (`_watch`) ends this process if another one fails.

    With a loopback address, as `jaxtune launch` gives it, or without `coordinator` where SLURM or Open MPI started all
    processes on one host, the first process listens on that address only. Otherwise anybody who reaches its port can
    take part in the run, and end it; docs/several_gpus.md says what to close off.

    Args:
      coordinator: "host:port" of the first process, which listens there.
      processes: their number.
      process: the index of this one, from 0. Either all three are given or none (None), and then SLURM's or Open MPI's
        environment is used, if it started several processes; or `coordinator` alone is given there, which Open MPI 5
        and later need, because they do not tell the address.
    Raises:
      ValueError: the arguments are incomplete or malformed, the first process's address is unknown, or the processes
        could not connect, as when not all come within five minutes.
    """
    place = _place(coordinator, processes, process)
    if place is None or place.count == 1:
        return
    import jax

    _compile_alone()
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM in place of the run
    of_this_host = is_loopback(host_name(f"//{place.coordinator}"))  # as all processes are then: no other can reach it
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            place.devices,
            cluster_detection_method="deactivate",
            initialization_timeout=_START_SECONDS,
            coordinator_bind_address=place.coordinator if of_this_host else None,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except RuntimeError as error:
        raise ValueError(
            f"process {place.index} of {place.count} could not join the others at {place.coordinator}: {error}"
        ) from None
    if not first():
        terminal.be_silent()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a process that JAX ends loses what is still in a buffer
        sys.stdout.reconfigure(line_buffering=True)
    _Run.watcher = threading.Thread(target=_watch, name="others", daemon=True)
    _Run.watcher.start()


def _compile_alone() -> None:
    """Has XLA time algorithms for this process alone, by a flag in XLA_FLAGS, which XLA reads when the devices start. A
    flag that the user has set there is kept.

    By default processes divide the algorithms among them. A process that finds a program in its cache, or never
    compiles it, then has nothing to share, and the others would wait for it forever.
    """
    given = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_shard_autotuning" not in given:
        os.environ["XLA_FLAGS"] = f"{given} --xla_gpu_shard_autotuning=false".strip()


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process is in a run of several processes: `_place` finds it, and `join` passes it to jax.distributed."""

    coordinator: str  # "host:port" where the first process listens
    count: int  # number of processes
    index: int  # of this process
    devices: list[int] | None = None  # the GPUs it uses; None: all it sees


def _place(coordinator: str | None, processes: int | None, process: int | None) -> Place | None:
    """Returns the Place of this process for `join`, whose arguments it takes: either all three (`processes` may be 1,
    and the process uses all GPUs that it sees), or none, or `coordinator` alone. Without all three the environment
    variables of SLURM or Open MPI are used. If they name no several processes, the result is None, and `coordinator`
    alone is an error. If they do, a loopback address is taken where all are on one host and no `coordinator` is given;
    a process gets one GPU, by its index on its host, unless it is alone there or sees one GPU or none by
    CUDA_VISIBLE_DEVICES: then it uses all that it sees. Raises ValueError if the arguments are incomplete or malformed,
    or the first process's address is unknown."""
    if processes is not None or process is not None:
        if coordinator is None or processes is None or process is None:
            raise ValueError("--coordinator, --processes and --process are incomplete: give all three")
        if not re.fullmatch(r".+:\d+", coordinator):
            raise ValueError(f"--coordinator = {coordinator!r}: must be host:port, such as node001:12345")
        if not 0 <= process < processes:
            raise ValueError(f"--process = {process}: must be from 0 to {processes - 1}, one less than --processes")
        return Place(coordinator, processes, process)
    found = _by_surroundings(os.environ)
    if found is None:
        if coordinator is not None:
            raise ValueError(f"--coordinator = {coordinator!r}: give --processes and --process too")
        return None
    count, index, local_index, local_count = found
    given = coordinator
    from jaxtune.system.private_jax import ClusterEnv

    try:
        coordinator, *_ = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, count, index, [local_index], None, _START_SECONDS
        )
    except RuntimeError as error:
        raise ValueError(f"{error} Or give the first process's address: --coordinator=HOST:PORT") from None
    if given is None and coordinator is not None and local_count == count:
        coordinator = f"127.0.0.1:{coordinator.rpartition(':')[2]}"
    if coordinator is None:
        raise ValueError("the address of the first process is unknown: give --coordinator=HOST:PORT")
    # A scheduler may have assigned a GPU to each process already.
    sees_one = len(os.environ.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1
    return Place(coordinator, count, index, None if local_count == 1 or sees_one else [local_index])


def _by_surroundings(environment: Any) -> tuple[int, int, int, int] | None:
    """(processes, index, index on this host, processes on this host) from `environment`, a mapping of environment
    variables, as srun or mpirun sets them; None for one process.

    SLURM's variables of the step are used. Those of the job would also count processes that were not started."""
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        tasks = []  # the number on each host, from "4(x2),3"
        for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
            number, _, times = part.rstrip(")").partition("(x")
            tasks += [int(number)] * int(times or 1)
        here = tasks[int(environment["SLURM_NODEID"])]
        index, local = int(environment["SLURM_PROCID"]), int(environment["SLURM_LOCALID"])
        return int(environment["SLURM_STEP_NUM_TASKS"]), index, local, here
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        names = ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
        count, index, local, here = (int(environment[f"OMPI_COMM_WORLD_{name}"]) for name in names)
        return count, index, local, here
    return None


# ---- the processes of the run


def _client() -> Any:
    """Returns the client of JAX's coordination service, through which processes exchange values; None in a run of one
    process, or before `join`. It does not import or start JAX."""
    if "jax" not in sys.modules:
        return None
    from jaxtune.system.private_jax import distributed

    return distributed.global_state.client


def count() -> int:
    """The number of processes of the run; 1 before `join` and in a run of one process. Unlike jax.process_count it does
    not start JAX's devices."""
    if _client() is None:
        return 1
    from jaxtune.system.private_jax import distributed

    return distributed.global_state.num_processes


def index() -> int:
    """The index of this process among those of the run, from 0; 0 before `join` and in a run of one process. It is that
    of jax.process_index and device.process_index, but asking it does not start the devices. The planner counts this
    process's devices by it, shared_folders.writes chooses the process that writes, and errors name processes."""
    if _client() is None:
        return 0
    from jaxtune.system.private_jax import distributed

    return distributed.global_state.process_id


def first() -> bool:
    """Whether this is the process with index 0 (True), which writes metrics, results and console output for all. The
    others (False) write none of these."""
    return index() == 0


# ---- agreeing

_calls = itertools.count()
_points = itertools.count()
_meetings = itertools.count()


def all_of(value: Any) -> list[Any]:
    """Returns a list of the values that all processes passed as `value`, by the index of the process. They are sent as
    JSON, so a tuple comes back as a list. It is a collective call: every process must make it, in the same order as its
    other collective calls and in its main thread, or the others wait forever. A single process gets [value]."""
    client, number = _client(), next(_calls)
    if client is None:
        return [value]
    client.key_value_set(f"jaxtune/all/{number}/{index()}", json.dumps(value))
    return [json.loads(_get(client, f"jaxtune/all/{number}/{other}")) for other in range(count())]


def all_within(value: object, seconds: float) -> list[Any] | None:
    """`all_of`, for a process that ends: None if not all have called it in time, as they may wait for this one."""
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
    """Returns in all processes what `value()` returns in the first one, sent as JSON; the others do not call `value`.
    So they agree on what they could see or choose differently: a plan, the newest checkpoint, which files exist. If it
    raises an Exception, all processes raise it: the first the exception itself, the others one with the same
    message and a class of Python's own (shared_errors.py). Collective: every process must call it, in the same
    order as its other collective calls and in its main thread. A single process returns value()."""
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
    """Agrees after a step, or between two batches of an evaluation, on what each process may see differently: whether a
    signal came, and whether a save is due.

    A collective call: all processes call it at the same points of the run. The first process decides, and the others
    wait for its decision, which they get from the coordination service. They tell the service of a signal that came to
    them; the first process may see it only in a later call.

    Args:
      signal_name: the name of a signal that came to this process; None: none did.
      due: whether a save is due in this process, such as by its clock. Only the first process's value counts.
    Returns:
      (the name of a signal that the first process got or was informed of, or None; whether a save is due), the same in
        all processes; in a run of one process, the arguments.
    """
    client = _client()
    if client is None:
        return signal_name, due
    point = next(_points)
    if first():
        asked = client.key_value_dir_get(_ASKED)
        signal_name = signal_name or (asked[0][1] if asked else None)
        client.key_value_set(f"jaxtune/point/{point}", json.dumps([signal_name, due]))
        if point >= _KEPT_DECISIONS:
            client.key_value_delete(f"jaxtune/point/{point - _KEPT_DECISIONS}")
    elif signal_name is not None:
        client.key_value_set(f"{_ASKED}{index()}", signal_name, allow_overwrite=True)
    name, due = json.loads(_get(client, f"jaxtune/point/{point}"))
    return name, due


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What all processes decided while they waited for each other: one of these, or that all are ready."""

    ready: bool
    signal_name: str | None = None
    due: bool = False
    failed: list | None = None
    """What a process failed of, from shared_errors.described."""


def meet(
    future: Future,
    failure: Callable[[], list | None],
    signal_name: Callable[[], str | None],
    due: Callable[[], bool],
) -> Agreed:
    """Waits in a run of several processes until the `future` of each is done, or until one failed, a signal came to
    one, or a save is due in the first one, and returns the same in all.

    A collective call, as `agree`. No process is beyond it before all have called it, however long one waits.

    Args:
      future: what this process waits for.
      failure: what it failed of (shared_errors.described), None if it did not; asked once it is done.
      signal_name: the name of a signal that came to this process, or None; asked several times a second.
      due: whether a save is due; only the first process is asked.
    """
    client, point, said = _client(), next(_meetings), False
    place = f"{_READY}{point}/"
    while True:
        if not said and future.done():
            said = True
            client.key_value_set(f"{place}{index()}", json.dumps(failure()))
        if first():
            answers = {key: json.loads(value) for key, value in client.key_value_dir_get(place)}
            asked = client.key_value_dir_get(_ASKED)
            name = signal_name() or (asked[0][1] if asked else None)
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
            if (decided := _known(client, f"{_READY}decided/{point}", said)) is not None:
                return Agreed(**json.loads(decided))
        if not said:
            wait([future], _MEETING_SECONDS)
        elif first():
            time.sleep(_SOON_SECONDS)


def _known(client, key: str, is_soon: bool) -> str | None:
    """The value of a key if it is there, or, if `is_soon`, comes within a fifth of a second; else None."""
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
    """Returns the smallest of all processes' numbers (`value`): the planner plans for the least memory of their
    devices. A process without one passes None; the result is None if all do. Collective: every process must call it, in
    the same order as its other collective calls and in its main thread."""
    found = [number for number in all_of(value) if number is not None]
    return min(found, default=None)


def require_same(what: dict[str, Any], fix: str) -> None:
    """Raises ValueError if the processes have different settings, versions, rows, weights or stored scores. Without
    this check each process would compute another run, and nobody would notice. Collective: every process must call it,
    in the same order as its other collective calls and in its main thread.

    Args:
      what: {name: value that JSON can express} of this process.
      fix: what the user should do, printed after the name and the two values.
    Raises:
      ValueError: a process has another value than the first one; it is raised in all processes.
    """
    if count() == 1:
        return
    own = json.loads(json.dumps(what))
    expected = of_first(lambda: own)
    names = (name for name in sorted(own.keys() | expected.keys()) if own.get(name) != expected.get(name))
    other = next(([name, own.get(name), expected.get(name)] for name in names), None)
    for number, found in enumerate(all_of(other)):
        if found is not None:
            name, here, there = found
            raise ValueError(f"{name}: process {number} has {here!r}, the first process {there!r}; {fix}")


def hosts() -> int:
    """Returns the number of different machines that the processes run on, by their host names. The planner computes
    from it how many devices one machine has, because it divides weights within a machine where it can. Collective:
    every process must call it, in the same order as its other collective calls and in its main thread."""
    return len(set(all_of(socket.gethostname())))


@contextlib.contextmanager
def one_a_host() -> Iterator[None]:
    """A context that processes enter in turns: first the first process, then the first one of each other host, then all
    others. A run prepares its rows in it, which fills the cache on disk: later processes read what earlier ones wrote,
    and do not compute it again. If a process raises an Exception in its turn, all raise it after that turn (as
    `of_first`). Collective: every process must call it, in the same order as its other collective calls and in its main
    thread; nothing within may be collective. A single process enters it at once."""
    if count() == 1:
        yield
        return
    hosts = all_of(socket.gethostname())
    own = index()
    turn = 0 if own == 0 else 1 if hosts.index(hosts[own]) == own else 2
    for now in range(3):
        failed = None
        if now == turn:
            try:
                yield
            except Exception as error:
                failed = error
        found = all_of(None if failed is None else shared_errors.described(failed))
        if failed is not None:
            raise failed
        if failure := next(filter(None, found), None):
            raise shared_errors.made(failure)


@contextlib.contextmanager
def written_by_first(path: Path) -> Iterator[Path]:
    """A context for writing a folder that all processes compute and one writes, as a run's result: it yields `path` in
    the first process, and in the others a path of the same name in a temporary folder that is removed at the end. Its
    end waits until all processes have reached it, so that the first has written. A process that raises an Exception
    within does not wait, and the others raise it at their end (as `of_first`). Collective: every process must enter it,
    in the same order as its other collective calls and in its main thread. A single process gets `path`."""
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
    for other in range(count()):
        if failure := json.loads(_get(client, f"{key}{other}")):
            raise shared_errors.made(failure)


def _get(client: Any, key: str) -> str:
    """Waits for a key of the coordination service and returns its value. There is no time limit: if the process that
    should set the key fails, `_watch` ends this process, and JAX does if it was killed. The wait is interrupted every
    second, so that Python can handle signals. client: the service's client, which `_client` returns."""
    from jax.errors import JaxRuntimeError

    while True:
        try:
            return client.blocking_key_value_get(key, _POLL_MILLISECONDS)
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


# ---- ending


def last_words(text: str) -> None:
    """Stores `text`, an error's message or the signal that stopped the command. If the exit code is not 0, `leave`
    sends it to the other processes, which print it. Without it they print the exit code."""
    _Run.last_words = text


def leave(code: int) -> None:
    """The command line calls it at the end of a process, with its exit code; in a run of one process it does nothing.
    With code 0 it waits until all others call it, and returns. With any other code it reports the last words to the
    others and exits at once, because in an orderly shutdown JAX and the others would wait for each other. Only the
    first process, in which the coordination service runs, waits up to 10 seconds before, until all have read the
    report, and one second more, in which they exit."""
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
    """Tells the coordination service that this process knows of a failure, for which a failing first process waits
    before it exits, because the service ends with it. client: the service's client, which `_client` returns."""
    client.key_value_set(f"{_HEARD}{index()}", "", allow_overwrite=True)


def _watch() -> None:
    """Runs in a thread from `join` on and ends this process if another one fails or the first one disappears. Without
    it a process would wait forever in a collective operation with one that is gone.

    It waits until a process reports its end. If that process failed, this process prints the failed one's message and
    exits with the same exit code: the first process after up to 10 seconds, in which it may finish writing and end by
    itself, any other at once. If the first process disappears without a report, this one exits with code 1; if another
    one does, JAX ends the rest. If the run ended normally (code 0), the thread returns.
    """
    from jax.errors import JaxRuntimeError

    client = _client()
    while not _Run.leaving:
        try:
            ended = json.loads(client.blocking_key_value_get(_ENDED, 3_600_000))
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                continue
            if not _Run.leaving and not first():
                _end("the first process is gone. The same command continues from the last checkpoint.", 1)
            return
        if ended["code"] == 0:
            return
        if first():  # it may be ending for the same reason, and still be writing to disk
            deadline = time.monotonic() + _WORDS_SECONDS
            while not _Run.leaving and time.monotonic() < deadline:
                time.sleep(0.05)
        if not _Run.leaving and ended["process"] != index():
            with contextlib.suppress(JaxRuntimeError):
                _heard(client)
            _end(f"process {ended['process']} on {ended['host']} ended: {ended['words']}", ended["code"])


def _end(text: str, code: int) -> None:
    """Ends this process at once with the exit code `code`, without the orderly shutdown in which JAX would wait for the
    other processes. It first prints on stderr that the process ends because of `text`. `_watch` calls it because
    another process of the run failed, or the first one is gone; a process that fails itself ends by `leave`."""
    with contextlib.suppress(OSError):
        os.write(2, f"jaxtune: process {index()} ends, because {printable(text)}\n".encode())
    os._exit(code)
