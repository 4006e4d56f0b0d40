"""The screen can never end a run: readers of stdout and stderr that die, a closed terminal, a log on a full disk.

Real processes of the command on a tiny model, in a pipe, on a terminal or under nohup.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxtune
from jaxtune import cli
from jaxtune.system import interrupts, terminal
from jaxtune.train.callbacks import Callback
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.folder.results import read_result
from jaxtune.train.log.metrics import read_metrics
from jaxtune.train.signals import EXIT_SAVED, Interrupted, StopSignal
from jaxtune.train.trainer import Trainer
from tests import patience
from tests.faults.command import ONE_DEVICE, STEPS, make_folder
from tests.train.tiny_runs import assert_same, dataset, documents, lora_model, make_config


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("screen"))


ON_A_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
WITHOUT = {"SIGHUP": "trap '' HUP", "a screen": "exec >&- 2>&-"}  # what a shell takes away before it starts a command


def start(*arguments: str, by: tuple[str, ...] = (), **options) -> subprocess.Popen:
    """The command in a process of its own, begun by another program."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(jaxtune.__file__).parents[1]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": ONE_DEVICE,
    }
    return subprocess.Popen([*by, sys.executable, "-m", "jaxtune", *arguments], env=environment, **options)


def without(what: str) -> tuple[str, ...]:
    return "sh", "-c", f'{WITHOUT[what]}; exec "$@"', "sh"


def endless(recipe: Path, output: Path) -> list[str]:
    """Arguments of a run that is under way for minutes."""
    return ["train", str(recipe), f"output={output}", "steps=200000", "optim.learning_rate=1e-5"]


def under_way(process: subprocess.Popen, output: Path) -> None:
    """Waits until a run has made some steps."""
    lines = functools.partial(lines_of, output)
    patience.wait_until(lambda: sum("loss" in line for line in lines()) >= 3, lambda: process.poll() is None)


def lines_of(output: Path) -> list[dict]:
    with contextlib.suppress(FileNotFoundError):
        return read_metrics(output / "metrics.jsonl")
    return []


def require_saved(process: subprocess.Popen, output: Path) -> None:
    """The run has ended as a signal ends it, and its last step is saved."""
    assert process.wait(patience.SECONDS) == EXIT_SAVED
    (last,) = saved_steps(output / "checkpoints")
    assert last == max(line["step"] for line in read_metrics(output / "metrics.jsonl")) >= 3


@contextlib.contextmanager
def dead_reader() -> Iterator[int]:
    """The end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.full
def test_ctrl_c_on_a_pipeline_with_tee_saves(recipe, tmp_path):
    """What a terminal does at Ctrl-C: every process of the pipeline is interrupted, and tee dies of it."""
    output = tmp_path / "run"
    train = start(*endless(recipe, output), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0)
    tee = subprocess.Popen(
        ["tee", tmp_path / "log"], stdin=train.stdout, stdout=subprocess.DEVNULL, process_group=train.pid
    )
    train.stdout.close()
    try:
        under_way(train, output)
        os.killpg(train.pid, signal.SIGINT)
        assert tee.wait(patience.SECONDS) == -signal.SIGINT
        require_saved(train, output)
    finally:
        train.kill()
        tee.kill()


@pytest.mark.full
@pytest.mark.parametrize("wish", ["the terminal is closed", "the shell sends it too"])
def test_a_closed_terminal_saves(recipe, tmp_path, wish):
    """Nobody reads the bar any more, and SIGHUP comes, from the system and from the shell."""
    output = tmp_path / "run"
    master, slave = pty.openpty()
    shim = (sys.executable, "-c", ON_A_TERMINAL)
    train = start(*endless(recipe, output), by=shim, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    try:
        os.set_blocking(master, False)

        def has_four_lines() -> bool:
            with contextlib.suppress(BlockingIOError):
                os.read(master, 65536)
            return len(lines_of(output)) >= 4

        patience.wait_until(has_four_lines, lambda: train.poll() is None)
        if wish == "the shell sends it too":
            train.send_signal(signal.SIGHUP)
        os.close(master)
        require_saved(train, output)
    finally:
        train.kill()


@pytest.mark.full
def test_nohup_goes_on(recipe, tmp_path):
    output = tmp_path / "run"
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    train = start(*endless(recipe, output), by=without("SIGHUP"), **silent)
    try:
        under_way(train, output)
        train.send_signal(signal.SIGHUP)
        steps = len(read_metrics(output / "metrics.jsonl"))
        patience.wait_until(lambda: len(lines_of(output)) >= steps + 20, lambda: train.poll() is None)
        train.send_signal(signal.SIGTERM)
        require_saved(train, output)
    finally:
        train.kill()


@pytest.fixture(scope="module")
def straight(recipe) -> Path:
    output = recipe.parent / "straight"
    assert cli.main(["train", str(recipe), f"output={output}"]) == 0
    return output


@pytest.mark.full
@pytest.mark.parametrize("screen", ["dead", "full", "closed"])
def test_a_run_ends_well_whatever_becomes_of_its_screen(recipe, straight, tmp_path, screen):
    """A reader that died at once, a log on a full disk, descriptors that were closed before the start."""
    output = tmp_path / "run"
    options: dict = {}
    with contextlib.ExitStack() as stack:
        if screen == "closed":
            options["by"] = without("a screen")
        else:
            sink = stack.enter_context(dead_reader() if screen == "dead" else open("/dev/full", "wb"))  # noqa: SIM115
            options.update(stdout=sink, stderr=sink)
        train = start("train", str(recipe), f"output={output}", "evaluation.exact_match_rows=2", **options)
        assert train.wait(patience.SECONDS) == 0
    for name in ("adapter", "merged"):
        assert read_result(output / name).step == STEPS
        for file in (straight / name).glob("*.safetensors"):
            assert (output / name / file.name).read_bytes() == file.read_bytes()
    for file in output.rglob("*.jsonl"):  # and nothing that is said got into a file
        assert len(read_metrics(file)) == len(file.read_bytes().splitlines())


def test_a_script_that_prints_outlives_its_reader(tmp_path, monkeypatch):
    """A trainer in Python, and what a callback prints; the streams are the script's own again when it is done."""

    class Prints(Callback):
        def stepped(self, step, line):
            print("step", step, flush=True)

    with dead_reader() as writer, open(writer, "w", closefd=False) as dead:
        monkeypatch.setattr(sys, "stdout", dead)
        monkeypatch.setattr(sys, "stderr", dead)
        config = make_config(tmp_path / "run", steps=3)
        trained = Trainer(lora_model(), None, config, dataset(documents(12)), callbacks=[Prints()]).train()
        assert sys.stdout is sys.stderr is dead
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            dead.close()
    config = make_config(tmp_path / "straight", steps=3)
    assert_same(trained, Trainer(lora_model(), None, config, dataset(documents(12))).train())


