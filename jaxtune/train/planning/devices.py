"""Devices as the planner knows them: their rates, and the memory that a run may use of them. `find_device` makes a
`Device` by its name; `limit` and `budget` say how much of its memory a run and its steps may take, and `card_gb` on
which card they would fit (`card_bytes` is what a card's allocator gives out, `with_fragments` what it must have);
`host_memory_bytes` (by the limits of a container or job, `_group_limits`) and `allow_pinned_memory` are about the
memory of the host, which the devices that `devices_here` counts share; `memory_peak_bytes` reads the largest use so
far, `free_bytes` what is left; and `device_peak_flops` and `float32_time` give rates of the data sheets."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxtune.models.fitted import DEVICE_SHARES
from jaxtune.profile.data_sheets import DATA_SHEETS, data_sheet, known_devices, refusal
from jaxtune.profile.device import known_ceilings
from jaxtune.system import processes
from jaxtune.system.invocation import spelled
from jaxtune.train.config import TrainConfig

# Bytes of the GB in a card's size ("a 24 GB card", memory.budget_gb=24): cards are sold in GiB. The CUDA context and
# its libraries take CONTEXT_BYTES of a card outside of the allocator. Bytes of arrays and plans are printed in GB of
# 1e9.
_CARD_GB = 2.0**30
CONTEXT_BYTES = 0.6e9
# The part of the allocator's memory that cannot be used: a share, and at least this many bytes. A program's temporaries
# are one block, which was refused 3.3 GB where 3.5 were free, when loading still left holes.
_FRAGMENTS, _FRAGMENT_BYTES = 0.02, 0.5e9


@dataclasses.dataclass(frozen=True)
class Device:
    """The planner's view of a device: its memory, and the rates (FLOP/s and bytes/s) from which it forecasts times.
    `find_device` makes it. It need not exist here: --plan plans for devices of other machines, too."""

    # jax.Device.device_kind, a card's name as the user wrote it, or "cpu".
    name: str
    # Bytes for arrays and programs; None where nothing limits them.
    memory_bytes: float | None
    # FLOP/s of large 16-bit products.
    gemm: float
    # Bytes/s of a copy within the device, read and written bytes counted.
    copy: float
    # Bytes/s to the host, in one direction; 0 where offload is of no use because device and host share one memory.
    link: float
    # Bytes of its host's memory that this device may pin; other devices of the run pin their own. 0 for "cpu".
    host_bytes: float
    # Where the rates come from, in words.
    note: str
    # Whether it runs the kernels for compute capability 9.0: its name has H100 or H200.
    hopper: bool = False
    # Where host_bytes comes from, in words; "" on a machine of which this process may use all memory, and for "cpu".
    host_note: str = ""
    # Bytes that may be pinned on a machine with the host memory that is usual for such a device, for a warning in a
    # plan for another machine; None for a device of this machine.
    usual_host_bytes: float | None = None
    # Bytes/s to the other devices of the run, in one direction, as collectives reach it on one host.
    peer: float = math.inf
    # Its share, in bytes, of the memory of its host that the run may use; devices of the run on a host share it
    # equally.
    host_memory_bytes: float = math.inf


_PINNED_SHARE = 0.7  # share of the host's memory that may be pinned
_ONE_MEMORY_GBPS = 25.0  # network rate between machines whose device and host share one memory
# The environment variable that limits the GiB that XLA pins; its default is 64.
_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
# Of these GiB, what loading and resuming pinned before the first step, in pieces too small for what a step pins: 2.1
# when a full 8B was resumed.
_STAGED_GIB = 3
# An unknown device of this machine is assumed to have the rates of this one, which only rank plans, until it is
# measured.
_ASSUMED = "RTX 3060"


def host_memory_bytes() -> float:
    """Bytes of host memory that this process may use: those of the machine, or of the container or job that it runs in
    if that is limited to less. What else runs there is not subtracted. The planner counts on it for all that it places
    on the host."""
    return float(min([_machine_bytes(), *_group_limits()]))


def _machine_bytes() -> int:
    """Bytes of this machine's memory, whatever part of them this process may use. `host_memory_bytes` takes the smaller
    of it and the limits, and `_limited_note` shows both."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _group_limits() -> Iterator[int]:
    """The limits of memory, in bytes, of the control groups that this process is in: of its own and of those around it,
    which limit it too. Groups without a limit give none, or with version 1 a number larger than any memory; outside
    Linux nothing is yielded. A container sees its own as the root; SLURM and systemd make others further down (the
    kernel's documentation of cgroups, versions 1 and 2). `host_memory_bytes` takes the smallest."""
    lines = []
    with contextlib.suppress(OSError):  # no Linux
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    for line in ["0::/", "1:memory:/", *lines]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (_GROUPS / "memory", "memory.limit_in_bytes") if controllers else (_GROUPS, "memory.max")
        own = root / path.strip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                with contextlib.suppress(OSError, ValueError):  # not limited: "max"
                    limit = int((folder / name).read_text(encoding="ascii"))
                    yield limit


