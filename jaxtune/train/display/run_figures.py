"""The figures of a run that its page shows, read from the run's folder, as one JSON object: `RunFiles.page` returns it.
`jaxtune report` and `jaxtune watch` make their pages of it. `Figures` collects the lines of metrics.jsonl, a `Curve`
has the values of one metric, and `thinned` makes a long curve short enough to draw."""

from __future__ import annotations

import array
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from jaxtune.train.display import metrics as m
from jaxtune.train.display.rollouts import ROLLOUTS, latest
from jaxtune.train.folder.run_folder import CONFIG, RESULTS, STATE
from jaxtune.train.folder.run_state import RunState, read_state

JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]

_MOST_ROLLOUTS, _MOST_SHOWN = 32, 1000  # sampled answers of the latest generation, and characters of each
MOST_POINTS = 600  # of a line; a longer one is drawn by the means and the extremes of as many intervals

# Numbers of a line of metrics.jsonl that are no curve of their own, and the units that a step's loss is a mean over
# (Objective.unit).
_NOT_DRAWN = {"step", "time", "steps", "epoch", "skipped", "rows", "answers", "seconds", "mfu"}
_NOT_DRAWN |= {"targets", "pairs", "examples"}
_NOT_DRAWN_ENDS = ("_seconds", "_tokens", "_per_second", "_memory_bytes")
# Curves in the order of the page, each with its title, unit and factor; the run's other metrics come after them.
_FIRST = {
    "loss": ("loss", "", 1.0),
    "reward": ("reward", "", 1.0),
    "grad_norm": ("gradient norm", "", 1.0),
    "learning_rate": ("learning rate", "", 1.0),
    "tokens_per_second": ("speed", "tokens/s", 1.0),
    "peak_memory_bytes": ("peak memory", "GB", 1e-9),
}
_FROM_ZERO = {"tokens_per_second", "peak_memory_bytes"}
_EVALUATED = "eval_"


@dataclasses.dataclass
class Curve:
    """The values of one metric over the steps of a run; `steps` (int64) and `values` (float64) are two arrays of equal
    length. Charts are drawn of it, and the main results are read from it."""

    steps: array.array = dataclasses.field(default_factory=lambda: array.array("q"))
    values: array.array = dataclasses.field(default_factory=lambda: array.array("d"))

    def add(self, step: int, value: float) -> None:
        """Appends the point (step, value): `Figures.add` one of the training steps, `_charts` one of an evaluation."""
        self.steps.append(step)
        self.values.append(value)


class Figures:
    """The content of a metrics.jsonl that a run's page shows: the curve of each metric, the evaluations, the plan, and
    sums such as the wall time. It is made empty, and `add` adds one line of the file.

    Only curves and sums are kept, because all lines of a long run would fill the memory.

    Attributes:
      curves: {key of a drawn metric: its Curve}, apart from those of evaluations.
      evaluations: (step, identity of the rows or "", {name of a drawn metric without the prefix "eval_": value}) of
        each evaluation.
      plan: the plan in force, in words, a list of lines: of a run that was resumed, or ran out of memory, the last of
        several.
      step: the number of steps done, by the last line.
      seconds: the wall time of the run's steps and pauses, without the time between a kill and its resume.
      step_seconds: the wall time of its steps alone.
      steps_timed: the number of steps that `step_seconds` counts.
      skipped: the number of updates that were skipped because they were not finite.
    """

    def __init__(self):
        self.curves: dict[str, Curve] = {}
        self.evaluations: list[tuple[int, str, dict[str, float]]] = []
        self.plan: list[str] = []
        self.step = 0
        self.seconds = 0.0
        self.step_seconds = 0.0
        self.steps_timed = 0
        self.skipped = 0.0

    def add(self, line: JsonMapping) -> None:
        """Adds one line of metrics.jsonl, as metrics.parsed returns it: of steps, an evaluation or a pause. Numbers of
        drawn metrics are appended to their curves, those named eval_... to `evaluations`; other values, such as texts,
        are in no curve. The sums, `step` and `plan` are updated. `RunFiles` calls it for each line of the file once."""
        self.step = line["step"]
        self.seconds += _wall_seconds(line)
        steps = line.get("steps", 1)
        if _is_number(line.get("step_seconds")) and _is_number(steps):
            self.step_seconds += line["step_seconds"] * steps
            self.steps_timed += int(steps)
        if isinstance(line.get("plan"), list) and line["plan"]:
            self.plan = [str(text) for text in line["plan"]]
        if _is_number(line.get("skipped")):
            self.skipped = line["skipped"]
        numbers = {key: float(value) for key, value in line.items() if _is_number(value)}
        evaluated = {key.removeprefix(_EVALUATED): numbers.pop(key) for key in [*numbers] if key.startswith(_EVALUATED)}
        if evaluated := {key: value for key, value in evaluated.items() if _is_drawn(key)}:
            self.evaluations.append((self.step, str(line.get(m.ROWS, "")), evaluated))
        for key, value in numbers.items():
            if _is_drawn(key):
                self.curves.setdefault(key, Curve()).add(self.step, value)

    def comparable_evaluations(self) -> list[tuple[int, dict[str, float]]]:
        """(step, {metric's name: value}) of the evaluations of the same rows as the last evaluation's, and of those
        whose lines do not say which rows they had. Evaluations of other rows cannot be compared with these. The charts
        and the main results have only these."""
        last = self.evaluations[-1][1] if self.evaluations else ""
        return [(step, numbers) for step, rows, numbers in self.evaluations if rows in ("", last)]


