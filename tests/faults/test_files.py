"""Files and folders of ours are whole or not there, and what is damaged is told: on a full disk, after a kill at any
moment, with two writers and a reader, and as version 0.2 wrote them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import hashlib
import inspect
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import jaxtune
from jaxtune.system import disk, files
from jaxtune.system.files import atomic_write, new_file, new_folder, remove_temporary, temporary_path
from jaxtune.system.program_cache import ProgramCache
from jaxtune.system.sealed import fingerprints, read_manifest, require_sealed, seal, sealed, unsealed, write_manifest

SIZES = st.integers(0, 300) | st.integers(0, 70_000)


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


# ---- sealed files and listed folders


def write_file(path: Path, content: bytes) -> None:
    with new_file(path) as (_, file):
        file.write(content)
        seal(file, path.name)


def write_folder(path: Path, content: bytes) -> None:
    with new_folder(path) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_bytes(content)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(SIZES, st.data())
def test_no_change_of_a_sealed_file_is_overlooked(tmp_path_factory, size, data):
    path, content = tmp_path_factory.mktemp("sealed") / "values.npy", bytes(i % 251 for i in range(size))
    write_file(path, content)
    good = path.read_bytes()
    require_sealed(path)
    assert good == sealed(path.name, content) and unsealed(path.name, good) == content
    bit, cut = data.draw(st.integers(0, 8 * len(good) - 1)), data.draw(st.integers(0, len(good) - 1))
    for bad in (flipped(good, bit), good[:cut], good + b"\0", good + good):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="its checksum is not that of its name and content"):
            require_sealed(path)
        with pytest.raises(ValueError, match="its checksum is not that of its name and content"):
            unsealed(path.name, bad)
    with pytest.raises(ValueError, match="its checksum"):
        unsealed("renamed.npy", good)


@given(st.dictionaries(st.text("abc", min_size=1), SIZES, min_size=1), st.data())
def test_no_change_of_a_listed_folder_is_overlooked(tmp_path_factory, sizes, data):
    folder = tmp_path_factory.mktemp("listed")
    for name, size in sizes.items():
        (folder / f"{name}.d").mkdir()
        (folder / f"{name}.d" / "file").write_bytes(bytes(i % 251 for i in range(size)))
    write_manifest(folder, "list.json", {"step": 3})
    record = read_manifest(folder, "list.json")
    assert record["step"] == 3 and record["files"].keys() == {f"{name}.d/file" for name in sizes}
    name = data.draw(st.sampled_from(sorted(record["files"])))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content + b"\0")
    with pytest.raises(ValueError, match=rf"{name}: expected {len(content):,} bytes, found {len(content) + 1:,}"):
        read_manifest(folder, "list.json")
    if content:
        (folder / name).write_bytes(flipped(content, data.draw(st.integers(0, 8 * len(content) - 1))))
        with pytest.raises(ValueError, match=rf"{name}: expected CRC-32 {record['files'][name]['crc32']}, found "):
            read_manifest(folder, "list.json")
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"{name}: the file is missing, expected {len(content):,} bytes"):
        read_manifest(folder, "list.json")


@pytest.mark.parametrize(
    "files",
    [
        None,
        [1],
        {"a": 1},
        {"a": {}},
        {"a": {"bytes": "x", "crc32": ""}},
        {"a": {"bytes": 1e999, "crc32": ""}},
        *({name: {"bytes": 1, "crc32": "00000000"}} for name in ("/etc/passwd", "../a", "a\0")),
    ],
)
def test_a_list_that_is_none_or_of_another_version_is_refused(tmp_path, files):
    (tmp_path / "list.json").write_text(json.dumps({"format": 1, "files": files}))
    with pytest.raises(ValueError, match=r"list\.json: unreadable \(\w+Error: "):
        read_manifest(tmp_path, "list.json")
    (tmp_path / "list.json").write_text(json.dumps({"format": 2, "files": {}}))
    with pytest.raises(ValueError, match="expected format 1, found 2"):
        read_manifest(tmp_path, "list.json")


def test_fingerprints(tmp_path):
    (tmp_path / "a").write_bytes(b"123456789")
    assert fingerprints([tmp_path / "a"]) == {tmp_path / "a": {"bytes": 9, "crc32": "cbf43926"}}  # CRC-32's check value


def test_what_version_0_2_wrote_is_read(tmp_path):
    """Values of references and teachers, and compiled programs."""
    (tmp_path / "a.npy").write_bytes(b"values" + xxhash.xxh3_128(b"a.npyvalues").digest())
    require_sealed(tmp_path / "a.npy")
    cache = ProgramCache(tmp_path / "cache")
    old = b"jaxtune1" + hashlib.sha256(b"key\0program").digest() + b"program"
    atomic_write(cache._file("key"), old, mode=0o600)
    assert cache.get("key") == b"program"
    for bad in (b"jaxtune2" + old[8:], old[:-1], old + b"\0"):
        atomic_write(cache._file("key"), bad, mode=0o600)
        assert cache.get("key") is None


# ---- an error or a kill at any moment

WRITES = {"file": write_file, "folder": write_folder}
CALLS = ("open", "fsync", "replace", "rename")


def content_of(path: Path) -> bytes | None:
    if path.is_dir():
        return (path / "sub" / "file").read_bytes()
    return unsealed(path.name, path.read_bytes()) if path.exists() else None


@pytest.mark.parametrize("write", WRITES)
def test_a_disk_that_is_full_at_any_call_leaves_the_old_or_the_new(tmp_path, monkeypatch, write):
    """The first time there is nothing in place of the target."""
    path, number, fails, calls = tmp_path / "target", 0, True, []

    def full(real):
        def call(*arguments, **options):
            calls.append(real)
            if len(calls) == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        return call

    while fails or number < 5:
        before, number = content_of(path), number + 1
        calls.clear()
        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(files.os, name, full(getattr(os, name)))
            try:
                WRITES[write](path, b"%d" % number)
            except OSError as error:
                assert error.errno == errno.ENOSPC and content_of(path) in (before, b"%d" % number)
            else:
                assert content_of(path) == b"%d" % number
        fails = len(calls) >= number
        remove_temporary(tmp_path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["target"] * path.exists()


@given(st.integers(0, 9000), st.integers(0, 9000))
def test_a_disk_that_is_full_after_any_byte_leaves_the_old(tmp_path_factory, size, limit):
    folder = tmp_path_factory.mktemp("full")
    for write, name, seal_bytes in ((write_file, "sealed", 16), (atomic_write, "plain", 0)):
        atomic_write(folder / name, b"old")
        with no_room_beyond(limit), contextlib.ExitStack() as stack:
            if size + seal_bytes > limit:
                stack.enter_context(pytest.raises(OSError, match="File too large"))
            write(folder / name, b"x" * size)
        whole = size + seal_bytes if size + seal_bytes <= limit else 3
        assert (folder / name).stat().st_size == whole
    assert {path.name for path in folder.iterdir()} == {"sealed", "plain"}


_KILLED = f"""
import os, signal, sys
from pathlib import Path
from jaxtune.system import files
from jaxtune.system.files import new_file, new_folder
from jaxtune.system.sealed import seal
{inspect.getsource(write_file)}
{inspect.getsource(write_folder)}
left = int(sys.argv[3])
def killed(real):
    def call(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call
for name in {CALLS}:
    setattr(files.os, name, killed(getattr(os, name)))
write_{{}}(Path(sys.argv[1]), sys.argv[2].encode())
"""


@pytest.mark.parametrize("write", WRITES)
def test_a_kill_at_any_call_leaves_the_old_or_the_new(tmp_path, write):
    """`remove_temporary`, with which a run starts, gives a folder that was being replaced its name back."""
    path, number, code = tmp_path / "target", 0, -9
    environment = os.environ | {"PYTHONPATH": str(Path(jaxtune.__file__).parents[1])}
    while code or number < 5:
        before, number = content_of(path), number + 1
        command = [sys.executable, "-c", _KILLED.format(write), str(path), f"{number}", f"{number}"]
        code = subprocess.run(command, env=environment).returncode
        assert code in (0, -9)
        remove_temporary(tmp_path)
        assert content_of(path) in (before, b"%d" % number) and (code or content_of(path) == b"%d" % number)
        assert [entry.name for entry in tmp_path.iterdir()] == ["target"] * path.exists()


# ---- at once


@pytest.mark.parametrize("write", WRITES)
def test_two_writers_and_a_cleaner_at_once(tmp_path, write):
    """And a reader, who finds a file whole at any moment. A replaced folder is away for a moment."""
    path, contents = tmp_path / "target", [bytes([65 + writer]) * 100_000 for writer in range(2)]
    WRITES[write](path, contents[0])
    ended = threading.Event()

    def read():
        while not ended.is_set():
            remove_temporary(tmp_path)
            with contextlib.suppress(*[FileNotFoundError, IsADirectoryError] * (write == "folder")):
                assert content_of(path) in [*contents, *[None] * (write == "folder")]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        reading = pool.submit(read)
        try:
            writing = [pool.submit(lambda c=c: [WRITES[write](path, c) for _ in range(60)]) for c in contents]
            for writer in writing:
                writer.result()
        finally:
            ended.set()
        reading.result()
    remove_temporary(tmp_path)
    assert content_of(path) in contents and [entry.name for entry in tmp_path.iterdir()] == ["target"]


def test_a_folder_replaces_a_link_to_one(tmp_path):
    """As a result that was moved to another disk and linked back."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "old").write_text("old")
    (tmp_path / "model").symlink_to(tmp_path / "elsewhere")
    with files.new_folder(tmp_path / "model") as folder:
        (folder / "new").write_text("new")
    assert not (tmp_path / "model").is_symlink() and [path.name for path in (tmp_path / "model").iterdir()] == ["new"]
    assert (tmp_path / "elsewhere" / "old").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "model"}


def test_an_empty_folder_makes_room_like_others(tmp_path):
    """As an interrupted removal of an older version left it."""
    (tmp_path / "empty").mkdir()
    os.utime(tmp_path / "empty", (0, 0))
    (tmp_path / "new").write_bytes(bytes(10))
    assert disk.remove_oldest([tmp_path / "empty", tmp_path / "new"], lambda remaining, removed: removed == 0) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
