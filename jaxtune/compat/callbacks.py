"""transformers' callbacks. What one sets in `control` after a step is done at that step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtune.compat.looking import only_looks
from jaxtune.compat.model import CompatModel
from jaxtune.compat.settings import plain_value
from jaxtune.models.decoder import Decoder
from jaxtune.system.terminal import say
from jaxtune.train.callbacks import Between, Callback, users_callback
from jaxtune.train.config.sections import is_greatest
from jaxtune.train.evaluation.early_stop import waited
from jaxtune.train.folder.best import best_of, is_better
from jaxtune.train.log.metrics import read_metrics
from jaxtune.train.loop.run import by_set


@dataclasses.dataclass
class TrainerControl:
    """Requests of callbacks. The run sets the last three anew before on_step_end, True if SFTConfig makes that due, so
    earlier requests are lost. False does not prevent what is due, except on_log.
    """

    should_training_stop: bool = False  # end the run
    should_epoch_stop: bool = False  # raises ValueError, because an epoch is not a loop of its own here
    should_save: bool = False  # save a checkpoint
    should_evaluate: bool = False  # evaluate on eval_dataset; ValueError without one
    should_log: bool = False  # call on_log with the step's numbers


@dataclasses.dataclass
class TrainerState:
    """The progress of a run, with transformers' field names."""

    epoch: float = 0.0  # epochs done so far, with the fraction of the current one
    global_step: int = 0  # optimizer steps done so far, those before a continued run included
    max_steps: int = 0  # optimizer steps of the whole run
    num_train_epochs: int = 0  # epochs of the whole run, rounded up
    logging_steps: int = 1  # steps between two logged lines
    eval_steps: int | None = None  # always None
    save_steps: int | None = None  # always None
    train_batch_size: int | None = None  # per_device_train_batch_size; None until a trainer has set it
    # the numbers of every step and evaluation of the last call of train(), {"step": ..., name: number} each, with the
    # names of metrics.jsonl, which lacks the steps that are not logged; the last line has the metrics of TrainOutput
    log_history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # the best value of metric_for_best_model in this call of train(); None: no evaluation gave one, or none is named
    best_metric: float | None = None
    best_global_step: int | None = None  # the step after which it was measured; None: there is no best_metric
    # the checkpoint-N folder of that step, written at the end of train() with load_best_model_at_end
    best_model_checkpoint: str | None = None
    # both are always True: one process drives all devices, so what a script does under such a check is always done
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True


class TrainerCallback:
    """transformers' base class of callbacks; a script overrides the methods that it wants.

    Each gets `args` (SFTConfig), `state`, `control` and by name `model`, `processing_class`, and None for transformers'
    other objects. A control that it returns replaces the current one. should_epoch_stop raises ValueError. Classes with
    on_substep_end, on_pre_optimizer_step or on_optimizer_step are refused: a step is one compiled program.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called when the trainer has been made; requests have no effect."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called before the first step of train(); only should_training_stop has an effect, after it."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called at the end of train() with the final weights (the best ones with load_best_model_at_end)."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called before the first step of an epoch and of train(); requests as in on_step_begin."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called after the last step of an epoch and of the run. Requests are done at that step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called before a step, after which should_training_stop ends the run."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called after a step was dispatched; its numbers may not have arrived. Requests are done at that step."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called with `logs`, {name: number} of a logged step or an evaluation. Requests are done at that step, to
        evaluate only if `logs` are a step's; before the first step only should_training_stop counts. If no callback's
        on_log reads control, model or trainer, it is called with the step's state after the next step's on_step_begin.
        """

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called after an evaluation with its `metrics`; requests as in on_log."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called after a checkpoint was saved; only should_training_stop has an effect. The folder checkpoint-N exists
        by then, unless the save is the run's last or a signal caused it.
        """


class EarlyStoppingCallback(TrainerCallback):
    """Ends training when metric_for_best_model does not become better.

    Args:
      early_stopping_patience: evaluations in a row that were not better than the best before; NaN never is.
      early_stopping_threshold: the difference by which a value must be better.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0):
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold or 0.0
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts to count anew; ValueError without evaluations or a metric."""
        if args.metric_for_best_model is None:
            raise ValueError(
                "EarlyStoppingCallback: metric_for_best_model = None: name what is watched, such as 'eval_loss'"
            )
        if plain_value(args.eval_strategy) == "no":
            raise ValueError("EarlyStoppingCallback: eval_strategy = 'no': set it to 'steps' or 'epoch'")
        self.early_stopping_patience_counter = 0

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Counts this evaluation, as in transformers also one of evaluate(); one without the metric does not count."""
        if (name := best_name(args)) not in metrics:
            return say(f"EarlyStoppingCallback: an evaluation without {name} (metric_for_best_model) does not count")
        value = best_value(args, metrics)
        count = waited(
            self.early_stopping_patience_counter,
            value,
            state.best_metric,
            _greatest(args),
            self.early_stopping_threshold,
        )
        self.early_stopping_patience_counter = count
        control.should_training_stop |= 0 < count >= self.early_stopping_patience


