"""Metrics of a run: metrics.jsonl and other loggers, the progress bar and the plot of the loss.

A line of metrics.jsonl has `step` (steps done), `time` (unix seconds) and metrics such as `loss` and `eval_loss`.
loop/monitor.py says how speeds are counted.
"""

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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxtune.system import processes, terminal
from jaxtune.system.extras import install
from jaxtune.system.files import atomic_write
from jaxtune.train.log.rollouts import ROLLOUTS, RolloutsFile

if TYPE_CHECKING:
    from jaxtune.train.data.batches import Rollout

logger = logging.getLogger(__name__)

JSONL = "metrics.jsonl"


# ---- loggers


_LOGGERS_SECONDS = 10.0  # that a save or an evaluation waits for loggers behind a network


class MetricsLogger:
    """Appends metrics to `folder`/metrics.jsonl, and to TensorBoard, Weights & Biases and trackio if asked.

    A thread writes, in order, so that no step waits for a disk; `flush` waits for it. NaN and infinities are written as
    "nan", "inf" and "-inf". A logger that fails is reported once and left out, but the file is tried again. Only the
    first process of a run records. ValueError: a package is missing, or a new run finds metrics of an old one.

    Args:
      wandb_project, trackio_project: None: not logged there. A resumed run continues its own.
      run_name: None: the folder's.
      config: JSON-able, for these two.
      resumed_step: later lines are dropped; None: a new run.
      rollouts_mb: the largest size of `folder`/rollouts.jsonl; 0: there is none.
      rollout_tables: whether these two get sampled answers as tables; "prompts": one to each prompt.
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
        # metrics.jsonl and rollouts.jsonl never wait for a logger behind a network
        self._writers = {of: ThreadPoolExecutor(1, f"metrics of {of}") for of in ("files", "loggers")}
        self._latest: dict[str, Future[object]] = {}
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
        sink_makers: dict[str, Callable[[], _Sink]] = {JSONL: lambda: _JsonlSink(self.path)}
        if tensorboard:
            sink_makers["TensorBoard"] = lambda: _TensorBoardSink(folder / "tensorboard", resumed_step)
        if wandb_project is not None:
            sink_makers["Weights & Biases"] = lambda: _WandbSink(folder, wandb_project, run_name, config, resumed_step)
        if trackio_project is not None:
            sink_makers["trackio"] = lambda: _TrackioSink(folder, trackio_project, run_name, config, resumed_step)
        for name, make in sink_makers.items():
            with self._survived(name):
                self._sinks[name] = make()
        if rollouts_mb:
            with self._survived(ROLLOUTS):
                self._rollouts = RolloutsFile(folder, int(rollouts_mb * 1e6), resumed_step)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Records a line in every logger; only metrics.jsonl gets more than the numbers. Raises no error of a logger.

        values: numbers, strings, None, arrays, or lists and dicts of them; else ValueError.
        """
        line = {"step": int(step), "time": round(time.time(), 3)} | {
            key: _plain(value) for key, value in values.items()
        }
        self._write("files", lambda: self._each(lambda sink: sink.log(line), files=True))
        self._write("loggers", lambda: self._each(lambda sink: sink.log(line), files=False))

    def log_rollouts(self, step: int, rows: Sequence[Rollout]) -> None:
        """Records a generation's answers, which train first in `step`, in rollouts.jsonl and as tables."""
        plain = [_plain_texts(row) for row in rows]
        shown = plain
        if self._tables == "prompts":
            shown = list({json.dumps(row.get("prompt")): row for row in reversed(plain)}.values())[::-1]

        def write() -> None:
            if self._rollouts is not None:
                with self._survived(ROLLOUTS):
                    self._rollouts.add(plain)

        self._write("files", write)
        if self._tables:
            self._write("loggers", lambda: self._each(lambda sink: sink.table(step, shown), files=False))

    def flush(self, seconds: float | None = None) -> None:
        """Waits until files are written, at most so long, and ten seconds for other loggers."""
        for of, limit in (("files", seconds), ("loggers", min(seconds or _LOGGERS_SECONDS, _LOGGERS_SECONDS))):
            if of in self._latest:
                wait([self._latest[of]], limit)

    def close(self, seconds: float | None = None) -> None:
        """Closes the loggers after `flush`; later `log` and `close` do nothing."""
        self.flush(seconds)
        for writer in self._writers.values():
            writer.shutdown(wait=False)
        for files in (True, False):
            self._each(lambda sink: sink.close(), files)
        self._sinks, self._rollouts = {}, None

    def _write(self, of: str, write: Callable[[], object]) -> None:
        if self._sinks or self._rollouts is not None:
            self._latest[of] = self._writers[of].submit(write)

    def _each(self, act: Callable[[_Sink], None], files: bool) -> None:
        for name, sink in list(self._sinks.items()):
            if (name == JSONL) == files:
                with self._survived(name):
                    act(sink)

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    @contextlib.contextmanager
    def _survived(self, name: str) -> Iterator[None]:
        """Logs an error of the logger `name` once, and stops using it, unless it is metrics.jsonl."""
        try:
            yield
        except Exception as error:  # no error of a logger may end a run
            if name not in self._reported:
                logger.error("%s failed; training continues without it: %s: %s", name, type(error).__name__, error)
            self._reported.add(name)
            if name != JSONL:
                self._sinks.pop(name, None)


