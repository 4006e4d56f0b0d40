"""What makes the same bits on every x86 machine; for the environment, before jax is imported.

No instructions that only some processors have, no library that chooses its own by the processor, no sums divided by the
number of cores, and no code that an optimiser rearranged: with that a step gives other bits under other plans.
"""

from __future__ import annotations

import os
import platform

FLAGS = {
    "xla_cpu_max_isa": "AVX2",
    "xla_cpu_prefer_vector_width": "256",
    "xla_cpu_multi_thread_eigen": "false",
    "xla_cpu_experimental_ynn_fusion_type": "",
    "xla_backend_optimization_level": "0",
}


def set_flags() -> None:
    for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_XLA_PROFILE_VERSION"):  # which tests/conftest.py sets
        os.environ.pop(name, None)
    if platform.machine() == "x86_64":
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
        # Without the code generator that compiles faster for tests: these programs are those that runs have.
        taken = {*FLAGS, "xla_backend_extra_options"}
        others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.split("=")[0][2:] not in taken]
        os.environ["XLA_FLAGS"] = " ".join([*others, *(f"--{name}={value}" for name, value in FLAGS.items())])
