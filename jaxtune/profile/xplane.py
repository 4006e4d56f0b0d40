"""Reader of XPlane files, which jax.profiler writes.

Events are read through ProfileData. The HLO of every program that ran is in the plane "/host:metadata", which
ProfileData does not show; it is read as a protobuf message.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import re
from typing import Any

from google.protobuf.message import DecodeError

from jaxtune.profile.hlo import Instruction, Module, flops, moved_bytes
from jaxtune.profile.launches import Launch, join
from jaxtune.profile.messages import HloProto, XSpace
from jaxtune.profile.scopes import categorise, is_collective, scope_of
from jaxtune.profile.timeline import find_period
from jaxtune.profile.trace import COLLECTIVE, COPY, KERNEL, MEMSET, TO_DEVICE, TO_HOST, Buffer, Event, Trace, TraceError
from jaxtune.profile.weights import linear_of

_COPY_KINDS = {"MemcpyD2H": TO_HOST, "MemcpyH2D": TO_DEVICE, "MemcpyD2D": COPY, "MemcpyP2P": COPY}
# Programs below such a share of the device time are left out when the period of the steps is looked for; the first
# share that gives a period is taken.
_MINOR = (0.0002, 0.002, 0.02)


@dataclasses.dataclass(slots=True)
class _Raw:
    """An event as ProfileData gives it, before it is joined with the HLO."""

    start_ns: float  # on the profile's clock
    end_ns: float  # on the same clock
    name: str  # of the kernel, copy or operation
    stream: str  # the stream or thread that ran it
    stats: dict[str, Any]  # {name: value} of what the profiler recorded with it, such as "hlo_op"


def read_xplane(data: bytes, path: str) -> Trace:
    """The Trace of the busiest device in an XPlane file's unpacked bytes, or of the CPU if no device did any work.

    TraceError: no XPlane, or no work in it. path: for the Trace and messages.
    """
    import warnings

    with warnings.catch_warnings():  # jaxlib 0.11 warns that its stats lack a __module__
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.profiler import ProfileData

        modules, versions = _metadata(data, path)
        try:
            profile = ProfileData.from_serialized_xspace(data)
            planes = list(profile.planes)
        except Exception as error:
            raise TraceError(f"{path}: not a whole XPlane file: {error}") from error
        devices = [plane for plane in planes if plane.name.startswith("/device:")]
        by_device = [(plane, _device_events(plane)) for plane in devices]
        by_device = [(plane, raw) for plane, raw in by_device if raw]
        host = next((plane for plane in planes if plane.name == "/host:CPU"), None)
        if by_device:
            plane, raw = max(by_device, key=lambda pair: sum(r.end_ns - r.start_ns for r in pair[1]))
            stats = {str(key): value for key, value in plane.stats if key}
            device = str(stats.get("gpu_device_name") or stats.get("device_type_string") or plane.name)
        elif host is not None:
            raw, device = _cpu_events(host), "CPU"
        else:
            raw, device = [], ""
        marks = [] if host is None else _step_marks(host)
        peak = 0 if host is None else _peak_memory(host)
    if not raw:
        names = ", ".join(plane.name for plane in planes) or "none"
        raise TraceError(f"{path}: no device work in it (planes: {names}); capture around code that runs programs")
    raw.sort(key=lambda r: (r.start_ns, r.end_ns))
    origin = raw[0].start_ns
    events, runs, unmatched_ns = _events(raw, modules, origin)
    notes = []
    steps = _steps(events, runs, marks, notes)
    if not modules:
        notes.append("the trace has no HLO: kernels are known by their names only, without scopes, FLOPs or bytes")
    programs = {event.module for event in events}
    buffers = _buffers([module for key, module in modules.items() if key in programs or module.name in programs])
    return Trace(
        path=path,
        framework="jax",
        device=device,
        events=events,
        steps=steps,
        num_devices=max(1, len(by_device)),
        versions=versions,
        notes=notes,
        peak_memory_bytes=peak,
        buffers=buffers,
        unmatched_ns=unmatched_ns,
    )


def _metadata(data: bytes, path: str) -> tuple[dict[str, Module], dict[str, str]]:
    """({program id, or else name: its HLO}, {package: version}); TraceError for damaged bytes."""
    modules: dict[str, Module] = {}
    versions: dict[str, str] = {}
    try:
        for plane in XSpace.FromString(data).planes:
            if plane.name != "/host:metadata":
                continue
            names = {entry.key: entry.value.name for entry in plane.stat_metadata}
            for program in (entry.value for entry in plane.event_metadata):
                for stat in program.stats:
                    if names.get(stat.metadata_id) == "Hlo Proto":
                        module = Module(HloProto.FromString(stat.bytes_value))
                        match = re.search(r"\((\d+)\)$", program.name)
                        modules[match.group(1) if match else module.name] = module
            for stat in plane.stats:
                name = names.get(stat.metadata_id, "")
                if name.endswith("_version"):
                    versions[name.removesuffix("_version")] = stat.str_value
    except (DecodeError, KeyError, ValueError) as error:
        raise TraceError(f"{path}: not a whole XPlane file: {error}") from error
    return modules, versions


def _device_events(plane) -> list[_Raw]:
    """All events of a GPU's streams or of a TPU's operations, unordered."""
    lines = list(plane.lines)
    if any(line.name == "XLA Ops" for line in lines):  # a TPU, whose other lines repeat the same time
        lines = [line for line in lines if line.name == "XLA Ops"]
    else:
        lines = [line for line in lines if line.name.startswith("Stream")]
    out = []
    for line in lines:
        stream = line.name.split("(")[0]
        for event in line.events:
            out.append(_Raw(event.start_ns, event.end_ns, event.name, stream, {k: v for k, v in event.stats if k}))
    return out


def _cpu_events(plane) -> list[_Raw]:
    """Operations of programs on the CPU, without those that contain others: no time counts twice."""
    out = []
    for line in plane.lines:
        rows: list[_Raw] = []
        for event in line.events:
            stats = {k: v for k, v in event.stats if k}
            if "hlo_op" in stats and "hlo_module" in stats and event.duration_ns > 0:
                rows.append(_Raw(event.start_ns, event.end_ns, event.name, line.name.split("/")[0], stats))
        rows.sort(key=lambda row: (row.start_ns, -row.end_ns))
        # The time of a loop or a branch is the time of the instructions inside it.
        out += [row for row, after in zip(rows, [*rows[1:], None]) if after is None or after.start_ns >= row.end_ns]
    return out


def _step_marks(plane) -> list[tuple[float, int]]:
    """(start in ns, step_num) of each StepTraceAnnotation, ascending."""
    out = []
    for line in plane.lines:
        for event in line.events:
            if event.name.startswith("$") or event.duration_ns <= 0:  # Python frames
                continue
            for key, value in event.stats:
                if key == "step_num":
                    out.append((event.start_ns, int(value)))
    return sorted(out)


def _peak_memory(plane) -> int:
    """The allocator's peak on any GPU, which may be from before the trace; 0 without allocations."""
    peak = 0
    for line in plane.lines:
        for event in line.events:
            if event.name in ("MemoryAllocation", "MemoryDeallocation"):
                stats = {k: v for k, v in event.stats if k}
                if str(stats.get("allocator_name", "")).startswith("GPU"):
                    peak = max(peak, int(stats.get("peak_bytes_in_use", 0)))
    return peak