class RunFiles:
    """Reads the figures of the run in `folder` for its page. The object is kept between requests of a page that shows a
    running run, so that a later call of `page` reads only the lines that were added to metrics.jsonl since."""

    def __init__(self, folder: Path):
        """Reads nothing yet; `page` does. folder: the run's, which may not exist yet."""
        self.folder = folder
        self._figures = Figures()
        self._file, self._read = (0, 0), 0  # device and inode of metrics.jsonl, bytes of whole lines read
        self._seen: Any = None
        self._page: JsonObject = {}

    def page(self) -> JsonObject:
        """What the page shows of the run, as the JSON object that `_page` makes: its name, state, steps done, main
        results ("facts"), plan, charts, samples of answers and settings. While the run's state and files (metrics,
        results, config) have not changed, it is the same object as at the last call, so that a server that is asked
        every two seconds computes nothing.

        Raises:
          ValueError: the folder has no metrics.jsonl.
        """
        path = self.folder / m.JSONL
        if not path.is_file():
            raise ValueError(f"{self.folder} is not a run's folder: there is no {m.JSONL} in it")
        state = read_state(self.folder)
        seen = (state, *(_identity(self.folder / name) for name in (m.JSONL, RESULTS, CONFIG, STATE, ROLLOUTS)))
        if seen != self._seen:
            self._read_lines(path)
            self._page, self._seen = _page(self.folder, self._figures, state), seen
        return self._page

    def _read_lines(self, path: Path) -> None:
        """Adds to the figures the lines that the metrics.jsonl at `path` got since the last call; lines that cannot be
        read are left out. If the file was replaced by another, as a resume does, or became shorter, all of its lines
        are read into new figures. A last line without its line end, which the run is writing, is left for the next
        call."""
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._file or status.st_size < self._read:  # a resumed run has replaced the file
                self._figures, self._read, self._file = Figures(), 0, identity
            file.seek(self._read)
            *whole, _ = file.read().split(b"\n")
        self._read += sum(len(text) + 1 for text in whole)
        for text in whole:
            if (line := m.parsed(text)) is not None:
                self._figures.add(line)


