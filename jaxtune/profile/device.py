"""Rates that a device can reach: measured once and cached, or taken from its data sheet."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from jaxtune.profile.data_sheets import data_sheet
from jaxtune.system.files import atomic_write
from jaxtune.system.invocation import spelled


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Highest rates of one device; 0 where a rate is unknown."""

    device: str
    gemm_bf16_tflops: float  # of one large matrix product
    gemm_fp8_tflops: float  # of one large matrix product
    copy_tbps: float  # bytes read plus bytes written
    # from pinned host memory, while all devices of the machine copy, as in a step over a mesh
    to_device_gbps: float = 0.0
    to_host_gbps: float = 0.0  # to pinned host memory, under the same condition
    launch_us: float = 0.0  # between the starts of small programs that are launched back to back
    # power, clocks and temperature under load, as nvidia-smi names them
    power: dict[str, str] = dataclasses.field(default_factory=dict)
    source: str = "data sheet"  # "measured" or "data sheet"
    versions: dict[str, str] = dataclasses.field(default_factory=dict)  # of jax and jaxlib, where measured
    measured_at: str = ""  # UTC time, where measured

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON, which the cache file stores."""
        return dataclasses.asdict(self)


def cache_file(device: str) -> Path:
    """The path of the file that caches the measured ceilings of this kind of device; it may not exist. The environment
    variable JAXTUNE_CACHE moves its folder, ~/.cache/jaxtune."""
    root = os.environ.get("JAXTUNE_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "jaxtune")
    return Path(root) / "ceilings" / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', device)}.json"


def known_ceilings(device: str) -> Ceilings | None:
    """The ceilings of this kind of device from the cache, else from its data sheet, else None. Nothing is measured.

    Raises:
      ValueError: the cache file is damaged.
    """
    file = cache_file(device)
    if file.is_file():
        try:
            return Ceilings(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{file} is damaged ({error}): delete it, then run `{spelled('profile ceilings')}`"
            ) from None
    sheet = data_sheet(device)
    if sheet is None:
        return None
    return Ceilings(device, sheet.bf16_tflops, sheet.fp8_tflops or 0.0, sheet.copy_tbps)


def ceilings(*, remeasure: bool = False) -> Ceilings:
    """The ceilings of this process's first device: measured at the first call (about 10 s on a GPU), cached after."""
    import jax

    device = jax.local_devices()[0]
    known = known_ceilings(device.device_kind)
    if known is not None and known.source == "measured" and not remeasure:
        return known
    measured = _measure(device)
    file = cache_file(device.device_kind)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, json.dumps(measured.to_dict(), indent=2))
    return measured


