"""Metrics of a run: metrics.jsonl and other loggers (`MetricsLogger`; `require_packages` for those), the `Progress` bar
and the plot of the loss. `read_metrics` and `evaluations` read metrics.jsonl, `parsed` a line of it (metrics such as
`loss` and `eval_loss`, `step`: steps done, `time`: unix seconds). `duration` writes times as text, and `decorate` makes
what a run can do without. monitor.py says how speeds are counted."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxtune.system import processes, terminal
from jaxtune.system.files import atomic_write
from jaxtune.train.display.rollouts import ROLLOUTS, RolloutsFile

if TYPE_CHECKING:
    from jaxtune.train.data.batches import Rollout

logger = logging.getLogger(__name__)

JSONL = "metrics.jsonl"


# ---- loggers


class MetricsLogger:
    """Appends metrics (`log`) to `folder`/metrics.jsonl, and to TensorBoard, Weights & Biases and trackio if asked.

    The file is the primary record: one JSON object per line, written at each call. NaN and infinities are written as
    the strings "nan", "inf" and "-inf", so that every line is valid JSON. A logger that fails during training (network,
    disk), or when it is opened, is reported once, and training continues without it; the file alone is tried again at
    each line. Only the first process of a run records. As a context it closes the loggers at its end.

    Args:
      folder: the run's folder.
      tensorboard: whether to write event files in `folder`/tensorboard.
      wandb_project, trackio_project: names of projects there; None: not logged there. A resumed run continues its own.
      run_name: the run's name there; None: the folder's.
      config: JSON-able mapping that Weights & Biases and trackio show as the run's configuration.
      resumed_step: the step from which a resumed run continues; lines of later steps, and an incomplete last line, are
        dropped. None for a new run.
      rollouts_mb: the largest size of `folder`/rollouts.jsonl; 0: there is none.
      rollout_tables: whether Weights & Biases and trackio get sampled answers as tables; "prompts": one to each prompt.

    Raises:
      ValueError: an optional package is missing, or a new run finds metrics of an old one.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        tensorboard: bool = False,
        wandb_project: str | None = None,
        trackio_project: str | None = None,
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        resumed_step: int | None = None,
        rollouts_mb: float = 0.0,
        rollout_tables: bool | Literal["prompts"] = True,
    ):
        self._rollouts: RolloutsFile | None = None
        self._tables = rollout_tables
        self._sinks: dict[str, _Sink] = {}
        self._reported: set[str] = set()
        if not processes.first():
            return
        require_packages(tensorboard, wandb_project, trackio_project)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / JSONL
        if resumed_step is not None:
            _drop_after(self.path, resumed_step)
        elif self.path.exists() and self.path.stat().st_size > 0:
            if any(line.get("step") != 0 for line in read_metrics(self.path)):
                raise ValueError(f"{self.path} is of another run: resume that one or choose another output folder")
            self.path.unlink()  # of a run that was killed before its first step
        makers: dict[str, Callable[[], _Sink]] = {JSONL: lambda: _JsonlSink(self.path)}
        if tensorboard:
            makers["TensorBoard"] = lambda: _TensorBoardSink(folder / "tensorboard", resumed_step)
        if wandb_project is not None:
            makers["Weights & Biases"] = lambda: _WandbSink(folder, wandb_project, run_name, config, resumed_step)
        if trackio_project is not None:
            makers["trackio"] = lambda: _TrackioSink(folder, trackio_project, run_name, config, resumed_step)
        for name, make in makers.items():
            with self._survived(name):
                self._sinks[name] = make()
        if rollouts_mb:
            with self._survived(ROLLOUTS):
                self._rollouts = RolloutsFile(folder, int(rollouts_mb * 1e6), resumed_step)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Records a line of `step`, the time and `values`, {metric's name: number, string, None, array, or lists and
        dicts of them}, in every logger; only metrics.jsonl gets more than the numbers. step: the number of optimizer
        steps done. Raises ValueError for a value of another kind, but no error of a logger."""
        line = {"step": int(step), "time": round(time.time(), 3)} | {
            key: _plain(value) for key, value in values.items()
        }
        for name, sink in list(self._sinks.items()):
            with self._survived(name):
                sink.log(line)

    def log_rollouts(self, step: int, rows: Sequence[Rollout]) -> None:
        """Records the answers of a generation (display/rollouts.py) in rollouts.jsonl and as tables. step: the first
        that trains on them. Raises no error of a logger."""
        plain = [_plain_texts(row) for row in rows]
        if self._rollouts is not None:
            with self._survived(ROLLOUTS):
                self._rollouts.add(plain)
        if self._tables == "prompts":
            plain = list({json.dumps(row.get("prompt")): row for row in reversed(plain)}.values())[::-1]
        for name, sink in list(self._sinks.items()) if self._tables else ():
            with self._survived(name):
                sink.table(step, plain)

    def close(self) -> None:
        """Closes the loggers that are in use. A failure is only logged. Later, `log` and `close` do nothing."""
        for name, sink in list(self._sinks.items()):
            with self._survived(name):
                sink.close()
        self._sinks, self._rollouts = {}, None

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *exc) -> None:
        """Closes all loggers (`close`), whether or not an exception ended the context."""
        self.close()

    @contextlib.contextmanager
    def _survived(self, name: str) -> Iterator[None]:
        """A context for a call of the logger `name`: an error in it is logged once and not raised, and the logger is
        not called again. The logger of metrics.jsonl is kept."""
        try:
            yield
        except Exception as error:  # no error of a logger may end a run
            if name not in self._reported:
                logger.error("%s failed; training continues without it: %s: %s", name, type(error).__name__, error)
            self._reported.add(name)
            if name != JSONL:
                self._sinks.pop(name, None)


class _Sink:
    """The interface of a logger: one place in which metrics are recorded, such as a file or TensorBoard. `log` records
    one line, and `close` is called once at the end of the run, unless MetricsLogger stopped using it at an error."""

    def log(self, line: dict[str, Any]) -> None:
        """Records a line, {name: JSON value}: `step`, `time` (unix seconds), metrics. MetricsLogger catches errors."""

    def table(self, step: int, rows: Sequence[Rollout]) -> None:
        """Records sampled answers as a table, if the logger has tables. step: the first that trains on them."""

    def close(self) -> None:
        """Finishes writing and closes the logger, if it is in use at the end of the run."""


class _JsonlSink(_Sink):
    """The logger that appends to the metrics.jsonl at `path`; only this one is tried again after an error."""

    def __init__(self, path: Path):
        self._path = path
        self._torn = False  # whether the last line may be incomplete, as after a full disk
        with contextlib.suppress(OSError):  # the first line tries again, and its error is reported
            path.touch()

    def log(self, line: dict[str, Any]) -> None:
        """Appends `line`; OSError if it cannot. After a write that failed, the next call begins a new line first."""
        data = b"\n" * self._torn + json.dumps(line, allow_nan=False).encode() + b"\n"
        with open(self._path, "ab", buffering=0) as file:
            self._torn = True
            if file.write(data) != len(data):
                raise OSError(f"{self._path}: only a part of a line could be written")
        self._torn = False


class _TensorBoardSink(_Sink):
    """The logger that writes TensorBoard's event files in `folder`. resumed_step: the step from which a resumed run
    continues, after which TensorBoard hides what earlier processes wrote; None for a new run."""

    def __init__(self, folder: Path, resumed_step: int | None):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if resumed_step is None else resumed_step + 1)

    def log(self, line: dict[str, Any]) -> None:
        """Writes the numbers of `line` (see `_Sink.log`), at its step and time, as scalars."""
        for key, value in _numbers(line).items():
            self._writer.add_scalar(key, value, line["step"], walltime=line["time"])

    def close(self) -> None:
        """Writes what is not written yet, and closes the event file."""
        self._writer.close()


class _WandbSink(_Sink):
    """The logger for Weights & Biases. folder: the run's, in which the id of the run there is stored, so that a resumed
    run (resumed_step is not None) continues it. project, name: those of the run there; None: the folder's name. config:
    its configuration."""

    def __init__(
        self,
        folder: Path,
        project: str,
        name: str | None,
        config: Mapping[str, Any] | None,
        resumed_step: int | None,
    ):
        import wandb

        id_file = folder / "wandb_run_id"
        run_id = id_file.read_text().strip() if resumed_step is not None and id_file.exists() else None
        self._run = wandb.init(
            project=project,
            name=name or folder.resolve().name,
            dir=str(folder),
            config=dict(config or {}),
            id=run_id,
            resume="allow",
        )
        # A separate axis for steps: wandb's own may only grow, so it would drop the steps that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")
        atomic_write(id_file, self._run.id)

    def log(self, line: dict[str, Any]) -> None:
        """Sends the numbers of `line` to Weights & Biases, with its step as one more metric, not as wandb's step."""
        self._run.log({"step": line["step"], **_numbers(line)})

    def table(self, step: int, rows: Sequence[Rollout]) -> None:
        """Sends the answers as the table "completions", as TRL does."""
        import wandb

        names, cells = _columns(rows)
        self._run.log({"step": step, "completions": wandb.Table(columns=names, data=cells)})

    def close(self) -> None:
        """Ends the run at Weights & Biases, when the training run ends."""
        self._run.finish()


