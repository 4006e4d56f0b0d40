"""The checks of `jaxtune doctor`: whether this machine is ready for training, with advice on what is not."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

from jaxtune.system import timing
from jaxtune.system.disk import free_bytes
from jaxtune.system.extras import install
from jaxtune.system.invocation import spelled

# The oldest driver for CUDA 12 and for CUDA 13 (NVIDIA's compatibility tables).
_DRIVERS = {"cuda13": 580, "cuda12": 525}
_LEAST_DISK_GB, _SLOW_SHARE = 20, 0.5


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check; one that is "wrong" makes the exit code 1."""

    state: Literal["ok", "note", "wrong"]  # "note": slower or less than possible; "wrong": training will not work
    summary: str  # what was found
    fix: str = ""  # what to do; "" if it is ok, or if there is nothing to do

    def to_text(self) -> str:
        """The state and what was found on one line, the advice on a second one."""
        return f"{self.state:<6}{self.summary}" + (f"\n      {self.fix}" if self.fix else "")


def findings(measure: bool = True) -> Iterator[Finding]:
    """Runs all checks, in a fixed order, and yields each result at once. ValueError: the cache of rates is damaged.

    measure: also checks rates on a GPU; they are measured once, in about ten seconds, and cached.
    """
    card = functools.cache(_nvidia_smi)
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "packages": lambda: [_packages()],
        "the driver": lambda: [_driver(card())],
        "devices": lambda: _devices(card()),
        "memory and disk": _room,
        "rates": lambda: _rates() if measure and _on_gpu() else (),
        "attention": lambda: [_attention()],
    }
    with timing.phase("check", words="checking this machine", total=len(checks), unit="checks") as work:
        for what, check in checks.items():
            with timing.phase("check", what, f"checking {what}"):
                found = list(check())
            yield from found
            work.advance()


def _on_gpu() -> bool:
    import jax

    return jax.devices()[0].platform == "gpu"


def _packages() -> Finding:
    """Versions of packages; "wrong" if jax and jaxlib differ, as they may then fail in unclear ways."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    if metadata.version("jax") != metadata.version("jaxlib"):
        return Finding(
            "wrong", f"packages: {versions}", "jax and jaxlib must be of one version: pip install -U jax jaxlib"
        )
    return Finding("ok", f"packages: {versions}")


def _nvidia_smi() -> dict[str, str] | None:
    """The first GPU's values as text, memory in MiB; {"error": message} if nvidia-smi fails, None without it."""
    from jaxtune.profile.device import nvidia_smi

    return nvidia_smi("name", "driver_version", "memory.total", "memory.used", units=False)


def _driver(card: dict[str, str] | None) -> Finding:
    """Whether NVIDIA's driver is new enough for one of JAX's builds, whichever is installed. card: of _nvidia_smi."""
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
    """Yields "wrong" for a GPU that JAX does not use or support."""
    import jax

    from jaxtune.pallas import targets
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
    used_gib = 0.0 if card is None or "error" in card else float(card["memory.used"] or 0) / 1024
    if used_gib > 2:
        yield Finding("note", f"GPU memory in use by all programs: {used_gib:.1f} GiB", "nvidia-smi lists them")
    hopper = targets.of_device(devices[0]) is targets.HOPPER
    if importlib.util.find_spec("jax_triton") is None and not hopper:
        yield Finding("note", "jax-triton is not installed", f"{install('cuda13')} (or cuda12): kernels for this GPU")


def _room() -> Iterator[Finding]:
    """Memory of the host, and free disk where the hub's cache is or will be."""
    from huggingface_hub import constants

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    yield Finding("ok", f"host memory: {memory:.0f} GB")
    folder = Path(constants.HF_HUB_CACHE)
    free = free_bytes(folder) / 1e9
    if free < _LEAST_DISK_GB:
        yield Finding(
            "note",
            f"disk: {free:.0f} GB free for models ({folder})",
            "an 8B model takes 16 GB; HF_HOME moves the folder",
        )
    else:
        yield Finding("ok", f"disk: {free:.0f} GB free for models ({folder})")


def _rates() -> Iterator[Finding]:
    """Rates of products, copies and the host link; one below half of the data sheet's is a "note"."""
    import jax

    from jaxtune import profile
    from jaxtune.profile.data_sheets import data_sheet

    rates = profile.ceilings()
    sheet = data_sheet(jax.devices()[0].device_kind)
    for rate_name, value, unit, stated in (
        ("products in bf16", rates.gemm_bf16_tflops, "TFLOP/s", sheet and sheet.bf16_tflops),
        ("copies in device memory", rates.copy_tbps, "TB/s", sheet and sheet.copy_tbps),
        ("link to the device", rates.to_device_gbps, "GB/s", sheet and sheet.link_gbps),
        ("link to the host", rates.to_host_gbps, "GB/s", sheet and sheet.link_gbps),
    ):
        comparison = f" (data sheet: {stated:g})" if stated else ""
        if stated and value < _SLOW_SHARE * stated:
            fix = (
                "the card may be in a slot with fewer lanes: nvidia-smi -q shows its link"
                if "link" in rate_name
                else "another program may use the card, or heat or a power limit slows it: nvidia-smi -q -d PERFORMANCE"
            )
            yield Finding("note", f"{rate_name}: {value:.3g} {unit}{comparison}", fix)
        else:
            yield Finding("ok", f"{rate_name}: {value:.3g} {unit}{comparison}")


def _attention() -> Finding:
    """The chosen attention against float32's, forward and backward; "wrong" from 2 % in norm on."""
    import jax
    import jax.numpy as jnp

    from jaxtune.pallas.attention import attention, packed_layout

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 256, 4, 64), (2, 256, 2, 64), (2, 256, 2, 64))
    query, key, value = (jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True))
    layout = packed_layout((2, 256), jnp.broadcast_to(1 + jnp.arange(256) // 100, (2, 256)))

    def out(implementation: str | None, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value, layout, scale=0.125, implementation=implementation)

    def run(implementation: str | None, *arrays: jax.Array) -> list[jax.Array]:
        """[the output, the gradients of its sum of squares by query, key and value]."""
        forward = functools.partial(out, implementation)
        backward = jax.grad(lambda *arrays: (forward(*arrays).astype(jnp.float32) ** 2).sum(), argnums=(0, 1, 2))
        return [jax.jit(forward)(*arrays), *jax.jit(backward)(*arrays)]

    start_time = time.monotonic()
    wide = [array.astype(jnp.float32) for array in (query, key, value)]
    errors = [
        jnp.linalg.norm(ours.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
        for ours, expected in zip(run(None, query, key, value), run("reference", *wide), strict=True)
    ]
    largest = float(jnp.stack(errors).max())  # NaN if one of them is, unlike Python's max
    seconds = time.monotonic() - start_time
    summary = f"attention: forward and backward within {largest:.1e} of float32's (0.02 is allowed), in {seconds:.1f} s"
    if not largest < 0.02:
        return Finding("wrong", summary, f"please report it with the output of: {spelled('info --kernels')}")
    return Finding("ok", summary)
