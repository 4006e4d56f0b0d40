"""Digests of jaxtune's files, which are read once in a process."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.models.programs import kept
from jaxtune.models.programs.kept import Request, programs_of
from jaxtune.system import sources
from jaxtune.system.program_cache import ProgramCache

CACHE_OF_PROGRAMS = kept.cache_of_programs  # which the tests' own replaces

PATHS = st.sampled_from(["a.py", "pallas/a.py", "pallas/b/a.py", "pallas_of_others.py", "models/a.py"])
FILES = st.dictionaries(PATHS, st.binary(max_size=3), min_size=1)


@pytest.fixture
def unread():
    """Files are read anew, and again after the test."""

    def forget() -> None:
        sources._read_once.cache_clear()
        sources.digest.cache_clear()

    yield forget
    forget()


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        os.utime(file, (1, 1))
    return folder


@given(FILES, FILES)
def test_a_digest_is_of_the_files_of_a_folder(tmp_path_factory, first, second):
    def read(files: dict[str, bytes]) -> tuple[str, str]:
        sources._read_once.cache_clear()
        sources.digest.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources, "_ROOT", written(tmp_path_factory.mktemp("sources"), files))
            return sources.digest(), sources.digest("pallas")

    def within(files: dict[str, bytes]) -> dict[str, bytes]:
        return {path: content for path, content in files.items() if path.startswith("pallas/")}

    try:
        of_first, of_second = read(first), read(second)
    finally:
        sources._read_once.cache_clear()
        sources.digest.cache_clear()
    assert (of_first[0] == of_second[0]) == (first == second)
    assert (of_first[1] == of_second[1]) == (within(first) == within(second))


def test_threads_read_the_files_once(unread, monkeypatch):
    unread()
    opened, real = [], Path.open

    def count(path: Path, *arguments, **options):
        opened.append(path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", count)
    with ThreadPoolExecutor(8) as pool:
        digests = {*pool.map(lambda _: sources.digest(), range(8)), *pool.map(lambda _: sources.digest(""), range(8))}
    assert len(digests) == 1 and len(opened) == len(set(opened)) > 100


@pytest.mark.parametrize("changed", [None, "before they are read", "later"])
def test_files_that_change_after_the_start_give_no_entry(unread, monkeypatch, tmp_path, changed):
    """Changed before they are read: nothing is loaded, either."""
    unread()
    code, cache = written(tmp_path / "code", {"a.py": b"", "pallas/b.py": b""}), ProgramCache(tmp_path / "cache")
    monkeypatch.setattr(sources, "_ROOT", code)
    monkeypatch.setattr(kept, "in_use", lambda: cache)
    monkeypatch.setattr(kept.described, "replaced", lambda package: None)
    monkeypatch.setattr(kept, "cache_of_programs", CACHE_OF_PROGRAMS)
    if changed != "before they are read":
        assert sources.are_loaded()
    if changed is not None:
        os.utime(code / "pallas" / "b.py", (time.time() + 1, time.time() + 1))
    assert CACHE_OF_PROGRAMS() is (None if changed == "before they are read" else cache)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=where)
    assert kept.result_shapes(jax.nn.relu, shape).shape == (3,)
    assert programs_of([Request(jax.nn.relu, (shape,), where, None, {})])[0](np.ones(3, np.float32)).tolist() == [1] * 3
    entries = {file.name.partition("-")[0] for file in cache.folder.iterdir()}
    assert entries == (set() if changed else {"shapes", "step"})