class _TrackioSink(_Sink):
    """The logger for trackio, which stores runs by name in its own folder (TRACKIO_DIR). The arguments mean what those
    of _WandbSink mean. A run's name, stored in the output folder, gets a random ending, so that two runs of one name
    are two."""

    def __init__(
        self,
        folder: Path,
        project: str,
        name: str | None,
        config: Mapping[str, Any] | None,
        resumed_step: int | None,
    ):
        import trackio

        name_file = folder / "trackio_run_name"
        known = resumed_step is not None and name_file.exists()
        name = name_file.read_text().strip() if known else f"{name or folder.resolve().name}-{secrets.token_hex(3)}"
        with contextlib.redirect_stdout(sys.stderr):  # trackio prints lines, and stdout is for results
            self._run = trackio.init(
                project=project,
                name=name,
                config=dict(config or {}),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        atomic_write(name_file, name)

    def log(self, line: dict[str, Any]) -> None:
        """Stores the numbers of `line` (see `_Sink.log`), at its step, in trackio."""
        self._run.log(_numbers(line), step=line["step"])

    def table(self, step: int, rows: Sequence[Rollout]) -> None:
        """Stores the answers as the table "completions", as TRL does."""
        import pandas
        import trackio

        names, cells = _columns(rows)
        self._run.log({"completions": trackio.Table(dataframe=pandas.DataFrame(cells, columns=names))}, step=step)

    def close(self) -> None:
        """Ends the run in trackio."""
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


def require_packages(tensorboard: bool, wandb_project: str | None, trackio_project: str | None) -> None:
    """Imports the loggers' packages: tensorboardX if `tensorboard` is true, wandb and trackio if their project is not
    None. The train command calls it first, and MetricsLogger again. ValueError, with a remedy, if one is missing."""
    if tensorboard:
        _require_package("tensorboardX", "metrics.tensorboard")
    if wandb_project is not None:
        _require_package("wandb", "metrics.wandb_project")
    if trackio_project is not None:
        _require_package("trackio", "metrics.trackio_project")


def _require_package(package: str, key: str) -> None:
    """Imports `package`; raises ValueError, with the config key `key` that needs it, if it is missing."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{key} needs {package} ({error}): pip install {package}, or leave {key} out") from None


def _plain(value: Any) -> Any:
    """A metric as a JSON value: arrays become numbers or lists, NaN and infinities the strings "nan", "inf" and "-inf".
    Raises ValueError for what is no number, text, None, list, mapping or array."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # arrays of numpy and JAX
        return _plain(value.tolist())
    raise ValueError(f"a metric must be a number, string, list or dict, not {type(value).__name__}")


def _plain_texts(row: Rollout) -> Rollout:
    """A sampled answer as JSON values: what is no number, list or dict becomes text."""

    def plain(value: object):
        """`value` as `_plain` makes it, or its text; NaN becomes null."""
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, float) and math.isnan(value):
            return None
        try:
            return _plain(value)
        except ValueError:
            return str(value)

    return json.loads(json.dumps(plain(row)))