def _identity(path: Path) -> Any:
    """A value that changes when the file at `path` does (inode, size and time of its last change); None if the file is
    missing. `RunFiles.page` computes nothing while it is the same for all files of the run."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _page(folder: Path, figures: Figures, state: RunState) -> JsonObject:
    """The JSON object of one run that page.js draws: {"name", "folder", "state", "why" (see RunState), "step": steps
    done, "total": steps of the run or None, "left": time left in words or "", "facts": main results, "plan": lines,
    "charts", "samples" of answers, "rollouts": the latest, "settings": {key: value} of those that differ from the
    defaults, "config": the text of config.yaml}.

    Args:
      folder: the run's folder.
      figures: what its metrics.jsonl contains.
      state: whether the run is running or how it ended, as read_state returns it.
    """
    results, settings = _json(folder / RESULTS), _settings(folder / CONFIG)
    name = json.loads(settings.get("metrics.run_name", "null"))
    return {
        "name": str(name or folder.resolve().name),
        "folder": str(folder.resolve()),
        "state": state.name,
        "why": state.why,
        "step": figures.step,
        "total": state.total_steps,
        "left": _seconds_left(figures, state),
        "facts": _facts(figures, results),
        "plan": figures.plan,
        "charts": _charts(figures),
        "samples": _samples(results),
        "rollouts": _rollouts(folder),
        "settings": settings,
        "config": _read(folder / CONFIG),
    }


def _seconds_left(figures: Figures, state: RunState) -> str:
    """The estimated time left of a run in words, for its page (a terminal shows the estimate of `metrics.Progress`), by
    the mean time of a step in `figures` and the total steps in `state`; "" if the run is not running, or its end or
    speed is not known."""
    if state.name != "running" or state.total_steps is None or not figures.steps_timed:
        return ""
    left = (state.total_steps - figures.step) * figures.step_seconds / figures.steps_timed
    return _in_words(left) if math.isfinite(left) and left >= 0 else ""


def _charts(figures: Figures) -> list[JsonObject]:
    """The charts of a run's `figures`, in the order of the page, one for each metric that has a finite value. Each is
    {"key": the metric's name, "title", "unit", "zero": whether its axis begins at 0, "line": the curve of the training
    steps, "dots": the values of the comparable evaluations (comparable_evaluations) for the same metric}; the last two
    have the form that `thinned` returns."""
    evaluations = figures.comparable_evaluations()
    dotted: dict[str, Curve] = {}
    for step, numbers in evaluations:
        for key, value in numbers.items():
            dotted.setdefault(key, Curve()).add(step, value)
    own = [key for key in (figures.curves | dotted) if key not in _FIRST]
    charts = []
    for key in (*_FIRST, *own):
        title, unit, factor = _FIRST.get(key, (key.replace("_", " "), "", 1.0))
        line, dots = (thinned(found.get(key, Curve()), factor) for found in (figures.curves, dotted))
        if line["x"] or dots["x"]:
            from_zero = key in _FROM_ZERO
            charts.append({"key": key, "title": title, "unit": unit, "zero": from_zero, "line": line, "dots": dots})
    return charts


def thinned(curve: Curve, factor: float = 1.0) -> dict[str, list[float]]:
    """The finite points of a curve, as a chart draws them: {"x": steps, "y": values}. Of more than MOST_POINTS (600)
    points, which a browser would draw slowly, it makes at most that many intervals: "x" has the last step of each, "y"
    its mean, and two more lists, "low" and "high", its smallest and largest value.

    Args:
      curve: the curve.
      factor: multiplies the values, to convert their unit.
    """
    points = [
        (step, value * factor)
        for step, value in zip(curve.steps, curve.values, strict=True)
        if math.isfinite(value * factor)
    ]
    if len(points) <= MOST_POINTS:
        return {"x": [step for step, _ in points], "y": [_short(value) for _, value in points]}
    each = -(-len(points) // MOST_POINTS)
    found: dict[str, list[float]] = {"x": [], "y": [], "low": [], "high": []}
    for interval in itertools.batched(points, each):
        values = [value for _, value in interval]
        found["x"].append(interval[-1][0])
        found["y"].append(_short(statistics.fmean(values)))
        found["low"].append(_short(min(values)))
        found["high"].append(_short(max(values)))
    return found


def _short(value: float) -> float:
    """`value` rounded to six significant digits, as a chart's point shows it, which keeps the page small. NaN and
    infinities stay as they are."""
    return float(f"{value:.6g}")


def _facts(figures: Figures, results: JsonMapping) -> list[list[str]]:
    """The main results of a run, which the page shows, a list of [name, value in words]: steps and wall time ("-" if it
    is not finite); then those that are known of the first and last losses, exact match, the median speed and the
    highest peak memory; and skipped updates, if there are any. figures: the content of metrics.jsonl. results: the
    content of results.json."""
    facts = [["steps", f"{figures.step:,}"]]
    facts.append(["time", _in_words(figures.seconds) if math.isfinite(figures.seconds) else "-"])
    losses = figures.curves.get("loss", Curve()).values
    evaluated = [numbers["loss"] for _, numbers in figures.comparable_evaluations() if "loss" in numbers]
    for name, values in (("training loss", losses), ("evaluation loss", evaluated)):
        if values:
            last = f" to {values[-1]:.4f}" if len(values) > 1 else ""
            facts.append([name, f"{values[0]:.4f}{last}"])
    for when in ("before", "after"):
        if (score := _exact_match(results, when)) is not None:
            rows = results[when].get("rows")
            facts.append(
                [f"exact match {when} training", f"{100 * score:.1f} %" + (f" of {rows:,}" if _is_number(rows) else "")]
            )
    if speeds := figures.curves.get("tokens_per_second", Curve()).values:
        facts.append(["speed, median", f"{statistics.median(speeds):,.0f} tokens/s"])
    if peaks := figures.curves.get("peak_memory_bytes", Curve()).values:
        facts.append(["peak memory", f"{1e-9 * max(peaks):.2f} GB"])
    if figures.skipped:
        facts.append(["updates skipped, as they were not finite", f"{figures.skipped:.0f}"])
    return facts


def _in_words(seconds: float) -> str:
    """A time of `seconds`, which must be finite, in words, for the page: 17 s, 1 min 6 s; from an hour on without
    seconds: 13 h 53 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def _exact_match(results: JsonMapping, when: str) -> float | None:
    """The share of right answers, 0 to 1, that `results`, the content of results.json, has for `when`, "before" or
    "after" training; None if it was not measured. `_facts` contains it."""
    found = results.get(when)
    return float(found["exact_match"]) if isinstance(found, dict) and _is_number(found.get("exact_match")) else None