class _Sink:
    """One place in which metrics are recorded. After an error, which MetricsLogger catches, it is not called again."""

    def log(self, line: dict[str, Any]) -> None:
        """Records a line of `step`, `time` and metrics, all JSON values."""

    def table(self, step: int, rows: Sequence[Rollout]) -> None:
        """Records sampled answers, which train first in `step`, if it has tables."""

    def close(self) -> None:
        """Called once at the end of the run."""


class _JsonlSink(_Sink):
    def __init__(self, path: Path):
        self._path = path
        self._torn = False  # whether the last line may be incomplete, as after a full disk
        with contextlib.suppress(OSError):  # the first line tries again, and its error is reported
            path.touch()

    def log(self, line: dict[str, Any]) -> None:
        """Appends a line; after a write that failed, the next call begins a new line first."""
        data = b"\n" * self._torn + json.dumps(line, allow_nan=False).encode() + b"\n"
        with open(self._path, "ab", buffering=0) as file:
            self._torn = True
            if file.write(data) != len(data):
                raise OSError(f"{self._path}: only a part of a line could be written")
        self._torn = False


class _TensorBoardSink(_Sink):
    """TensorBoard's event files; after resumed_step it hides what earlier processes wrote."""

    def __init__(self, folder: Path, resumed_step: int | None):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if resumed_step is None else resumed_step + 1)

    def log(self, line: dict[str, Any]) -> None:
        for key, value in _numbers(line).items():
            self._writer.add_scalar(key, value, line["step"], walltime=line["time"])

    def close(self) -> None:
        self._writer.close()