def _columns(rows: Sequence[Rollout]) -> tuple[list[str], list[list[object]]]:
    """(names of columns, cells) of a table of sampled answers: rewards and extra values have columns of their own, and
    lists and messages are JSON texts."""
    flat = []
    for row in rows:
        spread = {**row, **row.get("rewards", {}), **row.get("extra", {})}
        flat.append({key: value for key, value in spread.items() if key not in ("rewards", "extra")})
    names = list(dict.fromkeys(key for row in flat for key in row))

    def cell(value: object) -> object:
        """A value as a table shows it."""
        return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value

    return names, [[cell(row.get(name)) for name in names] for row in flat]


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line, without step and time, for loggers that plot; "nan", "inf" and "-inf" become floats."""
    numbers = {}
    for key, value in line.items():
        if value in ("nan", "inf", "-inf"):
            value = float(value)
        if isinstance(value, int | float) and key not in ("step", "time"):
            numbers[key] = value
    return numbers


ROWS = "eval_rows"  # the key of an evaluation's line with Documents.identity of its rows


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of the metrics.jsonl at `path`, as dicts that `parsed` makes, except those for which it returns None.
    OSError without a file. A run and `jaxtune evaluate` find earlier evaluations by it, `loss_plot` the losses."""
    with open(path, "rb") as file:
        return [line for text in file if (line := parsed(text)) is not None]


