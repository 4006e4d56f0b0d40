"""The checks of `jaxtune doctor`, which prints their results: whether this machine is ready for training, with advice
on what is not. `findings` runs all of them and yields a `Finding` or more of each: the versions of packages
(`_packages`); NVIDIA's driver (`_driver`), as nvidia-smi reports it (`_nvidia_smi`); the GPUs (`_devices`); host memory
and free disk (`_room`); on a GPU (`_on_gpu`) the measured rates of products, copies and the host link beside those of
its data sheet (`_rates`); and whether attention computes what plain float32 attention does (`_attention`)."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

from jaxtune.system.extras import install
from jaxtune.system.invocation import spelled

# The oldest driver for CUDA 12 and for CUDA 13 (NVIDIA's compatibility tables).
_DRIVERS = {"cuda13": 580, "cuda12": 525}
_LEAST_DISK_GB, _SLOW_SHARE = 20, 0.5


@dataclasses.dataclass(frozen=True)
class Finding:
    """A result of a check of `jaxtune doctor`: whether it is in order, what was found, and what to do if not. If one is
    "wrong", the exit code of `jaxtune doctor` is 1."""

    state: Literal["ok", "note", "wrong"]  # "note": slower or less than possible; "wrong": training will not work
    what: str  # what was found
    fix: str = ""  # what to do; "" if it is ok, or if there is nothing to do

    def to_text(self) -> str:
        """The state and what was found as one line, and the advice, if there is any, on a second one."""
        return f"{self.state:<6}{self.what}" + (f"\n      {self.fix}" if self.fix else "")


def findings(measure: bool = True) -> Iterator[Finding]:
    """Runs all checks and yields each result as soon as it is known. The order is: packages; driver; GPUs; host
    memory; disk; the rates of matrix products, of copies in device memory, and of copies to and from the device; and
    attention, whose results are compared with those of plain float32 attention. `jaxtune doctor` prints them.

    Args:
      measure: True: the rates are checked, if JAX uses a GPU. They are measured once, in about ten seconds, and stored
        in a cache. False: the rates are left out, and all else is checked.
    Raises:
      ValueError: the cache of rates is damaged, where it is read; the results before were yielded.
    """
    yield _packages()
    card = _nvidia_smi()
    yield _driver(card)
    yield from _devices(card)
    yield from _room()
    if measure and _on_gpu():
        yield from _rates()
    yield _attention()


def _on_gpu() -> bool:
    """Whether JAX's first device is a GPU; False on a CPU or a TPU. Only on a GPU does `findings` measure rates;
    elsewhere `_devices` says why no GPU is used."""
    import jax

    return jax.devices()[0].platform == "gpu"


def _packages() -> Finding:
    """Lists the versions of jax, flax and other packages. The finding is "wrong" if the versions of jax and jaxlib
    are not exactly equal, because the two may then fail in unclear ways; else "ok". jaxtune requires all of these
    packages; for one that is missing, importlib.metadata raises PackageNotFoundError."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    if metadata.version("jax") != metadata.version("jaxlib"):
        return Finding(
            "wrong", f"packages: {versions}", "jax and jaxlib must be of one version: pip install -U jax jaxlib"
        )
    return Finding("ok", f"packages: {versions}")


def _nvidia_smi() -> dict[str, str] | None:
    """For `_driver` and `_devices`: asks nvidia-smi for the first GPU: {"name", "driver_version", "memory.total",
    "memory.used": value as text}, memory in MiB without the unit. {"error": message} if it fails or takes over 30 s;
    None if it is not installed."""
    from jaxtune.profile.device import nvidia_smi

    return nvidia_smi("name", "driver_version", "memory.total", "memory.used", units=False)


