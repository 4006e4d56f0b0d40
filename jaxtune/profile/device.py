"""The highest rates that a device reaches, as `Ceilings`. `known_ceilings` looks them up without measuring: those
measured earlier, or else the data sheet's. Reports use either; the planner uses measured ones only, and otherwise
computes from the data sheet itself. `ceilings` measures them if that has not been done yet and stores them in
`cache_file`, for `jaxtune doctor` and `jaxtune profile ceilings`. `nvidia_smi` reads a GPU's state, for the measurement
and for `jaxtune doctor`."""

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
    """The highest rates that one device reaches, measured by `ceilings` or taken from the vendor's data sheet. Reports
    compare a profile's kernels with those of products and of copies in memory. The planner computes with measured ones
    only: those of bfloat16 products, of copies in memory and of copies to the host. `jaxtune doctor` and `jaxtune
    profile ceilings` show measured ones. A rate is 0 where it is unknown."""

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
        """The fields as a dict of JSON values. The cache file stores it, and `known_ceilings` makes a Ceilings of it
        again; `jaxtune profile ceilings` prints it."""
        return dataclasses.asdict(self)


def cache_file(device: str) -> Path:
    """The path of the JSON file in which `ceilings` stores what it measured on a kind of device, and from which
    `known_ceilings` reads it; it may not exist yet. device: jax.Device.device_kind, from which the file's name is made.
    The file is in the folder ~/.cache/jaxtune/ceilings, or in $JAXTUNE_CACHE/ceilings if that environment variable is
    set."""
    root = os.environ.get("JAXTUNE_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "jaxtune")
    return Path(root) / "ceilings" / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', device)}.json"


def known_ceilings(device: str) -> Ceilings | None:
    """The ceilings of a kind of device (jax.Device.device_kind): those measured earlier, from the cache file; else
    those of its data sheet, with 0 for the rates to and from the host and for launches; else None. Nothing is measured,
    so a profile of another machine's device can be read. Reports compare kernels with what it returns. The planner uses
    it only if its source is "measured"; otherwise it computes from the data sheet itself, host link included.

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
    """The measured ceilings of this process's first device, from the cache file if it has them. Otherwise they are
    measured, which takes about 10 s on a GPU, and stored there. `jaxtune doctor` and `jaxtune profile ceilings` call
    it; reports and the planner only read what it stored (known_ceilings). remeasure: True measures in any case and
    replaces the file, a damaged one too; False measures only if no measured ceilings are stored there. Raises
    ValueError if the file is damaged and `remeasure` is False."""
    import jax

    device = jax.local_devices()[0]
    known = None if remeasure else known_ceilings(device.device_kind)
    if known is not None and known.source == "measured":
        return known
    measured = _measure(device)
    file = cache_file(device.device_kind)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, json.dumps(measured.to_dict(), indent=2))
    return measured


def _measure(device) -> Ceilings:
    """Measures all ceilings of `device`, a jax.Device, and returns them, for `ceilings`; it takes about ten seconds on
    a GPU. FP8 is 0 on a GPU of compute capability below 8.9. On any other device than a GPU, such as the CPU in tests,
    small sizes are measured and power is {}. The rates of the host link are those while all of this process's devices
    of this kind copy."""
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
    """The median wall time in seconds of `repeats` calls of run(), from which each figure in Ceilings is computed. run:
    a function without arguments that starts work and returns JAX arrays, which are waited for. A first call, for
    warming up, is not counted; callers have compiled their programs before."""
    import jax

    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def _gemm_tflops(device, dtype, size: int, *, sample_power: bool = False) -> tuple[float, dict[str, str]]:
    """Measures how fast a device multiplies two matrices in products that are launched one behind another, for the
    fields gemm_bf16_tflops, gemm_fp8_tflops and power of Ceilings.

    Args:
      device: a jax.Device.
      dtype: dtype of the matrices; the results are in bfloat16 on a GPU, else in float32.
      size: rows and columns of each matrix.
      sample_power: True also asks nvidia-smi for power and clocks of the first GPU while further products run, which
        are not timed; False does not.
    Returns:
      (TFLOP/s, {nvidia-smi's name of a field: value}, which is {} without sample_power or where nvidia-smi fails)
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
    """The bandwidth of the memory of `device`, a jax.Device, in TB/s, bytes read plus bytes written, for the field
    copy_tbps of Ceilings. It is measured with programs that read an array of `num_bytes` bytes and write one of the
    same size."""
    import jax
    import jax.numpy as jnp

    with jax.default_device(device):
        x = jnp.zeros(num_bytes // 4, jnp.float32)
        add = jax.jit(lambda x: x + 1.0).lower(x).compile()
        count = 8
        seconds = _seconds(lambda: [add(x) for _ in range(count)][-1])
    return 2 * num_bytes * count / seconds / 1e12


def _host_link_gbps(devices, num_bytes: int) -> tuple[float, float]:
    """Measures copies between pinned host memory and devices that all copy at once, because they may share the link,
    for the fields to_device_gbps and to_host_gbps of Ceilings. The planner computes the time of offloading, in both
    directions, from the rate to the host alone; `jaxtune doctor` shows both. devices: jax.Devices of one kind.
    num_bytes: the size of each device's copy. Returns (GB/s to each device, GB/s from each device to the host). These
    are measured on a CPU too if JAX has pinned host memory there; (0, 0) if the backend has none."""
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
    """The microseconds from the start of one program to the start of the next on `device`, a jax.Device: the median
    wall time of five runs of 500 programs, divided by 500. Each program needs the result of the one before, and is so
    small that only its launch takes time. It is the field `launch_us` of Ceilings, which `jaxtune profile ceilings`
    prints and nothing computes with."""
    import jax
    import jax.numpy as jnp

    count = 500
    with jax.default_device(device):
        x = jnp.zeros((), jnp.float32)
        add = jax.jit(lambda x: x + 1.0).lower(x).compile()

        def run():
            """Launches the 500 programs, each on the result of the one before, and returns the last result."""
            y = x
            for _ in range(count):
                y = add(y)
            return y

        return _seconds(run) / count * 1e6


def _power_state() -> dict[str, str]:
    """nvidia-smi's readings of the first GPU, {field of its query: value with unit}: power, clocks, temperature and
    performance state. {} where nvidia-smi is missing or fails. _gemm_tflops asks for them while the device is busy.
    They are stored beside measured rates to explain slow ones."""
    keys = ("power.draw", "power.limit", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu", "pstate")
    found = nvidia_smi(*keys)
    return {} if found is None or "error" in found else found


def nvidia_smi(*fields: str, units: bool = True) -> dict[str, str] | None:
    """Asks nvidia-smi for readings of the first GPU that JAX sees (CUDA_VISIBLE_DEVICES), for `jaxtune doctor` and the
    field power of Ceilings. Nothing is changed on the device.

    Args:
      fields: names of nvidia-smi's query fields (--query-gpu), such as "power.draw".
      units: True: values have their units, as in "312.50 W"; False: they are numbers alone.
    Returns:
      {field: value as text}; {"error": reason} where nvidia-smi fails or takes over 30 s; None where it is not
        installed.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    form = "csv,noheader" if units else "csv,noheader,nounits"
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    first = first if first.isdigit() or first.startswith("GPU-") else "0"  # not of a part of a GPU (MIG), or none
    command = [tool, f"--query-gpu={','.join(fields)}", f"--format={form}", f"--id={first}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    lines = done.stdout.strip().splitlines()
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    if done.returncode != 0 or len(values) != len(fields):
        said = done.stderr.strip() or done.stdout.strip() or f"it says nothing and exits with {done.returncode}"
        return {"error": said.splitlines()[0]}
    return dict(zip(fields, values, strict=True))
