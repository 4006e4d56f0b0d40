"""The report of one trace: where the step's time went, how well it was used, what it waited for. `show` reads a profile
and makes its `Report`; `make_report` makes it from a Trace, table by table."""

from __future__ import annotations

import collections
import dataclasses
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxtune.profile.device import Ceilings, known_ceilings
from jaxtune.profile.page import report_page
from jaxtune.profile.reading import read
from jaxtune.profile.roofline import LAUNCH_GAP_NS, floor_ns, losses
from jaxtune.profile.scopes import CATEGORIES, readable
from jaxtune.profile.tables import Idle, KernelRow, ReportData, Share, Transfer
from jaxtune.profile.text import report_text
from jaxtune.profile.timeline import TRANSFERS, charge, gaps, length, union
from jaxtune.profile.trace import Event, Trace
from jaxtune.system.invocation import spelled

_MS = 1e-6
_TOP_BUFFERS = 12


@dataclasses.dataclass
class Report(ReportData):
    """The report on one profile, as `show` returns it: where the step's time went, by category, scope and kernel. It
    adds to the tables in ReportData their form as text for a terminal (`to_text`, `str`) and as an HTML page."""

    def to_text(self, width: int = 120) -> str:
        """The report as plain text for a terminal: a headline and notes, the three largest losses of time, the tables
        by category, scope, kernel and transfer, then idle time, memory and the device's ceilings; losses, transfers,
        memory and ceilings that are unknown or absent are left out. A loss is a reason why the step takes longer than
        it could on this device. width: columns of the terminal; the kernels' shapes are shown from 110 on."""
        return report_text(self, width)

    def to_html(self) -> str:
        """The report as the text of one HTML page, which needs no network or other file; a caller writes it into a
        file."""
        return report_page(self)

    def __str__(self) -> str:
        """The report as `to_text` gives it, for a terminal of 120 columns."""
        return self.to_text()


def show(path: str | Path) -> Report:
    """Reads a profile and reports where the time of its step goes. `jaxtune profile show` prints the result, and
    `compare` calls it for each profile that is given as a path. path: the folder or file that `capture`, jax.profiler
    or PyTorch's profiler (a Chrome trace) wrote.

    Raises:
      TraceError: there is none that can be read.
      ValueError: the file with the device's measured ceilings is damaged.
    """
    return make_report(read(path))


def make_report(trace: Trace) -> Report:
    """Makes the Report of a trace, for `show`: all tables, and the losses against the device's known ceilings, which it
    reads from their cache file or the data sheet. Work outside of the trace's steps, of which it has at least one, is
    left out. It sets each event's `self_ns` in place, the time that is booked on it alone, so that no moment counts
    twice. Raises ValueError if the cache file is damaged."""
    charge(trace.events)
    num_steps = len(trace.steps)
    inside = [event for event in trace.events if event.step >= 0]
    steps_ms = [(end - start) * _MS for start, end in trace.steps]
    step_ms = statistics.fmean(steps_ms)
    idle = _idle(inside, trace.steps)
    idle_per_step = [
        max(0.0, total - sum(e.self_ns for e in inside if e.step == i) * _MS) for i, total in enumerate(steps_ms)
    ]
    tokens = trace.meta.get("tokens_per_step")
    ceilings = known_ceilings(trace.device)
    limits = ceilings or Ceilings(trace.device, 0.0, 0.0, 0.0, source="unknown")
    return Report(
        path=trace.path,
        framework=trace.framework,
        device=trace.device,
        num_devices=trace.num_devices,
        versions=trace.versions,
        meta=trace.meta,
        notes=trace.notes + _own_notes(trace, ceilings),
        steps_ms=steps_ms,
        step_ms=step_ms,
        tokens_per_step=int(tokens) if isinstance(tokens, (int, float)) and tokens > 0 else None,
        categories=_categories(inside, num_steps, step_ms, idle_per_step),
        scopes=_scopes(inside, num_steps, step_ms, idle_per_step),
        kernels=_kernels(inside, num_steps, ceilings),
        transfers=_transfers(inside, num_steps),
        idle=idle,
        peak_memory_bytes=trace.peak_memory_bytes or sum(buffer.num_bytes for buffer in trace.buffers),
        buffers=_buffers(trace),
        flops_per_step=sum(event.flops for event in inside) / num_steps,
        ceilings=ceilings,
        losses=losses(inside, num_steps, idle.ms, limits, wait=_wait_words(idle)),
        timeline=_timeline(inside, trace.steps),
    )


