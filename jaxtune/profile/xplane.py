"""Reader of XPlane files, which jax.profiler writes. `read_xplane` makes the Trace (trace.py) of the busiest device, or
of the CPU if no device did any work. `_events` joins the kernels with the HLO, from which their scopes, shapes, FLOPs
and bytes are read, `_steps` finds the steps, and `_buffers` what is in memory at the peak.

Events are read through jax.profiler.ProfileData. The HLO of every program that ran is in the plane "/host:metadata",
which ProfileData does not show; that plane is read as a protobuf message.
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
    """An event of the trace as jax.profiler.ProfileData gives it, before it is joined with the HLO. `_events` makes an
    Event of each."""

    start_ns: float  # on the profile's clock
    end_ns: float  # on the same clock
    name: str  # of the kernel, copy or operation
    stream: str  # the stream or thread that ran it
    stats: dict[str, Any]  # {name: value} of what the profiler recorded with it, such as "hlo_op"


def read_xplane(data: bytes, path: str) -> Trace:
    """Reads `data`, the unpacked bytes of an XPlane file, and returns the Trace of the device with the longest sum of
    kernels, copies and memsets; if no device did any work, of the CPU. path: the file's path, for the Trace and for
    error messages. `read` (reading.py) calls it.

    Raises:
      TraceError: the bytes are not an XPlane, or no work is in it, neither of a device nor of programs on the CPU.
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
    used = {event.module for event in events}
    buffers = _buffers([module for key, module in modules.items() if key in used or module.name in used])
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
    """Reads from `data`, an XPlane file's bytes, what it records about programs and versions: ({program id, or else
    name: the program's HLO}, {package: version}), which may be empty. The kernels are joined with these programs; the
    versions are for the Trace. path: the file's, for messages. Raises TraceError if the bytes are damaged."""
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
    """All events of one device's plane, an XPlane of jax.profiler.ProfileData, as _Raw: those of a GPU's streams, or of
    a TPU's operations, in no order; [] if nothing ran on it. read_xplane calls it for each device."""
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
    """The operations of programs that ran on the CPU, as _Raw: events of the host's plane (an XPlane of ProfileData)
    that name an HLO instruction and its module. Those that contain others on their thread, such as loops, are left out,
    so that no time counts twice. read_xplane reads them if no device did any work."""
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
    """(start in ns on the profile's clock, step_num) of each jax.profiler.StepTraceAnnotation in the host's plane, by
    ascending start; [] if the program marked no steps. `_steps` takes from it only how many different step_nums there
    are."""
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
    """The largest peak of bytes in use that the allocator of any GPU reported in the host's plane, its own running peak
    (peak_bytes_in_use), which may be from before the trace; 0 if the plane has no allocations on a GPU. It is the
    Trace's peak_memory_bytes, for which `read` takes that of the record if it is 0."""
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
    """The kind of an event (`raw`), one of those in trace.py: "kernel", "memset", "copy" (within the device or between
    two), "to_host", "to_device" or "collective", by its name and its statistics. `_events` makes it "collective" too if
    the instruction that is found later is one."""
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
    """Joins the events of the profile with the HLO of their programs.

    Args:
      raw: the events as the profile has them, in order of their starts.
      modules: {program id, or else name: its HLO}, which gives scopes and work.
      origin: the time in ns from which the resulting events count.
    Returns:
      (the Events with scope ("host link" for copies to and from the host that have none), phase, category and work
        (FLOPs and bytes), whose steps are set later; the runs of programs, in order, each (start_ns, program id or
        name, name of its HLO module, which is the jitted function's); the ns of kernels and copies whose program has
        HLO, but in it no instruction was found for them)
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
                event.flops, event.moved_bytes, event.shape, event.dtype = work.of(instruction)
            event.kind = COLLECTIVE if is_collective(instruction.opcode) else event.kind
        is_gemm = None
        if instruction is not None and not instruction.is_mosaic:
            is_gemm = bool(work.of(instruction)[0]) or instruction.is_gemm
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
    """Whether an event (`raw`) is a copy (cudaMemcpy) and not a kernel, by its name; a Launch has the result, by which
    `join` finds the instruction."""
    return raw.name.startswith(("Memcpy", "memcpy"))


class _WorkCache:
    """Reads of an instruction, for `_events`, its FLOPs, bytes, shapes and dtype (`of`), its linear layer (`linear`),
    and the op_name from which scope_of takes scope and phase (`scope`). The first two are computed once per instruction
    and kept, because many events of a trace have the same one. The keys are id(instruction), so it is used only while
    the program's Module exists."""

    def __init__(self):
        self._work: dict[int, tuple[float, float, str, str]] = {}
        self._linears: dict[int, str] = {}

    def linear(self, instruction: Instruction) -> str:
        """The name of the linear layer whose weight a product multiplies by (weights.linear_of), such as "up_proj"; ""
        if no operand is known to be a weight, and for any instruction that is no product: neither a dot, nor a
        library's product, nor a fusion with FLOPs. It is found at the first call and kept."""
        if id(instruction) not in self._linears:
            product = instruction.is_gemm or (instruction.opcode == "fusion" and self.of(instruction)[0] > 0)
            self._linears[id(instruction)] = linear_of(instruction) if product else ""
        return self._linears[id(instruction)]

    def of(self, instruction: Instruction) -> tuple[float, float, str, str]:
        """(FLOPs, bytes moved, the first four operands and the result in words, dtype of the first operand, or of the
        result if there is none) of an instruction, as a kernel's Event has them. It is computed at the first call for
        an instruction and kept."""
        if id(instruction) not in self._work:
            shapes = instruction.operand_shapes
            result = instruction.shape
            if result.parts and instruction.is_gemm:
                result = result.parts[0]
            words = ", ".join(str(s) for s in shapes[:4]) + (", ..." if len(shapes) > 4 else "")
            dtype = shapes[0].dtype if shapes else result.dtype
            work = float(flops(instruction)), float(moved_bytes(instruction)), f"{words} -> {result}", dtype
            self._work[id(instruction)] = work
        return self._work[id(instruction)]

    def scope(self, instruction: Instruction) -> str:
        """Returns the op_name of an instruction, as JAX writes it, from which scope_of reads scope and phase. Fusions
        and asynchronous calls, which call other computations, can lack an op_name. It is then that of an instruction in
        the first called computation in which one has an op_name: the last one that has it and is no parameter. "" if
        none has."""
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
    """(start_ns, end_ns) of each step, in order. A step is a period of the sequence in which programs run, apart from
    those that take less than 0.02 % of the time, or, if that gives none, 0.2 % or 2 %; if there is still none, because
    programs change with their shapes, a period of the functions' names. If there is none either, all runs are one step.
    If the program marked steps, they win over a period if their number divides that of the runs in which the period was
    found, or, if none was found, of the runs of programs with at least 2 % of the time: those runs are divided equally
    among the steps. Work before the first step and after the last belongs to none, and a step that the capture cut is
    left out (_whole). If no program takes 2 % of the time, or none ran, and no period was found, the whole trace is one
    step, to which all events belong.

    Args:
      events: of the trace; their field `step` is set.
      runs: (start_ns, program id or name, name of its HLO module) of each run of a program.
      marks: (start in ns, number) of each step that the program annotated; only the different numbers are counted.
      notes: a list to which remarks on how steps were found are appended.
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
    return _whole(steps, events, {program for _, program, _ in major}, notes)


def _whole(
    steps: list[tuple[float, float]], events: list[Event], programs: set[str], notes: list[str]
) -> list[tuple[float, float]]:
    """Leaves out the first or the last step, or both, if the capture began or ended within it. Such a step has less
    than 90 % of the kernels of each other step; if there are more than three, it is compared with those between the
    first and the last only, and a single step always stays. Returns the other steps; the events' `step` is renumbered,
    -1 for a step that is left out. `_steps` calls it at its end.

    Args:
      steps: (start_ns, end_ns) of each step.
      events: with their step set; changed in place.
      programs: the programs whose kernels are counted.
      notes: a list to which a remark on each step left out is appended.
    """
    counts = collections.Counter(event.step for event in events if event.module in programs)
    cut = []
    for index in {0, len(steps) - 1}:
        others = range(1, len(steps) - 1) if len(steps) > 3 else {*range(len(steps))} - {index}
        fewest = min((counts[other] for other in others), default=0)
        if counts[index] < 0.9 * fewest:
            cut.append(index)
            which = "last" if index else "first"
            notes.append(
                f"the {which} step has {counts[index]} kernels, others {fewest} or more: the capture cut it, and it is "
                "left out"
            )
    for event in events:
        event.step = -1 if event.step in cut else max(-1, event.step - (0 in cut))
    return [step for index, step in enumerate(steps) if index not in cut]


def _buffers(modules: list[Module]) -> list[Buffer]:
    """The buffers that are live at the memory peak of that one of the programs (`modules`) which needs the most memory,
    the largest first, for the Trace and so for the report's table of memory; an empty list without programs. Parts of
    no bytes are left out."""
    best: list[Buffer] = []
    for module in modules:
        peak = module.peak_buffers()
        rows = [Buffer(size, _what(what, kind), kind) for size, what, kind in peak if size > 0]
        if sum(r.num_bytes for r in rows) > sum(r.num_bytes for r in best):
            best = rows
    return best


def _what(instruction: Instruction | None, kind: str) -> str:
    """Describes what is in a buffer, for the report's table of memory. For an argument with a path it is that path; for
    the result of another instruction, "scope (phase): shape", with the instruction's name if it has no scope, and its
    opcode in place of the shape of a tuple. The instruction is None for bytes that belong to no single value: the text
    is then that the bytes are between buffers if `kind` is "fragmentation", else that smaller values share the
    memory."""
    if instruction is None:
        return "between buffers" if kind == "fragmentation" else "smaller values in the same place"
    if instruction.opcode == "parameter" and instruction.scope:
        return instruction.scope
    scope, phase = scope_of(instruction.scope)
    where = f"{scope} ({phase})" if scope else instruction.name
    return f"{where}: {instruction.shape if instruction.shape.parts is None else instruction.opcode}"