# ---- commands whose result is what they print


def test_a_result_that_cannot_be_printed_is_told():
    with open("/dev/full", "wb") as full:
        done = start("info", stdout=full, stderr=subprocess.PIPE, text=True)
        said = done.communicate()[1]
    *_, error = said.splitlines()  # before it, what was being done, if that took long
    assert (done.returncode, error) == (2, "jaxtune: error: [Errno 28] No space left on device: '<stdout>'")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["info"]])
def test_a_reader_that_has_seen_enough_is_no_error_to_tell(arguments):
    with dead_reader() as writer:
        done = start(*arguments, stdout=writer, stderr=subprocess.PIPE, text=True)
        assert done.communicate()[1] == ""
    assert done.returncode in (0, 1)


def test_what_a_stream_cannot_encode_is_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with terminal.outliving():
        terminal.say("naïve ✓", flush=True)
        sys.stdout.writelines(["a\n", "ß\n"])
        assert sys.stdout.encoding == "ascii" and not sys.stdout.isatty()
        sys.stdout.flush()
    assert written.getvalue() == b"na\\xefve \\u2713\na\n\\xdf\n"
    sys.stdout.close()
    with terminal.outliving():
        print("into a stream that was closed", flush=True)


# ---- signals


def test_a_hang_up_is_no_second_wish(monkeypatch):
    """The shell and the system both send SIGHUP, and the end of a session SIGTERM beside it."""
    for numbers in ("HUP HUP HUP", "TERM HUP", "HUP TERM HUP"):
        with StopSignal() as stop:
            for number in numbers.split():
                os.kill(os.getpid(), signal.Signals[f"SIG{number}"])
            assert stop.requested and stop.signal_name == f"SIG{numbers.split()[0]}"


def test_a_signal_that_python_drops_comes_once_more(capfd):
    """As everything that a finaliser or a callback of the garbage collector raises: a stopped export went on."""

    class Dropping:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    hook = sys.unraisablehook
    with StopSignal() as stop, pytest.raises(Interrupted, match="SIGTERM"), stop.at_once():
        Dropping()
        time.sleep(30)
    assert stop.requested and sys.unraisablehook is hook
    said = capfd.readouterr().err
    assert said.count("SIGTERM: leaving") == 1 and "ignored" not in said


def test_a_ctrl_c_that_python_drops_is_raised_again(monkeypatch, capfd):
    """Before a run has handlers of its own: it went on, with a traceback on the screen."""

    class Dropping:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    interrupts.raise_dropped_interrupts()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Dropping()
            time.sleep(30)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "ignored" not in capfd.readouterr().err


def test_an_ignored_hang_up_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
