"""Files of ours are whole or not there, on a full disk and after a kill."""

from __future__ import annotations

import concurrent.futures
import contextlib
import resource
import threading

import pytest

from jaxtune.system.files import atomic_write, fingerprints, remove_temporary, temporary_path


@contextlib.contextmanager
def no_room_beyond(count_bytes: int):
    """A limit on the size of files makes real writes fail as on a full disk: part of the data gets there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "config.yaml"
    with no_room_beyond(4096), pytest.raises(OSError, match="File too large"):
        atomic_write(path, "x" * 10_000)
    assert list(tmp_path.iterdir()) == []
    atomic_write(path, "steps: 3\n")
    with no_room_beyond(4096), pytest.raises(OSError, match="File too large"):
        atomic_write(path, "x" * 10_000)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("config.yaml", "steps: 3\n")]


def test_a_link_is_replaced_and_its_target_kept(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    atomic_write(tmp_path / "link", "ours", mode=0o600)
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "link").stat().st_mode & 0o777 == 0o600


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    left = temporary_path(tmp_path / "merged")
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    temporary_path(tmp_path / "config.yaml").write_text("st")
    names = {"config.yaml", ".hidden", "x.tmp", ".mine.tmp", ".notes.2024-draft.tmp"}
    for name in names:
        (tmp_path / name).write_text("kept")
    remove_temporary(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.full
def test_a_file_that_is_being_written_is_no_leftover(tmp_path):
    """Not even in the moment between its creation and its lock: other processes clean the folder all the time."""
    stopped = threading.Event()

    def clean():
        while not stopped.is_set():
            remove_temporary(tmp_path)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        cleaning = [pool.submit(clean) for _ in range(3)]
        try:
            for number in range(1000):
                atomic_write(tmp_path / "state", f"{number}", durable=False)
                assert (tmp_path / "state").read_text() == f"{number}"
        finally:
            stopped.set()
        assert [one.result() for one in cleaning] == [None] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_fingerprints(tmp_path):
    (tmp_path / "a").write_bytes(b"123456789")
    assert fingerprints([tmp_path / "a"]) == {tmp_path / "a": {"bytes": 9, "crc32": "cbf43926"}}  # CRC-32's check value
