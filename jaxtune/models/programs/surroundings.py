"""What decides programs beside their functions: the machine, the software, and their settings."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata

import jax

from jaxtune.models.programs import described
from jaxtune.pallas import dispatch, gpu_kernel, tuning, versions
from jaxtune.system import sources
from jaxtune.system.private_jax import xla_client

_OF_COMPILERS = ("XLA_", "JAX_", "JAXTUNE_", "MOSAIC_", "TRITON_", "PALLAS_", "NVIDIA_TF32", "CUBLAS", "CUDNN", "NCCL_")
_OF_ALLOCATOR = ("XLA_PYTHON_CLIENT_", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
# Places that Mosaic names when it is imported, which a start does at its first use; what is there, versions tell.
_OF_MOSAIC = re.compile("MOSAIC_GPU_.*(_PATH|_ROOT)")


def of(devices: Sequence) -> tuple:
    settings = {name: str(value) for name, value in sorted(jax.config.values.items()) if "_cache_" not in name}
    kernels = dispatch.target(), tuning.state(), repr(gpu_kernel.interpreter())
    return of_start(devices), settings, kernels


def of_start(devices: Sequence) -> tuple:
    """Those of them that are set when a process starts."""
    client = devices[0].client
    platform = client.platform, client.platform_version, [device.device_kind for device in devices], _topology(devices)
    variables = {name: value for name, value in sorted(os.environ.items()) if _decides(name)}
    flags = [word for word in sys.argv if word.startswith("--xla")]
    return platform, sources.digest(), _versions(), variables, flags


def _decides(variable: str) -> bool:
    """Whether programs may depend on an environment variable."""
    told_otherwise = "CACHE" in variable or variable.startswith(_OF_ALLOCATOR) or _OF_MOSAIC.fullmatch(variable)
    return variable.startswith(_OF_COMPILERS) and not told_otherwise


def _topology(devices: Sequence) -> int | None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # a backend that does not tell
        return xla_client.get_topology_for_devices(list(devices)).fingerprint()
    return None


@functools.cache
def _versions() -> tuple[str, ...]:
    packages = sorted(described.PACKAGES - {"jaxtune"})
    return (sys.version, *versions.of_kernels(), *(f"{name} {metadata.version(name)}" for name in packages))
