"""Devices as the planner knows them: rates, and the memory of device and host that a run may use."""

from __future__ import annotations

import dataclasses
import difflib
import math
import resource
import socket
import sys
from collections.abc import Sequence

from jaxtune.models.fitted import DEVICE_SHARES
from jaxtune.profile.data_sheets import DATA_SHEETS, data_sheet, known_devices, refusal
from jaxtune.profile.device import known_ceilings
from jaxtune.system import host_memory, processes
from jaxtune.system.invocation import spelled
from jaxtune.train.config.sections import MemoryConfig

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
    """A device's memory and its rates (FLOP/s, bytes/s). It need not exist here: plans are made for other machines,
    too.
    """

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


_ONE_MEMORY_GBPS = 25.0  # network rate between machines whose device and host share one memory
# An unknown device of this machine is assumed to have the rates of this one, which only rank plans, until it is
# measured.
_ASSUMED = "RTX 3060"


def _limited_note() -> str:
    """How much memory a container or job leaves, in words; "" if all."""
    allowed, total = host_memory.size_bytes(), host_memory.machine_bytes()
    if allowed >= total:
        return ""
    return (
        f"{allowed / 1e9:.1f} GB (the limit of this container or job; the machine has {total / 1e9:.1f} GB), of which "
        f"{host_memory.PINNED_SHARE:.0%} may be pinned"
    )


def _pinnable_bytes(on_host: int, in_process: int) -> float:
    """Bytes that one device may pin: its share of 70 % of the host's memory, or of XLA's limit."""
    return min(
        host_memory.size_bytes() * host_memory.PINNED_SHARE / on_host, host_memory.pinned_limit_bytes() / in_process
    )


def pool_bytes(pinned: float) -> float:
    """Bytes of XLA's pinned pool once a step has pinned `pinned` bytes: the next power of two (tsl::BFCAllocator), kept
    until the process ends. An 8B that pins 19.4 GB takes 34.4 GB.
    """
    return 2.0 ** math.ceil(math.log2(pinned)) if pinned > 0 else 0.0


def most_pinned_bytes(device: Device, room: float) -> float:
    """The most bytes that a step may pin so that XLA's pool fits into `room` bytes: Device.host_bytes, beyond which the
    pool does not grow, or the largest power of two.
    """
    if device.host_bytes <= room:
        return device.host_bytes
    return 2.0 ** math.floor(math.log2(room)) if room > 0 else 0.0


def devices_here(count: int) -> tuple[int, int]:
    """(devices on this host, of this process) among JAX's first `count`; hosts are told apart by name. Collective."""
    import jax

    in_process = sum(device.process_index == processes.index() for device in jax.devices()[:count])
    host = socket.gethostname()
    return sum(number for name, number in processes.all_of([host, in_process]) if name == host), in_process


def card_bytes(size_gb: float) -> float:
    """Bytes that JAX's allocator may give out on a card of `size_gb` GiB: all but the CUDA context (0.6 GB)."""
    return size_gb * _CARD_GB - CONTEXT_BYTES


def card_gb(plan_bytes: float) -> float:
    """GiB of a card that holds a plan of these bytes, context and fragments included, rounded up to 0.1; perhaps none
    that is sold.
    """
    return math.ceil((with_fragments(plan_bytes) + CONTEXT_BYTES) / _CARD_GB * 10) / 10


def find_device(
    name: str,
    memory_bytes: float | None = None,
    host_gb: float | None = None,
    sharing: tuple[int, int] = (1, 1),
) -> Device:
    """The Device of this name, with measured rates (`jaxtune profile ceilings`) or its data sheet's. A GPU of this
    machine with neither gets an RTX 3060's, which only rank plans.

      name: jax.Device.device_kind, a card's name, or "cpu", whose rates are made up.
      memory_bytes: what the allocator here may give out; None: a device of another machine, with its data sheet's
      memory less the CUDA context ("cpu": no limit).
      host_gb: host memory for each device of another machine; None: the usual.
      sharing: `devices_here`; no effect for another machine.

    ValueError if it is refused, unknown and of another machine, or its measured rates cannot be read.
    """
    if name == "cpu":  # for tests and tiny runs: one memory for device and host, and rates that only rank plans
        return Device("cpu", memory_bytes, 1e11, 2e10, 0.0, 0.0, "not measured")
    if (reason := refusal(name)) is not None:
        raise ValueError(f"{'plan.device' if memory_bytes is None else 'this GPU'} = {name!r}: {reason}")
    sheet = data_sheet(name)
    if sheet is None and memory_bytes is None:
        near = difflib.get_close_matches(name, known_devices(), 3, 0.85)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"plan.device = {name!r}: not a device that is known; {hint}known: {', '.join(known_devices())}"
        )
    rated, shares = sheet or DATA_SHEETS[_ASSUMED], DEVICE_SHARES.of("xla", name)
    rates, note = _rates(name)
    hopper = "H100" in name or "H200" in name
    peer = (rated.nvlink_gbps or rated.link_gbps or _ONE_MEMORY_GBPS) * 1e9 * shares.peers
    if memory_bytes is not None:
        pinnable, host_share = _pinnable_bytes(*sharing), host_memory.size_bytes() / sharing[0]
        limited = _limited_note()
        return Device(
            name, memory_bytes, *rates, pinnable, note, hopper, limited, peer=peer, host_memory_bytes=host_share
        )
    assert sheet is not None
    host = sheet.host_gb if host_gb is None else host_gb
    source = "usual for this device; set plan.host_gb to yours" if host_gb is None else "plan.host_gb"
    return Device(
        name,
        card_bytes(sheet.memory_gib),
        *rates,
        host * 1e9 * host_memory.PINNED_SHARE,
        note,
        hopper,
        peer=peer,
        host_note=f"{host:g} GB ({source}), of which {host_memory.PINNED_SHARE:.0%} may be pinned",
        usual_host_bytes=sheet.host_gb * 1e9 * host_memory.PINNED_SHARE,
        host_memory_bytes=host * 1e9,
    )