def best_name(args: Any) -> str:
    """The key of metric_for_best_model in an evaluation's metrics: "eval_loss" for "loss" and for "eval_loss"."""
    metric = args.metric_for_best_model
    return metric if metric.startswith("eval_") else f"eval_{metric}"


def best_value(args: Any, metrics: Mapping[str, Any]) -> float:
    """The number of metric_for_best_model in an evaluation's metrics; ValueError if it is missing."""
    name = best_name(args)
    if name not in metrics:
        raise ValueError(
            f"SFTConfig: metric_for_best_model = {args.metric_for_best_model!r} is not in an evaluation, which has "
            f"{', '.join(metrics)}"
        )
    return float(metrics[name])


def with_first_name(values: Mapping[str, object], names: Sequence[str]) -> dict[str, object]:
    """An evaluation's metrics with the name of the first of its sets, "eval_NAME_loss" for "eval_loss"; unchanged for a
    set without a name.
    """
    if not names:
        return dict(values)
    of_first = by_set(values, names[1:])[0]
    return {
        f"eval_{names[0]}_{key.removeprefix('eval_')}" if key in of_first and key.startswith("eval_") else key: value
        for key, value in values.items()
    }


def _greatest(args: Any) -> bool:
    """Whether greater values of metric_for_best_model are better."""
    return is_greatest(args.metric_for_best_model, args.greater_is_better)


# Numbers of a step that transformers does not print; metrics.jsonl has them.
_UNPRINTED = frozenset(("step", "time", "steps", "skipped", "mfu", "spikes", "loss_scale"))


_PRINTERS = ("PrinterCallback", "ProgressCallback")  # transformers': they print these lines themselves


def _in_words(metrics: Mapping[str, Any]) -> str:
    names = [name for name, value in metrics.items() if isinstance(value, int | float) and name not in _UNPRINTED]
    names = [name for name in names if not name.endswith(("_seconds", "_bytes")) and "tokens" not in name]
    names.sort(key=lambda name: name == "epoch")
    return str({name: float(f"{metrics[name]:.4g}") for name in names})


_WITHIN_A_STEP = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")  # events that cannot be called


def checked_callback(callback: Any) -> Any:
    """A script's callback as an instance (a class is called); ValueError if it is none or has an event in a step."""
    callback = callback() if isinstance(callback, type) else callback
    if not any(callable(getattr(callback, f"on_{event}", None)) for event in ("step_end", "log", "train_begin")):
        raise ValueError(f"SFTTrainer: callbacks = {callback!r}: give objects of a class made from TrainerCallback")
    for event in _WITHIN_A_STEP:
        if listens(callback, event):
            raise ValueError(
                f"SFTTrainer: callbacks: {type(callback).__name__} has {event}, but a step is one compiled program: "
                "use on_step_end, or jaxtune.train.Trainer(optimizer=...) for updates of your own"
            )
    return callback


def listens(callback: Any, event: str) -> bool:
    """Whether a callback's class defines the method `event` ("on_log") itself, and not only TrainerCallback does."""
    for kind in type(callback).__mro__:
        if kind.__name__ == "TrainerCallback":
            return False
        if event in vars(kind):
            return True
    return False