def _samples(results: JsonMapping) -> list[dict[str, str]]:
    """Held-out questions with the expected answer and the model's, from `results`, the content of results.json: a list
    of {"question", "expected", "before": the answer before training, "given": the one after it}, one for each question
    that was sampled before or after training; "" for an answer that is not there."""
    before, after = (
        {sample["question"]: sample for sample in _asked(results.get(when))} for when in ("before", "after")
    )
    found = []
    for question, sample in (before | after).items():
        answers = ((before, "before"), (after, "given"))
        found.append(sample | {name: samples.get(question, {}).get("given", "") for samples, name in answers})
    return found


def _rollouts(folder: Path) -> list[JsonObject]:
    """The answers of the latest generation that the page shows: [{"step", "prompt", "answer", "rewards": texts "name
    number", "reward", "advantage", "tokens", "ended"}]."""

    def number(value: object) -> str:
        """A number in words; "-" without one."""
        return f"{value:.4g}" if _is_number(value) else "-"

    found = []
    for line in latest(folder)[:_MOST_ROLLOUTS]:
        rewards = line.get("rewards")
        rewards = rewards if isinstance(rewards, dict) else {}
        found.append(
            {
                "step": line["step"],
                **{key: _shown(line.get(key)) for key in ("prompt", "answer")},
                "rewards": ", ".join(f"{name} {number(value)}" for name, value in rewards.items()),
                **{key: number(line.get(key)) for key in ("reward", "advantage", "tokens")},
                "ended": str(line.get("ended", "")),
            }
        )
    return found


def _shown(value: object) -> str:
    """A prompt or an answer as text of at most 1,000 characters; of messages "role: content", a line each."""
    messages = value if isinstance(value, list) else [value]
    texts = [f"{one.get('role')}: {_content(one)}" if isinstance(one, dict) else str(one) for one in messages]
    text = "\n".join(texts)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


def _content(message: JsonMapping) -> str:
    """The content of a message, and the calls of tools in it."""
    parts = (message.get("content"), message.get("tool_calls"))
    return " ".join(one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in parts if one)


