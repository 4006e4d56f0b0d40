"""Waits that hear: a signal, the clock, the disk, an error, while a run waits for rows or the user's code."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxtune import generate
from jaxtune.models.files import file_plan
from jaxtune.system import waiting
from jaxtune.train.callbacks import Callback
from jaxtune.train.config import CheckpointConfig, DataConfig, EvaluationConfig
from jaxtune.train.data.batches import Batch, BatchSource
from jaxtune.train.folder import checkpoint
from jaxtune.train.folder.checkpoint import NoRoom, saved_steps
from jaxtune.train.loop import saving
from jaxtune.train.loop.saving import TrainingInterrupted
from jaxtune.train.trainer import Trainer
from tests import patience
from tests.train.tiny_runs import LENGTH, VOCAB, assert_same, dataset, documents, lora_model, make_config

STEPS = 8


class Drawn(BatchSource):
    """Rows that follow from the step; `hooks` {step: called while its rows are waited for}."""

    rows_per_step, length = 4, LENGTH

    def __init__(self, hooks=None, needs_model: bool = True):
        self.hooks, self.needs_model = hooks or {}, needs_model

    def batch_at(self, step, model=None):
        if hook := self.hooks.get(step):
            hook(model)
        draw = np.random.default_rng(step)
        batch = Batch.empty(self.rows_per_step, self.length)
        batch.tokens[:] = draw.integers(1, VOCAB, batch.tokens.shape)
        batch.targets[:], batch.segment_ids[:], batch.weights[:] = np.roll(batch.tokens, -1, 1), 1, 1.0
        batch.positions[:] = np.arange(self.length)
        return batch


class AtEvaluation(Callback):
    def __init__(self, hook):
        self.hook = hook

    def evaluating(self, step, model):
        self.hook(model)


def trainer_of(folder, source, *callbacks, steps=STEPS, **changes) -> Trainer:
    held_out = dataset(documents(4)) if callbacks else None
    data = DataConfig(train="rows", eval="held-out rows" if callbacks else None, length=LENGTH)
    config = make_config(folder, steps=steps, data=data, **changes)
    return Trainer(lora_model(), None, config, source, held_out, callbacks=callbacks)


@contextlib.contextmanager
def sent(number: int, began: threading.Event, sleep: patience.Sleep):
    """Sends a signal to this process a moment after `began`, which must end what sleeps."""

    def send():
        assert began.wait(patience.SECONDS)
        time.sleep(0.3)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()
    assert not sleep.over
    sleep.wake()


# ---- what a run waits for


def in_users_code(began, sleep):
    def hook(model):
        with waiting.users_code("reward slow"):
            began.set()
            sleep()

    return hook


def in_users_code_that_swallows(began, sleep):
    def hook(model):
        with waiting.users_code("reward stubborn"):
            caught = 0
            while caught < 2 and not sleep.over:
                try:
                    began.set()
                    sleep()
                except BaseException:
                    caught += 1
        raise AssertionError("the look after the code hears the signal")

    return hook


def in_a_future(began, sleep):
    def hook(model):
        began.set()
        waiting.result(Future(), "rewards")

    return hook


def in_sampling(began, sleep):
    def hook(model):
        for _ in sleep.pieces():
            generate(model(), [[1, 2, 3]], 8, 1.0, eos_token_ids=())
            began.set()

    return hook


def in_a_stalled_stream(began, sleep):
    def hook(model):
        began.set()
        sleep.in_a_lock()

    return hook


WAITS = [in_users_code, in_users_code_that_swallows, in_a_future, in_sampling, in_a_stalled_stream]


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    """All runs here have one program: it is compiled once."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path_factory.mktemp("programs")), 0.0), strict=True):
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
        del os.environ[name.upper()]
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return trainer_of(tmp_path_factory.mktemp("undisturbed"), Drawn()).train()


@pytest.mark.full
def test_a_signal_in_each_wait_saves_at_once_and_the_run_goes_on_to_the_same_bits(tmp_path, undisturbed, capfd):
    for step, (make, number) in enumerate(zip(WAITS, [signal.SIGTERM, signal.SIGINT] * 3, strict=False), 1):
        began, sleep = threading.Event(), patience.Sleep()
        source = Drawn({step: make(began, sleep)}, needs_model=make is not in_a_stalled_stream)
        with sent(number, began, sleep), pytest.raises(TrainingInterrupted, match=f"after step {step}; saved in"):
            trainer_of(tmp_path, source).train()
        assert saved_steps(tmp_path / "checkpoints")[-1] == step
        assert f"saving step {step}, then leaving" in capfd.readouterr().err
    began, sleep = threading.Event(), patience.Sleep()
    at_evaluation = AtEvaluation(in_users_code(began, sleep))
    evaluation = EvaluationConfig(every_steps=6, at_end=False)
    with sent(signal.SIGTERM, began, sleep), pytest.raises(TrainingInterrupted, match="after step 6; saved in"):
        trainer_of(tmp_path, Drawn(), at_evaluation, evaluation=evaluation).train()
    assert_same(trainer_of(tmp_path, Drawn()).train(), undisturbed)


