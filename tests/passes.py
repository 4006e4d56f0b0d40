"""How XLA compiles a program of the tests: with its costly passes or without them, and long scans in linear time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

# `compiler_options` of jax.jit for a derivative through a scan of many steps. The tests compile with XLA's older code
# generator (conftest.py), which copies the values of all steps that such a scan keeps whenever it adds those of one:
# over 1,024 tokens of the gated delta rule's definition that took 10 s, and 225 s without the costly passes. With the
# newer generator, to which these options go back, it takes 1.1 s.
LONG_SCAN = {"xla_backend_extra_options": ""}


@contextlib.contextmanager
def compiled_with_passes(passes: bool) -> Iterator[None]:
    """Everything inside is compiled with XLA's costly passes, or without them.

    JAX looks for a function's compiled program in memory before it looks at that setting. A program that was compiled
    under the other setting would be taken: a run would compute its first values by other programs than a process of
    its own does. So the two settings also have different numbers of XLA's profile. The number does nothing else on a
    CPU, and JAX compares it when it looks for a program.
    """
    before = {name: jax.config.values[name] for name in ("jax_disable_most_optimizations", "jax_xla_profile_version")}
    jax.config.update("jax_disable_most_optimizations", not passes)
    jax.config.update("jax_xla_profile_version", int(not passes))
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
