"""The versions of all software that compiles or runs kernels, under which checks that passed are stored: a kernel that
was right with one may be wrong with another.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

from jaxtune.system import private_jax

# Packages that compile kernels (JAX, Triton, NVIDIA's ptxas) or whose functions kernels call (cuDNN, cuBLAS).
_PACKAGES = ("jax", "triton", "pytorch-triton", "nvidia-")  # and jaxlib, jax-cuda13-plugin, jax-triton, ...
_DRIVER = Path("/proc/driver/nvidia/version")
_LIBRARIES = ("cudnn", "cublas", "cuda_runtime")


@functools.cache
def of_kernels() -> tuple[str, ...]:
    """Versions of installed packages, loaded NVIDIA libraries (perhaps from elsewhere) and the driver; cached."""
    return (*_packages(), *_loaded(), _driver())


def _packages() -> list[str]:
    """Such as "jaxlib 0.11.2", by the names of their folders: to read what is in all of them takes half a second."""
    found: dict[str, str] = {}
    for folder in sys.path:
        for path in Path(folder).glob("*.*-info"):
            name, _, version = path.stem.partition("-")
            name = name.lower().replace("_", "-")
            if name.startswith(_PACKAGES):
                found.setdefault(name, version)  # Python takes the first
    return [f"{name} {version}" for name, version in sorted(found.items())]


def _loaded() -> list[str]:
    """Such as "loaded cudnn 91900", or the error of a library that cannot be loaded."""
    functions = {name: getattr(private_jax.lib.cuda_versions, f"{name}_get_version", None) for name in _LIBRARIES}
    return [f"loaded {name} {_version(function)}" for name, function in functions.items() if function is not None]


def _version(function: Callable[[], int]) -> int | str:
    try:
        return function()
    except RuntimeError as error:  # the library cannot be loaded: kernels that need it will say so
        return str(error)


def _driver() -> str:
    try:
        return _DRIVER.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # the file does not exist under WSL
        return "unknown driver"
