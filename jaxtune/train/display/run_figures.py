"""The figures of a run that its page shows, read from the run's folder, as one JSON object."""

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

from jaxtune.train.folder.run_folder import CONFIG, RESULTS, STATE
from jaxtune.train.folder.run_state import RunState, read_state
from jaxtune.train.log import metrics as m
from jaxtune.train.log.rollouts import ROLLOUTS, latest

JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]

_DEFAULT = "sft"  # of objective.name; the page loads no config, which needs packages
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
_BEFORE_REWARDS = ("loss", "reward")  # the rewards of single functions and of pairs come next
_FROM_ZERO = {"tokens_per_second", "peak_memory_bytes"}
_EVALUATED = "eval_"


@dataclasses.dataclass
class Curve:
    """One metric over the steps: int64 `steps` and float64 `values`."""

    steps: array.array = dataclasses.field(default_factory=lambda: array.array("q"))
    values: array.array = dataclasses.field(default_factory=lambda: array.array("d"))

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)


class Figures:
    """What a page shows of a metrics.jsonl. Only curves and sums stay: all lines of a long run would fill the memory.

    Attributes:
      evaluations: (step, identity of the rows or "", {metric without "eval_": value}).
      plan: the plan in force, lines.
      seconds: the wall time of steps and pauses, without the time between a kill and its resume.
      step_seconds, steps_timed: the wall time of the steps alone, and their number.
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
        """Adds one line, of steps, an evaluation or a pause."""
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
        """(step, {metric: value}) of evaluations of the last one's rows, or of unnamed rows."""
        last = self.evaluations[-1][1] if self.evaluations else ""
        return [(step, numbers) for step, rows, numbers in self.evaluations if rows in ("", last)]


class RunFiles:
    """Reads the figures of one run. Keep it: a later call of `page` reads only the new lines."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._figures = Figures()
        self._file, self._read = (0, 0), 0  # device and inode of metrics.jsonl, bytes of whole lines read
        self._seen: Any = None
        self._page: JsonObject = {}

    def page(self) -> JsonObject:
        """The run's JSON object for page.js; the same one while its files stay. ValueError without metrics.jsonl."""
        path = self.folder / m.JSONL
        if not path.is_file():
            raise ValueError(f"{self.folder} is not a run's folder: there is no {m.JSONL} in it")
        state = read_state(self.folder)
        identity = (state, *(_identity(self.folder / name) for name in (m.JSONL, RESULTS, CONFIG, STATE, ROLLOUTS)))
        if identity != self._seen:
            self._read_lines(path)
            self._page, self._seen = _page(self.folder, self._figures, state), identity
        return self._page

    def _read_lines(self, path: Path) -> None:
        """Adds new whole lines; a file that was replaced, as a resume does, or became shorter is read anew."""
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._file or status.st_size < self._read:  # a resumed run has replaced the file
                self._figures, self._read, self._file = Figures(), 0, identity
            file.seek(self._read)
            *complete_lines, _ = file.read().split(b"\n")
        self._read += sum(len(text) + 1 for text in complete_lines)
        for text in complete_lines:
            if (line := m.parsed(text)) is not None:
                self._figures.add(line)


