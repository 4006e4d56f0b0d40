"""transformers' callbacks, compute_metrics and the best model at the end, in scripts of jaxtune.compat."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from jaxtune.compat import EarlyStoppingCallback, SFTConfig, SFTTrainer, TrainerCallback
from jaxtune.compat.callbacks import Events, TrainerControl, TrainerState
from jaxtune.train.callbacks import Between
from jaxtune.train.engine.programs import Engine
from jaxtune.train.loop.saving import TrainingInterrupted
from tests.test_compat import folder, load, rows  # noqa: F401

EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class Noting(TrainerCallback):
    """Notes each event with the step, and asks for what `wishes` say: {event: {step: name of a control}}."""

    def __init__(self, **wishes):
        self.seen, self.weights, self.wishes = [], [], wishes

    def note(self, event, state, control, model, **more):
        self.seen.append((event, state.global_step))
        wish = self.wishes.get(event, {}).get(state.global_step)
        if wish is not None:
            setattr(control, wish, True)
        if event in ("on_step_end", "on_train_end"):
            self.weights.append([np.array(leaf) for leaf in jax.tree.leaves(nnx.state(model.module, nnx.Param))])
        if event == "on_log":
            assert np.isfinite(more["logs"].get("loss", more["logs"].get("eval_loss")))
        if event == "on_evaluate":
            assert more["metrics"]["eval_loss"] > 0
        return control


for event in EVENTS:

    def method(self, args, state, control, _event=event, model=None, **more):
        return self.note(_event, state, control, model, **more)

    setattr(Noting, event, method)


def trainer_of(folder, tmp_path, callbacks=(), **settings):  # noqa: F811
    parts = {
        name: settings.pop(name) for name in ("compute_metrics", "preprocess_logits_for_metrics") if name in settings
    }
    args = (
        dict(
            output_dir=str(tmp_path / "run"),
            max_steps=6,
            save_strategy="no",
            learning_rate=1e-2,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=1,
        )
        | settings
    )
    return SFTTrainer(
        load(folder)[0],
        args=SFTConfig(**args),
        train_dataset=rows(6),
        eval_dataset=rows(3),
        callbacks=list(callbacks),
        **parts,
    )


@pytest.mark.full
def test_events_come_in_transformers_order_and_what_is_asked_for_is_done(folder, tmp_path):  # noqa: F811
    noting = Noting(on_step_end={2: "should_evaluate", 3: "should_save", 5: "should_training_stop"})
    trainer = trainer_of(folder, tmp_path, logging_steps=2)
    trainer.add_callback(noting)
    out = trainer.train()
    per_epoch = trainer._epoch_steps
    assert out.global_step == trainer.state.global_step == 5 and trainer.state.max_steps == 6
    steps = []
    for step in range(1, 6):
        steps += [("on_step_begin", step - 1), ("on_step_end", step)]
        steps += [("on_log", step)] if step % 2 == 0 else []
        steps += [("on_log", 2), ("on_evaluate", 2)] if step == 2 else [("on_save", 3)] if step == 3 else []
        if step % per_epoch == 0:
            steps += [("on_epoch_end", step)] + ([("on_epoch_begin", step)] if step < 5 else [])
    begun = [("on_train_begin", 0), ("on_epoch_begin", 0)]
    assert noting.seen == [*begun, *steps, ("on_train_end", 5)]
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == [1, 2, 3, 4, 5]
    # Each event sees the weights of its moment, and the last are those that the model is left with.
    assert len(noting.weights) == 6
    for one, other in zip(noting.weights, noting.weights[1:-1]):
        assert any(not np.array_equal(a, b) for a, b in zip(one, other))
    for one, other in zip(noting.weights[-2], noting.weights[-1]):
        np.testing.assert_allclose(one, other, rtol=1e-2)  # bfloat16 in one, float32 in the other
    assert (tmp_path / "run/checkpoints/step_00000003").is_dir()


@pytest.mark.full
def test_early_stopping_and_the_best_model(folder, tmp_path):  # noqa: F811
    """The loss falls, then a rate that is far too high makes it rise: the run ends, and the best weights are back."""
    patient = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = trainer_of(
        folder,
        tmp_path,
        [patient],
        max_steps=40,
        eval_strategy="steps",
        eval_steps=1,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        load_best_model_at_end=True,
        save_total_limit=1,
    )
    trainer.train()
    losses = {line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line}
    best = min(losses, key=losses.get)
    assert trainer.state.best_global_step == best and trainer.state.best_metric == losses[best]
    assert trainer.state.global_step == best + 2 < 40
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best], rel=2e-3)


@pytest.mark.full
@pytest.mark.parametrize(("when", "greater"), [(3, False), (6, False), (6, True)])
def test_the_best_model_after_an_evaluation_that_was_interrupted(
    folder,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
    when,
    greater,
):
    """The call that goes on evaluates the weights of the checkpoint, not those that it was given, as the first. Where
    the best weights (here those of the greatest loss) were an earlier call's, that is said."""
    real = Engine.evaluate

    def interrupted(self, program, trainable, frozen, batches, shown, between, load):
        if between.args[0] == when:  # of Saver.poll: steps done
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, program, trainable, frozen, batches, shown, between, load)

    trainer = trainer_of(
        folder,
        tmp_path,
        [noting := Noting()],
        eval_strategy="steps",
        eval_steps=3,
        load_best_model_at_end=True,
        greater_is_better=greater,
    )
    untrained = trainer.evaluate()["eval_loss"]
    with monkeypatch.context() as patch, pytest.raises(TrainingInterrupted):
        patch.setattr(Engine, "evaluate", interrupted)
        trainer.train()
    noting.seen.clear()
    trainer.train(resume_from_checkpoint=True)
    assert ("on_evaluate", when) in noting.seen and noting.seen[-1] == ("on_train_end", 6)
    losses = {line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line}
    best = min(losses, key=losses.get)
    assert losses[best] < untrained - 0.1
    told = "after step 3 was the best, but its weights were lost when the run was interrupted: the model has those of"
    assert (told in capsys.readouterr().out) == greater
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (best, losses[best])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best], rel=2e-3)


