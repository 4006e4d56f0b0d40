"""The report of one trace: where the step's time went, how well it was used, what it waited for."""

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
from jaxtune.profile.scopes import CATEGORIES, short_name
from jaxtune.profile.tables import Idle, KernelRow, ReportData, Share, Transfer
from jaxtune.profile.text import report_text
from jaxtune.profile.timeline import TRANSFERS, charge, gaps, length, union
from jaxtune.profile.trace import Event, Trace
from jaxtune.system.invocation import spelled

_MS = 1e-6
_TOP_BUFFERS = 12


@dataclasses.dataclass
class Report(ReportData):
    """The report on one profile."""

    def to_text(self, width: int = 120) -> str:
        """Text for a terminal of `width` columns; kernels' shapes are shown from 110 on."""
        return report_text(self, width)

    def to_html(self) -> str:
        """One self-contained HTML page."""
        return report_page(self)

    def __str__(self) -> str:
        return self.to_text()


def show(path: str | Path) -> Report:
    """Reads a profile, the folder or file of `capture`, jax.profiler or PyTorch's profiler, and makes its report.

    TraceError: none can be read; ValueError: the file of measured ceilings is damaged.
    """
    return make_report(read(path))


def make_report(trace: Trace) -> Report:
    """The Report of a trace with at least one step; sets its events' `self_ns`, in place. ValueError as in `show`."""
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
    notes = []
    busy = sum(e.duration_ns for e in trace.events) or 1.0
    if trace.unmatched_ns > 0.02 * busy:
        notes.append(f"{trace.unmatched_ns / busy:.0%} of the kernel time was not found in the HLO")
    if ceilings is None and trace.device.lower() != "cpu":
        notes.append(f"no ceilings known for {trace.device}: run `{spelled('profile ceilings')}` on it")
    return notes


def _share(name: str, per_step: list[float], step_ms: float, phase: str = "") -> Share:
    ms = statistics.fmean(per_step)
    return Share(name, ms, ms / step_ms if step_ms else 0.0, per_step, phase)


def _sums(events: Iterable[Event], num_steps: int, key) -> dict[Any, list[float]]:
    """{key: booked ms in each step} of events that are all inside steps."""
    out: dict[Any, list[float]] = collections.defaultdict(lambda: [0.0] * num_steps)
    for event in events:
        out[key(event)][event.step] += event.self_ns * _MS
    return out


def _categories(events, num_steps: int, step_ms: float, idle: list[float]) -> list[Share]:
    """Shares of categories, idle time last; an event counts without its children (self_ns)."""
    sums = _sums(events, num_steps, lambda e: e.category)
    rows = [_share(name, sums[name], step_ms) for name in CATEGORIES if name in sums and name != "idle"]
    return [*rows, _share("idle", idle, step_ms)]


def _scopes(events, num_steps: int, step_ms: float, idle: list[float]) -> list[Share]:
    """Shares of scopes and phases, the longest first, idle time last."""
    sums = _sums(events, num_steps, lambda e: (e.scope, e.phase))
    rows = [_share(scope or "(no scope)", per_step, step_ms, phase) for (scope, phase), per_step in sums.items()]
    rows.sort(key=lambda row: -row.ms)
    return [*rows, _share("idle", idle, step_ms)]


def _kernels(events, num_steps: int, ceilings: Ceilings | None) -> list[KernelRow]:
    """Rows of calls with one readable name, category, scope, phase and shape, the longest first."""
    groups: dict[tuple, list[Event]] = collections.defaultdict(list)
    for event in events:
        groups[short_name(event.name), event.category, event.scope, event.phase, event.shape].append(event)
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
    """Rows of copies to the device, to the host and collectives, per step, with the five longest waits."""
    rows = []
    busy = union([(e.start_ns, e.end_ns) for e in events if e.kind not in TRANSFERS])
    names = {"to_device": "copies to device", "to_host": "copies to host", "collective": "collectives"}
    for kind, name in names.items():
        members = [e for e in events if e.kind == kind]
        if not members:
            continue
        # Transfers overlap: each is exposed where no kernel runs, although a category counts that time once.
        intervals = union([(e.start_ns, e.end_ns) for e in members])
        total, exposed = length(intervals), length(union(intervals + busy)) - length(busy)
        moved = sum(e.moved_bytes for e in members)
        worst = sorted((e for e in members if e.self_ns > 0), key=lambda e: -e.self_ns)[:5]
        waits = [{"ms": e.self_ns * _MS, "op": e.op or e.name, "scope": e.scope, "step": e.step} for e in worst]
        scale = _MS / num_steps
        rows.append(
            Transfer(
                name,
                len(members) / num_steps,
                total * scale,
                (total - exposed) * scale,
                exposed * scale,
                moved / num_steps / 1e9,
                moved / total if total else 0.0,
                waits,
            )
        )
    return rows