# ---- kernels


def _kind(raw: _Raw) -> str:
    """Whether an event is a copy, and in which direction."""
    details = str(raw.stats.get("memcpy_details", ""))
    if raw.name in _COPY_KINDS or details:
        if "kind_src:device kind_dst:device" in details:
            return COPY
        if "kind_dst:device" in details:
            return TO_DEVICE
        if "kind_src:device" in details:
            return TO_HOST
        return _COPY_KINDS.get(raw.name, COPY)
    if raw.name.startswith("Memset"):
        return MEMSET
    if is_collective(raw.name):
        return COLLECTIVE
    return KERNEL


def _events(raw: list[_Raw], modules: dict[str, Module], origin: float):
    """Joins events with the HLO of their programs: (Events without steps, runs, ns of kernels that the HLO lacks).

      modules: {program id, or else name: HLO}.
      origin: ns from which times count.

    A run is (start_ns, program, name of its module).
    """
    # A function compiled for several shapes is several programs of one name, which differ in their numbers.
    programs = [
        str(event.stats.get("program_id") or event.stats["hlo_module"]) if event.stats.get("hlo_module") else ""
        for event in raw
    ]
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for index, program in enumerate(programs):
        if program:
            groups[program].append(index)
    by_name = {module.name: module for module in modules.values()}
    joined: dict[int, Launch] = {}
    unmatched = 0.0
    for key, indices in groups.items():
        name = str(raw[indices[0]].stats["hlo_module"])
        module = modules.get(key) or by_name.get(name)
        launches = [Launch(raw[i].name, str(raw[i].stats.get("hlo_op", "")), _is_copy(raw[i])) for i in indices]
        if module is not None:
            join(module, launches)
            unmatched += sum(
                raw[i].end_ns - raw[i].start_ns for i, launch in zip(indices, launches) if launch.instruction is None
            )
        joined.update(zip(indices, launches))
    work = _WorkCache()
    out, runs, running = [], [], {}
    for index, item in enumerate(raw):
        launch = joined.get(index)
        event = Event(
            item.start_ns - origin, item.end_ns - origin, item.name, item.stream, _kind(item), module=programs[index]
        )
        instruction = None if launch is None else launch.instruction
        if launch is not None:
            event.op = launch.hlo_op if instruction is None else instruction.name
            key = (event.module, launch.execution)
            if key not in running:
                running[key] = True
                runs.append((event.start_ns, event.module, str(item.stats["hlo_module"])))
        if instruction is not None:
            event.scope, event.phase = scope_of(work.scope(instruction))
            linear = work.linear(instruction)
            if linear and linear not in event.scope.split("/"):
                event.scope = f"{event.scope}/{linear}".lstrip("/")
            if launch is not None and launch.main:
                event.flops, event.moved_bytes, event.shape, event.dtype = work.work_of(instruction)
            event.kind = COLLECTIVE if is_collective(instruction.opcode) else event.kind
        is_gemm = None
        if instruction is not None and not instruction.is_mosaic:
            is_gemm = bool(work.work_of(instruction)[0]) or instruction.is_gemm
        event.category = categorise(
            event.kind,
            item.name,
            event.scope,
            is_gemm=is_gemm,
            target="" if instruction is None else instruction.target,
        )
        if event.kind in (TO_HOST, TO_DEVICE):
            event.scope = event.scope or "host link"
        if event.kind in (COPY, TO_HOST, TO_DEVICE):
            size = re.search(r"size:(\d+)", str(item.stats.get("memcpy_details", "")))
            if size:
                event.moved_bytes = float(size.group(1)) * (2 if event.kind == COPY else 1)
        out.append(event)
    return out, runs, unmatched