def _rates(name: str) -> tuple[tuple[float, float, float], str]:
    """((FLOP/s of products, bytes/s of copies and of the host link), where they are from)."""
    sheet, ceilings, shares = data_sheet(name), known_ceilings(name), DEVICE_SHARES.of("xla", name)
    if ceilings is not None and ceilings.source == "measured":
        products = ceilings.gemm_bf16_tflops * 1e12 * shares.sustained
        copies, link = ceilings.copy_tbps * 1e12, ceilings.to_host_gbps * 1e9
        note = "rates measured on this machine"
    else:
        rated = sheet or DATA_SHEETS[_ASSUMED]
        products = rated.bf16_tflops * 1e12 * shares.products
        copies, link = rated.copy_tbps * 1e12 * shares.copies, rated.link_gbps * 1e9 * shares.link
        note = "not measured: from its data sheet, at the shares that an H200 reaches"
        if sheet is None:
            note = (
                f"unknown device, with the rates of an {_ASSUMED}; `{spelled('profile ceilings')}` measures them once"
            )
        elif sheet is data_sheet("H200"):
            note = "measured"
    return (products, copies, 0.0 if sheet is not None and sheet.link_gbps == 0 else link), note


def limit(memory: MemoryConfig, device: Device) -> float | None:
    """Bytes that the allocator may give out to a run: the device's, or of a card of memory.budget_gb GiB if less; None:
    no limit. Only the smallest plan may use all of it.
    """
    limits = [] if device.memory_bytes is None else [device.memory_bytes]
    if memory.budget_gb is not None:
        size = memory.budget_gb
        limits.append(size * _CARD_GB if device.name == "cpu" else card_bytes(size))
    return min(limits, default=None)


def budget(memory: MemoryConfig, device: Device) -> float | None:
    """`limit` without what fragmentation loses (2 %, on a GPU at least 0.5 GB): what forecasts must fit in."""
    if (most := limit(memory, device)) is None:
        return None
    return most - max(most * _FRAGMENTS, 0.0 if device.name == "cpu" else _FRAGMENT_BYTES)


def with_fragments(usable_bytes: float) -> float:
    """Bytes that a GPU's allocator needs so that these are usable; the inverse of `budget`."""
    return max(usable_bytes / (1 - _FRAGMENTS), usable_bytes + _FRAGMENT_BYTES)


def memory_peak_bytes(device: int = 0) -> int:
    """The largest memory use so far of this process's device `device`; of the process where devices do not record it
    (CPU).
    """
    import jax

    stats = jax.local_devices()[device].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def free_bytes(devices: Sequence) -> float | None:
    """Bytes that the fullest of these devices can still give out, perhaps in no single block; None on a CPU."""
    stats = [device.memory_stats() or {} for device in devices]
    if not all({"bytes_limit", "bytes_in_use"} <= device_stats.keys() for device_stats in stats):
        return None
    return min(
        (float(device_stats["bytes_limit"] - device_stats["bytes_in_use"]) for device_stats in stats), default=None
    )


_WIDTH = {
    "bfloat16": "bf16_tflops",
    "float16": "bf16_tflops",
    "float32": "fp32_tflops",
    "float8_e4m3fn": "fp8_tflops",
    "float8_e5m2": "fp8_tflops",
}


def float32_time(device_kind: str) -> float:
    """How many times as long a float32 matrix product takes as a 16-bit one, by data sheet; 1 without one."""
    wide, usual = (device_peak_flops(device_kind, dtype) for dtype in ("float32", "bfloat16"))
    return usual / wide if wide and usual else 1.0


def device_peak_flops(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Dense peak FLOP/s in `dtype` (bfloat16, float16, float32 without TF32, float8_e4m3fn, float8_e5m2); None if no
    data sheet states it.
    """
    sheet = data_sheet(device_kind)
    tflops = None if sheet is None or dtype not in _WIDTH else getattr(sheet, _WIDTH[dtype])
    return None if tflops is None else tflops * 1e12
