"""Digests of jaxtune's files, which are read once in a process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.system import sources
from tests import patience

PATHS = st.sampled_from(["a.py", "pallas/a.py", "pallas/b/a.py", "pallas_of_others.py", "models/a.py"])
FILES = st.dictionaries(PATHS, st.binary(max_size=3), min_size=1)


@pytest.fixture(scope="module", autouse=True)
def no_other_thread_reads():
    """As one does that `use_program_cache` began."""
    for thread in threading.enumerate():
        if thread.name == "import":
            thread.join(patience.SECONDS)


@pytest.fixture
def unread():
    """Files are read anew, and again after the test."""

    def forget() -> None:
        sources._read.cache_clear()
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
        sources._read.cache_clear()
        sources.digest.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources, "_ROOT", written(tmp_path_factory.mktemp("sources"), files))
            return sources.digest(), sources.digest("pallas")

    def within(files: dict[str, bytes]) -> dict[str, bytes]:
        return {path: content for path, content in files.items() if path.startswith("pallas/")}

    try:
        of_first, of_second = read(first), read(second)
    finally:
        sources._read.cache_clear()
        sources.digest.cache_clear()
    assert (of_first[0] == of_second[0]) == (first == second)
    assert (of_first[1] == of_second[1]) == (within(first) == within(second))


def test_threads_read_the_files_once(unread, monkeypatch):
    unread()
    opened = []

    def count(path: Path, *arguments, **options):
        opened.append(path)
        return open(path, *arguments, **options)

    monkeypatch.setattr(sources, "open", count, raising=False)
    with ThreadPoolExecutor(8) as pool:
        digests = {*pool.map(lambda _: sources.digest(), range(8)), *pool.map(lambda _: sources.digest(""), range(8))}
    assert len(digests) == 1 and len(opened) == len(set(opened)) > 100


@pytest.fixture
def code(unread, monkeypatch, tmp_path) -> Path:
    """A package of three files, not read yet."""
    unread()
    folder = written(tmp_path / "code", {"a.py": b"", "pallas/b.py": b"b", "pallas/c.py": b""})
    monkeypatch.setattr(sources, "_ROOT", folder)
    return folder


def touched(file: Path) -> None:
    file.write_bytes(b"d")
    os.utime(file, (time.time() + 1, time.time() + 1))


def as_old_ones(file: Path) -> None:
    """As installers link them from a cache: with an old time, but another."""
    file.write_bytes(b"d")
    os.utime(file, (2, 2))


CHANGES = {
    "written": lambda code: touched(code / "pallas" / "b.py"),
    "replaced by an old one": lambda code: as_old_ones(code / "pallas" / "b.py"),
    "replaced by a larger one of its time": lambda code: written(code, {"pallas/b.py": b"longer"}),
    "removed": lambda code: (code / "pallas" / "b.py").unlink(),
    "added, an old one": lambda code: written(code, {"pallas/d.py": b""}),
    "removed with its folder": lambda code: (code / "pallas").rename(code.parent / "pallas"),
    "removed, all": lambda code: code.rename(code.parent / "elsewhere"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_after_the_first_reading_is_noticed(code, change):
    assert sources.are_loaded() and sources.are_unchanged() and sources.are_unchanged("pallas")
    CHANGES[change](code)
    assert not sources.are_unchanged() and not sources.are_unchanged("pallas")
    assert sources.are_loaded()


def test_a_change_in_another_folder_is_none_of_a_folder(code):
    assert sources.are_unchanged("pallas")
    touched(code / "a.py")
    assert sources.are_unchanged("pallas") and not sources.are_unchanged()


@pytest.mark.parametrize("comes", ["before", "after"])
def test_an_editors_lock_is_no_file(code, comes):
    """Emacs': a link that leads nowhere."""
    if comes == "after":
        assert sources.are_unchanged()
    (code / "pallas" / ".#b.py").symlink_to("user@machine.123:456")
    assert sources.are_loaded() and sources.are_unchanged() and sources.are_unchanged("pallas")


@pytest.mark.parametrize("files", ["none", "a zip archive", "no folder", "unreadable"])
def test_files_that_cannot_be_read_are_not_trusted(code, files, monkeypatch):
    """Their digest would be that of each other version."""
    if files == "unreadable":

        def refused(*arguments, **options):
            raise PermissionError

        monkeypatch.setattr(sources, "open", refused, raising=False)
    else:
        code.rename(code.parent / "elsewhere")
        if files == "none":
            (code / "pallas" / "__pycache__").mkdir(parents=True)
            (code / "pallas" / "b.pyc").touch()
        elif files == "a zip archive":
            code.touch()
    assert not any(ask(folder) for ask in (sources.are_loaded, sources.are_unchanged) for folder in ("", "pallas"))
    assert sources.digest() == sources.digest("pallas")


_WITHOUT_PROC = """
import pathlib, sys, time
real = pathlib.Path.read_text
def read_text(path, *arguments, **options):
    if str(path).startswith("/proc"):
        raise FileNotFoundError
    return real(path, *arguments, **options)
pathlib.Path.read_text = read_text
from jaxtune.system import sources
from jaxtune.system.private_jax import compilation_cache
sources._ROOT = pathlib.Path(sys.argv[1])
time.sleep(0.1)
(sources._ROOT / "pallas" / "b.py").touch()
time.sleep(0.1)
print(sources.are_loaded(), sources.are_unchanged())
"""


def test_changes_are_noticed_without_proc(code):
    """Since the import of `sources`, as nobody says when the process began."""
    environment = {"PYTHONPATH": str(Path(sources.__file__).parents[2])}
    command = [sys.executable, "-c", _WITHOUT_PROC, str(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=patience.SECONDS)
    assert done.stdout.split() == ["False", "False"], done.stderr


_FORKS = """
import os, signal
from jaxtune.system import sources
with sources._lock:
    if (child := os.fork()) == 0:
        signal.alarm(30)
        os._exit(0 if sources.are_loaded() else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_does_not_wait_for_a_thread_that_reads():
    environment = {"PYTHONPATH": str(Path(sources.__file__).parents[2])}
    command = [sys.executable, "-c", _FORKS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=patience.SECONDS)
    assert done.stdout == "0\n", done.stderr