def _is_copy(raw: _Raw) -> bool:
    return raw.name.startswith(("Memcpy", "memcpy"))


class _WorkCache:
    """What events need of an instruction, computed once; by id(instruction), so the Module must outlive it."""

    def __init__(self):
        self._work: dict[int, tuple[float, float, str, str]] = {}
        self._linears: dict[int, str] = {}

    def linear(self, instruction: Instruction) -> str:
        """The linear of a product; "" for other instructions."""
        if id(instruction) not in self._linears:
            product = instruction.is_gemm or (instruction.opcode == "fusion" and self.work_of(instruction)[0] > 0)
            self._linears[id(instruction)] = linear_of(instruction) if product else ""
        return self._linears[id(instruction)]

    def work_of(self, instruction: Instruction) -> tuple[float, float, str, str]:
        """(FLOPs, bytes, operands and result in words, dtype of the first operand or else of the result)."""
        if id(instruction) not in self._work:
            shapes = instruction.operand_shapes
            result = instruction.shape
            if result.tuple_shapes and instruction.is_gemm:
                result = result.tuple_shapes[0]
            words = ", ".join(str(s) for s in shapes[:4]) + (", ..." if len(shapes) > 4 else "")
            dtype = shapes[0].dtype if shapes else result.dtype
            work = float(flops(instruction)), float(moved_bytes(instruction)), f"{words} -> {result}", dtype
            self._work[id(instruction)] = work
        return self._work[id(instruction)]

    def scope(self, instruction: Instruction) -> str:
        """The op_name; of a fusion or asynchronous call without one, the last in its first called computation
        with any.
        """
        if instruction.scope or not instruction.called or instruction.computation is None:
            return instruction.scope
        module = instruction.computation.module
        assert module is not None
        for id in instruction.called:
            inner = module.computation(id)
            for item in reversed(inner.instructions):
                if item.scope and item.opcode != "parameter":
                    return item.scope
        return ""