def parsed(text: bytes) -> dict[str, Any] | None:
    """`text`, a line of a metrics.jsonl, as a dict, with "nan", "inf" and "-inf" as floats (at the top level only);
    None if it is no JSON object with an integer `step`. `read_metrics` and the page of a run read lines by it."""
    with contextlib.suppress(ValueError, RecursionError):
        line = json.loads(text.decode("utf-8", "replace"))
        if isinstance(line, dict) and type(line.get("step")) is int:
            return {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in line.items()}
    return None


def evaluations(path: Path, rows: str) -> dict[int, float]:
    """{step: evaluation loss} from the metrics.jsonl at `path`, of evaluations of the rows `rows` (Documents.identity)
    or of unnamed ones; {} without a file. For results.json, and to see if a run that is complete lacks the last one."""
    lines = read_metrics(path) if path.exists() else []
    return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line and line.get(ROWS, rows) == rows}


def _drop_after(path: Path, last_step: int) -> None:
    """Removes lines of steps after `last_step`, and unreadable ones, from the file `path`, if any, for a resume."""
    if not path.exists():
        return
    kept = [line for line in read_metrics(path) if line["step"] <= last_step]
    atomic_write(path, "".join(json.dumps(_plain(line)) + "\n" for line in kept))


# ---- the progress bar


def duration(seconds: float) -> str:
    """`seconds`, rounded, as text: 1:05, or 2:03:04 from an hour on. `Progress` (time left) and finish_line show it."""
    minutes, seconds_left = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