def _limited_note() -> str:
    """What Device.host_note says of this machine, in words: how much of its memory this process may use, and which part
    of that may be pinned, if a container or job is limited to less than there is; otherwise ""."""
    allowed, there = host_memory_bytes(), _machine_bytes()
    if allowed >= there:
        return ""
    return (
        f"{allowed / 1e9:.1f} GB (the limit of this container or job; the machine has {there / 1e9:.1f} GB), of which "
        f"{_PINNED_SHARE:.0%} may be pinned"
    )


def allow_pinned_memory() -> None:
    """Lets XLA pin as much of this machine's memory (keep it in place for copies to and from the GPU) as the planner
    counts on, 70 % of what this process may use, and what loading pins beside that, by an environment variable; a limit
    that is already set there stays. XLA's default of 64 GiB may be less than that, or more.

    `jaxtune train` calls it before JAX starts its devices, when XLA reads the limit. The memory is pinned as it is
    used."""
    os.environ.setdefault(_PINNED_LIMIT, str(math.ceil(host_memory_bytes() * _PINNED_SHARE / 2**30) + _STAGED_GIB))


def _pinnable_bytes(on_host: int, in_process: int) -> float:
    """Bytes of host memory that one device may pin: the smaller of its share of 70 % of the memory that this process
    may use, and its share of what XLA lets this process pin (see allow_pinned_memory) beside what loading pins.
    `find_device` stores it in Device.host_bytes, by which plans limit what they offload and the optimizer's states on
    the host.

    Args:
      on_host: number of the run's devices on this host.
      in_process: number of the run's devices that this process uses.
    """
    limit = max(int(os.environ.get(_PINNED_LIMIT, 64)) - _STAGED_GIB, 0) * 2.0**30
    return min(host_memory_bytes() * _PINNED_SHARE / on_host, limit / in_process)


def pool_bytes(pinned: float) -> float:
    """The size in bytes of XLA's pool of pinned host memory once a step has pinned `pinned` bytes: the power of two
    that holds them. The pool grows by regions of such sizes (tsl::BFCAllocator), a step takes its part in one piece,
    and the process keeps the pool until it ends. So an 8B whose step pins 19.4 GB takes 34.4 GB. The forecasts of
    phases count it."""
    return 2.0 ** math.ceil(math.log2(pinned)) if pinned > 0 else 0.0


def most_pinned_bytes(device: Device, room: float) -> float:
    """The most bytes that a step may pin for `device` so that XLA's pool (`pool_bytes`) fits into `room` bytes of host
    memory. If Device.host_bytes is at most `room`, it is Device.host_bytes, because XLA lets the pool grow no further;
    else it is the largest power of two within `room`. `_pinnable` in host_room.py limits plans by it."""
    if device.host_bytes <= room:
        return device.host_bytes
    return 2.0 ** math.floor(math.log2(room)) if room > 0 else 0.0


def devices_here(count: int) -> tuple[int, int]:
    """(devices on this host, devices of this process) among JAX's first `count` devices, which the run uses. The
    devices of a host share its memory, and those of a process share what XLA lets the process pin (`_pinnable_bytes`
    divides by both numbers). A host is known by its host name.

    A collective call: all processes of the run must make it.
    """
    import jax

    own = sum(device.process_index == processes.index() for device in jax.devices()[:count])
    host = socket.gethostname()
    return sum(number for name, number in processes.all_of([host, own]) if name == host), own


