"""Compiling, and memory that runs out meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import jax

# XLA takes the first algorithm that a vendor's library names, and times none.
UNTIMED = {"xla_gpu_autotune_level": 0}


def out_of_memory(error: BaseException) -> bool:
    """Whether the message of an XLA error (JaxRuntimeError) says that device or host memory ran out."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def compiled(lowered: jax.stages.Lowered, options: Mapping[str, bool | int | str]) -> jax.stages.Compiled:
    """Compiles; again without timing algorithms if memory ran out, as timing allocates operands beside the weights."""
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
    return lowered.compile(compiler_options={**options, **UNTIMED})