def _identity(path: Path) -> Any:
    """A value that changes when the file does; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _page(folder: Path, figures: Figures, state: RunState) -> JsonObject:
    """The JSON object of one run for page.js. "total" may be None, "left" ""; "settings" differ from the defaults."""
    results, settings = _json(folder / RESULTS), _settings(folder / CONFIG)
    name = settings.get("metrics.run_name")
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
        "charts": _charts(figures, str(settings.get("objective.name") or settings.get("objective") or _DEFAULT)),
        "samples": _samples(results),
        "rollouts": _rollouts(folder),
        "settings": {key: json.dumps(value, ensure_ascii=False, default=str) for key, value in settings.items()},
        "config": _read(folder / CONFIG),
    }


def _seconds_left(figures: Figures, state: RunState) -> str:
    """The estimated time left in words; "" if the run is not running, or it is not known."""
    if state.name != "running" or state.total_steps is None or not figures.steps_timed:
        return ""
    seconds_left = (state.total_steps - figures.step) * figures.step_seconds / figures.steps_timed
    return _in_words(seconds_left) if math.isfinite(seconds_left) and seconds_left >= 0 else ""


def _charts(figures: Figures, objective: str) -> list[JsonObject]:
    """The charts in the order of the page: {"key", "title", "unit", "zero", "line": training steps, "dots":
    evaluations}.
    """
    evaluations = figures.comparable_evaluations()
    dotted: dict[str, Curve] = {}
    for step, numbers in evaluations:
        for key, value in numbers.items():
            dotted.setdefault(key, Curve()).add(step, value)
    other_keys = sorted(
        (key for key in (figures.curves | dotted) if key not in _FIRST), key=lambda key: "reward" not in key
    )
    charts = []
    rewards = sum("reward" in key for key in other_keys)
    for key in (
        *_BEFORE_REWARDS,
        *other_keys[:rewards],
        *(key for key in _FIRST if key not in _BEFORE_REWARDS),
        *other_keys[rewards:],
    ):
        title, unit, factor = _FIRST.get(key, (key.replace("_", " "), "", 1.0))
        line, dots = (thinned(curves.get(key, Curve()), factor) for curves in (figures.curves, dotted))
        if line["x"] or dots["x"]:
            from_zero = key in _FROM_ZERO
            if key == "loss" and objective != _DEFAULT:
                key, title = f"loss/{objective}", f"loss ({objective})"
            charts.append({"key": key, "title": title, "unit": unit, "zero": from_zero, "line": line, "dots": dots})
    return charts


def thinned(curve: Curve, factor: float = 1.0) -> dict[str, list[float]]:
    """The finite points {"x": steps, "y": values times `factor`}. More than 600, which a browser draws slowly, become
    that many intervals: their last steps and means, with "low" and "high".
    """
    points = [
        (step, value * factor)
        for step, value in zip(curve.steps, curve.values, strict=True)
        if math.isfinite(value * factor)
    ]
    if len(points) <= MOST_POINTS:
        return {"x": [step for step, _ in points], "y": [_short(value) for _, value in points]}
    interval_size = -(-len(points) // MOST_POINTS)
    thinned_points: dict[str, list[float]] = {"x": [], "y": [], "low": [], "high": []}
    for interval in itertools.batched(points, interval_size):
        values = [value for _, value in interval]
        thinned_points["x"].append(interval[-1][0])
        thinned_points["y"].append(_short(statistics.fmean(values)))
        thinned_points["low"].append(_short(min(values)))
        thinned_points["high"].append(_short(max(values)))
    return thinned_points


def _short(value: float) -> float:
    """Six significant digits, which keep the page small."""
    return float(f"{value:.6g}")


def _facts(figures: Figures, results: JsonMapping) -> list[list[str]]:
    """The main results, [name, value in words]."""
    facts = [["steps", f"{figures.step:,}"]]
    facts.append(["time", _in_words(figures.seconds) if math.isfinite(figures.seconds) else "-"])
    losses, rewards = (figures.curves.get(key, Curve()).values for key in ("loss", "reward"))
    evaluated = [numbers["loss"] for _, numbers in figures.comparable_evaluations() if "loss" in numbers]
    for name, values in (("training loss", losses), ("evaluation loss", evaluated), ("reward", rewards)):
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
    """Finite seconds as 17 s, 1 min 6 s, or 13 h 53 min."""
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds_left} s" if minutes else f"{seconds_left} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def _exact_match(results: JsonMapping, when: str) -> float | None:
    """The share of right answers "before" or "after" training; None: not measured."""
    entry = results.get(when)
    return float(entry["exact_match"]) if isinstance(entry, dict) and _is_number(entry.get("exact_match")) else None


def _samples(results: JsonMapping) -> list[dict[str, str]]:
    """[{"question", "expected", "before": the answer before training, "given": after}]; "" for a missing answer."""
    before, after = (
        {sample["question"]: sample for sample in _sampled_answers(results.get(when))} for when in ("before", "after")
    )
    samples_shown = []
    for question, sample in (before | after).items():
        answers = ((before, "before"), (after, "given"))
        samples_shown.append(sample | {name: samples.get(question, {}).get("given", "") for samples, name in answers})
    return samples_shown


def _rollouts(folder: Path) -> list[JsonObject]:
    """The latest generation's answers as texts."""

    def number(value: object) -> str:
        return f"{value:.4g}" if _is_number(value) else "-"

    answers = []
    for line in latest(folder)[:_MOST_ROLLOUTS]:
        rewards = line.get("rewards")
        rewards = rewards if isinstance(rewards, dict) else {}
        answers.append(
            {
                "step": line["step"],
                **{key: _cut_text(line.get(key)) for key in ("prompt", "answer")},
                "rewards": ", ".join(f"{name} {number(value)}" for name, value in rewards.items()),
                **{key: number(line.get(key)) for key in ("reward", "advantage", "tokens")},
                "ended": str(line.get("ended", "")),
            }
        )
    return answers