def _idle(events: Sequence[Event], steps: Sequence[tuple[float, float]]) -> Idle:
    """Time of the steps in which nothing ran, per step, with the five longest waits."""
    gap_ns = wait_ns = 0.0
    count = 0
    waits = []
    ends = {e.end_ns: e for e in events}
    starts = {e.start_ns: e for e in events}
    for index, (start, end) in enumerate(steps):
        for gap_start, gap_end in gaps(events, start, end):
            if gap_end - gap_start < LAUNCH_GAP_NS:
                gap_ns += gap_end - gap_start
                count += 1
            else:
                wait_ns += gap_end - gap_start
                before, after = ends.get(gap_start), starts.get(gap_end)
                waits.append(
                    {
                        "ms": (gap_end - gap_start) * _MS,
                        "step": index,
                        "after": "" if before is None else before.op or short_name(before.name),
                        "before": "" if after is None else after.op or short_name(after.name),
                    }
                )
    waits.sort(key=lambda w: -w["ms"])
    scale = _MS / len(steps)
    return Idle((gap_ns + wait_ns) * scale, count / len(steps), gap_ns * scale, wait_ns * scale, waits[:5])


def _wait_words(idle: Idle) -> str:
    """ " (longest: 1.20 ms, before fusion.3)"; "" below 0.05 ms."""
    if not idle.longest or idle.longest[0]["ms"] < 0.05:
        return ""
    wait = idle.longest[0]
    return f" (longest: {wait['ms']:.2f} ms, before {wait['before'] or 'the end of the step'})"


def _buffers(trace: Trace) -> list[dict[str, Any]]:
    """The 12 largest groups of buffers at the peak; paths that differ in indices only are one group."""
    groups: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for buffer in trace.buffers:
        # An index in a parameter's path, "layers[3]['mlp']", and not one in a shape.
        label = re.sub(r"\[\d+\]", "[*]", buffer.label) if "['" in buffer.label else buffer.label
        groups[label, buffer.kind].append(buffer.num_bytes)
    rows = [{"bytes": sum(s), "count": len(s), "what": label, "kind": kind} for (label, kind), s in groups.items()]
    return sorted(rows, key=lambda r: -r["bytes"])[:_TOP_BUFFERS]


def _timeline(events: Sequence[Event], steps: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The middle step for page.js: {"step", "length_us", "streams": {stream: [us from the start, us, category, name,
    scope and phase]}}.
    """
    step = len(steps) // 2
    origin, end = steps[step]
    streams: dict[str, list[list[Any]]] = {}
    for event in (e for e in events if e.step == step):
        row = streams.setdefault(event.stream, [])
        place_label = f"{event.scope} {event.phase}".strip()
        start, stop = (event.start_ns - origin) / 1e3, (event.end_ns - origin) / 1e3
        if row and row[-1][2] == event.category and row[-1][4] == place_label and start - row[-1][0] - row[-1][1] < 2.0:
            row[-1][1] = round(max(stop - row[-1][0], row[-1][1]), 1)
            if short_name(event.name) not in row[-1][3]:
                row[-1][3] = (row[-1][3] + ", " + short_name(event.name))[:160]
        else:
            row.append(
                [round(start, 1), round(stop - start, 1), event.category, short_name(event.name)[:120], place_label]
            )
    return {"step": step, "length_us": round((end - origin) / 1e3, 1), "streams": streams}