def _asked(found: Any) -> list[dict[str, str]]:
    """The sampled answers in `found`, the entry `before` or `after` of results.json, as dicts {"question", "expected",
    "given"}; entries that lack one of these are left out, because the file may contain anything."""
    samples = found.get("samples") if isinstance(found, dict) else None
    keys = ("question", "expected", "given")
    whole = [
        one for one in (samples if isinstance(samples, list) else []) if isinstance(one, dict) and one.keys() >= {*keys}
    ]
    return [{key: str(sample[key]) for key in keys} for sample in whole]


def _settings(path: Path) -> dict[str, str]:
    """{dotted key: value as JSON text} of the settings in the config.yaml at `path` that differ from jaxtune's
    defaults, or that it does not know; {} if the file is missing or is not a YAML mapping. The page lists them; nothing
    is checked."""
    import yaml

    from jaxtune.train.config.file import flat_keys

    try:
        tree = yaml.safe_load(_read(path))
    except (yaml.YAMLError, RecursionError):
        return {}
    defaults = _default_settings()
    flat = flat_keys(tree) if isinstance(tree, dict) else {}
    changed = {str(key): value for key, value in flat.items() if value != defaults.get(key)}
    return {key: json.dumps(value, ensure_ascii=False, default=str) for key, value in changed.items()}


@functools.cache
def _default_settings() -> JsonObject:
    """{dotted key: default, a JSON value, null for a key without one} of a run's config, by which `_settings` finds the
    settings of a run that differ. The keys of the sections model, data, adapter and mesh are included, although a
    config need not have these sections or gives them no default; of qat there is only the section, null."""
    from jaxtune.train import config
    from jaxtune.train.config.file import flat_keys

    def defaults(section: Any) -> JsonObject:
        """{name of a key: its default} of a dataclass `section`."""
        return {field.name: field.default for field in dataclasses.fields(section)}

    tree = defaults(config.TrainConfig)
    for name, section in (
        ("model", config.ModelConfig),
        ("data", config.DataConfig),
        ("adapter", config.AdapterConfig),
        ("mesh", config.MeshConfig),
    ):
        tree[name] = defaults(section)
    text = json.dumps(tree, default=_as_json)
    return flat_keys(json.loads(text))


def _as_json(default: object) -> JsonObject | None:
    """A function for json.dumps, which calls it with each `default` of a config key that JSON has no value for. For a
    section, a dataclass, it returns {field: value}; for the marker of a key without a default it returns None
    (null)."""
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        return dataclasses.asdict(default)
    return None


def _read(path: Path) -> str:
    """The text of the file at `path` in a run's folder; "" if it is missing. Bytes that are not UTF-8 are replaced,
    because the file may contain anything; a run replaces it as a whole, so it is never half written. The page reads
    config.yaml and results.json by it."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _json(path: Path) -> JsonObject:
    """The mapping in the JSON file at `path`; empty if there is no such file, or if it is not a JSON object. `_page`
    reads results.json by it, which many runs do not have."""
    try:
        found = json.loads(_read(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_drawn(key: str) -> bool:
    """Whether the metric `key` is drawn as a curve on the page. True for the metrics of `_FIRST`, such as loss, and for
    all that are not in `_NOT_DRAWN` and do not end as in `_NOT_DRAWN_ENDS` (times, speeds, sizes and counts), such as
    the rewards of an objective."""
    return key in _FIRST or not (key in _NOT_DRAWN or key.endswith(_NOT_DRAWN_ENDS))


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether `value`, a JSON value, is a number that fits a float. False for true and false, and for an integer that
    is too large, because JSON's integers have any size. The page leaves out other values."""
    if isinstance(value, bool):
        return False
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def _wall_seconds(line: JsonMapping) -> float:
    """The wall time in seconds that a line of metrics.jsonl adds to the run's: that of its steps (`steps` times
    `step_seconds`), or, for the line of a pause such as a save, the sum of all its numbers named ..._seconds: the
    pause's own, which is without its parts (monitor.py), and its parts. A line of neither kind adds 0.
    `Figures.seconds` is the sum over all lines."""
    if _is_number(line.get("step_seconds")):
        steps = line.get("steps", 1)
        return line["step_seconds"] * steps if _is_number(steps) else 0.0
    return sum(line[key] for key in line if key.endswith("_seconds") and _is_number(line[key]))
