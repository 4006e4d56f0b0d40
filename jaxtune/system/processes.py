"""A run of several processes: how they find each other, agree on what each of them sees alone, and end together.

Every process runs the same program. What all of them compute from the same numbers they decide alike without a word;
what one of them sees by itself (a signal, a clock, a folder, the memory that is free) they agree on here, through the
service of `jax.distributed`, which the first process keeps. None of it touches a device: a step never waits for it.

A process that fails says so to the service, and the others, which may be waiting for it in a collective that will never
end, print its words and end with its exit code. One that is killed says nothing: after HEARTBEAT_SECONDS the service
misses it, and JAX ends the others. So does a first process that is gone, at once.

Every room may use this; of ours it imports the terminal alone. In a run of one process each function gives back what it
is given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import ipaddress
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
from pathlib import Path
from typing import Any

from jaxtune.system import terminal
from jaxtune.system.terminal import printable

HEARTBEAT_SECONDS = 30
_START_SECONDS = 300
_ENDED, _HEARD, _ASKED = "jaxtune/ended", "jaxtune/heard/", "jaxtune/asked/"
_WORDS_SECONDS = 10.0  # that a process which fails and the first one leave each other to end well
_POLL_MILLISECONDS = 1000  # that a wait lasts before Python looks at its signals
_KEPT_DECISIONS = 64  # of the stops that were agreed on; nobody is so far behind


class _Run:
    """What this process knows of the run that it is a part of."""

    watcher: threading.Thread | None = None
    leaving = False
    last_words = ""


# ---- joining


def join(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Makes this process one of several where its command or its surroundings say so, before JAX starts its devices.

    The first process listens on its loopback address alone where all of them are on one host. Else whoever reaches its
    port can take part, and end the run: docs/several_gpus.md says what to close off.

    Args:
      coordinator: "host:port" of the first process, which listens there. processes: how many there are. process: which
        of them this is, from 0. All three, or none: then SLURM or Open MPI says it, if it started several processes;
        from Open MPI 5 on, which does not tell the address, `coordinator` beside it.
    Raises:
      ValueError: they do not fit each other; not all processes came in five minutes.
    """
    place = _place(coordinator, processes, process)
    if place is None or place.count == 1:
        return
    import jax

    _compile_alone()
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from the run
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            place.devices,
            cluster_detection_method="deactivate",
            initialization_timeout=_START_SECONDS,
            coordinator_bind_address=place.coordinator if _is_loopback(place.coordinator) else None,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except RuntimeError as error:
        raise ValueError(
            f"process {place.index} of {place.count} did not come together with the others at {place.coordinator}: "
            f"{error}"
        ) from None
    if not first():
        terminal.be_silent()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a process that JAX ends takes what is still in a buffer with it
        sys.stdout.reconfigure(line_buffering=True)
    _Run.watcher = threading.Thread(target=_watch, name="others", daemon=True)
    _Run.watcher.start()


def _compile_alone() -> None:
    """Has XLA, which reads this when the devices start, time algorithms for this process alone, whatever it compiles:
    steps, checks of kernels, what one process computes by itself. By its default the processes divide the algorithms
    among them, and one that finds a program in its cache, or never compiles it, has nothing to share: the others would
    wait for it without end.
    """
    given = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_shard_autotuning" not in given:
        os.environ["XLA_FLAGS"] = f"{given} --xla_gpu_shard_autotuning=false".strip()


@dataclasses.dataclass(frozen=True)
class Place:
    """Of a process among `count`: its index, where the first one listens, and the GPUs it takes (None: all it sees)."""

    coordinator: str
    count: int
    index: int
    devices: list[int] | None = None