def test_nothing_is_saved_before_the_first_step(tmp_path, capfd):
    began, sleep = threading.Event(), patience.Sleep()
    with sent(signal.SIGTERM, began, sleep), pytest.raises(TrainingInterrupted, match="nothing is saved yet"):
        trainer_of(tmp_path, Drawn({0: in_users_code(began, sleep)})).train()
    assert "leaving, as no step is done" in capfd.readouterr().err and not saved_steps(tmp_path / "checkpoints")


@pytest.mark.full
def test_minutes_that_are_over_save_in_each_wait(tmp_path, undisturbed):
    """Also in the user's code, by the watchdog. Each wait goes on when the step is saved, and else for ever."""

    def is_saved(step):
        return step in saved_steps(tmp_path / "checkpoints")

    def users_code(model):
        with waiting.users_code("reward slow"):
            patience.wait_until(lambda: is_saved(1))

    def future(model):
        result: Future = Future()
        threading.Thread(target=lambda: [patience.wait_until(lambda: is_saved(2)), result.set_result(None)]).start()
        waiting.result(result, "rewards")

    def sampling(model):
        patience.wait_until(lambda: generate(model(), [[1, 2, 3]], 4, 1.0, eos_token_ids=()) and is_saved(3))

    often = CheckpointConfig(every_minutes=1e-3, keep=STEPS)
    trained = trainer_of(tmp_path, Drawn({1: users_code, 2: future, 3: sampling}), checkpoint=often).train()
    assert_same(trained, undisturbed)
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    waits = [line["data_wait_seconds"] for line in metrics if "loss" in line]
    saves = {line["step"] for line in metrics if "save_seconds" in line}
    assert all(wait >= 0 for wait in waits) and saves >= {1, 2, 3}


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no row"),
        pytest.param(KeyboardInterrupt("by hand"), marks=pytest.mark.full),
        pytest.param(SystemExit(3), marks=pytest.mark.full),
    ],
)
def test_an_error_saves_the_last_step_also_where_saves_are_switched_off(tmp_path, error, undisturbed):
    def fail(model):
        raise error

    with pytest.raises(type(error)):
        trainer_of(tmp_path, Drawn({3: fail}, needs_model=isinstance(error, ValueError))).train()
    assert saved_steps(tmp_path / "checkpoints") == [3]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    if isinstance(error, ValueError):
        assert_same(trainer_of(tmp_path, Drawn()).train(), undisturbed)


# ---- callbacks


class At(Callback):
    """Calls `hook` once, when an event comes after `step` steps; `threads` are those in which it was called."""

    def __init__(self, event, hook, step=3):
        self.event, self.hook, self.step, self.threads, self.seen = event, hook, step, set(), []

    def _come(self, event, step, *arguments):
        self.threads.add(threading.current_thread())
        self.seen.append((event, step))
        if event == self.event and step >= self.step and self.hook is not None:
            hook, self.hook = self.hook, None
            hook(*arguments)

    def between(self, moment):
        self._come("between", moment.step, moment)

    def stepped(self, step, metrics):
        self._come("stepped", step)

    def evaluating(self, step, model):
        self._come("evaluating", step)

    def evaluated(self, step, metrics):
        self._come("evaluated", step)

    def saved(self, step):
        self._come("saved", step)


EVENTS = ["between", "stepped", "evaluating", "evaluated", "saved"]
WITH_ALL: dict[str, Any] = dict(
    evaluation=EvaluationConfig(every_steps=2, at_end=False),
    checkpoint=CheckpointConfig(every_steps=2, every_minutes=None, keep=STEPS),
)


@pytest.mark.parametrize("event", [pytest.param(e, marks=pytest.mark.full if e == "saved" else ()) for e in EVENTS])
def test_a_signal_or_an_error_in_a_callback_saves_and_the_run_goes_on_to_the_same_bits(tmp_path, event, undisturbed):
    began, sleep = threading.Event(), patience.Sleep()

    def slow(*_):
        began.set()
        sleep()

    def fail(*_):
        raise LookupError("mine")

    at = At(event, slow)
    with (
        sent(signal.SIGTERM, began, sleep),
        pytest.raises(TrainingInterrupted, match=r"SIGTERM after step \d; saved"),
    ):
        trainer_of(tmp_path, Drawn(), at, **WITH_ALL).train()
    first = saved_steps(tmp_path / "checkpoints")[-1]
    assert first in (3, 4) and at.threads == {threading.main_thread()}
    with pytest.raises(LookupError) as error:
        trainer_of(tmp_path, Drawn(), At(event, fail, 5), **WITH_ALL).train()
    assert error.value.__notes__ == [f"in the callback At.{event}"] and "test_waiting.py" in str(
        error.traceback[-1].path
    )
    last = saved_steps(tmp_path / "checkpoints")[-1]
    assert last in (5, 6, 7) and last > first
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, last + 1)]
    assert_same(trainer_of(tmp_path, Drawn(), At(event, None), **WITH_ALL).train(), undisturbed)


