"""What scripts get without asking: programs compiled once for all their runs."""

from __future__ import annotations

import functools

from jaxtune.system.program_cache import in_use, use_program_cache
from jaxtune.system.terminal import say


@functools.cache
def keep_programs() -> None:
    """Turns on the verified cache of programs, once; JAX's settings win. Call it before anything compiles."""
    use_program_cache()
    if (cache := in_use()) is not None:
        say(f"compiled programs are kept in {cache.folder} (JAX_ENABLE_COMPILATION_CACHE=false keeps none)")