def card_bytes(size_gb: float) -> float:
    """Bytes that JAX's allocator may give out on a card that is sold with `size_gb` GiB of memory: all of it, less the
    memory of the CUDA context (0.6 GB). Cards of other machines, and memory.budget_gb, have their limit from it."""
    return size_gb * _CARD_GB - CONTEXT_BYTES


def card_gb(needed: float) -> float:
    """The memory that a card must have so that a plan of `needed` bytes fits beside the CUDA context and what
    fragmentation loses, in GiB (the unit of cards' sizes), rounded up to 0.1; it need not be a size that is sold. An
    error about a plan that does not fit proposes it."""
    return math.ceil((with_fragments(needed) + CONTEXT_BYTES) / _CARD_GB * 10) / 10


def find_device(
    name: str,
    memory_bytes: float | None = None,
    host_gb: float | None = None,
    sharing: tuple[int, int] = (1, 1),
) -> Device:
    """Returns the planner's Device of this name, with rates measured on it (`jaxtune profile ceilings`) or from its
    data sheet. A GPU of this machine that has neither gets the rates of an RTX 3060, which only rank plans. Planner
    and ForwardPlanner, the choice of a mesh, and --plan (also for devices of other machines) call it.

    Args:
      name: jax.Device.device_kind, a card's name, or "cpu", whose rates are made up, and which has no host link.
      memory_bytes: the bytes that the allocator of this machine's device may give out; None: the device is one of
        another machine, with the memory that its data sheet leaves after the CUDA context (for "cpu": no limit).
      host_gb: host memory for each device, in GB, for a device of another machine; None: what such machines usually
        have.
      sharing: (devices of the run on this host, devices of this process), as `devices_here` returns them; they share
        the host's memory. It has no effect for a device of another machine.
    Raises:
      ValueError: the device is refused, with the reason; or it is one of another machine and unknown, with the known
        ones; or the file with its measured rates is damaged.
    """
    if name == "cpu":  # for tests and tiny runs: one memory for device and host, and rates that only rank plans
        return Device("cpu", memory_bytes, 1e11, 2e10, 0.0, 0.0, "not measured")
    here = memory_bytes is not None
    if (reason := refusal(name)) is not None:
        raise ValueError(f"{'this GPU' if here else 'plan.device'} = {name!r}: {reason}")
    sheet, known = data_sheet(name), known_ceilings(name)
    rated = sheet or DATA_SHEETS[_ASSUMED]
    shares = DEVICE_SHARES.of("xla", name)
    if sheet is None and not here:
        near = difflib.get_close_matches(name, known_devices(), 3, 0.85)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"plan.device = {name!r}: not a device that is known; {hint}known: {', '.join(known_devices())}"
        )
    if known is not None and known.source == "measured":
        rates = (known.gemm_bf16_tflops * 1e12 * shares.sustained, known.copy_tbps * 1e12, known.to_host_gbps * 1e9)
        note = "rates measured on this machine"
    else:
        rates = (
            rated.bf16_tflops * 1e12 * shares.products,
            rated.copy_tbps * 1e12 * shares.copies,
            rated.link_gbps * 1e9 * shares.link,
        )
        note = "not measured: from its data sheet, at the shares that an H200 reaches"
        if sheet is None:
            note = (
                f"unknown device, with the rates of an {_ASSUMED}; `{spelled('profile ceilings')}` measures them once"
            )
        elif sheet is data_sheet("H200"):
            note = "measured"
    if sheet is not None and sheet.link_gbps == 0:
        rates = (*rates[:2], 0.0)
    hopper = "H100" in name or "H200" in name
    peer = (rated.nvlink_gbps or rated.link_gbps or _ONE_MEMORY_GBPS) * 1e9 * shares.peers
    if memory_bytes is not None:
        pinnable, whole = _pinnable_bytes(*sharing), host_memory_bytes() / sharing[0]
        limited = _limited_note()
        return Device(name, memory_bytes, *rates, pinnable, note, hopper, limited, peer=peer, host_memory_bytes=whole)
    assert sheet is not None
    host = sheet.host_gb if host_gb is None else host_gb
    source = "usual for this device; set plan.host_gb to yours" if host_gb is None else "plan.host_gb"
    return Device(
        name,
        card_bytes(sheet.memory_gib),
        *rates,
        host * 1e9 * _PINNED_SHARE,
        note,
        hopper,
        peer=peer,
        host_note=f"{host:g} GB ({source}), of which {_PINNED_SHARE:.0%} may be pinned",
        usual_host_bytes=sheet.host_gb * 1e9 * _PINNED_SHARE,
        host_memory_bytes=host * 1e9,
    )