def _cut_text(value: object) -> str:
    """Text of at most 1,000 characters; of messages "role: content", a line each."""
    messages = value if isinstance(value, list) else [value]
    texts = [
        f"{message.get('role')}: {_content(message)}" if isinstance(message, dict) else str(message)
        for message in messages
    ]
    text = "\n".join(texts)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


def _content(message: JsonMapping) -> str:
    fields = (message.get("content"), message.get("tool_calls"))
    return " ".join(
        field if isinstance(field, str) else json.dumps(field, ensure_ascii=False) for field in fields if field
    )


def _sampled_answers(entry: Any) -> list[dict[str, str]]:
    """Sampled answers of an entry of results.json, which may contain anything; incomplete ones are left out."""
    samples = entry.get("samples") if isinstance(entry, dict) else None
    keys = ("question", "expected", "given")
    complete_samples = [
        answer
        for answer in (samples if isinstance(samples, list) else [])
        if isinstance(answer, dict) and answer.keys() >= {*keys}
    ]
    return [{key: str(sample[key]) for key in keys} for sample in complete_samples]


def _settings(path: Path) -> dict[str, object]:
    """{dotted key: value} of a config.yaml that differ from the defaults, unchecked; {} if it cannot be read."""
    import yaml

    from jaxtune.train.config.file import flat_keys

    try:
        tree = yaml.safe_load(_read(path))
    except (yaml.YAMLError, RecursionError):
        return {}
    defaults = _default_settings()
    flat = flat_keys(tree) if isinstance(tree, dict) else {}
    return {str(key): value for key, value in flat.items() if value != defaults.get(key)}


@functools.cache
def _default_settings() -> JsonObject:
    """{dotted key: default or None} of a run's config, with the sections that it need not have."""
    from jaxtune.train import config
    from jaxtune.train.config.file import flat_keys

    def defaults(section: Any) -> JsonObject:
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
    """json.dumps's `default`: a section's fields, None for a key without a default."""
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        return dataclasses.asdict(default)
    return None


def _read(path: Path) -> str:
    """The text of a file; "" if it is missing. Bytes that are not UTF-8 are replaced: it may contain anything."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _json(path: Path) -> JsonObject:
    try:
        value = json.loads(_read(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_drawn(key: str) -> bool:
    return key in _FIRST or not (key in _NOT_DRAWN or key.endswith(_NOT_DRAWN_ENDS))


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether a JSON value is a number that fits a float; JSON's integers have any size."""
    if isinstance(value, bool):
        return False
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def _wall_seconds(line: JsonMapping) -> float:
    """The wall time of a line: its steps, or a pause with its parts."""
    if _is_number(line.get("step_seconds")):
        steps = line.get("steps", 1)
        return line["step_seconds"] * steps if _is_number(steps) else 0.0
    return sum(line[key] for key in line if key.endswith("_seconds") and _is_number(line[key]))
