"""The wall clock of a run, divided into steps and pauses: on a host and a device whose clocks the test moves."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from jaxtune.train.callbacks import TrainingStopped
from jaxtune.train.config import MetricsConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.loop.monitor import Monitor
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.planning.devices import device_peak_flops
from tests.train.tiny_runs import make_config

STEP, DISPATCH, SLOTS = 0.879, 0.01, 4 * 16


class Machine:
    """A host that runs ahead of its device, and what a run on it would log."""

    def __init__(self, monkeypatch, tmp_path, log_every=1, total_steps=12, devices=1):
        self.now, self.free, self.done = 100.0, 100.0, 0
        self.lines, self.shown, self.norm = [], [], 1.0
        monkeypatch.setattr(jax, "device_get", self.fetch)
        self.run = SimpleNamespace(
            config=make_config(tmp_path, metrics=MetricsConfig(log_every=log_every), precision="bf16"),
            batches=SimpleNamespace(
                length=16, steps_per_epoch=100, rows_per_step=4, remarks=lambda *_: [], needs_model=False
            ),
            planner=SimpleNamespace(device=SimpleNamespace(name="cpu"), forecast=None),
            total_steps=total_steps,
            unit="targets",
            trained=["a"],
            peak_flops=devices * device_peak_flops("NVIDIA H200", "bfloat16"),
            callbacks=(),
            check_first=lambda line: None,
            zero_gradient=lambda line: None,
            history=[],
            flops=lambda lengths: 989e12 * STEP,
        )
        logger = SimpleNamespace(
            log=lambda step, values: self.lines.append({"step": step, **values}), flush=lambda: None
        )
        self.printed = []
        progress = SimpleNamespace(update=lambda step, **values: self.shown.append(values), print=self.printed.append)
        self.monitor = Monitor(self.run, logger, progress, lambda latest: latest["done"], lambda: self.now)

    def fetch(self, latest):
        self.now = max(self.now, latest["done"])
        return latest

    def step(self, seconds=STEP):
        """Dispatches a step, which the device begins when it is free."""
        self.now += DISPATCH
        self.free = max(self.free, self.now) + seconds
        values = dict(
            loss=1.0, grad_norm=self.norm, learning_rate=0.1, count=9, skipped=0, skipped_in_row=0, finite=True
        )
        values["own"] = {}
        counts = dict(tokens=60, trained_tokens=30, lengths=[30, 30])
        self.monitor.step_dispatched(self.done, values | {"done": self.free}, counts)
        self.done += 1

    def pause(self, name, seconds):
        with self.monitor.pause(name, self.done):
            self.now += seconds


def run(machine):
    with machine.monitor:
        with machine.monitor.pause("load", 0) as line:
            machine.now += 20.0
            line["compile_seconds"] = machine.monitor.uncounted_seconds()
            machine.now += 5.0
        for _ in range(12):
            if machine.done == 5:
                machine.pause("save", 1.4)
            if machine.done == 8:
                machine.pause("save", 1.3)
                machine.pause("eval", 3.0)
            if machine.done == 3:
                machine.now += 0.6  # the host is elsewhere, and fetches late
            machine.step()
        machine.monitor.flush()
    return machine.lines


def test_a_step_is_what_the_device_took_whatever_stands_between(monkeypatch, tmp_path):
    lines = run(Machine(monkeypatch, tmp_path))
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    after_a_pause = {1, 6, 9}  # the device waits for the next launch
    for line in steps:
        seconds = STEP + (DISPATCH if line["step"] in after_a_pause else 0.0)
        assert line["step_seconds"] == pytest.approx(seconds), line["step"]
        assert line["tokens_per_second"] == pytest.approx(SLOTS / seconds)
        assert line["mfu"] == pytest.approx(STEP / seconds)
    pauses = [(line["step"], {k: v for k, v in line.items() if k != "step"}) for line in lines if "loss" not in line]
    assert pauses == [
        (0, {"compile_seconds": pytest.approx(20.0), "load_seconds": pytest.approx(5.0)}),
        (5, {"save_seconds": pytest.approx(1.4)}),
        (8, {"save_seconds": pytest.approx(1.3)}),
        (8, {"eval_seconds": pytest.approx(3.0)}),
    ]


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize(("seconds", "shown"), [(0.06, 35), (0.7, 4), (9.0, 3)])
def test_the_plan_is_compared_with_what_seconds_of_steps_have_measured(monkeypatch, tmp_path, seconds, shown, samples):
    """Of a small model's steps the first ones say little; the plan predicts no sampling."""
    machine = Machine(monkeypatch, tmp_path, total_steps=60)
    machine.run.batches.needs_model = samples
    machine.run.planner = SimpleNamespace(
        device=SimpleNamespace(name="H200"), forecast=SimpleNamespace(peak_bytes=2e9, tokens_per_second=90.0, tokens=64)
    )
    with machine.monitor:
        for step in range(1, shown + 5):
            machine.step(seconds - DISPATCH)
            machine.monitor.flush()
            assert len(machine.printed) == (step >= shown)
    assert machine.printed[0].startswith("plan: peak 2.00 GB predicted")
    assert ("tokens/s" in machine.printed[0]) is not samples