def limit(config: TrainConfig, device: Device) -> float | None:
    """Bytes of the memory of `device` that the allocator may give out to the run of `config`: all that the device has,
    or what a card of memory.budget_gb GiB would have (on a CPU, those GiB) if that is set and less. None if nothing
    limits them, as on a CPU without it. Plans should fit in `budget`; only the smallest may try to use all of this."""
    limits = [] if device.memory_bytes is None else [device.memory_bytes]
    if config.memory.budget_gb is not None:
        size = config.memory.budget_gb
        limits.append(size * _CARD_GB if device.name == "cpu" else card_bytes(size))
    return min(limits, default=None)


def budget(config: TrainConfig, device: Device) -> float | None:
    """The part of `limit`, in bytes, that the arrays and programs of a step of `config` may take on `device`, without
    what fragmentation of the allocator's memory loses (2 %, and on a GPU at least 0.5 GB); None if nothing limits it.
    Plans are chosen so that their forecasts fit in it; only the smallest plan may need more."""
    if (most := limit(config, device)) is None:
        return None
    return most - max(most * _FRAGMENTS, 0.0 if device.name == "cpu" else _FRAGMENT_BYTES)


def with_fragments(needed: float) -> float:
    """Bytes that a GPU's allocator must have so that `needed` bytes of them are usable, in spite of the gaps between
    arrays, which take 2 % of the allocator's bytes and at least 0.5 GB: the inverse of what `budget` subtracts. card_gb
    proposes a card by it."""
    return max(needed / (1 - _FRAGMENTS), needed + _FRAGMENT_BYTES)


def memory_peak_bytes(device: int = 0) -> int:
    """The largest memory use so far, in bytes: of this process's device with index `device`, or of the process on the
    host if the device does not record it (CPU). The Monitor logs it as `peak_memory_bytes`; no plan depends on it."""
    import jax

    stats = jax.local_devices()[device].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def free_bytes(devices: Sequence) -> float | None:
    """The bytes that the allocator of the fullest of these devices can still give out, in all, though perhaps in no
    single block; None if a device does not record them (CPU). Planner.short_bytes asks it after memory ran out.
    devices: jax.Devices of this process."""
    stats = [device.memory_stats() or {} for device in devices]
    if not all({"bytes_limit", "bytes_in_use"} <= of.keys() for of in stats):
        return None
    return min((float(of["bytes_limit"] - of["bytes_in_use"]) for of in stats), default=None)


_WIDTH = {
    "bfloat16": "bf16_tflops",
    "float16": "bf16_tflops",
    "float32": "fp32_tflops",
    "float8_e4m3fn": "fp8_tflops",
    "float8_e5m2": "fp8_tflops",
}


def float32_time(device_kind: str) -> float:
    """How many times as long a matrix product in float32 takes as one in 16 bits, by the data sheet of `device_kind`
    (jax.Device.device_kind); 1 for a device without one. With it the planner counts the work of modules that compute in
    float32 by a precision map, but not that of the head on Hopper (StepCost.head_time)."""
    wide, usual = (device_peak_flops(device_kind, dtype) for dtype in ("float32", "bfloat16"))
    return usual / wide if wide and usual else 1.0


def device_peak_flops(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Dense peak FLOP/s of matrix products in `dtype` on one device (jax.Device.device_kind), fp32 without TF32; None
    if no data sheet states it. dtype: "bfloat16", "float16", "float32", "float8_e4m3fn" or "float8_e5m2"; None is
    returned for any other. A run's metric mfu is its FLOP/s over the sum of its devices' peaks, and float32_time is a
    ratio of two peaks."""
    sheet = data_sheet(device_kind)
    tflops = None if sheet is None or dtype not in _WIDTH else getattr(sheet, _WIDTH[dtype])
    return None if tflops is None else tflops * 1e12
