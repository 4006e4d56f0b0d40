"""The highest rates that a device reaches: measured once and cached, or the data sheet's."""

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
from jaxtune.system import timing
from jaxtune.system.files import atomic_write
from jaxtune.system.invocation import spelled


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The highest rates of one device, measured or from the data sheet; 0 where unknown."""

    device: str  # its kind, jax.Device.device_kind
    gemm_bf16_tflops: float  # TFLOP/s of one large matrix product in bfloat16
    gemm_fp8_tflops: float  # TFLOP/s of one large matrix product in FP8
    copy_tbps: float  # TB/s of a copy in the device's memory, bytes read plus bytes written
    # GB/s to one device from pinned host memory, while all of this process's devices copy, as in a step over a mesh
    to_device_gbps: float = 0.0
    to_host_gbps: float = 0.0  # GB/s from one device to pinned host memory, under the same condition
    launch_us: float = 0.0  # microseconds between the starts of small programs that are launched back to back
    # {nvidia-smi's name of a field: value with unit}: power, clocks and temperature under load
    power: dict[str, str] = dataclasses.field(default_factory=dict)
    source: str = "data sheet"  # "measured" or "data sheet"; "unknown" where a report has none and all rates are 0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)  # of jax and jaxlib, where measured
    measured_at: str = ""  # UTC time, where measured

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def cache_file(device: str) -> Path:
    """The JSON file of a device's measured ceilings, in ~/.cache/jaxtune/ceilings or $JAXTUNE_CACHE/ceilings."""
    root = os.environ.get("JAXTUNE_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "jaxtune")
    return Path(root) / "ceilings" / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', device)}.json"


def known_ceilings(device: str) -> Ceilings | None:
    """The ceilings measured earlier, or else the data sheet's without host link and launches, or None.

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
    """The first device's measured ceilings, from the cache file, or measured (about 10 s on a GPU) and stored there.

    ValueError: the file is damaged; `remeasure` replaces it.
    """
    import jax

    device = jax.local_devices()[0]
    cached = None if remeasure else known_ceilings(device.device_kind)
    if cached is not None and cached.source == "measured":
        return cached
    measured = _measure(device)
    file = cache_file(device.device_kind)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, json.dumps(measured.to_dict(), indent=2))
    return measured


def _measure(device) -> Ceilings:
    """Measures all ceilings; FP8 is 0 below compute capability 8.9, and sizes are small off a GPU."""
    import jax
    import jax.numpy as jnp
    import jaxlib

    on_gpu = device.platform == "gpu"
    bf16, power = _gemm_tflops(device, jnp.bfloat16, 8192 if on_gpu else 512, sample_power=on_gpu)
    fp8 = 0.0
    if not on_gpu or float(getattr(device, "compute_capability", "0")) >= 8.9:
        fp8, _ = _gemm_tflops(device, jnp.float8_e4m3fn, 8192 if on_gpu else 256)
    num_bytes = (1 << 30) if on_gpu else (1 << 24)
    same_kind = [local_device for local_device in jax.local_devices() if local_device.device_kind == device.device_kind]
    to_device, to_host = _host_link_gbps(same_kind, num_bytes // 2)
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
    """The median wall time of run(), which returns arrays that are waited for; a first call is not counted."""
    import jax

    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start_time = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start_time)
    return sorted(times)[len(times) // 2]


@timing.during("check", "rates", "measuring products")
def _gemm_tflops(device, dtype, size: int, *, sample_power: bool = False) -> tuple[float, dict[str, str]]:
    """(TFLOP/s, nvidia-smi's readings under load) of products [size, size] that are launched one behind another."""
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


@timing.during("check", "rates", "measuring copies on the device")
def _copy_tbps(device, num_bytes: int) -> float:
    """TB/s of memory, bytes read plus bytes written."""
    import jax
    import jax.numpy as jnp

    with jax.default_device(device):
        x = jnp.zeros(num_bytes // 4, jnp.float32)
        add = jax.jit(lambda x: x + 1.0).lower(x).compile()
        count = 8
        seconds = _seconds(lambda: [add(x) for _ in range(count)][-1])
    return 2 * num_bytes * count / seconds / 1e12


@timing.during("check", "rates", "measuring copies from and to the host")
def _host_link_gbps(devices, num_bytes: int) -> tuple[float, float]:
    """(GB/s to each device, GB/s from each) of pinned memory, while all copy at once; (0, 0) without."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    kinds = {memory.kind for memory in devices[0].addressable_memories()}
    if "pinned_host" not in kinds or "device" not in kinds:
        return 0.0, 0.0
    device_shardings = [SingleDeviceSharding(device, memory_kind="device") for device in devices]
    host_shardings = [SingleDeviceSharding(device, memory_kind="pinned_host") for device in devices]
    device_arrays = [jax.device_put(jnp.zeros(num_bytes // 4, jnp.float32), sharding) for sharding in device_shardings]
    host_arrays = jax.device_put(device_arrays, host_shardings)
    download_seconds = _seconds(lambda: jax.device_put(host_arrays, device_shardings))
    upload_seconds = _seconds(lambda: jax.device_put(device_arrays, host_shardings))
    return num_bytes / download_seconds / 1e9, num_bytes / upload_seconds / 1e9


@timing.during("check", "rates", "measuring launches")
def _launch_us(device) -> float:
    """Microseconds between the starts of programs that depend on each other and are too small to take time."""
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
    """Power, clocks and temperature of the first visible GPU as text; {} if nvidia-smi fails."""
    keys = ("power.draw", "power.limit", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu", "pstate")
    readings = nvidia_smi(*keys)
    return {} if readings is None or "error" in readings else readings


def nvidia_smi(*fields: str, units: bool = True) -> dict[str, str] | None:
    """{field: value as text} of the first GPU of CUDA_VISIBLE_DEVICES; {"error": reason} if nvidia-smi fails or takes
    over 30 s; None without it.

      fields: of --query-gpu, such as "power.draw".
      units: as in "312.50 W".
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    form = "csv,noheader" if units else "csv,noheader,nounits"
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    first = first if first.isdigit() or first.startswith("GPU-") else "0"  # not of a part of a GPU (MIG), or none
    command = [tool, f"--query-gpu={','.join(fields)}", f"--format={form}", f"--id={first}"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    lines = process.stdout.strip().splitlines()
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    if process.returncode != 0 or len(values) != len(fields):
        message = (
            process.stderr.strip() or process.stdout.strip() or f"it says nothing and exits with {process.returncode}"
        )
        return {"error": message.splitlines()[0]}
    return dict(zip(fields, values, strict=True))