def test_a_pause_after_one_that_raised_is_not_within_it(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path)
    with machine.monitor:
        with pytest.raises(ZeroDivisionError), machine.monitor.pause("eval", 0):
            machine.now += 1 / 0
        machine.now += 0.5  # belongs to no step
        machine.pause("save", 2.0)
        machine.step()
        machine.monitor.flush()
    saved, step = machine.lines
    assert saved["save_seconds"] == pytest.approx(2.5) and step["step_seconds"] == pytest.approx(STEP + DISPATCH)


@pytest.mark.parametrize("log_every", [1, 3, 5])
def test_steps_and_pauses_add_up_to_the_wall_clock(monkeypatch, tmp_path, log_every):
    machine = Machine(monkeypatch, tmp_path, log_every)
    lines = run(machine)
    in_steps = sum(line["steps"] * line["step_seconds"] for line in lines if "loss" in line)
    slots = sum(line["steps"] * line["step_seconds"] * line["tokens_per_second"] for line in lines if "loss" in line)
    apart = sum(
        value
        for line in lines
        for key, value in line.items()
        if key in ("compile_seconds", "load_seconds", "save_seconds", "eval_seconds")
    )
    assert in_steps + apart == pytest.approx(machine.now - 100.0)
    assert slots == pytest.approx(12 * SLOTS)


def test_the_speed_on_the_screen_is_that_of_the_last_steps(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path, total_steps=30)
    with machine.monitor:
        machine.step(9.0)  # the first loads programs
        for _ in range(14):
            machine.step()
        machine.pause("save", 60.0)
        for _ in range(15):
            machine.step()
        machine.monitor.flush()
    speeds = [shown["tokens_per_second"] for shown in machine.shown]
    assert speeds[0] == pytest.approx(SLOTS / (9.0 + DISPATCH))
    assert speeds[1:] == pytest.approx([SLOTS / STEP] * 29, rel=0.01)


def test_a_host_that_waits_for_rows_makes_a_step_longer_and_says_so(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path)
    with machine.monitor:
        for number in range(4):
            with machine.monitor.data_wait():
                machine.now += 5.0 if number == 2 else 0.0
            machine.step()
        machine.monitor.flush()
    slow = machine.run.history[2]
    assert slow["data_wait_seconds"] == pytest.approx(5.0)
    assert slow["step_seconds"] > STEP
    assert sum(line["step_seconds"] for line in machine.run.history) == pytest.approx(machine.now - 100.0)


def test_model_flop_utilisation_counts_every_device(monkeypatch, tmp_path):
    (first, *_) = run(Machine(monkeypatch, tmp_path, devices=2))[1:]
    assert first["mfu"] == pytest.approx(STEP / (STEP + DISPATCH) / 2)


@pytest.mark.parametrize(("losses", "why", "stops"), [((1.0,), None, 1), ((1.0,), "clipped", None), ((), None, None)])
def test_a_step_without_a_gradient(monkeypatch, tmp_path, losses, why, stops):
    """It ends the run only if nothing explains it: neither its objective, nor an earlier step that had one."""
    machine = Machine(monkeypatch, tmp_path)
    machine.run.zero_gradient = lambda line: why
    with machine.monitor as monitor:
        if not losses:
            machine.step()
        machine.norm = 0.0
        machine.step()
        if stops:
            with pytest.raises(TrainingStopped, match=r"step 1: the gradient norm is exactly zero"):
                monitor.flush()
        else:
            machine.step()
            monitor.flush()
            said = [text for text in machine.printed if "exactly zero" in text]
            assert len(said) == 1 and said[0].endswith(why or "its rows give no gradient")


def test_a_policy_and_learnt_rows_say_why_they_have_no_gradient():
    policy, plain = objective_of(ObjectiveConfig("grpo", reward_funcs=("a",))), objective_of(ObjectiveConfig())
    assert "clipped" in policy.zero_gradient({"loss": 0.3, "clip_ratio/region_mean": 0.5})
    cut = {"loss": 1e-8, "completions/clipped_ratio": 1.0}
    masking = objective_of(ObjectiveConfig("grpo", reward_funcs=("a",), mask_truncated_completions=True))
    assert "no part in the loss" in masking.zero_gradient(cut)
    assert policy.zero_gradient(cut) is None
    for objective in (policy, plain):
        assert objective.zero_gradient({"loss": 0.3, "clip_ratio/region_mean": 0.0}) is None
        assert objective.zero_gradient({"loss": 0.0}) == "its rows are learnt"
