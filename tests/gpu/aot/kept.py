"""What compilers said of programs for a GPU that is not there, kept between runs.

Such a program cannot be read back, as a CPU's can. But these tests ask for its text, its memory and what the assembler
printed alone, and those follow from what is compiled, for what and by what. So a compiler is asked once for each
program: by one run, by the other process of the run, and by the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import jax
from jax._src.lib import xla_client

from jaxtune.system.program_cache import ProgramCache


@functools.cache
def _versions() -> str:
    packages = sorted({f"{package.metadata['Name']}=={package.version}" for package in metadata.distributions()})
    return " ".join([sys.version, platform.platform(), *packages])


def recall(parts: tuple[object, ...], ask: Callable[[], dict]) -> dict:
    """What `ask` gives for what `parts` tell, with the versions of all that is installed: asked only if it is not kept.
    Nothing that `ask` raises is kept."""
    digest = hashlib.sha256()
    for part in (*parts, _versions()):
        digest.update(str(part).encode() + b"\0")
    cache = ProgramCache(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "ahead")
    content = cache.get(digest.hexdigest())
    if content is None:
        content = json.dumps(ask()).encode()
        cache.put(digest.hexdigest(), content)
    return json.loads(content)


class Said:
    """A compiled program's own words: all that these tests ask of one."""

    def __init__(self, text: str, memory: dict[str, int]):
        self._text, self._memory = text, memory

    def as_text(self) -> str:
        return self._text

    def memory_analysis(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(**self._memory)


def keep_what_is_said() -> None:
    """From now on, `Lowered.compile` gives a program's words, and prints what the assembler did."""
    # No lines of source files: a comment above them does not change a program. A kernel has its own, by this name.
    checkout = os.path.dirname(os.path.dirname(sys.modules["jaxtune"].__file__))
    jax.config.update("jax_traceback_in_locations_limit", 0)
    jax.config.update("jax_hlo_source_file_canonicalization_regex", re.escape(f"{checkout}{os.sep}"))
    compile_it = jax.stages.Lowered.compile

    @functools.wraps(compile_it)
    def compile_or_recall(lowered, compiler_options=None):
        dumps = sorted(item for item in os.environ.items() if item[0].startswith("MOSAIC_GPU_DUMP"))

        def ask() -> dict:
            with _printed() if dumps else contextlib.nullcontext([""]) as printed:
                compiled = compile_it(lowered, compiler_options)
            assert not dumps or printed[0], "the assembler printed nothing"
            memory = compiled.memory_analysis()
            sizes = {name: value for name in dir(memory) if isinstance(value := getattr(memory, name), int)}
            return {"text": compiled.as_text(), "memory": sizes, "printed": printed[0]}

        said = recall((*_of_program(lowered, compiler_options), dumps), ask)
        os.write(1, said["printed"].encode())
        return Said(said["text"], said["memory"])

    jax.stages.Lowered.compile = compile_or_recall


def _of_program(lowered: jax.stages.Lowered, options: dict | None) -> tuple[object, ...]:
    """The program with the names of its operations, its devices, and the compiler's options."""
    devices = list(lowered._lowering._device_list)  # JAX tells of them nowhere else
    topology = xla_client.get_topology_for_devices(devices)
    options = dict(lowered._lowering._compiler_options_kvs) | (options or {})
    settings = jax.config.values["jax_disable_most_optimizations"], jax.config.values["jax_use_shardy_partitioner"]
    text = lowered.as_text(debug_info=True)
    return text, topology.fingerprint(), len(devices), sorted(options.items()), settings, os.environ.get("XLA_FLAGS")


@contextlib.contextmanager
def _printed() -> Iterator[list[str]]:
    """Yields a list that holds, in the end, what C++ wrote to the process's standard output and error."""
    found = [""]
    with tempfile.TemporaryFile() as file:
        before = os.dup(1), os.dup(2)
        try:
            ctypes.CDLL(None).fflush(None)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield found
        finally:
            ctypes.CDLL(None).fflush(None)
            for number, old in enumerate(before, 1):
                os.dup2(old, number)
                os.close(old)
        file.seek(0)
        found[0] = file.read().decode(errors="replace")