def _measure(device) -> Ceilings:
    """Measures all ceilings of a jax.Device, which takes about ten seconds on a GPU, and returns them. On a CPU, for
    tests, small sizes are measured."""
    import jax
    import jax.numpy as jnp
    import jaxlib

    on_gpu = device.platform == "gpu"
    bf16, power = _gemm_tflops(device, jnp.bfloat16, 8192 if on_gpu else 512, sample_power=on_gpu)
    fp8 = 0.0
    if not on_gpu or float(getattr(device, "compute_capability", "0")) >= 8.9:
        fp8, _ = _gemm_tflops(device, jnp.float8_e4m3fn, 8192 if on_gpu else 256)
    num_bytes = (1 << 30) if on_gpu else (1 << 24)
    alike = [other for other in jax.local_devices() if other.device_kind == device.device_kind]
    to_device, to_host = _host_link_gbps(alike, num_bytes // 2)
    return Ceilings(
        device=device.device_kind,
        gemm_bf16_tflops=bf16,
        gemm_fp8_tflops=fp8,
        copy_tbps=_copy_tbps(device, num_bytes),
        to_device_gbps=to_device,
        to_host_gbps=to_host,
        launch_us=_launch_us(device),
        power=power,
        source="measured",
        versions={"jax": jax.__version__, "jaxlib": jaxlib.__version__},
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _seconds(run, *, repeats: int = 5) -> float:
    """Median wall time in seconds of `repeats` calls of run(), which returns JAX arrays that are waited for; a first
    call, which compiles, is not counted."""
    import jax

    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def _gemm_tflops(device, dtype, size: int, *, sample_power: bool = False) -> tuple[float, dict[str, str]]:
    """Measures how fast a jax.Device multiplies two size x size matrices of this dtype, in products that are launched
    one behind another.

    Returns:
      (TFLOP/s; nvidia-smi's readings of power and clocks while such products run, or {} without sample_power)
    """
    import jax
    import jax.numpy as jnp

    count = 16 if device.platform == "gpu" else 2
    wide = jnp.bfloat16 if device.platform == "gpu" else jnp.float32

    def product(a, b):  # a b^T, the one layout that FP8 has
        return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=wide)

    with jax.default_device(device):
        keys = jax.random.split(jax.random.key(0))
        a, b = ((jax.random.normal(k, (size, size), jnp.float32) / size**0.5).astype(dtype) for k in keys)
        program = jax.jit(product).lower(a, b).compile()
        seconds = _seconds(lambda: [program(a, b) for _ in range(count)][-1])
        power = {}
        last = program(a, b)
        if sample_power:
            for _ in range(400):
                last = program(a, b)
            power = _power_state()
            jax.block_until_ready(last)
    return 2 * size**3 * count / seconds / 1e12, power


def _copy_tbps(device, num_bytes: int) -> float:
    """The bandwidth of a jax.Device's memory in TB/s, bytes read plus bytes written, measured with programs that read
    an array of `num_bytes` bytes and write one of the same size."""
    import jax
    import jax.numpy as jnp

    with jax.default_device(device):
        x = jnp.zeros(num_bytes // 4, jnp.float32)
        add = jax.jit(lambda x: x + 1.0).lower(x).compile()
        count = 8
        seconds = _seconds(lambda: [add(x) for _ in range(count)][-1])
    return 2 * num_bytes * count / seconds / 1e12


def _host_link_gbps(devices, num_bytes: int) -> tuple[float, float]:
    """Measures copies of `num_bytes` between pinned host memory and each of these jax.Devices, while all of them copy:
    (GB/s to a device, GB/s to the host). (0, 0) if the backend has no pinned host memory."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    kinds = {memory.kind for memory in devices[0].addressable_memories()}
    if "pinned_host" not in kinds or "device" not in kinds:
        return 0.0, 0.0
    near = [SingleDeviceSharding(device, memory_kind="device") for device in devices]
    far = [SingleDeviceSharding(device, memory_kind="pinned_host") for device in devices]
    here = [jax.device_put(jnp.zeros(num_bytes // 4, jnp.float32), place) for place in near]
    there = jax.device_put(here, far)
    down = _seconds(lambda: jax.device_put(there, near))
    up = _seconds(lambda: jax.device_put(here, far))
    return num_bytes / down / 1e9, num_bytes / up / 1e9


def _launch_us(device) -> float:
    """How many microseconds pass from the start of one program to the start of the next if programs are so small that
    only their launches take time, and each waits for the one before. It is measured on a jax.Device."""
    import jax
    import jax.numpy as jnp

    count = 500
    with jax.default_device(device):
        x = jnp.zeros((), jnp.float32)
        add = jax.jit(lambda x: x + 1.0).lower(x).compile()

        def run():
            y = x
            for _ in range(count):
                y = add(y)
            return y

        return _seconds(run) / count * 1e6


def _power_state() -> dict[str, str]:
    """nvidia-smi's readings of power, clocks and temperature; empty where nvidia-smi is missing or fails."""
    keys = ("power.draw", "power.limit", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu", "pstate")
    found = nvidia_smi(*keys)
    return {} if found is None or "error" in found else found


def nvidia_smi(*fields: str, units: bool = True) -> dict[str, str] | None:
    """Readings of the first GPU by nvidia-smi, by field name. Nothing is changed on the device.

    Returns:
      {field: value}; {"error": reason} where nvidia-smi fails; None where it is not installed.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    form = "csv,noheader" if units else "csv,noheader,nounits"
    command = [tool, f"--query-gpu={','.join(fields)}", f"--format={form}", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    lines = done.stdout.strip().splitlines()
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    if done.returncode != 0 or len(values) != len(fields):
        return {"error": (done.stderr or done.stdout).strip().splitlines()[0] if done.stderr or done.stdout else "?"}
    return dict(zip(fields, values, strict=True))