def _is_loopback(coordinator: str) -> bool:
    """Whether "host:port" is an address that only this host can reach."""
    host = coordinator.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _place(coordinator: str | None, processes: int | None, process: int | None) -> Place | None:
    """Where this process stands; None for a run of its own."""
    if processes is not None or process is not None:
        if coordinator is None or processes is None or process is None:
            raise ValueError("--coordinator, --processes and --process belong together: give all three")
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
        raise ValueError(f"{error} Or name the first process's address: --coordinator=HOST:PORT") from None
    if given is None and coordinator is not None and local_count == count:
        coordinator = f"127.0.0.1:{coordinator.rpartition(':')[2]}"
    if coordinator is None:
        raise ValueError("the address of the first process is not known: --coordinator=HOST:PORT names it")
    # A scheduler may have given each process its GPU already.
    sees_one = len(os.environ.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1
    return Place(coordinator, count, index, None if local_count == 1 or sees_one else [local_index])


def _by_surroundings(environment: Any) -> tuple[int, int, int, int] | None:
    """(processes, index, index on this host, processes on this host) as srun or mpirun says them; None of one process.

    SLURM's are those of the step: in a batch script, and in a shell that salloc opens, the job's would name processes
    that nobody started.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        tasks = []  # "4(x2),3": on each host
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


# ---- who is there


def _client() -> Any:
    """Of the service; None in a run of one process."""
    if "jax" not in sys.modules:
        return None
    from jaxtune.system.private_jax import distributed

    return distributed.global_state.client


def count() -> int:
    """Processes of the run."""
    if _client() is None:
        return 1
    from jaxtune.system.private_jax import distributed

    return distributed.global_state.num_processes


def index() -> int:
    """Which of them this is, from 0."""
    if _client() is None:
        return 0
    from jaxtune.system.private_jax import distributed

    return distributed.global_state.process_id


def first() -> bool:
    """Whether this is the process that writes: files, metrics, the console."""
    return index() == 0


# ---- agreeing

_calls = itertools.count()
_points = itertools.count()


def all_of(value: Any) -> list[Any]:
    """What every process says, in their order, as JSON gives it back. All of them must ask, in their main thread."""
    client, number = _client(), next(_calls)
    if client is None:
        return [value]
    client.key_value_set(f"jaxtune/all/{number}/{index()}", json.dumps(value))
    return [json.loads(_get(client, f"jaxtune/all/{number}/{other}")) for other in range(count())]


def of_first(value: Callable[[], Any]) -> Any:
    """What the first process finds, as JSON gives it back; the others ask nobody else. All must ask, as for all_of."""
    client, number = _client(), next(_calls)
    if client is None:
        return value()
    key = f"jaxtune/first/{number}"
    if first():
        client.key_value_set(key, json.dumps(value()))
    return json.loads(_get(client, key))


def agree(signal_name: str | None, due: bool) -> tuple[str | None, bool]:
    """(the name of a signal that came to any process, whether something is due by the first one's clock).

    All ask at the same points of the run, as often as they like: it takes a message to the service and back.
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


def smallest(value: float | None) -> float | None:
    """The smallest of all processes' numbers; None if none of them has one."""
    found = [number for number in all_of(value) if number is not None]
    return min(found, default=None)


def require_same(what: dict[str, Any], fix: str) -> None:
    """Raises ValueError, in all processes, where one of them has another value than the first: each would make its own
    run, and none would see it. All must ask, as for all_of.

    Args:
      what: {name: JSON-able value}. fix: what to do, said after the names and the values.
    """
    if count() == 1:
        return
    ours = json.loads(json.dumps(what))
    theirs = of_first(lambda: ours)
    names = (name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name))
    other = next(([name, ours.get(name), theirs.get(name)] for name in names), None)
    for number, found in enumerate(all_of(other)):
        if found is not None:
            name, here, there = found
            raise ValueError(f"{name}: process {number} has {here!r}, the first process {there!r}; {fix}")


def hosts() -> int:
    """Machines of the run, by their names. All must ask, as for all_of."""
    return len(set(all_of(socket.gethostname())))


@contextlib.contextmanager
def one_a_host() -> Iterator[None]:
    """What is done inside, each process does after those that may have left something for it to read: the first
    process, then the first of each other host, then the rest.
    """
    if count() == 1:
        yield
        return
    hosts = all_of(socket.gethostname())
    own = index()
    turn = 0 if own == 0 else 1 if hosts.index(hosts[own]) == own else 2
    for now in range(3):
        if now == turn:
            yield
        all_of(None)


@contextlib.contextmanager
def written_by_first(path: Path) -> Iterator[Path]:
    """The path for the first process; for the others, which compute what it writes with it, one that is removed.

    Ends for all when the first has written."""
    with tempfile.TemporaryDirectory() as folder:
        yield path if first() else Path(folder) / path.name
    all_of(None)


def require_shared(folder: Any) -> None:
    """Raises ValueError where a folder of the first process is not the same one for all.

    A file system over the network may show a new name late; it is waited for.
    """
    if count() == 1:
        return
    name = of_first(lambda: _marked(folder))
    deadline = time.monotonic() + _START_SECONDS / 10
    while not (there := os.path.exists(os.path.join(folder, name))) and time.monotonic() < deadline:
        time.sleep(0.2)
    lacking = [number for number, found in enumerate(all_of(there)) if not found]
    if first():
        os.unlink(os.path.join(folder, name))
    if lacking:
        raise ValueError(
            f"output = {str(folder)!r}: processes {lacking} do not see what the first process writes there; name a "
            "folder that all hosts share"
        )


def _marked(folder: Any) -> str:
    name = f".shared_{os.getpid()}_{time.time_ns()}.tmp"
    with open(os.path.join(folder, name), "xb"):
        return name


def _get(client: Any, key: str) -> str:
    """Waits for a key as long as it takes: who would have set it either lives, or the run ends."""
    from jax.errors import JaxRuntimeError

    while True:
        try:
            return client.blocking_key_value_get(key, _POLL_MILLISECONDS)
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


# ---- ending


def last_words(text: str) -> None:
    """Why this process is about to fail, for the others to say."""
    _Run.last_words = text


def leave(code: int) -> None:
    """Called at the end of a process, with its exit code. Returns where all end well; a process that fails tells the
    others and is gone: to leave in good order, JAX would wait for them, and they for it."""
    if _Run.watcher is None:
        return
    client = _client()
    if code == 0:
        all_of(None)  # the first one may write for long
        _Run.leaving = True
        if first():
            client.key_value_set(_ENDED, json.dumps({"process": 0, "code": 0}))
        _Run.watcher.join()
        return
    _Run.leaving = True
    words = _Run.last_words or f"exit code {code}"
    message = {"process": index(), "host": socket.gethostname(), "code": code, "words": words}
    with contextlib.suppress(Exception):  # another was first, or the service is gone
        client.key_value_set(_ENDED, json.dumps(message))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(Exception):
        _heard(client)
    if first():  # the service goes with this process
        deadline = time.monotonic() + _WORDS_SECONDS
        with contextlib.suppress(Exception):
            while len(client.key_value_dir_get(_HEARD)) < count() and time.monotonic() < deadline:
                time.sleep(0.05)
    os._exit(code)


def _heard(client: Any) -> None:
    client.key_value_set(f"{_HEARD}{index()}", "", allow_overwrite=True)


def _watch() -> None:
    """Runs in a thread: ends this process when another one has failed."""
    from jax.errors import JaxRuntimeError

    client = _client()
    while not _Run.leaving:
        try:
            ended = json.loads(client.blocking_key_value_get(_ENDED, 3_600_000))
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                continue
            if not _Run.leaving and not first():
                _end("the first process is gone. The same command goes on from the last checkpoint.", 1)
            return
        if ended["code"] == 0:
            return
        if first():  # it may be about to end for the same reason, and have something to finish on the disk
            deadline = time.monotonic() + _WORDS_SECONDS
            while not _Run.leaving and time.monotonic() < deadline:
                time.sleep(0.05)
        if not _Run.leaving and ended["process"] != index():
            with contextlib.suppress(JaxRuntimeError):
                _heard(client)
            _end(f"process {ended['process']} on {ended['host']} ended: {ended['words']}", ended["code"])


def _end(text: str, code: int) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"jaxtune: process {index()} ends, because {printable(text)}\n".encode())
    os._exit(code)