class Progress:
    """A live progress bar on a terminal, within its use as a context; elsewhere plain lines of steps, at most one in
    `line_seconds`, and always the last step. `update` shows a step, `compiling` and `evaluating` what is between steps.

    Args:
      total_steps, start_step: the steps of the whole run, and those done before a resume.
      line_seconds: without a terminal, the least number of seconds between two lines.
      console: the rich Console to print on; None: that of stderr.
    """

    def __init__(self, total_steps: int, start_step: int = 0, line_seconds: float = 5.0, console: Any = None):
        self.total_steps = total_steps
        self.console = console if console is not None else terminal.console(stderr=True)
        self._line_seconds = line_seconds
        self._first: tuple[int, float] | None = None  # step and time, after compiling, from which the speed is counted
        self._last_line_seconds = self._evaluating_since = -math.inf
        self._live: Any = None
        if self.console.is_terminal:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn("{task.fields[left]}"),
                console=self.console,
            )
            self._task = self._bar.add_task("step", total=total_steps, completed=start_step, left="")

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            from rich.live import Live

            self._live = Live(self._bar, console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *exc) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """A context for compiling the step, whose time does not count in the estimate of the time left. The bar shows
        only the time so far (it depends on what is cached); without a bar, a line before and after it is printed."""
        started = time.monotonic()
        if self._live is None:
            self.print("compiling")
        else:
            self._bar.update(self._task, description="compiling")
        try:
            yield
        finally:
            self._first = None
            if self._live is not None:
                self._bar.update(self._task, description="step")
        if self._live is None:
            self.print(f"compiled in {time.monotonic() - started:.1f} s")

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        learning_rate: float | None = None,
        grad_norm: float | None = None,
        tokens_per_second: float | None = None,
        memory_bytes: int | None = None,
        reward: float | None = None,
        all_equal: bool = False,
    ) -> None:
        """Shows the Monitor's numbers of a step that are not None: loss, reward (of the latest generation),
        learning_rate, grad_norm (of the gradient), tokens_per_second, memory_bytes (the peak of device memory), and the
        estimated time left. `step`: steps done. all_equal: the rewards differ in no group, so nothing is learnt."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        parts = [
            None if loss is None else f"loss {loss:.4f}",
            None if reward is None else f"reward {reward:.3f}" + (" (equal in each group)" if all_equal else ""),
            None if learning_rate is None else f"lr {learning_rate:.2e}",
            None if grad_norm is None else f"grad norm {grad_norm:.3f}",
            None if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s",
            None if memory_bytes is None else f"memory {memory_bytes / 1e9:.2f} GB",
        ]
        text = "  ".join(part for part in parts if part is not None)
        seconds_left = self._seconds_left(step, now)
        left = "" if seconds_left is None else f"{duration(seconds_left)} left"
        if self._live is not None:
            from rich.console import Group
            from rich.text import Text

            self._bar.update(self._task, completed=step, left=left)
            self._live.update(Group(self._bar, Text(text)))
        elif now - self._last_line_seconds >= self._line_seconds or step >= self.total_steps:
            self._last_line_seconds = now
            self.print(f"step {step}/{self.total_steps}  {text}  {left}".rstrip())

    def evaluating(self, done: int, batches: int) -> None:
        """Shows that `done` of an evaluation's `batches` batches are done. If all are, the bar shows steps again.
        Without a bar (off a terminal, and in `jaxtune evaluate`, which does not enter the context) it prints a line at
        most each `line_seconds`, the first after that time, none at the end."""
        if self._live is not None:
            text = "step" if done == batches else f"evaluating {done}/{batches}"
            self._bar.update(self._task, description=text)
            return
        now = time.monotonic()
        if done == 1:
            self._evaluating_since = now
        if now - max(self._last_line_seconds, self._evaluating_since) >= self._line_seconds and done < batches:
            self._last_line_seconds = now
            self.print(f"evaluating: {done} of {batches} batches")

    def print(self, text: str) -> None:
        """Prints the line `text`, above the bar on a terminal, which breaks it at spaces only; it is never cut or
        coloured. The notes of a run and of its Monitor are printed by it."""
        self.console.print(terminal.plain(terminal.fitted(text, self.console)), soft_wrap=True)

    def _seconds_left(self, step: int, now: float) -> float | None:
        """Estimates the seconds until the last step, when `step` steps are done at the time `now` (time.monotonic()).
        It divides the time since the first `update` after compiling, evaluations and saves included, by the steps since
        then; None up to that `update`."""
        first_step, first_seconds = self._first or (step, now)
        if step <= first_step:
            return None
        return (now - first_seconds) / (step - first_step) * max(self.total_steps - step, 0)


# ---- plot


def loss_plot(folder: Path, unit: str) -> None:
    """Draws the finite losses in a folder's metrics.jsonl into its loss.png, at a run's end: of logged steps (if 50 or
    more, with a moving average), and of evaluations. unit: what they are means over (Objective.unit). Raises ValueError
    if there is none, ImportError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"it needs matplotlib ({error}): pip install matplotlib, or see jaxtune report") from None
    lines = read_metrics(folder / JSONL)

    def series(key: str) -> list[tuple[int, float]]:
        """(step, value) of the lines with a finite number for this key."""
        found = [(line["step"], line[key]) for line in lines if isinstance(line.get(key), int | float)]
        return [(step, value) for step, value in found if math.isfinite(value)]

    train, evaluation = series("loss"), series("eval_loss")
    if not train and not evaluation:
        raise ValueError(f"{folder / JSONL} has no finite loss to plot")
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    meant = "nats per token" if unit == "targets" else f"mean over {unit.replace('_', ' ')}"
    axes = figure.add_subplot(xlabel="optimizer step", ylabel=f"loss ({meant})")
    if train:
        steps, losses = zip(*train)
        window = len(losses) // 25 // 2 * 2 + 1
        smooth = window > 1
        axes.plot(steps, losses, color="tab:blue", alpha=0.25 if smooth else 1.0, linewidth=1, label="training loss")
        if smooth:
            axes.plot(steps, _moving_average(losses, window), color="tab:blue", label=f"mean of {window} steps")
    if evaluation:
        steps, losses = zip(*evaluation)
        axes.plot(steps, losses, "o--", color="tab:red", markersize=5, linewidth=1, label="evaluation loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.png")


def decorate(what: str, make: Callable[[], Any]) -> None:
    """Calls `make`, which makes something that a run can do without: loss.png or a profile. An error is logged and not
    raised, so that the run continues. what: the name of that thing, for the log."""
    try:
        make()
    except Exception as error:
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        logger.warning("%s was left out: %s%s", what, kind, error)


def _moving_average(values: tuple[float, ...], window: int) -> list[float]:
    """Means of each value and its neighbours, `window` (odd) in all, fewer at the ends, which `loss_plot` draws."""
    half = window // 2
    around = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in around]
