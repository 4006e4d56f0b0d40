"""What decides a program that is not in its trace: the machine, the software that lowers and compiles it, and their
settings.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Sequence

import jax

from jaxtune.pallas import versions
from jaxtune.system import sources
from jaxtune.system.private_jax import lib, xla_client

_OF_COMPILERS = ("XLA_", "JAX_", "JAXTUNE_", "MOSAIC_", "TRITON_", "PALLAS_", "NVIDIA_TF32", "CUBLAS", "CUDNN", "NCCL_")
_OF_ALLOCATOR = ("XLA_PYTHON_CLIENT_", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
# What Mosaic sets when it is imported, at its first use: the folder of CUDA's tools, which `of_start` has from JAX, and
# files of packages, which have versions.
_OF_MOSAIC = (
    "MOSAIC_GPU_CUDA_ROOT",
    "MOSAIC_GPU_RUNTIME_LIB_PATH",
    "MOSAIC_GPU_NVSHMEM_BC_PATH",
    "MOSAIC_GPU_NVSHMEM_SO_PATH",
)


def of(devices: Sequence) -> tuple:
    settings = {name: str(value) for name, value in sorted(jax.config.values.items()) if "_cache_" not in name}
    return of_start(devices), settings


def of_start(devices: Sequence) -> tuple:
    """Those of them that are set when a process starts."""
    client = devices[0].client
    kinds = [(device.id, device.device_kind) for device in devices]
    platform = client.platform, client.platform_version, kinds, _topology(devices)
    variables = {name: value for name, value in sorted(os.environ.items()) if _decides(name)}
    flags = [word for word in sys.argv if word.startswith("--xla")]
    tools = lib.cuda_path  # of the user's CUDA_ROOT, whose versions no package tells, or of a package
    kernels = sources.digest("pallas") if client.platform == "gpu" else None  # parts of which run when they are lowered
    return platform, kernels, (sys.version, *versions.of_kernels()), tools, variables, flags


def _decides(variable: str) -> bool:
    """Whether programs may depend on an environment variable."""
    if "CACHE" in variable or variable.startswith(_OF_ALLOCATOR) or variable in _OF_MOSAIC:
        return False
    return variable.startswith(_OF_COMPILERS)


@functools.cache
def _topology_of(devices: tuple) -> int | None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # a backend that does not tell
        return xla_client.get_topology_for_devices(list(devices)).fingerprint()
    return None


def _topology(devices: Sequence) -> int | None:
    return _topology_of(tuple(devices))
