"""Kill, truncate, corrupt, fill the disk, run twice: what a checkpoint folder must survive."""

import contextlib
import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import jaxtune
import jaxtune.train.folder.checkpoint as module
from jaxtune.train.folder.checkpoint import Checkpointer, CheckpointError
from jaxtune.train.signals import EXIT_SAVED, StopSignal
from tests import patience

PRELUDE = """
import functools, os, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
import jaxtune.train.folder.checkpoint as module
from jaxtune.train.folder.checkpoint import Checkpointer
from jaxtune.train.signals import EXIT_SAVED, StopSignal
folder, how = sys.argv[1], sys.argv[2]
say = functools.partial(print, flush=True)
def state_of(step):
    return {"w": jnp.full((64, 1024), step, jnp.float32), "step": jnp.int32(step)}
def hang(*a, **k):
    say("in save")
    time.sleep(300)
"""


def start(script: str, *arguments: str) -> subprocess.Popen:
    root = Path(jaxtune.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(script), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@contextlib.contextmanager
def running(script: str, *arguments: str):
    process = start(script, *arguments)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def state_of(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full((64, 1024), step, np.float32), "step": np.int32(step)}


def fill(folder: Path, steps=(1, 2)) -> None:
    with Checkpointer(folder) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step), {"cursor": step})


def assert_restores(folder: Path, step: int) -> None:
    with Checkpointer(folder) as checkpointer:
        found, state, meta = checkpointer.restore(like=state_of(0))
        assert (found, meta) == (step, {"cursor": step})
        assert (state["w"] == step).all() and state["step"] == step


# ---- SIGKILL

KILLED = """
with Checkpointer(folder) as checkpointer:
    def save(step):
        checkpointer.save(step, state_of(step), {"cursor": step})
    save(1)
    checkpointer.wait()
    if how == "arrays":
        Checkpointer._finish = hang
    elif how == "manifest":
        module.write_manifest = hang
    elif how == "rename":
        module.put = hang
    elif how == "replace":
        save(2)
        checkpointer.wait()
        real = os.rename
        os.rename = lambda old, new: hang() if "/.tmp_" in str(old) else real(old, new)
    elif how == "purge":
        save(2)
        checkpointer.wait()
        module.shutil.rmtree = lambda path, **k: hang() if os.path.exists(path) else None
        save(3)
    if how != "purge":
        save(2)
    checkpointer.wait()
"""


@pytest.mark.parametrize(
    ("where", "expected"),
    [("arrays", 1), ("manifest", 1), ("rename", 1), ("replace", 2), ("purge", 3)],
)
def test_killed_at_each_stage_of_a_save(tmp_path, where, expected, caplog):
    with running(KILLED, str(tmp_path), where) as process:
        assert process.stdout.readline() == "in save\n", process.stderr.read()
        if where == "arrays":  # let Orbax write: then everything but our own files is there
            time.sleep(0.3)
        process.kill()
        process.wait()
    left = {path.name for path in tmp_path.iterdir()}
    assert any(re.fullmatch(r"\.(tmp_)?step_.*", name) for name in left), left
    assert_restores(tmp_path, expected)
    assert "taking over" in caplog.text and f'"pid": {process.pid}' in caplog.text
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
    with Checkpointer(tmp_path) as checkpointer:  # and the next save works
        checkpointer.save(expected + 1, state_of(expected + 1), {"cursor": expected + 1})
    assert_restores(tmp_path, expected + 1)


