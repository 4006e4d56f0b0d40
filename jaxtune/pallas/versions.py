"""The versions of all software that compiles or runs kernels (`of_kernels`): installed packages, NVIDIA libraries and
the driver.

A check of a kernel that passed is stored under these versions (dispatch.first_use), so that the kernel is checked
again when one of them changes, because a kernel that was right with one version may be wrong with another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from jaxtune.system import private_jax

# Packages that compile kernels (JAX, Triton, NVIDIA's ptxas) or whose functions kernels call (cuDNN, cuBLAS).
_PACKAGES = ("jax", "triton", "pytorch-triton", "nvidia-")  # and jaxlib, jax-cuda13-plugin, jax-triton, ...
_DRIVER = Path("/proc/driver/nvidia/version")
_LIBRARIES = ("cudnn", "cublas", "cuda_runtime")


@functools.cache
def of_kernels() -> tuple[str, ...]:
    """The versions of the installed packages of JAX, Triton and NVIDIA (_PACKAGES), each as "name version"; those of
    the loaded NVIDIA libraries, which may come from elsewhere than the packages (`_loaded`); and the text about the
    driver (`_driver`). dispatch stores a passed check of a kernel under a hash that they are part of. They are read
    once in a process."""
    named = {(each.metadata["Name"] or "").lower().replace("_", "-"): each.version for each in metadata.distributions()}
    found = [f"{name} {version}" for name, version in sorted(named.items()) if name.startswith(_PACKAGES)]
    return (*found, *_loaded(), _driver())


def _loaded() -> list[str]:
    """The versions of cuDNN, cuBLAS and the CUDA runtime as this process has loaded them, which may differ from the
    installed packages; one text each, such as "loaded cudnn 91900", with the error in place of the number if the
    library cannot be loaded. A library for which jaxlib has no version function is left out."""
    functions = {name: getattr(private_jax.lib.cuda_versions, f"{name}_get_version", None) for name in _LIBRARIES}
    return [f"loaded {name} {_version(function)}" for name, function in functions.items() if function is not None]


def _version(function: Callable[[], int]) -> int | str:
    """The number that a library's version function returns, such as 91900, or the text of the error if the library
    cannot be loaded; kernels that need it then fail with their own message. `_loaded` calls it."""
    try:
        return function()
    except RuntimeError as error:  # the library cannot be loaded: kernels that need it will say so
        return str(error)


def _driver() -> str:
    """The text of /proc/driver/nvidia/version, which names the version of NVIDIA's kernel driver; "unknown driver" if
    the file cannot be read, for example because there is none, as under WSL."""
    try:
        return _DRIVER.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # the file does not exist under WSL
        return "unknown driver"