def _driver(card: dict[str, str] | None) -> Finding:
    """Checks whether NVIDIA's driver is new enough for one of JAX's two builds, CUDA 12 (driver 525 or newer) and CUDA
    13 (580 or newer); which of them is installed is not looked at. The finding is "ok", with the newest extra (cuda13
    or cuda12) that the driver runs; "wrong" if the driver is older than both need, or nvidia-smi fails; or a "note" if
    there is no nvidia-smi, because a CPU is enough for small runs. card: what `_nvidia_smi` returned for the first GPU:
    its values, {"error": message}, or None."""
    if card is None:
        return Finding(
            "note",
            "driver: there is no nvidia-smi, so no NVIDIA driver",
            "a CPU is enough for the quickstart and for --plan plan.device=NAME; a GPU needs NVIDIA's driver",
        )
    if "error" in card:
        return Finding("wrong", f"driver: nvidia-smi fails: {card['error']}", "reinstall NVIDIA's driver, or reboot")
    version = card["driver_version"]
    major = int(re.split(r"\D", version, maxsplit=1)[0] or 0)
    extra = next((name for name, least in _DRIVERS.items() if major >= least), None)
    if extra is None:
        return Finding(
            "wrong", f"driver: {version}", f"install NVIDIA's driver {min(_DRIVERS.values())} or newer, better 580"
        )
    return Finding("ok", f"driver: {version}, which runs the extra {extra}: {install(extra)}")


def _devices(card: dict[str, str] | None) -> Iterator[Finding]:
    """Yields findings on the GPUs.

    - "wrong": JAX does not use a GPU that nvidia-smi shows, or a GPU is not supported.
    - "ok": each supported GPU, with the memory that JAX may use.
    - "note": JAX has no GPU, and nvidia-smi none or an error; more than 2 GiB of the first GPU's memory were in use
      when nvidia-smi was asked, before JAX started; or jax-triton, with which Triton kernels run, is not installed, and
      the first GPU is not a Hopper.

    card: what `_nvidia_smi` returned: the first GPU's values; {"error": message} if nvidia-smi failed; None if it is
    not installed."""
    import jax

    from jaxtune.profile.data_sheets import refusal

    devices = jax.devices()
    if not _on_gpu():
        if card is not None and "error" not in card:
            missing = importlib.util.find_spec("jax_cuda13_plugin") or importlib.util.find_spec("jax_cuda12_plugin")
            fix = (
                "JAX_PLATFORMS keeps JAX from it: unset it"
                if "cpu" in os.environ.get("JAX_PLATFORMS", "")
                else f"{install('cuda13')} (or cuda12: see the driver above)"
                if missing is None
                else "see what JAX says: python -c 'import jax; jax.devices(\"cuda\")'"
            )
            yield Finding("wrong", f"GPU: {card['name']} is there, and JAX does not use it", fix)
        else:
            yield Finding("note", f"GPU: none; JAX runs on {devices[0].device_kind}")
        return
    for device in devices:
        problem = refusal(device.device_kind)
        if problem:
            yield Finding("wrong", f"GPU: {device.device_kind}", f"{problem}; use a newer card")
            continue
        limit = (device.memory_stats() or {}).get("bytes_limit", 0)
        yield Finding("ok", f"GPU: {device.device_kind}, {limit / 1e9:.1f} GB for JAX")
    used = 0.0 if card is None or "error" in card else float(card["memory.used"] or 0) / 1024
    if used > 2:
        yield Finding("note", f"GPU memory in use by all programs: {used:.1f} GiB", "nvidia-smi lists them")
    hopper = str(getattr(devices[0], "compute_capability", "")).startswith("9.")
    if importlib.util.find_spec("jax_triton") is None and not hopper:
        yield Finding("note", "jax-triton is not installed", f"{install('cuda13')} (or cuda12): kernels for this GPU")


def _room() -> Iterator[Finding]:
    """Yields a finding on the size of the host's memory, and one on the free space for downloaded models (the hub's
    cache), which is a "note" below 20 GB."""
    from huggingface_hub import constants

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    yield Finding("ok", f"host memory: {memory:.0f} GB")
    folder = Path(constants.HF_HUB_CACHE)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free / 1e9
    if free < _LEAST_DISK_GB:
        yield Finding(
            "note",
            f"disk: {free:.0f} GB free for models ({folder})",
            "an 8B model takes 16 GB; HF_HOME moves the folder",
        )
    else:
        yield Finding("ok", f"disk: {free:.0f} GB free for models ({folder})")