@pytest.mark.full
def test_compute_metrics_gets_logits_and_labels(folder, tmp_path):  # noqa: F811
    """The cross-entropy of what it is given is the evaluation's loss, with and without a function before it."""
    shapes = []

    def cross_entropy(logits, labels):
        logits, labels = np.asarray(logits, np.float64)[:, :-1], np.asarray(labels)[:, 1:]
        log_sum = np.log(np.exp(logits).sum(-1))
        of_labels = np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
        return np.where(labels == -100, 0.0, log_sum - of_labels), (labels != -100)

    def measure(prediction):
        logits, labels = prediction
        shapes.append(prediction.predictions.shape)
        losses, trained = cross_entropy(logits, labels)
        return {"own": losses.sum() / trained.sum(), "eval_count": trained.sum()}

    def first(logits, labels):
        losses, trained = cross_entropy(logits, labels)
        return losses, trained, logits.argmax(dim=-1)

    def measure_second(prediction):
        (losses, trained, chosen), labels = prediction.predictions, prediction.label_ids
        assert chosen.shape == labels.shape and chosen.dtype.kind == "i"
        return {"own": losses.sum() / trained.sum()}

    trainer = trainer_of(
        folder, tmp_path, compute_metrics=measure, eval_strategy="steps", eval_steps=3, packing=False, max_steps=3
    )
    trainer.train()
    [line] = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert line["eval_own"] == pytest.approx(line["eval_loss"], rel=1e-2) and line["eval_count"] == line["eval_targets"]
    values = trainer.evaluate()
    assert values["eval_own"] == pytest.approx(values["eval_loss"], rel=1e-2)
    assert shapes[0] == (3, 64, trainer.model.module.config.vocab_size)
    trainer.compute_metrics, trainer.preprocess_logits_for_metrics = measure_second, first
    assert trainer.evaluate()["eval_own"] == pytest.approx(values["eval_own"], rel=1e-6)
    trainer.compute_metrics = lambda prediction: {"text": "x"}
    with pytest.raises(ValueError, match="each value must be a number"):
        trainer.evaluate()


def events_of(leave, *callbacks):
    args, model = SimpleNamespace(metric_for_best_model=None), SimpleNamespace(module=None)
    return Events(args, TrainerState(), TrainerControl(), model, None, callbacks, dict, leave=leave)


