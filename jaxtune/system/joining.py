"""How a process becomes one of several: by arguments, or as SLURM or Open MPI started it.

A killed process is noticed after HEARTBEAT_SECONDS, and JAX ends the others, unless the run is complete.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import sys
from typing import Any

from jaxtune.system import terminal, timing
from jaxtune.system.ending import watch
from jaxtune.system.loopback import host_name, is_loopback
from jaxtune.system.processes import first

HEARTBEAT_SECONDS = 30
_START_SECONDS = 300


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
        with timing.phase("wait", "other processes"):
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
    watch(HEARTBEAT_SECONDS)


def is_one_of_several(*arguments: str | int | None) -> bool:
    """Whether `join` with these arguments waits for others, or refuses them."""
    return any(word is not None for word in arguments) or _by_surroundings(os.environ) is not None


def _compile_alone() -> None:
    """Has XLA time algorithms in each process alone, unless XLA_FLAGS say otherwise: shared timing waits for caches."""
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
    scheduler's process gets one GPU, by its index on the host, unless it is alone there or sees at most one.
    ValueError for incomplete arguments, or without the first process's address.
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
    """(Processes, index, index on this host, processes here) as srun or mpirun set them; None for one process."""
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