def _own_notes(trace: Trace, ceilings: Ceilings | None) -> list[str]:
    """A list of the remarks, sentences for the reader, that the report adds to those of the trace: that kernels and
    copies with more than 2 % of the time of all events were not found in the HLO, and that no ceilings are known for
    the device (`ceilings` is None), unless it is the CPU."""
    notes = []
    busy = sum(e.duration_ns for e in trace.events) or 1.0
    if trace.unmatched_ns > 0.02 * busy:
        notes.append(f"{trace.unmatched_ns / busy:.0%} of the kernel time was not found in the HLO")
    if ceilings is None and trace.device.lower() != "cpu":
        notes.append(f"no ceilings known for {trace.device}: run `{spelled('profile ceilings')}` on it")
    return notes


def _share(name: str, per_step: list[float], step_ms: float, phase: str = "") -> Share:
    """Makes a row of the table of categories or scopes, from the time of each step: a Share with the mean of
    `per_step` in ms, that mean divided by step_ms (a fraction, 0.0 if step_ms is 0), and the other arguments.

    Args:
      name: the category's or scope's.
      per_step: its ms in each step.
      step_ms: the step's mean ms.
      phase: the scope's phase; "" for a category.
    """
    ms = statistics.fmean(per_step)
    return Share(name, ms, ms / step_ms if step_ms else 0.0, per_step, phase)


def _sums(events: Iterable[Event], num_steps: int, key) -> dict[Any, list[float]]:
    """Sums the time that is booked on events, by any key and by step: {key: [ms in each of the num_steps steps]}.
    events: with `self_ns` set, of these steps only. key: the function from an event to its key: its category, or its
    scope and phase. The tables of these two are made from it; that of kernels is not."""
    out: dict[Any, list[float]] = collections.defaultdict(lambda: [0.0] * num_steps)
    for event in events:
        out[key(event)][event.step] += event.self_ns * _MS
    return out


def _categories(events, num_steps: int, step_ms: float, idle: list[float]) -> list[Share]:
    """Makes a Share for each category that occurs, in the order of CATEGORIES, of the time that is booked on its events
    (self_ns), so that no moment counts twice; and a last one for idle time, also if that is 0.

    Args:
      events: the Events inside the steps, with `self_ns` set; none may have step -1.
      num_steps: the number of steps.
      step_ms: the step's mean ms.
      idle: the idle ms of each step.
    """
    sums = _sums(events, num_steps, lambda e: e.category)
    rows = [_share(name, sums[name], step_ms) for name in CATEGORIES if name in sums and name != "idle"]
    return [*rows, _share("idle", idle, step_ms)]


def _scopes(events, num_steps: int, step_ms: float, idle: list[float]) -> list[Share]:
    """Makes a Share for each scope and phase that occurs, of the time that is booked on its events (self_ns), those
    with the most ms first; and a last one for idle time, also if that is 0. The scope "" is named "(no scope)".

    Args:
      events: the Events inside the steps, with `self_ns` set; none may have step -1.
      num_steps: the number of steps.
      step_ms: the step's mean ms.
      idle: the idle ms of each step.
    """
    sums = _sums(events, num_steps, lambda e: (e.scope, e.phase))
    rows = [_share(scope or "(no scope)", per_step, step_ms, phase) for (scope, phase), per_step in sums.items()]
    rows.sort(key=lambda row: -row.ms)
    return [*rows, _share("idle", idle, step_ms)]