def _rates() -> Iterator[Finding]:
    """Yields four findings: the rates of matrix products in bfloat16 (TFLOP/s), of copies in device memory (TB/s) and
    of copies to the device and to the host (GB/s). profile.ceilings measures them on the first device, in about ten
    seconds, or reads them from its cache file, and raises ValueError if that is damaged.

    A rate below half of what the GPU's data sheet states is a "note", with advice: the card may be throttled, used by
    another program, or in a slot with fewer lanes. Any other rate is "ok", as is each one of a GPU without a data
    sheet.
    """
    import jax

    from jaxtune import profile
    from jaxtune.profile.data_sheets import data_sheet

    rates = profile.ceilings()
    sheet = data_sheet(jax.devices()[0].device_kind)
    for what, value, unit, of in (
        ("products in bf16", rates.gemm_bf16_tflops, "TFLOP/s", sheet and sheet.bf16_tflops),
        ("copies in device memory", rates.copy_tbps, "TB/s", sheet and sheet.copy_tbps),
        ("link to the device", rates.to_device_gbps, "GB/s", sheet and sheet.link_gbps),
        ("link to the host", rates.to_host_gbps, "GB/s", sheet and sheet.link_gbps),
    ):
        beside = f" (data sheet: {of:g})" if of else ""
        if of and value < _SLOW_SHARE * of:
            fix = (
                "the card may be in a slot with fewer lanes: nvidia-smi -q shows its link"
                if "link" in what
                else "another program may use the card, or heat or a power limit slows it: nvidia-smi -q -d PERFORMANCE"
            )
            yield Finding("note", f"{what}: {value:.3g} {unit}{beside}", fix)
        else:
            yield Finding("ok", f"{what}: {value:.3g} {unit}{beside}")


def _attention() -> Finding:
    """Compares the implementation of attention that is chosen on this device with plain attention in float32, forward
    and backward, on small packed rows. The finding is "wrong" if a result is off by 2 % or more in norm or has a NaN,
    else "ok". "ok" says that attention computes correctly here, but not that a hand-written kernel does: one that does
    not compile or is wrong is refused at its first use (dispatch.first_use), and another implementation, perhaps plain
    attention in 16 bits, is then chosen and compared."""
    import jax
    import jax.numpy as jnp

    from jaxtune.pallas.attention import attention, packed_layout

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 256, 4, 64), (2, 256, 2, 64), (2, 256, 2, 64))
    query, key, value = (jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True))
    layout = packed_layout((2, 256), jnp.broadcast_to(1 + jnp.arange(256) // 100, (2, 256)))

    def out(implementation: str | None, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """The attention of these arrays by an implementation; None: by the one that is chosen on this device."""
        return attention(query, key, value, layout, scale=0.125, implementation=implementation)

    def run(implementation: str | None, *arrays: jax.Array) -> list[jax.Array]:
        """The result of attention by an implementation (None: the one that is chosen), and the gradients of the sum of
        its squares by query, key and value, the three arrays."""
        forward = functools.partial(out, implementation)
        backward = jax.grad(lambda *arrays: (forward(*arrays).astype(jnp.float32) ** 2).sum(), argnums=(0, 1, 2))
        return [jax.jit(forward)(*arrays), *jax.jit(backward)(*arrays)]

    started = time.monotonic()
    wide = [array.astype(jnp.float32) for array in (query, key, value)]
    errors = [
        jnp.linalg.norm(ours.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
        for ours, expected in zip(run(None, query, key, value), run("reference", *wide), strict=True)
    ]
    largest = float(jnp.stack(errors).max())  # NaN if one of them is, unlike Python's max
    took = time.monotonic() - started
    what = f"attention: forward and backward within {largest:.1e} of float32's (0.02 is allowed), in {took:.1f} s"
    if not largest < 0.02:
        return Finding("wrong", what, f"please report it with the output of: {spelled('info --kernels')}")
    return Finding("ok", what)