@pytest.mark.full
def test_callbacks_are_told_in_the_run_s_thread_of_what_the_watchdog_saves(tmp_path):
    def until_saved(*_):
        patience.wait_until(lambda: 2 in saved_steps(tmp_path / "checkpoints"))

    often = CheckpointConfig(every_minutes=1e-3, keep=STEPS)
    at = At("between", until_saved, 2)
    trainer_of(tmp_path, Drawn(), at, checkpoint=often).train()
    assert at.threads == {threading.main_thread()} and ("saved", 2) in at.seen
    assert [step for event, step in at.seen if event == "stepped"] == [*range(1, STEPS + 1)]


@pytest.mark.full
def test_a_save_that_a_callback_asks_for_is_not_interrupted(tmp_path, undisturbed):
    real = checkpoint.Checkpointer.save

    def save(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(3):  # where a signal would raise
            time.sleep(0.01)
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingInterrupted, match="SIGTERM after step 3; saved"):
        patch.setattr(checkpoint.Checkpointer, "save", save)
        trainer_of(tmp_path, Drawn(), At("between", lambda moment: moment.save())).train()
    assert saved_steps(tmp_path / "checkpoints") == [3]
    assert_same(trainer_of(tmp_path, Drawn()).train(), undisturbed)
    with waiting.listening(lambda: None), waiting.users_code("f"):
        with waiting.own_work():
            assert waiting.interruptible() is None
        assert waiting.interruptible() == "f"


def test_what_a_callback_asks_for_is_not_done_beside_a_look_of_the_watchdog():
    began, ended = threading.Event(), []

    def look():
        if threading.current_thread() is not threading.main_thread():
            began.set()
            time.sleep(0.3)
            ended.append(1)

    with waiting.listening(look), waiting.users_code("f"):
        assert began.wait(patience.SECONDS)
        with waiting.own_work():
            looks = len(ended)
            time.sleep(0.7)
            assert looks == len(ended) > 0


# ---- code that does not return

DEAF = """
    import ctypes, sys, threading
    from pathlib import Path
    import tests.train.test_waiting as t
    from jaxtune.system import waiting

    def deaf(model):
        with waiting.users_code("reward deaf"):
            print("waiting", flush=True)
            mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
            for _ in range(2):  # C code that gives up Python's lock, and waits for ever, whatever signal comes
                library.pthread_mutex_lock(mutex)

    def held(model):
        waiting.SILENT_SECONDS = 2
        with waiting.users_code("reward held"):
            print("waiting", flush=True)
            ctypes.PyDLL(None).sleep(6)  # C code that keeps it

    hook = dict(deaf=deaf, held=held)[sys.argv[1]]
    t.trainer_of(Path(sys.argv[2]), t.Drawn({2: hook})).train()
"""


def started(kind: str, folder: Path) -> subprocess.Popen[str]:
    script = [sys.executable, "-c", textwrap.dedent(DEAF), kind, str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.full
def test_c_code_that_does_not_return_is_left_by_the_watchdog(tmp_path, undisturbed):
    with started("deaf", tmp_path) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "waiting\n":
            assert process.poll() is None
        time.sleep(2)  # until it is in C: a signal before that raises in its Python code
        process.send_signal(signal.SIGTERM)
        _, messages = process.communicate(timeout=patience.SECONDS)
    assert process.returncode == 75, messages
    assert "reward deaf does not return" in messages and "SIGTERM after step 2; saved in" in messages
    assert json.loads((tmp_path / "state.json").read_text())["state"] == "stopped"
    assert_same(trainer_of(tmp_path, Drawn()).train(), undisturbed)


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the timer is Linux's")
def test_c_code_that_holds_the_lock_is_told_with_its_name(tmp_path):
    with started("held", tmp_path) as process:
        _, messages = process.communicate(timeout=patience.SECONDS)
    assert process.returncode == 0, messages
    assert "reward held has kept Python's lock for 2 s" in messages and "reward_isolation=process" in messages


# ---- disks


@pytest.fixture
def disk(monkeypatch):
    """A disk whose free bytes a test sets."""
    usage = collections.namedtuple("usage", "total used free")
    state = {"free": 10**12}
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage(10**12, 0, state["free"]))
    return state


EVERY = CheckpointConfig(every_steps=2, every_minutes=None)