def _kernels(events, num_steps: int, ceilings: Ceilings | None) -> list[KernelRow]:
    """Makes a KernelRow for the calls of each kernel, by its shortened name (`readable`), with the same category,
    scope, phase and shape; those with the most ms come first. Rates and `of_ceiling` are over the time that is booked
    on the calls (self_ns). `bound` and `of_ceiling` stay "" and 0 if that time is 0, if neither FLOPs nor bytes are
    known, if the device's rate for these FLOPs is unknown, and for transfers; of the rates, these have `tbps` only,
    over their whole duration.

    Args:
      events: the Events of all `num_steps` steps.
      num_steps: the number of steps.
      ceilings: the device's rates, with which the kernels are compared; None: `bound` and `of_ceiling` stay "" and 0.
    """
    groups: dict[tuple, list[Event]] = collections.defaultdict(list)
    for event in events:
        groups[readable(event.name), event.category, event.scope, event.phase, event.shape].append(event)
    rows = []
    for (name, category, scope, phase, shape), members in groups.items():
        per_step = [0.0] * num_steps
        for event in members:
            per_step[event.step] += event.self_ns * _MS
        total_ns = sum(e.self_ns for e in members)
        row = KernelRow(
            name, category, scope, phase, shape, len(members) / num_steps, total_ns * _MS / num_steps, per_step
        )
        flops, moved = sum(e.flops for e in members), sum(e.moved_bytes for e in members)
        if members[0].kind in TRANSFERS:  # compute may hide most of their time
            row.tbps = moved / (sum(e.duration_ns for e in members) or 1.0) / 1e3
        elif total_ns:
            row.tflops, row.tbps = flops / total_ns / 1e3, moved / total_ns / 1e3
            if ceilings is not None and (flops or moved):
                least, row.bound = floor_ns(flops, moved, members[0].dtype, ceilings)
                row.of_ceiling = least / total_ns if row.bound else 0.0
        rows.append(row)
    return sorted(rows, key=lambda row: -row.ms)


def _transfers(events: Sequence[Event], num_steps: int) -> list[Transfer]:
    """Makes a row for copies to the device, one for copies to the host and one for collectives, of those that occur:
    their time, how much of it kernels, memsets and copies within the device hid, and their bytes, all per step; and in
    `waits` the at most five single transfers for which a step waited longest. events: those of all `num_steps`
    steps."""
    rows = []
    busy = union([(e.start_ns, e.end_ns) for e in events if e.kind not in TRANSFERS])
    names = {"to_device": "copies to device", "to_host": "copies to host", "collective": "collectives"}
    for kind, name in names.items():
        members = [e for e in events if e.kind == kind]
        if not members:
            continue
        # Transfers overlap: each is exposed where no kernel runs, although a category counts that time once.
        took = union([(e.start_ns, e.end_ns) for e in members])
        whole, exposed = length(took), length(union(took + busy)) - length(busy)
        moved = sum(e.moved_bytes for e in members)
        worst = sorted((e for e in members if e.self_ns > 0), key=lambda e: -e.self_ns)[:5]
        waits = [{"ms": e.self_ns * _MS, "op": e.op or e.name, "scope": e.scope, "step": e.step} for e in worst]
        scale = _MS / num_steps
        rows.append(
            Transfer(
                name,
                len(members) / num_steps,
                whole * scale,
                (whole - exposed) * scale,
                exposed * scale,
                moved / num_steps / 1e9,
                moved / whole if whole else 0.0,
                waits,
            )
        )
    return rows


