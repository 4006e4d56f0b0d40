"""Whether XLA's costly passes are used while something is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


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