def test_a_checkpoint_that_version_0_2_was_replacing_gets_its_name_back(tmp_path):
    fill(tmp_path)
    for step in (1, 2):
        shutil.copytree(tmp_path / f"step_0000000{step}", tmp_path / f".old_step_0000000{step}")
    shutil.rmtree(tmp_path / "step_00000002")
    assert_restores(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", "step_00000002"}


def test_killed_at_any_moment(tmp_path):
    script = """
    with Checkpointer(folder) as checkpointer:
        for step in range(1, 10_000):
            checkpointer.save(step, state_of(step), {"cursor": step})
            if step == 4:
                say("running")
    """
    with running(script, str(tmp_path), "") as process:
        assert process.stdout.readline() == "running\n", process.stderr.read()
        time.sleep(0.517)
        process.kill()
        process.wait()
    with Checkpointer(tmp_path) as checkpointer:
        step, state, meta = checkpointer.restore()
        assert step >= 3 and step == checkpointer.latest()
        assert meta == {"cursor": step} and (state["w"] == step).all() and state["step"] == step


# ---- damaged files


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "truncated": (lambda f: os.truncate(largest_file(f), 1000), r"arrays/.*: expected [\d,]+ bytes, found 1,000"),
    "bit flipped": (lambda f: flip_bit(largest_file(f)), r"arrays/.*: expected CRC-32 [0-9a-f]{8}, found [0-9a-f]{8}"),
    "missing": (lambda f: largest_file(f).unlink(), r"arrays/.*: the file is missing, expected [\d,]+ bytes"),
    "meta flipped": (lambda f: flip_bit(f / "meta.json"), r"meta\.json: expected CRC-32"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), r"manifest\.json: the file is missing"),
    "manifest cut": (lambda f: os.truncate(f / "manifest.json", 100), r"manifest\.json: unreadable \(JSONDecodeError"),
    "manifest empty": (lambda f: (f / "manifest.json").write_text("{}"), r"manifest\.json: unreadable \(KeyError"),
    "manifest not ours": (lambda f: (f / "manifest.json").write_text("[1]"), r"manifest\.json: unreadable \(TypeError"),
    "no folder content": (lambda f: (shutil.rmtree(f), f.mkdir()), r"manifest\.json: the file is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_previous_checkpoint_used(tmp_path, caplog, damage):
    break_it, message = DAMAGE[damage]
    fill(tmp_path)
    break_it(tmp_path / "step_00000002")
    assert_restores(tmp_path, 1)
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "step_00000002 is damaged and cannot be used: " in error.getMessage()
    assert re.search(message, error.getMessage()), error.getMessage()
    assert "resuming from step 1 instead" in caplog.text

    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError, match=message):
        checkpointer.restore(step=2)  # asked for by number: never replaced by another


def test_every_file_counts(tmp_path):
    """A flipped bit in any file of a checkpoint is found."""
    fill(tmp_path, steps=(1,))
    folder = tmp_path / "step_00000001"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    with Checkpointer(tmp_path) as checkpointer:
        for path in files:
            good = path.read_bytes()
            flip_bit(path)
            with pytest.raises(CheckpointError, match="no intact checkpoint"):
                checkpointer.restore()
            path.write_bytes(good)
        assert checkpointer.restore()[0] == 1


def test_none_intact(tmp_path):
    fill(tmp_path)
    for step in (1, 2):
        os.truncate(largest_file(tmp_path / f"step_0000000{step}"), 10)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest() == 2  # so that nobody takes the folder for a fresh one
        with pytest.raises(CheckpointError, match=r"no intact checkpoint in .*step_00000002: .*step_00000001: "):
            checkpointer.restore()


def test_damaged_ones_do_not_push_out_the_good_one(tmp_path):
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step), {"cursor": step})
    for step in (2, 3):
        os.truncate(largest_file(tmp_path / f"step_0000000{step}"), 10)
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.restore()[0] == 1
        checkpointer.save(3, state_of(3), {"cursor": 3})
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3]
    assert_restores(tmp_path, 3)


# ---- a full disk


def test_free_space_is_checked_first(tmp_path, monkeypatch):
    fill(tmp_path, steps=(1,))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=123_000_000))
    with Checkpointer(tmp_path) as checkpointer:
        state = {"w": np.empty(200_000_000, np.uint8)}
        with pytest.raises(CheckpointError, match=r"no room to save step 2: it needs 0\.2\d GB, .* has 0\.12 GB free"):
            checkpointer.save(2, state, {})
        assert checkpointer.steps() == [1]
        assert not list(tmp_path.glob(".tmp*"))


def test_disk_full_while_the_arrays_are_written(tmp_path):
    """A file-size limit makes the real writes of the real writer fail."""
    fill(tmp_path, steps=(1,))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"w": np.random.default_rng(0).integers(0, 256, 2**24, np.uint8)}
    with Checkpointer(tmp_path) as checkpointer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, hard))
        try:
            with pytest.raises(
                CheckpointError,
                match=r"saving step 2 to .* failed: .*File too large.*; the last complete checkpoint is step 1",
            ):
                checkpointer.save(2, state, {})
                checkpointer.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not list(tmp_path.glob(".tmp*"))
        assert checkpointer.restore()[0] == 1
        checkpointer.save(2, state, {})  # there is room again
        checkpointer.wait()
        assert (checkpointer.restore()[1]["w"] == state["w"]).all()


def test_error_of_a_background_save_is_raised_at_the_next_call_once(tmp_path, monkeypatch):
    fill(tmp_path, steps=(1,))

    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(module, "atomic_write", full)
            checkpointer.save(2, state_of(2), {"cursor": 2})
            checkpointer._thread.join()
        with pytest.raises(CheckpointError, match=r"saving step 2 .* No space left on device.*last complete .* step 1"):
            checkpointer.save(3, state_of(3), {"cursor": 3})
        assert {path.name for path in tmp_path.iterdir()} == {"run.lock", "step_00000001"}
        checkpointer.save(3, state_of(3), {"cursor": 3})
    assert_restores(tmp_path, 3)