def _idle(events: Sequence[Event], steps: Sequence[tuple[float, float]]) -> Idle:
    """Sums the time of the steps in which nothing ran on the device: launch gaps, shorter than 20 us, and longer waits,
    as means per step, and lists the at most five longest waits with what ran before and after. The result is an Idle, a
    part of the report. events: those of all steps. steps: (start_ns, end_ns) of each."""
    short = long = 0.0
    count = 0
    waits = []
    ends = {e.end_ns: e for e in events}
    starts = {e.start_ns: e for e in events}
    for index, (start, end) in enumerate(steps):
        for began, ended in gaps(events, start, end):
            if ended - began < LAUNCH_GAP_NS:
                short += ended - began
                count += 1
            else:
                long += ended - began
                before, after = ends.get(began), starts.get(ended)
                waits.append(
                    {
                        "ms": (ended - began) * _MS,
                        "step": index,
                        "after": "" if before is None else before.op or readable(before.name),
                        "before": "" if after is None else after.op or readable(after.name),
                    }
                )
    waits.sort(key=lambda w: -w["ms"])
    scale = _MS / len(steps)
    return Idle((short + long) * scale, count / len(steps), short * scale, long * scale, waits[:5])


def _wait_words(idle: Idle) -> str:
    """Words on the longest wait in `idle`, such as " (longest: 1.20 ms, before fusion.3)", which begin with a space
    because `losses` appends them to a word of its sentence on idle time; "" if there is none or it is shorter than 0.05
    ms."""
    if not idle.longest or idle.longest[0]["ms"] < 0.05:
        return ""
    wait = idle.longest[0]
    return f" (longest: {wait['ms']:.2f} ms, before {wait['before'] or 'the end of the step'})"


def _buffers(trace: Trace) -> list[dict[str, Any]]:
    """The at most 12 largest rows for the report's table of memory, the largest first, as dicts {"bytes", "count",
    "what", "kind"}, made from a trace's buffers, which are live at the peak. "what" and "kind" are Buffer's; kind is
    "argument", "output", "temporary", "constant" or "fragmentation". Buffers with the same two are one row, also those
    whose parameter paths differ in indices only, such as a layer's ("[*]" is written for each): "count" is their
    number, "bytes" their sum."""
    groups: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for buffer in trace.buffers:
        # An index in a parameter's path, "layers[3]['mlp']", and not one in a shape.
        what = re.sub(r"\[\d+\]", "[*]", buffer.what) if "['" in buffer.what else buffer.what
        groups[what, buffer.kind].append(buffer.num_bytes)
    rows = [{"bytes": sum(s), "count": len(s), "what": what, "kind": kind} for (what, kind), s in groups.items()]
    return sorted(rows, key=lambda r: -r["bytes"])[:_TOP_BUFFERS]


def _timeline(events: Sequence[Event], steps: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """What page.js draws of the middle step: {"step": its index, "length_us": its length, "streams": {stream: rows}}.
    events: those of all steps. steps: (start_ns, end_ns) of each.

    A row is [us from the step's start, length us, category, name, scope with its phase]. Consecutive events of a stream
    with the same category, scope and phase, less than 2 us apart, are one row, which keeps the page small: its length
    includes the gaps between them, and its name is the different names of the kernels, joined by ", " and cut at 160
    characters.
    """
    step = len(steps) // 2
    origin, end = steps[step]
    streams: dict[str, list[list[Any]]] = {}
    for event in (e for e in events if e.step == step):
        row = streams.setdefault(event.stream, [])
        where = f"{event.scope} {event.phase}".strip()
        start, stop = (event.start_ns - origin) / 1e3, (event.end_ns - origin) / 1e3
        if row and row[-1][2] == event.category and row[-1][4] == where and start - row[-1][0] - row[-1][1] < 2.0:
            row[-1][1] = round(max(stop - row[-1][0], row[-1][1]), 1)
            if readable(event.name) not in row[-1][3]:
                row[-1][3] = (row[-1][3] + ", " + readable(event.name))[:160]
        else:
            row.append([round(start, 1), round(stop - start, 1), event.category, readable(event.name)[:120], where])
    return {"step": step, "length_us": round((end - origin) / 1e3, 1), "streams": streams}
