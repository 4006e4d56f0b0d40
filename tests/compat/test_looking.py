"""Which callbacks only look, and when their on_log comes: the order of events of random runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.compat import TrainerCallback
from jaxtune.compat.callbacks import Events, TrainerControl, TrainerState
from jaxtune.compat.looking import only_looks
from jaxtune.train.callbacks import Between

trainer = SimpleNamespace(save_model=lambda: None)
NOTED: list = []


def noted(value):
    NOTED.append(value)


def stop():
    trainer.save_model()


class Prints(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        print(dict(logs), state.global_step, args.output_dir)


class ByHelpers(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        self.write(logs)
        noted(state.epoch)

    def write(self, logs):
        NOTED.append(logs["loss"])


class Inherits(ByHelpers):
    pass


class Stops(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs["loss"] < 1:
            control.should_training_stop = True


class HandsOn(TrainerCallback):
    def on_log(self, args, state, what, **kwargs):
        return (lambda: what)()


class KeepsModel(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        self.net = kwargs["model"]

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.net.save_pretrained("best")


class KeepsControl(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        self.flags = control

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.flags.should_save = True


class CallsSuper(Stops):
    def on_log(self, args, state, what, logs=None, **kwargs):
        super().on_log(args, state, None, logs)


class OfKeywords(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        noted(kwargs["logs"])


class OfModel(TrainerCallback):
    def on_log(self, args, state, control, model=None, **kwargs):
        noted(model.config)


class ByTrainer(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        self.trainer.save_model()


class ByModule(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        stop()


class Within(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        noted([self.of_trainer for _ in logs])


class AnyArguments(TrainerCallback):
    def on_log(self, *arguments, **kwargs):
        noted(arguments)


class Called(TrainerCallback):
    on_log = SimpleNamespace(__call__=print)


@pytest.mark.parametrize(
    ("kind", "looks"),
    [(kind, True) for kind in (Prints, ByHelpers, Inherits)]
    + [(k, False) for k in (Stops, HandsOn, OfKeywords, OfModel, ByTrainer, ByModule, Within, AnyArguments, Called)]
    + [(k, False) for k in (KeepsModel, KeepsControl, CallsSuper)],
)
def test_only_what_cannot_act_only_looks(kind, looks):
    assert only_looks(kind, "on_log") == looks


class Looks(TrainerCallback):
    def __init__(self, seen, wishes):
        self.seen, self.wishes = seen, wishes

    def on_log(self, args, state, control, logs, **kwargs):
        self.seen.append(("log", state.global_step, round(state.epoch, 3), logs["loss"]))

    def on_step_begin(self, args, state, control, **kwargs):
        self.seen.append(("begin", state.global_step))

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(("end", state.global_step))
        for name in self.wishes.get(state.global_step, ()):
            setattr(control, f"should_{name}", True)

    def on_epoch_end(self, args, state, control, **kwargs):
        self.seen.append(("epoch", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        self.seen.append(("save", state.global_step))


class Acts(Looks):
    def on_log(self, args, state, control, logs, **kwargs):
        super().on_log(args, state, control, logs, **kwargs)


def run(kind, steps, per_epoch, every, wishes):
    """Events of a loop like Run.steps over `steps`, which reads a step's numbers after the next one's dispatch."""
    seen, waiting = [], []
    args = SimpleNamespace(metric_for_best_model=None, load_best_model_at_end=False)
    model = SimpleNamespace(module=None)
    events = Events(args, TrainerState(), TrainerControl(), model, None, [kind(seen, wishes)], dict)
    events._prints = False
    events.begin({"log": every, "evaluate": None, "save": None}, True, steps, per_epoch)

    def flush():
        while waiting:
            step = waiting.pop(0)
            events.stepped(step, {"loss": step / 8})

    def act(what, step):
        flush()
        seen.append((what, step))

    for step in range(1, steps + 1):
        seen.append(("dispatched", step))
        flush()
        waiting.append(step)
        acts = {name: lambda name=name, step=step: act(name, step) for name in ("evaluate", "save")}
        moment = Between(step, step == steps, wait=flush, model=lambda: None, **acts)
        events.between(moment)
        if moment.stopped:
            break
    flush()
    return seen


@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 3),
    st.dictionaries(
        st.integers(1, 12), st.sets(st.sampled_from(("log", "evaluate", "save", "training_stop")), max_size=3)
    ),
)
def test_lookers_get_the_same_numbers_with_the_same_state_at_most_a_step_late(steps, per_epoch, every, wishes):
    late, in_order = (run(kind, steps, per_epoch, every, wishes) for kind in (Looks, Acts))
    assert [event for event in late if event[0] != "log"] == [event for event in in_order if event[0] != "log"]
    assert [event for event in late if event[0] == "log"] == [event for event in in_order if event[0] == "log"]
    for event in late:
        if event[0] == "log":
            after = in_order[in_order.index(event) + 1 :]
            passed = late[: late.index(event)]
            skipped = [other for other in after if other in passed]
            assert skipped in ([], [("begin", event[1]), ("dispatched", event[1] + 1)]), (event, skipped)
