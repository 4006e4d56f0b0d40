"""XLA's options for the programs of a training run (`compiler_options`): for speed, for the same bits under every plan,
and for runs that must be deterministic; and compiling with them (`compiled`)."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jaxtune.models.placement import collectives
from jaxtune.models.placement.transfers import IN_FLIGHT, NO_REMATERIALIZATION
from jaxtune.train.planning.planner import out_of_memory

# XLA takes the first algorithm that a vendor's library names, and times none.
_UNTIMED = {"xla_gpu_autotune_level": 0}


def compiler_options(
    platform: str, deterministic: bool, divides: bool = False, merges: bool = True
) -> dict[str, bool | int | str]:
    """XLA options, {name: value}, with which `Engine` compiles the programs of a run: the step, the evaluation, and the
    passes over rows such as a reference's. A run's record has them.

    Without Triton GEMMs every product is computed by cuBLASLt, which adds the adapter's product in its epilogue; that
    saves 2.3 % of an 8B LoRA step on an H200 (benchmarks/results). 16-bit values are rounded wherever they are made,
    and not only where a fusion ends, so that another plan of residuals gives the same bits; the number of kernels does
    not change. On a GPU more copies between device and host may be on their way at a time (`IN_FLIGHT`), and XLA
    recomputes nothing by a choice of its own (`NO_REMATERIALIZATION`).

    Args:
      platform: the device's, such as "gpu"; on others only the rounding of 16-bit values is set, and the other
        arguments have no effect.
      deterministic: True: the vendor libraries' first algorithm is taken, so that every process makes the same choice,
        and XLA uses only operations that give the same bits on every run. False: the algorithm that is fastest when it
        is timed.
      divides: whether weights are divided over devices, so that options for collectives are needed.
      merges: whether XLA may merge products that share an operand. It puts the A matrices of adapters side by side and
        reads their input once. Where all parameters train it does so with weights of key and value, cuts what they give
        and joins the gradients, which takes longer than two products.
    """
    options: dict[str, bool | int | str] = {"xla_allow_excess_precision": False}
    if platform != "gpu":
        return options
    options |= {"xla_gpu_enable_triton_gemm": False, **IN_FLIGHT, **NO_REMATERIALIZATION}
    if not merges:
        options |= {"xla_gpu_dot_merger_threshold_mb": 0}
    if divides:
        options |= collectives.compiler_options()
    if deterministic:
        options |= {"xla_gpu_deterministic_ops": True, **_UNTIMED}
    return options


def compiled(lowered: jax.stages.Lowered, options: Mapping[str, bool | int | str]) -> jax.stages.Compiled:
    """Compiles a lowered program with XLA's options, {name: value}; Engine compiles every program by it.

    XLA times the algorithms of a matrix product on the device, with operands that it allocates there. Where weights
    leave no room for them, as when the plan is replaced after the first step, nothing is timed.

    Raises:
      jax.errors.JaxRuntimeError: XLA's errors, also if memory runs out when nothing is timed.
    """
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
    return lowered.compile(compiler_options={**options, **_UNTIMED})