# ---- steps


def _steps(events: list[Event], runs, marks, notes: list[str]) -> list[tuple[float, float]]:
    """(start_ns, end_ns) of each whole step, in order; sets the events' `step`.

    A step is a period of the sequence of programs. Marked steps win if their number divides that of the runs.
      runs: (start_ns, program id or name, module's name).
      marks: (start in ns, number), of which only different numbers count.
      notes: gets remarks on how steps were found.
    """
    busy: dict[str, float] = collections.defaultdict(float)
    for event in events:
        busy[event.module] += event.duration_ns
    total = sum(busy.values())
    count = len({number for _, number in marks})
    major, period = [], 0
    for column, share in itertools.product((1, 2), _MINOR):
        major = sorted(run for run in runs if busy[run[1]] >= share * total)
        period = find_period([run[column] for run in major])
        if period < len(major):
            break
    if not major:
        for event in events:
            event.step = 0
        return [(events[0].start_ns, max(e.end_ns for e in events))]
    names = [name for _, name, _ in major]
    if count and len(names) % count == 0:
        period = len(names) // count
    elif count:
        notes.append(f"{count} marked steps, but {len(names)} program runs: steps follow the runs")
    elif period == len(names) > 1:
        notes.append(f"{len(names)} program runs without a period, and no step is marked: they are read as one step")
    starts = [major[index][0] for index in range(0, len(names) - period + 1, period)]
    end = max(event.end_ns for event in events if event.module in names)
    if len(names) % period:
        end = major[len(starts) * period][0]
        notes.append("the capture ended within the last step, which is left out")
    steps = list(zip(starts, [*starts[1:], end]))
    for event in events:
        index = bisect.bisect_right(starts, event.start_ns) - 1
        if index >= 0 and event.start_ns <= steps[index][1]:
            event.step = index
    return _without_cut_steps(steps, events, {program for _, program, _ in major}, notes)


def _without_cut_steps(
    steps: list[tuple[float, float]], events: list[Event], programs: set[str], notes: list[str]
) -> list[tuple[float, float]]:
    """Leaves out a first or last step with less than 90 % of each other's kernels, and renumbers in place."""
    counts = collections.Counter(event.step for event in events if event.module in programs)
    cut_steps = []
    for index in {0, len(steps) - 1}:
        other_steps = range(1, len(steps) - 1) if len(steps) > 3 else {*range(len(steps))} - {index}
        fewest = min((counts[other_step] for other_step in other_steps), default=0)
        if counts[index] < 0.9 * fewest:
            cut_steps.append(index)
            edge = "last" if index else "first"
            notes.append(
                f"the {edge} step has {counts[index]} kernels, others {fewest} or more: the capture cut it, and it is "
                "left out"
            )
    for event in events:
        event.step = -1 if event.step in cut_steps else max(-1, event.step - (0 in cut_steps))
    return [step for index, step in enumerate(steps) if index not in cut_steps]


def _buffers(modules: list[Module]) -> list[Buffer]:
    """The buffers at the peak of the program that needs the most memory, the largest first."""
    best: list[Buffer] = []
    for module in modules:
        peak = module.peak_buffers()
        rows = [Buffer(size, _buffer_words(instruction, kind), kind) for size, instruction, kind in peak if size > 0]
        if sum(r.num_bytes for r in rows) > sum(r.num_bytes for r in best):
            best = rows
    return best


def _buffer_words(instruction: Instruction | None, kind: str) -> str:
    """What is in a buffer, in words: an argument's path, or "scope (phase): shape"."""
    if instruction is None:
        return "between buffers" if kind == "fragmentation" else "smaller values in the same place"
    if instruction.opcode == "parameter" and instruction.scope:
        return instruction.scope
    scope, phase = scope_of(instruction.scope)
    place_label = f"{scope} ({phase})" if scope else instruction.name
    return f"{place_label}: {instruction.shape if instruction.shape.tuple_shapes is None else instruction.opcode}"
