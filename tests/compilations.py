"""What XLA is asked for while something is tested, and not what the rest of the process has compiled meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator

import jax


@contextlib.contextmanager
def compilations(threads: Collection[threading.Thread] | None = None) -> Iterator[list[str]]:
    """Names of the programs that are compiled in these threads, or in the one that asks. JAX tells of each in the
    thread that waits for it.
    """
    heard_in = {threading.current_thread()} if threads is None else {*threads}
    names: list[str] = []

    def heard(event: str, _: float, **facts: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and threading.current_thread() in heard_in:
            names.append(str(facts.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