class _WandbSink(_Sink):
    """Weights & Biases; a resumed run continues the run whose id `folder` has."""

    def __init__(
        self, folder: Path, project: str, name: str | None, config: Mapping[str, Any] | None, resumed_step: int | None
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
        self._run.log({"step": line["step"], **_numbers(line)})

    def table(self, step: int, rows: Sequence[Rollout]) -> None:
        import wandb

        names, cells = _columns(rows)
        self._run.log({"step": step, "completions": wandb.Table(columns=names, data=cells)})

    def close(self) -> None:
        self._run.finish()


class _TrackioSink(_Sink):
    """trackio, which knows runs by name: names get a random ending, so that two folders of one name are two runs."""

    def __init__(
        self, folder: Path, project: str, name: str | None, config: Mapping[str, Any] | None, resumed_step: int | None
    ):
        import trackio

        name_file = folder / "trackio_run_name"
        is_continued = resumed_step is not None and name_file.exists()
        name = (
            name_file.read_text().strip() if is_continued else f"{name or folder.resolve().name}-{secrets.token_hex(3)}"
        )
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
        self._run.log(_numbers(line), step=line["step"])

    def table(self, step: int, rows: Sequence[Rollout]) -> None:
        import pandas
        import trackio

        names, cells = _columns(rows)
        self._run.log({"completions": trackio.Table(dataframe=pandas.DataFrame(cells, columns=names))}, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


def require_packages(tensorboard: bool, wandb_project: str | None, trackio_project: str | None) -> None:
    """Imports the packages of the loggers that are asked for; ValueError, with a remedy, if one is missing.
    wandb_project, trackio_project: None: the logger is not used.
    """
    if tensorboard:
        _require_package("tensorboardX", "tensorboard", "metrics.tensorboard")
    if wandb_project is not None:
        _require_package("wandb", "wandb", "metrics.wandb_project")
    if trackio_project is not None:
        _require_package("trackio", "trackio", "metrics.trackio_project")


def _require_package(package: str, extra: str, key: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{key} needs {package} ({error}): {install(extra)}; or leave {key} out") from None


def _plain(value: Any) -> Any:
    """A metric as a JSON value: arrays become numbers or lists, NaN and infinities strings; else ValueError."""
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
    """(names, cells) of a table of sampled answers, with columns for rewards and extra values; lists are JSON texts."""
    flat = []
    for row in rows:
        spread = {**row, **row.get("rewards", {}), **row.get("extra", {})}
        flat.append({key: value for key, value in spread.items() if key not in ("rewards", "extra")})
    names = list(dict.fromkeys(key for row in flat for key in row))

    def cell(value: object) -> object:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value

    return names, [[cell(row.get(name)) for name in names] for row in flat]


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line without step and time; "nan", "inf" and "-inf" are floats."""
    numbers = {}
    for key, value in line.items():
        if value in ("nan", "inf", "-inf"):
            value = float(value)
        if isinstance(value, int | float) and key not in ("step", "time"):
            numbers[key] = value
    return numbers


ROWS = "eval_rows"  # the key of an evaluation's line with Documents.identity of its rows


def of_rows(values: Mapping[str, Any], rows: str | None) -> bool:
    """Whether an evaluation is of these held-out rows (Documents.identity). Older versions did not name them."""
    return values.get(ROWS, rows) == rows


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Readable lines of a metrics.jsonl, as `parsed` makes them; OSError without a file."""
    with open(path, "rb") as file:
        return [line for text in file if (line := parsed(text)) is not None]


def parsed(text: bytes) -> dict[str, Any] | None:
    """A line of a metrics.jsonl as a dict, with "nan", "inf" and "-inf" as floats at the top; None if it is damaged."""
    with contextlib.suppress(ValueError, RecursionError):
        line = json.loads(text.decode("utf-8", "replace"))
        if isinstance(line, dict) and type(line.get("step")) is int:
            return {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in line.items()}
    return None


def evaluations(path: Path, rows: str | None, name: str = "eval_loss") -> dict[int, float]:
    """{step: value of a metric} of these rows (Documents.identity) or of unnamed ones; {} without a file."""
    lines = read_metrics(path) if path.exists() else []
    return {line["step"]: float(line[name]) for line in lines if name in line and of_rows(line, rows)}


def _drop_after(path: Path, last_step: int) -> None:
    """Removes lines of later steps, and unreadable ones, for a resume."""
    if not path.exists():
        return
    remaining_lines = [line for line in read_metrics(path) if line["step"] <= last_step]
    atomic_write(path, "".join(json.dumps(_plain(line)) + "\n" for line in remaining_lines))


# ---- the progress bar


def duration(seconds: float) -> str:
    """Seconds as 1:05, or 2:03:04 from an hour on."""
    minutes, seconds_left = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


class Progress:
    """A live progress bar on a terminal, while it is a context; elsewhere lines of steps, at most one in
    `line_seconds`, and the last step.

    Args:
      start_step: the steps done before a resume.
      console: to print on; None: stderr.
    """

    def __init__(self, total_steps: int, start_step: int = 0, line_seconds: float = 2.5, console: Any = None):
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
        """Compiling the step, whose time does not count in the time left."""
        start_time = time.monotonic()
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
            self.print(f"compiled in {time.monotonic() - start_time:.1f} s")

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
        """Shows the numbers of a step that are not None, and the estimated time left.

        step: steps done.
        memory_bytes: the peak on the device.
        reward: of the latest generation.
        all_equal: the rewards differ in no group, so nothing is learnt.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        words = [
            None if loss is None else f"loss {loss:.4f}",
            None if reward is None else f"reward {reward:.3f}" + (" (equal in each group)" if all_equal else ""),
            None if learning_rate is None else f"lr {learning_rate:.2e}",
            None if grad_norm is None else f"grad norm {grad_norm:.3f}",
            None if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s",
            None if memory_bytes is None else f"memory {memory_bytes / 1e9:.2f} GB",
        ]
        text = "  ".join(word for word in words if word is not None)
        seconds_left = self._seconds_left(step, now)
        time_left = "" if seconds_left is None else f"{duration(seconds_left)} left"
        if self._live is not None:
            from rich.console import Group
            from rich.text import Text

            self._bar.update(self._task, completed=step, left=time_left)
            self._live.update(Group(self._bar, Text(text)))
        elif now - self._last_line_seconds >= self._line_seconds or step >= self.total_steps:
            self._last_line_seconds = now
            self.print(f"step {step}/{self.total_steps}  {text}  {time_left}".rstrip())

    def evaluating(self, batches_done: int, batches: int) -> None:
        """Shows that `batches_done` of an evaluation's batches are done; without a bar at most each `line_seconds`."""
        if self._live is not None:
            text = "step" if batches_done == batches else f"evaluating {batches_done}/{batches}"
            self._bar.update(self._task, description=text)
            return
        now = time.monotonic()
        if batches_done == 1:
            self._evaluating_since = now
        if now - max(self._last_line_seconds, self._evaluating_since) >= self._line_seconds and batches_done < batches:
            self._last_line_seconds = now
            self.print(f"evaluating: {batches_done} of {batches} batches")

    def print(self, text: str) -> None:
        """Prints a line above the bar; a terminal breaks it at spaces only, and it is never cut or coloured."""
        self.console.print(terminal.plain(terminal.fitted(terminal.reworded(text), self.console)), soft_wrap=True)

    def _seconds_left(self, step: int, now: float) -> float | None:
        """An estimate from all time, evaluations and saves too, since the first `update` after compiling; None
        before.
        """
        first_step, first_seconds = self._first or (step, now)
        if step <= first_step:
            return None
        return (now - first_seconds) / (step - first_step) * max(self.total_steps - step, 0)


# ---- plot


def loss_plot(folder: Path, unit: str) -> None:
    """Draws a folder's losses into its loss.png, if matplotlib is installed; ValueError without a finite loss.

    unit: what they are means over (Objective.unit).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return  # an extra; jaxtune report draws the same
    lines = read_metrics(folder / JSONL)

    def series(key: str) -> list[tuple[int, float]]:
        points = [(line["step"], line[key]) for line in lines if isinstance(line.get(key), int | float)]
        return [(step, value) for step, value in points if math.isfinite(value)]

    train, evaluation = series("loss"), series("eval_loss")
    if not train and not evaluation:
        raise ValueError(f"{folder / JSONL} has no finite loss to plot")
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    unit_label = "nats per token" if unit == "targets" else f"mean over {unit.replace('_', ' ')}"
    axes = figure.add_subplot(xlabel="optimizer step", ylabel=f"loss ({unit_label})")
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


def try_optional(name: str, make: Callable[[], Any]) -> None:
    """Calls `make`, which makes something that a run can do without: an error is only logged, with its name `name`."""
    try:
        make()
    except Exception as error:
        logger.warning("%s was left out: %s: %s", name, type(error).__name__, error)


def _moving_average(values: tuple[float, ...], window: int) -> list[float]:
    """Means of `window` (odd) neighbours, fewer at the ends."""
    half = window // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(neighbours) / len(neighbours) for neighbours in windows]