def test_a_run_whose_first_save_cannot_fit_is_refused_before_it_begins(tmp_path, disk):
    disk["free"] = 1000
    with pytest.raises(NoRoom, match=r"no room for a checkpoint: it needs \d.* MB, .* has 0.00 MB free"):
        trainer_of(tmp_path, Drawn(), checkpoint=EVERY).train()
    assert not (tmp_path / "metrics.jsonl").exists()
    trainer_of(tmp_path, Drawn(), steps=1).train()  # without saves it needs no room


def test_what_will_not_fit_later_is_told_at_the_start(tmp_path, disk, capsys):
    trainer = trainer_of(tmp_path, Drawn(), checkpoint=EVERY)
    size = checkpoint.checkpoint_bytes({"state": trainer.model.state_shapes(trainer.engine)})
    room = 4 * size + file_plan.BESIDE_BYTES
    for free, words in ((2 * size, "warning: the disk of "), (room, "  on the disk of "), (10**12, None)):
        disk["free"] = free
        lines = trainer.disk_notes()
        assert [line.startswith(words) for line in lines] == [True] if words else not lines
        assert not words or "checkpoints 3 x 0.00 GB" in lines[0]
    assert "loses the whole run" in trainer_of(tmp_path, Drawn()).disk_notes()[-1]


@pytest.mark.parametrize("how", ["room", "write"])
def test_a_save_that_fails_between_steps_is_made_again(tmp_path, disk, undisturbed, how, monkeypatch, capsys):
    def fill(model):
        if how == "room":
            disk["free"] = 0
        else:
            monkeypatch.setattr(checkpoint, "write_manifest", fail)

    failed = threading.Event()

    def fail(*_):
        failed.set()
        raise OSError(28, "No space left on device")

    real = checkpoint.write_manifest

    def free(model):
        assert how == "room" or failed.wait(patience.SECONDS)  # the files are written in a thread
        disk["free"] = 10**12
        monkeypatch.setattr(checkpoint, "write_manifest", real)

    trained = trainer_of(tmp_path, Drawn({1: fill, 3: free}), checkpoint=EVERY).train()
    assert_same(trained, undisturbed)
    said = capsys.readouterr()
    assert "the next save tries again" in said.out + said.err and "step 2" in said.out + said.err
    assert saved_steps(tmp_path / "checkpoints")[-1] == STEPS


@pytest.mark.full
def test_a_disk_that_fills_while_the_run_waits_is_told(tmp_path, disk, monkeypatch, capsys):
    monkeypatch.setattr(saving, "_DISK_SECONDS", 0.0)

    def fill(model):
        disk["free"] = 0
        waiting.look()
        disk["free"] = 10**12

    trainer_of(tmp_path, Drawn({1: fill}), checkpoint=EVERY, steps=2).train()
    said = capsys.readouterr()
    assert "warning: the next save will fail: it needs" in said.out + said.err


@pytest.mark.full
def test_the_result_outlives_a_last_save_that_fails(tmp_path, disk, undisturbed, capsys):
    def fill(model):
        disk["free"] = 0

    last = CheckpointConfig(every_steps=STEPS, every_minutes=None)
    trainer = trainer_of(tmp_path, Drawn({STEPS - 1: fill}), checkpoint=last)
    assert_same(trainer.train(), undisturbed)
    assert trainer.unsaved is not None and f"no room to save step {STEPS}" in trainer.unsaved
    assert saved_steps(tmp_path / "checkpoints") == []


# ---- the parts


def test_interrupts_are_raised_only_where_they_are_heard():
    assert waiting.interruptible() is None
    with waiting.users_code("f"):
        assert waiting.interruptible() is None  # nothing would save
        with waiting.listening(lambda: None):
            assert waiting.interruptible() == "f"
    seen = []
    with waiting.listening(lambda: seen.append(waiting.interruptible())), waiting.users_code("g"):
        waiting.look()
    assert None in seen and "g" not in seen  # a save is not interrupted


def test_what_a_look_raises_ends_each_kind_of_wait_and_other_threads_do_not_look():
    class Left(Exception):
        pass

    def leave():
        raise Left

    with waiting.listening(leave):
        with pytest.raises(Left):
            waiting.look()
        with pytest.raises(Left):
            waiting.result(Future(), "a future")
        with pytest.raises(Left), waiting.users_code("f"):
            raise ValueError("of the code")
        result: Future = Future()
        with waiting.Worker("other") as worker:
            result = worker.submit(waiting.look)
            assert result.exception(5) is None


def test_a_timeout_and_a_wait_that_is_told(caplog, monkeypatch):
    monkeypatch.setattr(waiting, "SILENT_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="answers of step 3: not there after 0.5 s"):
        waiting.result(Future(), "answers of step 3", 0.5)
    assert caplog.text.count("waiting for answers of step 3") == 1
