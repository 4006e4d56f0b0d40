"""Kinds of NVIDIA GPUs, and what kernels may ask of the one that is compiled for. Nothing else looks at a compute
capability.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax

_LEAST_KB = 99  # shared memory of a block that each GPU since Ampere has


@dataclasses.dataclass(frozen=True)
class Target:
    name: str  # of the architecture
    capability: tuple[int, int]
    shared_memory_kb: int = _LEAST_KB  # that a block may have

    @property
    def number(self) -> str:
        return "{}.{}".format(*self.capability)

    @property
    def code(self) -> int:
        """As compilers name it: 90."""
        major, minor = self.capability
        return 10 * major + minor

    @property
    def has_triton(self) -> bool:
        return self.capability >= (8, 0)

    @property
    def has_fp8(self) -> bool:
        """Whether its instructions multiply e4m3 and convert to it."""
        return self.capability >= (8, 9)

    @property
    def has_packed_rows(self) -> bool:
        """Whether cuDNN's attention takes several documents a row, and heads of up to 256."""
        return self.capability >= (9, 0)


HOPPER, ADA = Target("Hopper", (9, 0), 227), Target("Ada", (8, 9))
# Shared memory: table of the CUDA programming guide, "technical specifications per compute capability".
TARGETS = {
    target.capability: target
    for target in (
        Target("Ampere", (8, 0), 163),
        Target("Ampere", (8, 6)),
        Target("Ampere", (8, 7), 163),
        ADA,
        HOPPER,
        Target("Blackwell", (10, 0), 227),
        Target("Blackwell", (10, 3), 227),
        Target("Blackwell", (11, 0), 227),
        Target("Blackwell", (12, 0)),
        Target("Blackwell", (12, 1)),
    )
}

_compiled_for: tuple[int, int] | None = None


@functools.cache
def _device_capability(platform: str) -> tuple[int, int] | None:
    """The first GPU's compute capability; None if it is not NVIDIA's. Cached for each of JAX's default backends."""
    if platform != "gpu":
        return None
    target = of_device(jax.local_devices(backend="gpu")[0])
    return None if target is None else target.capability


def of_device(device: object) -> Target | None:
    """Of a jax.Device; None if it is not an NVIDIA GPU."""
    text = getattr(device, "compute_capability", None)
    if not text:
        return None
    major, minor = str(text).split(".")
    return of((int(major), int(minor)))


def of(capability: tuple[int, int]) -> Target:
    return TARGETS.get(capability) or Target("unknown", capability)


def here() -> Target | None:
    """The kind of the NVIDIA GPU that is compiled for, this machine's or that of `compile_for`; None without one."""
    capability = _compiled_for if _compiled_for is not None else _device_capability(jax.default_backend())
    return None if capability is None else of(capability)


def installed() -> Target | None:
    """The kind of this machine's NVIDIA GPU, or None, whatever is compiled for."""
    capability = _device_capability(jax.default_backend())
    return None if capability is None else of(capability)


def absent() -> Target | None:
    """That of `compile_for`; None outside."""
    return None if _compiled_for is None else of(_compiled_for)


def required(target: Target) -> str | None:
    """Why a kernel that is written for one kind of GPU cannot run here, or None."""
    return None if here() is target else f"needs a {target.name} GPU (compute capability {target.number})"


def measured(target: Target) -> str | None:
    """Why a kernel that could run elsewhere, but was measured on one kind of GPU, is not chosen here, or None."""
    return None if here() is target else f"measured on {target.name} alone (compute capability {target.number})"


def fp8_refusal() -> str | None:
    """Why e4m3 is neither multiplied nor made by instructions here, or None."""
    target = here()
    if target is None:
        return "no NVIDIA GPU"
    return None if target.has_fp8 else f"FP8 needs compute capability {ADA.number}, this GPU has {target.number}"


def shared_memory_kb() -> int:
    """Of a block, of the GPU that is compiled for; what all have without one."""
    target = here()
    return _LEAST_KB if target is None else target.shared_memory_kb


@contextlib.contextmanager
def compile_for(capability: tuple[int, int]):
    """A context in which all threads choose implementations as for a GPU of this capability, unchecked."""
    global _compiled_for
    before, _compiled_for = _compiled_for, capability
    try:
        yield
    finally:
        _compiled_for = before


def device_kind() -> str | None:
    """The GPU that is compiled for, such as "NVIDIA H200": the current mesh's abstract device, or this machine's. None
    without one, and within `compile_for`.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return described.device_kind
    if _compiled_for is not None or jax.default_backend() != "gpu":
        return None
    return jax.local_devices(backend="gpu")[0].device_kind


def multiprocessors() -> int:
    """Multiprocessors of the GPU that is compiled for; 132 (H100, H200) within `compile_for`. Raises RuntimeError
    without a GPU.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return described.num_cores
    if _compiled_for is not None:
        return 132  # only the capability is known: assume the number of an H100 or H200
    return jax.local_devices(backend="gpu")[0].core_count
