"""The loop never waits for a step before it has launched the next one, and what acts acts as if it did."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from jaxtune.train.callbacks import Callback
from jaxtune.train.config import CheckpointConfig, DataConfig, EvaluationConfig, GuardConfig, MetricsConfig
from jaxtune.train.engine import programs as programs_of_engine
from jaxtune.train.engine.programs import Engine
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.log.metrics import read_metrics
from jaxtune.train.loop.monitor import Monitor, TrainingStopped
from jaxtune.train.loop.run import Run
from jaxtune.train.loop.saving import SavePolicy
from jaxtune.train.trainer import Trainer
from tests import patience
from tests.train.tiny_runs import LENGTH, dataset, documents, lora_model, make_config

STEPS = 8
ROWS, HELD_OUT = dataset(documents(40, seed=1)), dataset(documents(6, seed=2))
# A run takes a second: fewer examples, and no search for smaller ones.
_FEW = settings(max_examples=6, phases=(Phase.explicit, Phase.generate))
ACTS = ("wait", "save", "evaluate", "model", "stop")


class Watch(Callback):
    """Notes what it is told, and acts after steps as `wishes` say."""

    def __init__(self, seen: list, wishes: dict[int, set[str]]):
        self.seen, self.wishes = seen, wishes

    def between(self, moment):
        self.seen.append(("between", moment.step))
        for act in sorted(self.wishes.get(moment.step, ())):
            self.seen.append((act, moment.step))
            result = getattr(moment, act)()
            if act == "evaluate":
                self.seen.append(("loss", moment.step, result))

    def stepped(self, step, metrics):
        self.seen.append(("stepped", step, metrics["loss"], metrics["grad_norm"], metrics["skipped"]))

    def evaluated(self, step, metrics):
        self.seen.append(("evaluated", step, metrics["eval_loss"]))

    def saved(self, step):
        self.seen.append(("saved", step))


class Stays(Callback):
    """Once `step` is dispatched, a save is due, and a method goes on until the watchdog has read the step for it."""

    def __init__(self, method: str, step: int):
        self.method, self.step, self.is_save_due = method, step, False
        self.launched: list = []

    def between(self, moment):
        if (self.method, self.step) == ("between", moment.step):
            self._until_read()

    def stepped(self, step, metrics):
        if (self.method, self.step) == ("stepped", step + 1):
            self._until_read()

    def _until_read(self):
        self.is_save_due = True
        patience.wait_until(lambda: ("read", self.step) in self.launched)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    trainer = Trainer(lora_model(), None, config_of(tmp_path_factory.mktemp("first")), ROWS, HELD_OUT)
    return trainer.engine.compile(*trainer.model.first_shapes(trainer.engine))


def config_of(folder, log=1, saves=None, evaluates=None, **changes):
    return make_config(
        folder,
        steps=STEPS,
        checkpoint=CheckpointConfig(every_steps=saves, every_minutes=None, keep=STEPS),
        evaluation=EvaluationConfig(every_steps=evaluates, at_end=False),
        metrics=MetricsConfig(log_every=log),
        data=DataConfig(train="rows of the test", eval="held-out rows of the test", length=LENGTH),
        **changes,
    )


def run(folder, programs, wishes, bad=(), at_once=False, stays=None, stays_first=False, **settings):
    """(events, dispatches and reads, lines of metrics.jsonl without times, saved steps, why it stopped) of a run. bad:
    steps (from 1) whose loss is not finite. at_once: waits for each step."""
    seen, launched, stopped = [], [], None
    callbacks: list[Callback] = [Watch(seen, wishes)]
    if stays is not None:
        stays.launched = launched
        callbacks.insert(0 if stays_first else 1, stays)
    trainer = Trainer(lora_model(), None, config_of(folder, **settings), ROWS, HELD_OUT, callbacks=callbacks)

    def update(state, sums):
        step = sum(what == "dispatched" for what, _ in launched) + 1
        if step in bad:
            bad_sums = dataclasses.replace(sums.tree, loss=sums.tree.loss * float("nan"))
            sums = trainer.engine.flat(state.tree, bad_sums)[1]
        result = programs.update(state, sums)
        launched.append(("dispatched", step))
        return result

    trainer.engine.fit = lambda *_: dataclasses.replace(programs, update=update)
    dispatched, take = Monitor.step_dispatched, Monitor._take

    def flushed(monitor, *arguments):
        dispatched(monitor, *arguments)
        if at_once:
            monitor.flush()

    def taken(monitor):
        launched.append(("read", monitor.waiting[0][0] + 1))
        take(monitor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitor, "step_dispatched", flushed)
        patch.setattr(Monitor, "_take", taken)
        patch.setattr(SavePolicy, "time_is_up", lambda *_: stays is not None and stays.is_save_due)
        try:
            trainer.train()
        except TrainingStopped as error:
            stopped = str(error)
    lines: list[dict] = [
        {key: value for key, value in line.items() if "second" not in key and key not in ("time", "peak_memory_bytes")}
        for line in read_metrics(folder / "metrics.jsonl")
    ]
    # A save that is due may be made at the end of a callback's method, before that step's line.
    lines.sort(key=lambda line: (line["step"], "loss" not in line))
    return seen, launched, lines, saved_steps(folder / "checkpoints"), stopped


@_FEW
@given(
    st.dictionaries(st.integers(1, STEPS), st.sets(st.sampled_from(ACTS), max_size=2), max_size=3),
    st.integers(1, 3),
    st.none() | st.integers(2, 5),
    st.none() | st.integers(2, 5),
    st.sets(st.integers(1, STEPS), max_size=3),
)
def test_all_that_acts_acts_in_order_and_what_looks_gets_the_same_numbers(
    tmp_path_factory, programs, wishes, log, saves, evaluates, bad
):
    folders = (tmp_path_factory.mktemp(name) for name in ("late", "at_once"))
    how = dict(bad=bad, log=log, saves=saves, evaluates=evaluates, guards=GuardConfig(max_nonfinite_in_row=9))
    (late, launched, *kept), (in_order, _, *kept_in_order) = (
        run(folder, programs, wishes, at_once=at_once, **how) for folder, at_once in zip(folders, (False, True))
    )
    assert str(kept) == str(kept_in_order)  # NaN is no other NaN
    steps = functools.partial(filter, lambda event: event[0] == "stepped")
    others = functools.partial(filter, lambda event: event[0] != "stepped")
    assert str([*steps(late)]) == str([*steps(in_order)])
    put_off = bad and any("save" in acts for acts in wishes.values())
    if put_off:  # until a good step is read, which in order comes before its `between`
        assert [e for e in late if e[0] == "saved"] == [e for e in in_order if e[0] == "saved"]
        others = functools.partial(filter, lambda event: event[0] not in ("stepped", "saved"))
    assert str([*others(late)]) == str([*others(in_order)])
    names = [event[:2] for event in late]
    last = max(step for name, step in names if name == "between")
    for step in range(1, last):
        assert names.index(("stepped", step)) < names.index(("between", step + 1))
        acts = {"wait", "save", "evaluate"} & wishes.get(step, set())
        due = any(every and step % every == 0 for every in (saves, evaluates))
        late_save = any(event == ("saved", step) for event in names)
        if step > 1 and not (acts or due or late_save or bad):
            assert launched.index(("read", step)) > launched.index(("dispatched", step + 1))


@given(st.integers(1, STEPS - 1), st.integers(1, 3))
@_FEW
def test_a_guard_ends_the_run_one_step_late_and_no_bad_update_is_made(tmp_path_factory, programs, first, limit):
    """The step that runs meanwhile is not saved."""
    bad = set(range(first, STEPS + 1))
    guards = GuardConfig(max_nonfinite_in_row=limit)
    seen, launched, _, saved, stopped = run(
        tmp_path_factory.mktemp("bad"), programs, {}, bad, guards=guards, saves=first
    )
    end = first + limit - 1
    if end > STEPS:
        assert stopped is None
        return
    assert stopped is not None and f"{limit} steps in a row were not finite" in stopped
    assert [event[1] for event in seen if event[0] == "stepped"] == [*range(1, end + 1)]
    assert launched[-1] == ("read", end) and launched.count(("dispatched", end + 2)) == 0
    assert all(step < first for step in saved)


@given(st.integers(2, STEPS), st.sampled_from(("between", "stepped")), st.booleans())
@_FEW
def test_a_guard_ends_the_run_also_at_a_step_that_the_watchdog_has_read(
    tmp_path_factory, programs, end, method, stays_first
):
    assume(method == "between" or end > 2)  # the first step is `stepped` before the next is dispatched
    how = dict(bad={end}, guards=GuardConfig(max_nonfinite_in_row=1))
    how |= dict(stays=Stays(method, end), stays_first=stays_first)
    seen, launched, _, saved, stopped = run(tmp_path_factory.mktemp("read"), programs, {}, **how)
    assert stopped is not None and stopped.startswith("1 steps in a row")
    assert [event[1] for event in seen if event[0] == "stepped"] == [*range(1, end + 1)]
    assert launched[-1] == ("read", end) and launched.count(("dispatched", end + 1)) == 0
    assert all(step < end for step in saved)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_line_of_a_processs_first_step_is_out_before_the_next_step_is_dispatched(tmp_path, micro_batches):
    """A new run's and a resumed one's; later steps wait for no line."""

    def lines():
        return [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]

    for start, resumed in ((0, False), (4, True)):
        seen, before = [], []
        config = config_of(tmp_path, saves=4, micro_batches=micro_batches)
        trainer = Trainer(lora_model(), None, config, ROWS, HELD_OUT, callbacks=[Watch(seen, {})])
        accumulate = Engine.accumulate

        def noting(engine, *arguments, accumulate=accumulate, seen=seen, before=before):
            before.append((lines(), [event[:2] for event in seen]))
            return accumulate(engine, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "accumulate", noting)
            trainer.train(from_step=4 if resumed else None)
        (first_lines, first_seen), (written, told) = before[:2]
        assert first_lines == [*range(1, start + 1)] and first_seen == []
        assert written == [*first_lines, start + 1]
        assert told == [("between", start + 1), ("stepped", start + 1)]
        assert ("stepped", start + 2) not in before[2][1]


def test_an_error_that_the_watchdog_has_read_is_saved_before_and_says_where(tmp_path, programs, monkeypatch):
    def guard(self, step, *_):
        if step == 3:
            raise KeyError("of a step")

    monkeypatch.setattr(Monitor, "_guard", guard)
    with pytest.raises(KeyError, match="of a step") as raised:
        run(tmp_path, programs, {}, stays=Stays("between", 4))
    assert saved_steps(tmp_path / "checkpoints") == [4]
    assert "guard" in [entry.name for entry in raised.traceback]
    assert not any(note.startswith("in the callback") for note in getattr(raised.value, "__notes__", ()))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_where_steps_are_whole_graphs_their_rows_keep_their_addresses(tmp_path, monkeypatch, micro_batches):
    def history(name):
        config = config_of(tmp_path / name, micro_batches=micro_batches)
        trainer = Trainer(lora_model(), None, config, ROWS, HELD_OUT)
        trainer.train()
        return [(line["loss"], line["grad_norm"]) for line in trainer.history]

    addresses, overwritten = set(), programs_of_engine._overwritten

    def noting(*arguments):
        batch = overwritten(*arguments)
        addresses.add((batch.tokens.unsafe_buffer_pointer(), batch.segment_ids.unsafe_buffer_pointer()))
        return batch

    without = history("without")
    monkeypatch.setattr(Engine, "whole_graphs", True)
    monkeypatch.setattr(programs_of_engine, "_overwritten", noting)
    assert history("whole") == without and len(addresses) == micro_batches


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_step_is_its_programs_and_sends_nothing_else(tmp_path, monkeypatch, micro_batches):
    """Whatever else is launched is a launch for which a small step waits; rows are placed in a thread."""
    calls, at_steps = [], []
    call, dispatched = jax.stages.Compiled.__call__, Run._dispatched

    def counted(compiled, *arguments):
        calls.append(compiled)
        return call(compiled, *arguments)

    def noting(*arguments):
        at_steps.append(len(calls))
        with jax.transfer_guard_host_to_device("disallow_explicit"):
            return dispatched(*arguments)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", counted)
    monkeypatch.setattr(Run, "_dispatched", noting)
    Trainer(lora_model(), None, config_of(tmp_path, micro_batches=micro_batches), ROWS, HELD_OUT).train()
    assert [after - before for before, after in itertools.pairwise(at_steps)] == [micro_batches + 1] * (STEPS - 1)
