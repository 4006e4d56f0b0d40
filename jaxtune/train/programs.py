"""The compiled programs of a run, and how they are compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxtune.models.transfers import IN_FLIGHT


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of a run, and what compiling took; `before_qat`: those of its steps before qat.start."""

    accumulate: Any
    update: Any
    evaluate: Any
    seconds: float
    before_qat: Programs | None = None


def compiler_options(platform: str, deterministic: bool) -> dict[str, Any]:
    """XLA options of the step.

    Without Triton GEMMs every product goes to cuBLASLt, which adds the adapter's product in its epilogue: 2.3 % of an
    8B LoRA step on an H200 (benchmarks/results). 16-bit values are rounded wherever they are made, not only where a
    fusion ends, so that another plan of residuals gives the same bits; the programs have as many kernels either way.
    Under `deterministic` the vendor libraries' first algorithm is taken instead of the fastest timed one, so that
    another process makes the same choice.
    """
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if platform != "gpu":
        return options
    options |= {"xla_gpu_enable_triton_gemm": False, **IN_FLIGHT}
    if deterministic:
        options |= {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
    return options


def abstract(tree):
    """Shapes, dtypes and shardings of arrays."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)
