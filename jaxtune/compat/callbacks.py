"""transformers' callbacks for scripts (`TrainerCallback`, `EarlyStoppingCallback`, with `TrainerControl` and
`TrainerState`), whose events are derived from those of jaxtune.train.callbacks by `Events`.

Every event gets `args`, `state` and `control`, and by name `model` (with the current weights), `processing_class`, and
what transformers passes in addition. What a callback sets in `control` after a step is done at that step, as in
transformers. If a callback `listens` to on_log, the numbers of each step that is logged are waited for. `checked`
accepts a script's callback or refuses it; `best_name` and `best_value` compare evaluations, and
`with_trained` restores the best weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtune.compat.model import CompatModel
from jaxtune.compat.settings import plain_value
from jaxtune.models.decoder import Decoder
from jaxtune.system.terminal import say
from jaxtune.train.callbacks import Between, Callback, users_callback
from jaxtune.train.config import TrainConfig
from jaxtune.train.display.metrics import read_metrics
from jaxtune.train.early_stop import is_better, waited


@dataclasses.dataclass
class TrainerControl:
    """What callbacks request of the run: a callback sets a field to True, and the run does it after this step. Before
    on_step_end the run itself sets the last three fields: True if SFTConfig makes that due after this step, else False.
    So earlier requests are lost, but should_log passes the last step's numbers to on_log if they arrive before that. A
    callback cannot prevent what is due by setting the field to False, but should_log False prevents on_log."""

    should_training_stop: bool = False  # end the run
    should_epoch_stop: bool = False  # raises ValueError, because an epoch is not a loop of its own here
    should_save: bool = False  # save a checkpoint
    should_evaluate: bool = False  # evaluate on eval_dataset; ValueError without one
    should_log: bool = False  # call on_log with the step's numbers


@dataclasses.dataclass
class TrainerState:
    """The progress of a run, with transformers' field names. Callbacks get it, and trainer_state.json is written from
    it."""

    epoch: float = 0.0  # epochs done so far, with the fraction of the current one
    global_step: int = 0  # optimizer steps done so far, those before a continued run included
    max_steps: int = 0  # optimizer steps of the whole run
    num_train_epochs: int = 0  # epochs of the whole run, rounded up
    logging_steps: int = 1  # steps between two logged lines
    eval_steps: int | None = None  # always None
    save_steps: int | None = None  # always None
    train_batch_size: int | None = None  # per_device_train_batch_size; None until a trainer has set it
    # the numbers of every step and evaluation of the last call of train(), {"step": ..., name: number} each, with the
    # names of metrics.jsonl, which lacks the steps that are not logged
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
    """transformers' base class of callbacks, whose methods do nothing: a script overrides those of the events that it
    wants to react to. Each method gets `args` (the SFTConfig), `state` (the TrainerState), `control` (the
    TrainerControl) and, by name, `model`, `processing_class` and what the event adds (on_log `logs`, on_evaluate
    `metrics`). It may change `control`, or return another one that replaces it; None keeps it. transformers' own class
    is accepted too. A callback that defines on_substep_end, on_pre_optimizer_step or on_optimizer_step is refused with
    ValueError (`checked`), because a step is one compiled program; other events of transformers, such as
    on_prediction_step, are never called."""

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called when the trainer has been made. `args` is the SFTConfig, `state` the TrainerState. `control` is the
        TrainerControl; what is set in it or returned has no effect, because train() and each step set its fields anew,
        except that should_epoch_stop raises ValueError. `kwargs` has `model`, `processing_class` (also as `tokenizer`),
        and None for transformers' other objects, such as `optimizer`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called before the first step of a call of train(). `args` is the SFTConfig, `state` the TrainerState. It may
        change `control`, the TrainerControl, or return another one (None keeps it), but only should_training_stop has
        an effect from here, after the first step, and should_epoch_stop raises ValueError. `kwargs` has `model`,
        `processing_class` (also as `tokenizer`), and None for transformers' other objects, such as `optimizer`."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called at the end of train(), when the model has its final weights: the trained ones, or the best ones with
        load_best_model_at_end. `args` is the SFTConfig, `state` the TrainerState and `control` the TrainerControl, of
        which nothing has an effect any more, except that should_epoch_stop raises ValueError. `kwargs` has `model`,
        `processing_class` (also as `tokenizer`), and None for transformers' other objects, such as `optimizer`."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called before the first step of an epoch, and before the first step of train(), even if it continues within
        an epoch. `args` is the SFTConfig, `state` the TrainerState. It may change `control`, the TrainerControl, or
        return another one (None keeps it): should_training_stop has an effect after that step, should_log passes
        numbers of the step before to on_log if they arrive before on_step_end, should_epoch_stop raises ValueError, and
        the rest does nothing. `kwargs` has `model`, `processing_class`, also as `tokenizer`, and None for others."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called after the last step of an epoch, and after the last step of the run, but not if a callback ends the
        run within an epoch. `args` is the SFTConfig, `state` the TrainerState. It may change `control`, the
        TrainerControl, or return another one (None keeps it): its requests to log (unless this step was logged),
        evaluate, save or stop take effect at the same step, and should_epoch_stop raises ValueError. `kwargs` has
        `model`, `processing_class` (also as `tokenizer`), and None for transformers' other objects."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called before an optimizer step. `args` is the SFTConfig, `state` the TrainerState. It may change `control`,
        the TrainerControl, or return another one (None keeps it): should_training_stop has an effect after this step,
        should_log passes numbers of the step before to on_log if they arrive before on_step_end, should_epoch_stop
        raises ValueError, and the rest does nothing. `kwargs` has `model`, `processing_class` (also as `tokenizer`),
        and None for transformers' other objects, such as `optimizer`."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called after an optimizer step was dispatched; its numbers may not have arrived. `args` is the SFTConfig,
        `state` the TrainerState. It may change `control`, the TrainerControl, or return another one (None keeps it):
        its requests to log, evaluate, save or stop take effect at the same step, and should_epoch_stop raises
        ValueError. The fields are True already for what the SFTConfig makes due, which False does not prevent
        (should_log False only prevents on_log). `kwargs` has `model`, `processing_class` (also as `tokenizer`), and
        None for transformers' other objects, such as `optimizer`."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called with `logs` in `kwargs`, {name: number} of a step that is logged or of an evaluation; `kwargs` also
        has `model`, `processing_class` (also as `tokenizer`), and None for transformers' other objects, such as
        `optimizer`. `args` is the SFTConfig, `state` the TrainerState. It may change `control`, the TrainerControl, or
        return another one (None keeps it): after a step of train() a request to save or stop takes effect at that step,
        and so does one to evaluate if `logs` are a step's. In the evaluation of eval_on_start only a request to stop
        has an effect, after the first step."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called after an evaluation with `metrics` in `kwargs`, its numbers by name; `kwargs` also has `model`, with
        the weights that were evaluated, `processing_class` (also as `tokenizer`), and None for transformers' other
        objects. `args` is the SFTConfig, `state` the TrainerState. It may change `control`, the TrainerControl, or
        return another one (None keeps it): after a step of train() a request to save or stop takes effect at that step.
        In the evaluation of eval_on_start only a request to stop has an effect, after the first step."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Called after a checkpoint was saved. The folder checkpoint-N has been written by then if save_strategy or a
        callback caused the save; the save at the end of a run, or after a signal, comes without it. `args` is the
        SFTConfig, `state` the TrainerState. It may change `control`, the TrainerControl, or return another one (None
        keeps it), of which only should_training_stop has an effect here, after this step, and should_epoch_stop raises
        ValueError. `kwargs` has `model`, `processing_class` (also as `tokenizer`), and None for transformers' other
        objects, such as `optimizer`."""


