"""Compiled programs of a damaged, swapped or foreign cache are never run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxtune
from jaxtune.compat.kept import keep_programs
from jaxtune.system.program_cache import ProgramCache

# Two programs, so that one entry can be put in the other's place. The second asks for the same shapes.
SCRIPT = """
import sys
if sys.argv[2] == "zlib":
    sys.modules["zstandard"] = None
else:
    import types, zlib  # stands in for the package, which need not be here
    class Compressor:
        def compress(self, data): return b"zs" + zlib.compress(data)
    class Decompressor:
        def decompress(self, data): return zlib.decompress(data[2:])
    sys.modules["zstandard"] = types.SimpleNamespace(ZstdCompressor=Compressor, ZstdDecompressor=Decompressor)
import logging
logging.basicConfig(format="%(message)s")
import jax, numpy as np
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
from jaxtune.system.program_cache import use_program_cache
use_program_cache()
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
x = np.arange(6, dtype=np.float32).reshape(2, 3)
one = jax.jit(lambda x: x * 3 + 1)(x)
two = jax.jit(lambda x: x * 5 - 2)(x)
assert (np.asarray(one) == x * 3 + 1).all() and (np.asarray(two) == x * 5 - 2).all()
print(len(hits))
"""


def hits(folder: Path, compression: str = "zlib") -> tuple[int, str]:
    """(programs taken from the cache, what was said) of a process that runs two; it fails if one gives other bits."""
    environment = os.environ | {"PYTHONPATH": str(Path(jaxtune.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), compression], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout), done.stderr


@pytest.mark.full
def test_damaged_and_swapped_programs_are_said_and_compiled_anew(tmp_path):
    folder = tmp_path / "cache"
    assert hits(folder) == (0, "")
    files = sorted(folder.iterdir())
    assert len(files) == 2 and folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert hits(folder) == (2, "")
    good = [path.read_bytes() for path in files]

    files[0].write_bytes(good[0][:100])  # torn
    found, said = hits(folder)
    assert found == 1 and f"{files[0]} is not used: its checksum" in said and said.count("compiling it anew") == 1

    files[1].chmod(0o666)
    found, said = hits(folder)
    assert found == 1 and "others may write it" in said  # and the torn one is healed

    files[0].write_bytes(good[1])  # swapped
    files[1].write_bytes(good[0])
    found, said = hits(folder)
    assert found == 0 and said.count("compiling it anew") == 2
    assert hits(folder) == (2, "")

    assert hits(folder, "zstd") == (0, "")  # the package was installed: other entries, and none is taken for the other
    assert hits(folder, "zstd") == (2, "")


@pytest.fixture(scope="module")
def entry(tmp_path_factory) -> tuple[ProgramCache, Path, bytes]:
    cache = ProgramCache(tmp_path_factory.mktemp("cache"))
    cache.put("key", bytes(range(200)))
    (path,) = cache.folder.iterdir()
    return cache, path, path.read_bytes()


@given(st.data())
def test_no_change_of_an_entry_is_overlooked(entry, data):
    cache, path, good = entry
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    cut = data.draw(st.integers(0, len(good)))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    for changed in (bytes(bad), good[:cut], good + good[cut:] + b"\0"):
        path.write_bytes(changed)
        assert cache.get("key") == (bytes(range(200)) if changed == good else None)
        assert path.exists() == (changed == good)
    cache.put("key", bytes(range(200)))
    assert cache.get("key") == bytes(range(200)) and path.read_bytes() == good


def test_a_link_is_not_followed(tmp_path, caplog):
    cache = ProgramCache(tmp_path / "cache")
    cache.put("key", b"program")
    (path,) = cache.folder.iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.get("key") is None and "cannot be read" in caplog.text
    cache.put("key", b"again")
    assert cache.get("key") == b"again" and b"program" in (tmp_path / "elsewhere").read_bytes()


def test_the_size_of_the_cache_is_bounded(tmp_path):
    cache = ProgramCache(tmp_path, max_bytes=3 * 140)
    for name in "abc":
        cache.put(name, b"x" * 100)
        os.utime(cache._file(name), (ord(name), ord(name)))
    assert cache.get("a")  # used last from now on
    cache.put("d", b"x" * 100)
    assert [cache.get(name) is not None for name in "abcd"] == [True, False, True, True]
    cache.put("e", b"x" * 1000)
    assert cache.get("e") is None and cache.get("d")


def test_scripts_keep_programs_where_they_say_and_it_is_told_once(capsys):
    folder = jax.config.jax_compilation_cache_dir
    keep_programs.cache_clear()
    keep_programs()
    keep_programs()
    assert capsys.readouterr().out.count(f"are kept in {folder} ") == 1
    assert jax.config.jax_compilation_cache_dir == folder
    keep_programs.cache_clear()
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        keep_programs()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert capsys.readouterr().out == ""