def begin(events):
    events.begin({"log": 1, "evaluate": None, "save": None}, False, 6, 3)


def test_a_save_that_has_to_wait_leaves_its_folder_when_it_is_made():
    """While updates are skipped, a run saves nothing and keeps the request. Other saves leave no folder."""

    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 3

    left = []
    events = events_of(left.append, Asks())
    begin(events)
    for step in range(1, 7):
        events.between(Between(step, step == 6, *[lambda: None] * 4))
        if step >= 5:
            events.saved(step)
    assert left == [5]


def test_another_call_of_train_forgets_the_best_of_the_one_before():
    events = events_of(lambda step: None)
    state = events.state
    state.best_metric, state.best_global_step, state.best_model_checkpoint = 1.0, 3, "run/checkpoint-3"
    begin(events)
    assert (state.best_metric, state.best_global_step, state.best_model_checkpoint) == (None, None, None)


def test_callbacks_are_managed_and_checked(folder, tmp_path):  # noqa: F811
    trainer = trainer_of(folder, tmp_path, [Noting])
    noting = trainer.callbacks[0]
    assert noting.seen == [("on_init_end", 0)]
    trainer.add_callback(EarlyStoppingCallback)
    assert isinstance(trainer.pop_callback(EarlyStoppingCallback), EarlyStoppingCallback)
    trainer.remove_callback(noting)
    assert trainer.callbacks == [] and trainer.pop_callback(Noting) is None

    class Within(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs): ...

    with pytest.raises(ValueError, match="Within has on_optimizer_step, but a step is one compiled program"):
        trainer.add_callback(Within())
    trainer.add_callback(EarlyStoppingCallback())
    with pytest.raises(ValueError, match="EarlyStoppingCallback: metric_for_best_model = None"):
        trainer.train()


@pytest.mark.parametrize("strategy", ["no", IntervalStrategy.NO, SaveStrategy.NO])
def test_early_stopping_without_evaluations_is_refused(folder, tmp_path, strategy):  # noqa: F811
    """However transformers lets a script say that there are none."""
    settings = dict(eval_strategy=strategy, metric_for_best_model="eval_loss")
    trainer = trainer_of(folder, tmp_path, [EarlyStoppingCallback()], **settings)
    with pytest.raises(ValueError, match="EarlyStoppingCallback: eval_strategy = 'no'"):
        trainer.train()


@pytest.mark.full
def test_evaluations_of_a_script_count_towards_the_patience_as_in_transformers(folder, tmp_path, capsys):  # noqa: F811
    """Under names of their own, such as test_loss, they do not."""
    from transformers.trainer_callback import EarlyStoppingCallback as Theirs

    both = ours, theirs = EarlyStoppingCallback(9), Theirs(9)
    settings = dict(max_steps=2, eval_strategy="steps", eval_steps=1, metric_for_best_model="loss")
    trainer = trainer_of(folder, tmp_path, both, greater_is_better=False, **settings)
    trainer.evaluate()
    trainer.train()
    counts = [ours.early_stopping_patience_counter]
    for prefix in ("eval", "test", "eval"):
        assert f"{prefix}_loss" in trainer.evaluate(metric_key_prefix=prefix)
        counts.append(ours.early_stopping_patience_counter)
        assert counts[-1] == theirs.early_stopping_patience_counter
    assert [count - counts[0] for count in counts] == [0, 1, 1, 2]
    told = "EarlyStoppingCallback: an evaluation without eval_loss (metric_for_best_model) does not count"
    assert capsys.readouterr().out.count(told) == 1


def test_transformers_own_callbacks_are_taken(folder, tmp_path, capsys):  # noqa: F811
    from transformers.trainer_callback import EarlyStoppingCallback as Theirs
    from transformers.trainer_callback import PrinterCallback

    trainer = trainer_of(
        folder,
        tmp_path,
        [PrinterCallback, Theirs(1)],
        max_steps=20,
        eval_strategy="steps",
        eval_steps=1,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        metric_for_best_model="eval_loss",
        greater_is_better=False,
    )
    trainer.train()
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert len(losses) < 20 and losses[-1] >= min(losses[:-1])
    assert capsys.readouterr().out.count("'eval_loss'") == len(losses)