class EarlyStoppingCallback(TrainerCallback):
    """transformers' callback that ends training when evaluations do not become better, for SFTTrainer's `callbacks`.
    SFTConfig's metric_for_best_model names the number that is compared.

    Args:
      early_stopping_patience: training ends after that number of evaluations in a row that were not better than the
        best one before by more than the threshold. The first evaluation counts as better, and NaN never does.
      early_stopping_threshold: the difference by which a value must be better; None: 0.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0):
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold or 0.0
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts to count anew; raises ValueError if `args`, the SFTConfig, asks for no evaluation, or names no metric
        to compare. The other arguments are not used."""
        if args.metric_for_best_model is None:
            raise ValueError(
                "EarlyStoppingCallback: metric_for_best_model = None: name what is watched, such as 'eval_loss'"
            )
        if plain_value(args.eval_strategy) == "no":
            raise ValueError("EarlyStoppingCallback: eval_strategy = 'no': set it to 'steps' or 'epoch'")
        self.early_stopping_patience_counter = 0

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Called after each evaluation with `metrics`, its numbers; as in transformers, also after those of evaluate().
        args: the SFTConfig. state: the TrainerState, whose best_metric does not count this evaluation yet. Counts the
        evaluations in a row without improvement, and sets control.should_training_stop after early_stopping_patience of
        them. One without the number of metric_for_best_model is not counted, and a line says so."""
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
    """Returns the name that the number of metric_for_best_model has in an evaluation's metrics: "eval_loss" for "loss"
    and for "eval_loss". Evaluations are compared by that number: best_value and Events.note_better look it up. `args`
    is an SFTConfig in which metric_for_best_model is not None."""
    wanted = args.metric_for_best_model
    return wanted if wanted.startswith("eval_") else f"eval_{wanted}"


def best_value(args: Any, metrics: Mapping[str, Any]) -> float:
    """Returns the number in an evaluation's `metrics` by which evaluations are compared, that named best_name(args).
    `args` is an SFTConfig in which metric_for_best_model is not None. Events and EarlyStoppingCallback call it.

    Raises:
      ValueError: the evaluation has no such number.
    """
    name = best_name(args)
    if name not in metrics:
        raise ValueError(
            f"SFTConfig: metric_for_best_model = {args.metric_for_best_model!r} is not in an evaluation, which has "
            f"{', '.join(metrics)}"
        )
    return float(metrics[name])


def _greatest(args: Any) -> bool:
    """Whether greater values of metric_for_best_model, which must not be None, are better."""
    greater = args.greater_is_better
    return not args.metric_for_best_model.endswith("loss") if greater is None else bool(greater)


# Numbers of a step that transformers does not print; metrics.jsonl has them.
_UNPRINTED = frozenset(("step", "time", "steps", "skipped", "mfu", "spikes", "loss_scale"))


_PRINTERS = ("PrinterCallback", "ProgressCallback")  # transformers': they print these lines themselves


def _in_words(metrics: Mapping[str, Any]) -> str:
    """Numbers as transformers prints them: {'loss': 0.6931, ..., 'epoch': 0.5}."""
    names = [name for name, value in metrics.items() if isinstance(value, int | float) and name not in _UNPRINTED]
    names = [name for name in names if not name.endswith(("_seconds", "_bytes")) and "tokens" not in name]
    names.sort(key=lambda name: name == "epoch")
    return str({name: float(f"{metrics[name]:.4g}") for name in names})


_WITHIN_A_STEP = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")  # events that cannot be called


def checked(callback: Any) -> Any:
    """Returns a script's callback as an instance, which SFTTrainer adds to its list; of a class an instance is made,
    without arguments.

    Raises:
      ValueError: it is not a callback (it has none of on_step_end, on_log and on_train_begin), or its class defines
        on_substep_end, on_pre_optimizer_step or on_optimizer_step, which cannot be called because a step is one
        compiled program.
    """
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
    """Whether the class of a callback defines the method `event`, such as "on_log", instead of inheriting the empty one
    of TrainerCallback, this module's or transformers'. If none listens to on_log, the run does not wait for a step's
    numbers; `checked` refuses by it callbacks with events within a step."""
    for kind in type(callback).__mro__:
        if kind.__name__ == "TrainerCallback":
            return False
        if event in vars(kind):
            return True
    return False


class Events(Callback):
    """Passes the events of a run of SFTTrainer to the script's callbacks, does what they request, and keeps the best
    weights if load_best_model_at_end asks for it. It is a callback of jaxtune.train, which calls it. SFTTrainer makes
    one for each call of train(), and others to report on_init_end and the numbers of evaluate().

    Args:
      args: the SFTConfig.
      state, control: the TrainerState and TrainerControl, which are passed to the callbacks.
      model: the script's model; it refers to the current weights while callbacks look at it.
      processing_class: the tokenizer, which is passed to the callbacks.
      callbacks: the script's callbacks, as instances.
      measure: returns the numbers of the script's compute_metrics for the current model; it is called after each
        evaluation.
      handed_back: maps a module of the run to the one that the script sees, for example with dropout turned on again.
      leave: called after a save that save_strategy made due or a callback requested, with the number of steps done:
        writes the current model as a checkpoint-N folder. By default nothing is written.
    Attributes:
      best: the trained arrays of the best evaluation (an nnx state of numpy arrays), if load_best_model_at_end asks for
        them; None otherwise, and before an evaluation.
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
    ):
        self._handed_back, self._leave, self._asked = handed_back, leave, False
        self.args, self.state, self.control, self.model, self.measure = args, state, control, model, measure
        self.best: Any = None  # trained arrays on the host
        self._callbacks, self._processing_class = callbacks, processing_class
        self._scheduled: dict[str, float | None] = {}
        self._steps_per_epoch, self._can_evaluate = 1, False
        self._printed: set[str] = set()
        self._prints = not any(kind.__name__ in _PRINTERS for each in callbacks for kind in type(each).__mro__)
        self._left = 0  # the step of the last checkpoint-N folder

    def tell(self, event: str, **more: Any) -> None:
        """Calls the method named `event`, such as "on_log", of every callback that has one, in their order. The method
        gets the SFTConfig, the state and the control, and by name the model, the tokenizer (as processing_class and
        tokenizer), None for objects of transformers that do not exist here (optimizer, lr_scheduler, data loaders), and
        `more`. A control that a callback returns replaces the current one; None keeps it.

        Raises:
          ValueError: a callback set should_epoch_stop.
        """
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
                    **more,
                )
            self.control = self.control if answer is None else answer
        if self.control.should_epoch_stop:
            raise ValueError(
                "SFTTrainer: a callback set should_epoch_stop, which is not supported. Instead: should_training_stop"
            )

    # ---- the run

    def begin(self, config: TrainConfig, total_steps: int, steps_per_epoch: int) -> None:
        """Called by SFTTrainer.train before the first step: sets the state's max_steps and num_train_epochs, clears its
        best_metric, best_global_step and best_model_checkpoint, which are of an earlier call, and the control's request
        to stop, and calls on_train_begin, on_epoch_begin and on_step_begin. It leaves global_step and epoch as they
        are, so these methods do not see the step that a continued run begins with.

        Args:
          config: the run's config, which says after how many steps it logs, evaluates and saves without a request.
          total_steps: the number of optimizer steps of the whole run.
          steps_per_epoch: the number of optimizer steps of an epoch.
        """
        self._scheduled = {
            "log": config.metrics.log_every,
            "evaluate": config.evaluation.every_steps,
            "save": config.checkpoint.every_steps,
        }
        self._steps_per_epoch, self._can_evaluate = max(1, steps_per_epoch), config.data.eval is not None
        self.control.should_training_stop = False
        # those of an earlier call, whose weights no longer exist
        self.state.best_metric = self.state.best_global_step = self.state.best_model_checkpoint = None
        self.state.max_steps, self.state.num_train_epochs = total_steps, -(-total_steps // self._steps_per_epoch)
        self.tell("on_train_begin")
        self.tell("on_epoch_begin")
        self.tell("on_step_begin")

    def between(self, moment: Between) -> None:
        """Called by jaxtune's trainer after each step was dispatched: calls the callbacks' methods in the order of
        transformers' loop (on_step_end, on_epoch_end, ...), and logs, evaluates, saves or stops if that is due or
        requested. moment: the run between two steps, whose methods evaluate, save and stop it. Raises ValueError if a
        callback requests an end of the epoch, or an evaluation without eval_dataset."""
        control = self.control
        self._at(moment.step, moment.model)
        due = {name: bool(every) and moment.step % every == 0 for name, every in self._scheduled.items()}
        for name, is_due in due.items():
            setattr(control, f"should_{name}", is_due)
        self._asked |= due["save"]  # other saves, such as after a signal, leave no folder
        self.tell("on_step_end")
        self._do(moment, due)
        epoch_ended = moment.last or moment.step % self._steps_per_epoch == 0
        if epoch_ended:
            self.tell("on_epoch_end")
            self._do(moment, {})
        if self.control.should_training_stop and not moment.last:
            moment.stop()
        if moment.last or moment.stopped:
            return
        if epoch_ended:
            self.tell("on_epoch_begin")
        self.tell("on_step_begin")

    def _at(self, step: int, model: Callable[[], Decoder]) -> None:
        """Sets the state's step and epoch, and makes the script's model refer to the current weights. step: the number
        of steps done. model: a function that assembles the current module; it is called only when the script's model is
        next accessed: by a callback or compute_metrics, to write a checkpoint-N folder, or to copy the best weights."""
        self.state.global_step, self.state.epoch = step, step / self._steps_per_epoch
        self.model.module = lambda: self._handed_back(model())

    def _do(self, moment: Between, due: Mapping[str, bool]) -> None:
        """Logs, evaluates and saves if the control's fields request it, in the order of transformers, and then clears
        these fields; `between` has set those of what is due. The numbers of a step are waited for, and on_log is
        called, only if a callback listens to on_log. After a save that is done here `saved` writes a checkpoint-N
        folder, unless it has written that of this step. `between` calls it after on_step_end and on_epoch_end.

        Args:
          moment: the run between two steps.
          due: {"log", "evaluate", "save": whether the script's config makes that due at this step}; {} after an epoch.
            If a callback sets such a request to False, jaxtune's trainer logs, evaluates or saves all the same, which
            is printed once; should_log False prevents on_log.
        Raises:
          ValueError: an evaluation is requested and there is no eval_dataset.
        """
        for name, is_due in due.items():
            if is_due and not getattr(self.control, f"should_{name}") and name not in self._printed:
                self._printed.add(name)
                say(
                    f"SFTTrainer: a callback sets should_{name} to False, but SFTConfig's {name} steps stay as they are"
                )
        if self.control.should_log and any(listens(callback, "on_log") for callback in self._callbacks):
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
        """The numbers of step `step` (from 1) have arrived: they are printed if logging_steps has the step, and passed
        to on_log if they were waited for (`_do`)."""
        if self._prints and (every := self._scheduled.get("log")) and step % every == 0:
            say(_in_words(metrics))
        if self.control.should_log and step == self.state.global_step:
            self.control.should_log = False
            self.tell("on_log", logs=metrics)

    def evaluating(self, step: int, model: Callable[[], Decoder]) -> None:
        """Called by jaxtune's trainer before an evaluation: makes the script's model refer to the weights that it
        evaluates. Callbacks and compute_metrics then see these weights. step: the number of steps done. model: a
        function that returns the module with these weights."""
        self._at(step, model)

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        """Called by jaxtune's trainer after an evaluation, with its numbers: adds the epoch and the numbers of
        compute_metrics to `metrics`, in place, and calls on_log and on_evaluate with them. If metric_for_best_model is
        set and its number is the best so far, the state records it, and with load_best_model_at_end `best` becomes a
        copy of the trained weights. step: the number of steps done. Raises ValueError if the evaluation lacks that
        number, or compute_metrics returns no numbers."""
        metrics["epoch"] = round(self.state.epoch, 4)
        metrics |= self.measure()
        if self._prints:
            say(_in_words(metrics))
        self.tell("on_log", logs=metrics)  # as in transformers, where evaluations are logs too
        self.tell("on_evaluate", metrics=metrics)
        if self.args.metric_for_best_model is None:
            return
        value = best_value(self.args, metrics)
        if is_better(value, self.state.best_metric, _greatest(self.args)):
            self.state.best_metric, self.state.best_global_step = value, step
            if self.args.load_best_model_at_end:
                # A copy, because the next step donates the arrays.
                self.best = jax.tree.map(np.array, jax.device_get(nnx.state(self.model.module, nnx.Param)))

    def saved(self, step: int) -> None:
        """Called by jaxtune's trainer after each save, with the number of steps done. If save_strategy made the save
        due or a callback requested it, it writes the checkpoint-N folder, and then calls on_save. Such a save comes
        some steps later if updates were skipped at its own step, as their numbers were not finite. After other saves,
        such as one that a signal caused or that of the run's end, it only calls on_save."""
        if self._asked:
            self._asked, self._left = False, step
            self._leave(step)
        self.tell("on_save")

    def note_better(self, metrics: Path, done: int) -> None:
        """Called at the end of a run that was continued and has load_best_model_at_end: prints a note if an evaluation
        of an earlier call of train() was better than that of the weights that the model now has, or if these were not
        evaluated and others were. Those better weights were lost with the earlier process.

        Args:
          metrics: the file metrics.jsonl of the run, which has all evaluations.
          done: the number of steps done; if this call evaluated nothing, the model has the weights after them, and else
            those of its own best evaluation.
        """
        kept = done if self.state.best_global_step is None else self.state.best_global_step
        name = best_name(self.args)
        found = {line["step"]: line[name] for line in read_metrics(metrics) if not np.isnan(line.get(name, np.nan))}
        best = kept
        for step, value in found.items():
            best = step if is_better(value, found.get(best), _greatest(self.args)) else best
        if best != kept:
            say(
                f"SFTTrainer: load_best_model_at_end: the evaluation after step {best} was the best, but its weights "
                f"were lost when the run was interrupted: the model has those of step {kept}"
            )


def with_trained(module: Decoder, trained: Any) -> Decoder:
    """Returns a new module, `module` with its trained arrays (nnx.Param) replaced by the numpy arrays `trained`, a
    state such as Events.best; each is put on the devices that its predecessor was on. It is used at the end of a run
    with load_best_model_at_end."""
    graph, own, frozen = nnx.split(module, nnx.Param, ...)
    return nnx.merge(graph, jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), trained, own), frozen)