class Events(Callback):
    """Passes the events of a run to the script's callbacks, does what they request, and keeps the best weights.

    Args:
      measure: the numbers of compute_metrics for the current model.
      handed_back: maps a module of the run to the script's, with dropout turned on again.
      leave: writes checkpoint-N, given N, after a save that was due or requested.
      eval_names: of a dict of evaluation sets; () of one set.
      router_coefficient: of the experts' load-balancing loss, which TRL's loss includes and logs as aux_loss.
    Attributes:
      best: trained arrays of the best evaluation, an nnx state of numpy arrays, if load_best_model_at_end.
    """

    is_users = False  # it writes folders; the callbacks that it calls are

    def __init__(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        model: CompatModel,
        processing_class: Any,
        callbacks: Sequence[Any],
        measure: Callable[[], dict[str, float]],
        handed_back: Callable[[Decoder], Decoder] = lambda module: module,
        leave: Callable[[int], Any] = lambda step: None,
        eval_names: Sequence[str] = (),
        router_coefficient: float = 0.0,
    ):
        self._handed_back, self._leave, self._asked = handed_back, leave, False
        self._eval_names, self._router_coefficient = eval_names, router_coefficient
        self.args, self.state, self.control, self.model, self.measure = args, state, control, model, measure
        self.best: Any = None  # trained arrays on the host
        self._callbacks, self._processing_class = callbacks, processing_class
        self._scheduled: Mapping[str, float | None] = {}
        self._steps_per_epoch, self._can_evaluate = 1, False
        self._printed: set[str] = set()
        self._prints = not any(kind.__name__ in _PRINTERS for callback in callbacks for kind in type(callback).__mro__)
        self._left = 0  # the step of the last checkpoint-N folder
        self._unlogged: set[int] = set()  # steps whose numbers on_log waits for
        self._late: set[str] = set()  # requests that came after their step
        self._at = 0  # the step whose requests are still done, in `between`
        self._acts = False  # whether an on_log may act, so that the run waits for it

    def tell(self, event: str, **event_arguments: Any) -> None:
        """Calls the method `event` of every callback; ValueError if one set should_epoch_stop."""
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is None:
                continue
            with users_callback(callback, event):
                answer = method(
                    self.args,
                    self.state,
                    self.control,
                    model=self.model,
                    processing_class=self._processing_class,
                    tokenizer=self._processing_class,
                    optimizer=None,
                    lr_scheduler=None,
                    train_dataloader=None,
                    eval_dataloader=None,
                    **event_arguments,
                )
            self.control = self.control if answer is None else answer
        if self.control.should_epoch_stop:
            raise ValueError(
                "SFTTrainer: a callback set should_epoch_stop, which is not supported. Instead: should_training_stop"
            )

    # ---- the run

    def begin(
        self, scheduled: Mapping[str, float | None], can_evaluate: bool, total_steps: int, steps_per_epoch: int
    ) -> None:
        """Starts a call of train(): resets the state's best and the request to stop, and calls the first events.
        global_step and epoch stay, so these events do not see the step that a continued run begins with.

          scheduled: {"log", "evaluate", "save": steps between}.
        """
        self._scheduled, self._can_evaluate = scheduled, can_evaluate
        self._steps_per_epoch = max(1, steps_per_epoch)
        self.control.should_training_stop = False
        logging = [callback for callback in self._callbacks if listens(callback, "on_log")]
        self._acts = not all(only_looks(type(callback), "on_log") for callback in logging)
        self._unlogged, self._late = set(), set()
        # those of an earlier call, whose weights no longer exist
        self.state.best_metric = self.state.best_global_step = self.state.best_model_checkpoint = None
        self.state.max_steps, self.state.num_train_epochs = total_steps, -(-total_steps // self._steps_per_epoch)
        self.tell("on_train_begin")
        self.tell("on_epoch_begin")
        self.tell("on_step_begin")

    def between(self, moment: Between) -> None:
        """After a step was dispatched: calls the events in transformers' order and does what is due or requested."""
        control, self._at = self.control, moment.step
        self._set_position(moment.step, moment.model)
        due = {name: bool(every) and moment.step % every == 0 for name, every in self._scheduled.items()}
        for name, is_due in due.items():
            setattr(control, f"should_{name}", is_due or name in self._late)
        self._late.clear()
        self._asked |= due["save"]  # other saves, such as after a signal, leave no folder
        self.tell("on_step_end")
        self._do(moment, due)
        epoch_ended = moment.last or moment.step % self._steps_per_epoch == 0
        if epoch_ended:
            if self._unlogged:
                moment.wait()
            self.tell("on_epoch_end")
            self._do(moment, {})
        if self.control.should_training_stop and not moment.last:
            moment.stop()
        self._at = 0
        if moment.last or moment.stopped:
            return
        if epoch_ended:
            self.tell("on_epoch_begin")
        self.tell("on_step_begin")

    def _set_position(self, step: int, model: Callable[[], Decoder]) -> None:
        """Sets the state's step and epoch, and the script's model to `model`, which is called when it is looked at."""
        self.state.global_step, self.state.epoch = step, step / self._steps_per_epoch
        self.model.module = lambda: self._handed_back(model())

    def _do(self, moment: Between, due: Mapping[str, bool]) -> None:
        """Logs, evaluates and saves as the control's fields say, and clears them. due: what SFTConfig makes due."""
        for name, is_due in due.items():
            if is_due and not getattr(self.control, f"should_{name}") and name not in self._printed:
                self._printed.add(name)
                say(
                    f"SFTTrainer: a callback sets should_{name} to False, but SFTConfig's {name} steps stay as they are"
                )
        if self.control.should_log and any(listens(callback, "on_log") for callback in self._callbacks):
            self._unlogged.add(moment.step)
            if self._acts:
                moment.wait()
        if self.control.should_evaluate:
            if not self._can_evaluate:
                raise ValueError("SFTTrainer: a callback set should_evaluate, which needs eval_dataset")
            moment.evaluate()
        if self.control.should_save:
            self._asked = moment.step != self._left
            moment.save()
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False

    def stepped(self, step: int, metrics: dict[str, Any]) -> None:
        if "router_aux_loss" in metrics:
            metrics["aux_loss"] = metrics["router_aux_loss"]
            metrics["loss"] += self._router_coefficient * metrics["aux_loss"]
        if self._prints and (every := self._scheduled.get("log")) and step % every == 0:
            say(_in_words(metrics))
        if step in self._unlogged:
            self._unlogged.discard(step)
            self.control.should_log = False
            self.tell("on_log", logs=metrics)
            if step != self._at:
                self._late = {name for name in ("evaluate", "save") if getattr(self.control, f"should_{name}")}

    def evaluating(self, step: int, model: Callable[[], Decoder]) -> None:
        self._set_position(step, model)

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds the epoch and compute_metrics' numbers to `metrics`, in place, calls the events, and notes the best."""
        metrics["epoch"] = round(self.state.epoch, 4)
        metrics |= self.measure()
        renamed, names = with_first_name(metrics, self._eval_names), self._eval_names
        metrics.clear()
        metrics |= renamed
        for of_set in by_set(metrics, names)[1:] if names else [metrics]:
            if self._prints:
                say(_in_words(of_set))
            self.tell("on_log", logs=of_set)  # as in transformers, where evaluations are logs too
            self.tell("on_evaluate", metrics=of_set)
        if self.args.metric_for_best_model is None:
            return
        value = best_value(self.args, metrics)
        if is_better(value, self.state.best_metric, _greatest(self.args)):
            self.state.best_metric, self.state.best_global_step = value, step
            if self.args.load_best_model_at_end:
                # A copy, because the next step donates the arrays.
                self.best = jax.tree.map(np.array, jax.device_get(nnx.state(self.model.module, nnx.Param)))

    def saved(self, step: int) -> None:
        """Writes checkpoint-N if the save was due or requested; it comes late if updates at its step were skipped."""
        if self._asked:
            self._asked, self._left = False, step
            self._leave(step)
        self.tell("on_save")

    def closed(self, metrics: Mapping[str, float]) -> None:
        """Adds the run's closing line, the metrics of TrainOutput, to the history, prints it and calls on_log."""
        line = dict(metrics)
        self.state.log_history.append({"step": self.state.global_step, **line})
        if self._prints:
            say(_in_words(line))
        self.tell("on_log", logs=line)

    def note_better(self, metrics: Path, steps_done: int) -> None:
        """Prints a note if an evaluation before an interruption was better than that of the current weights.

        metrics: the run's metrics.jsonl.
        steps_done: the steps done.
        """
        current_step = steps_done if self.state.best_global_step is None else self.state.best_global_step
        name = best_name(self.args)
        values = {line["step"]: line[name] for line in read_metrics(metrics) if name in line}
        current_first = {step: values[step] for step in (current_step, *values) if step in values}
        best = best_of(current_first, _greatest(self.args))
        if best not in (None, current_step):
            say(
                f"SFTTrainer: load_best_model_at_end: the evaluation after step {best} was the best, but its weights "
                f"were lost when the run was interrupted: the model has those of step {current_step}"
            )


def with_trained(module: Decoder, trained: Any) -> Decoder:
    """A new module: `module` with its trained arrays replaced by numpy arrays, on the devices of their predecessors."""
    graph, replaced, frozen = nnx.split(module, nnx.Param, ...)
    return nnx.merge(graph, jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), trained, replaced), frozen)