def test_a_purge_that_fails_does_not_stop_training(tmp_path, monkeypatch, caplog):
    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, state_of(1), {"cursor": 1})
        checkpointer.wait()
        monkeypatch.setattr(shutil, "rmtree", refuse)
        checkpointer.save(2, state_of(2), {"cursor": 2})
        checkpointer.wait()
        assert "step_00000001 could not be removed: " in caplog.text
        assert checkpointer.steps() == [2]
    monkeypatch.undo()
    assert_restores(tmp_path, 2)
    assert not list(tmp_path.glob(".tmp*"))


# ---- one run a folder


def test_two_processes_on_one_folder(tmp_path):
    script = """
    checkpointer = Checkpointer(folder)
    say("locked")
    time.sleep(300)
    """
    with running(script, str(tmp_path), "") as process:
        assert process.stdout.readline() == "locked\n", process.stderr.read()
        with pytest.raises(
            ValueError, match=rf'is in use by another run \(.*"pid": {process.pid}, "host": .*"started"'
        ):
            Checkpointer(tmp_path)
        process.kill()
        process.wait()
        fill(tmp_path)  # a dead run holds nothing
    assert_restores(tmp_path, 2)


def test_two_in_one_process(tmp_path):
    with Checkpointer(tmp_path), pytest.raises(ValueError, match="in use by another run"):
        Checkpointer(tmp_path)
    Checkpointer(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_worker_does_not_keep_the_lock(tmp_path):
    script = """
    checkpointer = Checkpointer(folder)
    if os.fork() == 0:
        say(os.getpid())  # by then it has let go of what it must not keep
    time.sleep(300)
    """
    with running(script, str(tmp_path), "") as process:
        child = int(process.stdout.readline())
        try:
            process.kill()
            process.wait()
            Checkpointer(tmp_path).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_output_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to .*file/run: Not a directory; choose another output folder"):
        Checkpointer(tmp_path / "file" / "run")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may write anywhere
    try:
        with pytest.raises(ValueError, match=r"cannot write to .*locked: Permission denied; choose another"):
            Checkpointer(locked)
    finally:
        os.seteuid(user)


# ---- signals

LOOP = """
mesh = jax.make_mesh((len(jax.devices()),), ("data",))
advance = jax.jit(lambda s: {"w": s["w"] + 1, "step": s["step"] + 1}, donate_argnums=0)
state = {"w": jnp.zeros((64, 1024)), "step": jnp.int32(0)}
with Checkpointer(folder) as checkpointer, StopSignal() as stop:
    for step in range(1, 100_000):
        state = advance(state)
        time.sleep(0.02)
        if step == 3:
            say("running")
        if stop.requested:
            checkpointer.save(step, state, {"cursor": step, "why": stop.signal_name})
            break
sys.exit(EXIT_SAVED if stop.requested else 0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_exits_with_its_own_code(tmp_path, number):
    with running(LOOP, str(tmp_path), "") as process:
        assert process.stdout.readline() == "running\n", process.stderr.read()
        process.send_signal(number)
        _, messages = process.communicate(timeout=600)
    assert process.returncode == EXIT_SAVED == 75
    assert f"{number.name}: finishing this step, then saving" in messages
    with Checkpointer(tmp_path) as checkpointer:
        step, state, meta = checkpointer.restore()
    assert meta == {"cursor": step, "why": number.name} and step >= 3
    assert (state["w"] == step).all() and state["step"] == step


def test_second_signal_exits_at_once():
    script = """
    with StopSignal() as stop:
        say("running")
        while not stop.requested:
            time.sleep(0.01)
        say("stopping")
        threading.Thread(target=time.sleep, args=(3600,)).start()  # a save that hangs
        time.sleep(3600)
    """
    with running(script, "", "") as process:
        assert process.stdout.readline() == "running\n", process.stderr.read()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate(timeout=patience.SECONDS)  # the hung save takes an hour
    assert process.returncode == -signal.SIGINT
    assert "SIGINT again: leaving at once, without a save" in messages


def test_stop_signal_gives_the_old_handlers_back_and_is_inert_in_a_thread():
    before = [signal.getsignal(number) for number in StopSignal.signals]
    with StopSignal() as stop:
        assert [signal.getsignal(number) for number in StopSignal.signals] != before
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested and stop.signal_name == "SIGTERM"
    assert [signal.getsignal(number) for number in StopSignal.signals] == before

    seen = []

    def elsewhere():
        with StopSignal() as stop:
            seen.append([signal.getsignal(number) for number in StopSignal.signals] == before and not stop.requested)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [True]
