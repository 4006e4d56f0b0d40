"""XLA's options for the programs of a run."""

from __future__ import annotations

import os

from jaxtune.models.placement import collectives
from jaxtune.models.placement.transfers import IN_FLIGHT, NO_REMATERIALIZATION
from jaxtune.models.programs.compiling import UNTIMED

SHORT_STEP_SECONDS = 0.1  # a step forecast below it may wait for its launches
# Of these XLA's own choice lacks the last three, and pieces of less than five launches.
_WHOLE_GRAPHS: dict[str, bool | int | str] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION",
    "xla_gpu_graph_min_graph_size": 1,
}

# Else XLA compiles each fusion by two code generators and times both: for the hundreds of an adapter's update that took
# 8 of 20 s (8B, rank 16), and these only read and write memory.
_ONE_GENERATOR: dict[str, bool | int | str] = {"xla_gpu_experimental_enable_fusion_autotuner": False}


def compiler_options(
    platform: str, deterministic: bool, divides: bool = False, merges: bool = True
) -> dict[str, bool | int | str]:
    """XLA options {name: value}. Without Triton GEMMs cuBLASLt adds the adapter's product in its epilogue: 2.3 % of an
    8B LoRA step on an H200. 16-bit values are rounded wherever they are made, so that plans of residuals give equal
    bits. XLA recomputes nothing by its own choice.

      platform: on others than "gpu" only the rounding is set.
      deterministic: equal bits on every run, and untimed algorithms, so that processes choose alike.
      divides: weights are divided over devices.
      merges: whether XLA may merge products that share an operand. Adapters' input is then read once; but with all
      parameters trained it joins key and value, which takes longer than two products.
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
        options |= {"xla_gpu_deterministic_ops": True, **UNTIMED}
    return options


def update_options(platform: str, by_tensor: bool) -> dict[str, bool | int | str]:
    """Further XLA options of StepProgram.update. by_tensor: of the program."""
    return {} if platform != "gpu" or by_tensor else _ONE_GENERATOR


def launch_options(whole_graphs: bool) -> dict[str, bool | int | str]:
    """XLA options on a GPU that change launches alone, no number; {} if XLA_FLAGS has one of them. With whole graphs a
    135M's step of 16 x 512 tokens makes 221,665 tokens/s on an H200; 203,382 as XLA does by itself, 138,177 without any
    graph.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    return {} if not whole_graphs or any(name in flags for name in _WHOLE_GRAPHS) else _WHOLE_GRAPHS
