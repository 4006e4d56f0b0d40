"""Reader of Chrome traces of PyTorch's profiler.

A kernel is joined by its correlation id to the CPU call that launched it, and so to the operators and ranges around it.
Its scope is the path of marked ranges (torch.profiler.record_function) and modules (with_stack=True), or else the
outermost aten operator; in the backward that of the forward operator with the same sequence number; in the optimizer
"optimizer". Shapes need record_shapes=True. Without a GPU, operators take the place of kernels.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jaxtune.profile.chrome_shapes import ELEMENT_BYTES, FLOATS, SHORT_DTYPES, attention_flops, in_words, operand_arrays
from jaxtune.profile.scopes import categorise
from jaxtune.profile.trace import COLLECTIVE, COPY, KERNEL, MEMSET, TO_DEVICE, TO_HOST, Event, Trace, TraceError

_NODE = "autograd::engine::evaluate_function"
_STEP = re.compile(r"^ProfilerStep#(\d+)$")
_OPTIMIZER_STEP = re.compile(r"^Optimizer\.(step|zero_grad)#")
_MODULE = re.compile(r"^nn\.Module: (.+?)(_\d+)?$")
_PRODUCTS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "aten::addmm_",
    "aten::linear",
}
# These write their first array without reading it; other operators that end with "_" do both.
_ONLY_WRITE = ("aten::copy_", "aten::fill_", "aten::zero_")


@dataclasses.dataclass(slots=True)
class _Call:
    """A range of time on a CPU thread: an operator, a marked range, a Python function, or a call of the CUDA API."""

    start: float  # microseconds, as the trace counts them
    end: float  # the same
    name: str  # the trace event's, such as "aten::mm"
    category: str  # the trace event's "cat": "cpu_op", "user_annotation", "python_function", "cuda_runtime", ...
    args: dict[str, Any]  # the trace event's "args": correlation id, sequence number, shapes of the inputs
    parent: _Call | None = None  # the innermost range around this one on the same thread; set by _nest
    main: Event | None = None  # an operator's longest kernel so far, which has its FLOPs and bytes; set by _add_work

    def up(self) -> Iterable[_Call]:
        """This call, then the ranges around it from the inside out."""
        call: _Call | None = self
        while call is not None:
            yield call
            call = call.parent


def read_chrome(data: bytes, path: str) -> Trace:
    """The Trace of the busiest device in a Chrome trace's unpacked bytes; on a machine without a GPU, of CPU operators.

    TraceError: no JSON, no trace, a damaged one, or one without work. path: for the Trace and messages.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not whole JSON ({error}); record it again") from None
    rows = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows[:100]):
        raise TraceError(f"{path}: JSON, but no Chrome trace: it has no list traceEvents")
    try:
        return _read(rows, content if isinstance(content, dict) else {}, path)
    except TraceError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{path}: a trace event lacks or breaks {error}") from error


def _read(rows: list[dict], head: dict[str, Any], path: str) -> Trace:
    """The Trace of the busiest device. KeyError and the like for damaged events."""
    device_rows, calls, launches = [], collections.defaultdict(list), {}
    for row in rows:
        if row.get("ph") != "X":
            continue
        category, args = str(row.get("cat", "")), row.get("args") or {}
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            device_rows.append(row)
        elif category in ("cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver"):
            start = float(row["ts"])
            call = _Call(start, start + float(row.get("dur", 0)), str(row["name"]), category, args)
            calls[row.get("tid")].append(call)
            if category in ("cuda_runtime", "cuda_driver") and "correlation" in args:
                launches[args["correlation"]] = call
    for thread in calls.values():
        _nest(thread)
    on_cpu = not device_rows and not head.get("deviceProperties")  # deviceProperties lists the GPUs
    if on_cpu:
        device_rows, launches = _operators_as_kernels(calls)
    if not device_rows:
        raise TraceError(
            f"{path}: no GPU kernels in it (event categories kernel, gpu_memcpy, gpu_memset); profile with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], or give JAX's .xplane.pb"
        )
    device, device_rows, num_devices = _busiest_device(device_rows, head.get("deviceProperties") or [])
    forward = _Forward(calls)
    marks = sorted(
        ((c.start, c.end) for thread in calls.values() for c in thread if _STEP.match(c.name)), key=lambda m: m[0]
    )
    origin = min(float(row["ts"]) for row in device_rows)
    optimizer_ends = sorted(c.end for t in calls.values() for c in t if c.name.startswith("Optimizer.step#"))
    step_of = _step_finder(marks, optimizer_ends)
    events = []
    for row in sorted(device_rows, key=lambda r: float(r["ts"])):
        call = launches.get((row.get("args") or {}).get("correlation"))
        event = _event(row, call, forward, origin)
        event.step = step_of(call.start if call is not None else None)
        events.append(event)
    steps = _steps(events)
    notes = ["the trace has no GPU: CPU operators are shown as kernels"] if on_cpu else []
    if not marks:
        notes.append(
            "no ProfilerStep ranges: "
            + ("a step ends with the optimizer's step" if optimizer_ends else "the trace is read as one step")
        )
    if not any(call.args.get("Input Dims") for thread in calls.values() for call in thread):
        notes.append("the trace has no shapes (record_shapes=False): FLOPs of products are unknown")
    named = {"torch": "pytorch_version", "cuda": "cuda_runtime_version"}
    versions = {name: str(head[key]) for name, key in named.items() if key in head}
    return Trace(
        path=path,
        framework="torch",
        # Metadata that the program added with torch.profiler's add_metadata_json are top-level entries.
        meta={key: head[key] for key in ("what", "tokens_per_step") if key in head},
        device="CPU" if on_cpu else device,
        events=events,
        steps=steps,
        num_devices=num_devices,
        versions=versions,
        notes=notes,
        peak_memory_bytes=_peak_memory(rows),
    )


def _nest(thread: list[_Call]) -> None:
    """Sorts one thread's calls by start, and sets their `parent`, the innermost call around each; in place."""
    thread.sort(key=lambda c: (c.start, -c.end))
    stack: list[_Call] = []
    for call in thread:
        while stack and stack[-1].end < call.end:
            stack.pop()
        call.parent = stack[-1] if stack else None
        stack.append(call)


def _operators_as_kernels(threads: dict[Any, list[_Call]]) -> tuple[list[dict], dict[Any, _Call]]:
    """Operators of a CPU trace as kernels: (trace events, {correlation id: the operator's call})."""
    rows, calls = [], {}
    for thread, all_calls in threads.items():
        operators = [call for call in all_calls if call.category == "cpu_op" and "::" in call.name]
        inside = collections.defaultdict(list)
        for call in operators:
            enclosing = next(
                (operator for operator in call.up() if operator is not call and operator.category == "cpu_op"), None
            )
            inside[id(enclosing)].append(call)
        for call in operators:
            if call.name.startswith("autograd::"):
                continue
            ends = [call.start, *(operator.end for operator in inside[id(call)])]
            starts = [*(operator.start for operator in inside[id(call)]), call.end]
            duration, start = max((start - end, end) for start, end in zip(starts, ends, strict=True))
            if duration > 0:
                number = len(rows)
                calls[number] = call
                rows.append(
                    {
                        "ts": start,
                        "dur": duration,
                        "name": call.name,
                        "cat": "kernel",
                        "tid": thread,
                        "args": {"correlation": number},
                    }
                )
    return rows, calls


def _busiest_device(rows: list[dict], properties: list[dict]) -> tuple[str, list[dict], int]:
    """(name, its rows, number of devices) of the device with the longest sum of durations."""
    by_device: dict[Any, list[dict]] = collections.defaultdict(list)
    for row in rows:
        by_device[(row.get("args") or {}).get("device", row.get("pid"))].append(row)
    busiest, busiest_rows = max(by_device.items(), key=lambda item: sum(float(row.get("dur", 0)) for row in item[1]))
    entries = [entry for entry in properties if entry.get("id") == busiest] or properties or [{}]
    return str(entries[0].get("name", "")), busiest_rows, len(by_device)


class _Forward:
    """Finds the forward operator of an autograd node by their sequence number, which counts per thread."""

    def __init__(self, threads: dict[Any, list[_Call]]):
        self._calls: dict[tuple[Any, int], _Call] = {}
        nodes: dict[Any, list[_Call]] = collections.defaultdict(list)
        for thread, calls in threads.items():
            for call in calls:
                if call.category != "cpu_op" or "Sequence number" not in call.args:
                    continue
                if call.name.startswith(_NODE):
                    nodes[call.args.get("Fwd thread id")].append(call)
                elif not call.args.get("Fwd thread id") and call.args["Sequence number"] >= 0:
                    # Every operator shows the number that the next node will get; the last one creates the node.
                    self._calls[thread, call.args["Sequence number"]] = call
        self._threads = {
            number: max(
                threads,
                key=lambda thread, thread_nodes=thread_nodes: sum(self._fits(thread, node) for node in thread_nodes),
                default=None,
            )
            for number, thread_nodes in nodes.items()
        }

    def _fits(self, thread: Any, node: _Call) -> bool:
        """Whether the forward of `node` may have run on `thread`, by an operator's name."""
        call = self._calls.get((thread, node.args["Sequence number"]))
        if call is None:
            return False
        name = re.sub(r"(Backward)?\d*$", "", node.name.rsplit(": ", 1)[-1]).lower()
        return any(_bare(enclosing.name) == name for enclosing in call.up())

    def operator_of(self, node: _Call) -> _Call | None:
        number = node.args.get("Sequence number")
        thread = self._threads.get(node.args.get("Fwd thread id"))
        return None if number is None else self._calls.get((thread, number))


def _bare(operator: str) -> str:
    """ "aten::_softmax" as "softmax", for comparison with SoftmaxBackward0."""
    return operator.removeprefix("aten::").replace("_", "").lower()


def _backward_call(call: _Call) -> _Call | None:
    """The innermost autograd node around a call; None in the forward."""
    return next((enclosing for enclosing in call.up() if enclosing.name.startswith(_NODE)), None)


# ---- steps


def _step_finder(marks: Sequence[tuple[float, float]], optimizer_ends: Sequence[float]):
    """A function from a launch's time in microseconds (None: unknown) to its step from 0, or -1."""
    starts = [start for start, _ in marks]

    def find(moment: float | None) -> int:
        if marks:
            if moment is None:
                return -1
            index = bisect.bisect_right(starts, moment) - 1
            return index if index >= 0 and moment <= marks[index][1] else -1
        if optimizer_ends and moment is not None:
            index = bisect.bisect_left(optimizer_ends, moment)
            return index if index < len(optimizer_ends) else -1
        return 0

    return find


def _steps(events: list[Event]) -> list[tuple[float, float]]:
    """(start_ns, end_ns) of each step, from its first event to the next step's; renumbers from 0."""
    numbers = sorted({e.step for e in events if e.step >= 0})
    if not numbers:
        for event in events:
            event.step = 0
        numbers = [0]
    new_number = {number: index for index, number in enumerate(numbers)}
    for event in events:
        event.step = new_number.get(event.step, -1)
    starts = [min(e.start_ns for e in events if e.step == i) for i in range(len(numbers))]
    ends = [max(e.end_ns for e in events if e.step == i) for i in range(len(numbers))]
    return list(zip(starts, [*starts[1:], ends[-1]]))


# ---- kernels


def _event(row: dict, call: _Call | None, forward: _Forward, origin: float) -> Event:
    """The Event of one kernel, memset or copy, without its step; call: that launched it, or None."""
    args = row.get("args") or {}
    name = str(row["name"])
    start = (float(row["ts"]) - origin) * 1e3
    kind = _kind(row, name)
    event = Event(
        start, start + float(row.get("dur", 0)) * 1e3, name, f"Stream #{args.get('stream', row.get('tid'))}", kind
    )
    if kind in (COPY, TO_HOST, TO_DEVICE) and "bytes" in args:
        event.moved_bytes = float(args["bytes"]) * (2 if kind == COPY else 1)
    enclosing = [] if call is None else list(call.up())
    if call is not None:
        operators = [c for c in enclosing if c.category == "cpu_op"]
        event.scope, event.phase = _scope(call, forward)
        event.op = next(
            (c.name for c in operators if c.name.startswith("aten::")), operators[0].name if operators else ""
        )
        if kind == KERNEL:
            _add_work(event, operators)
    event.category = _category(event, enclosing)
    if event.category == "optimizer":
        event.scope, event.phase = "optimizer", "forward"
    return event


def _kind(row: dict, name: str) -> str:
    if row["cat"] == "gpu_memset":
        return MEMSET
    if row["cat"] == "gpu_memcpy":
        if "HtoD" in name:
            return TO_DEVICE
        return TO_HOST if "DtoH" in name else COPY
    return COLLECTIVE if "nccl" in name.lower() else KERNEL


def _category(event: Event, enclosing: Sequence[_Call]) -> str:
    """`categorise`'s category, with operators and ranges around the launch, the innermost first."""
    operators = [c.name for c in enclosing if c.category == "cpu_op"]
    words = " ".join(operators)
    is_gemm = True if event.flops and not _PRODUCTS.isdisjoint(operators) else None
    scope = event.scope
    if event.kind == KERNEL and re.search(r"attention", words, re.IGNORECASE):
        scope = "scaled_dot_product_attention"
    elif re.search(r"cross_?entropy|nll_?loss|log_?softmax", words, re.IGNORECASE):
        scope = "loss"
    elif any(_OPTIMIZER_STEP.match(c.name) for c in enclosing) or "aten::_foreach_" in words:
        scope = "optimizer"  # _foreach_ outside of the optimizer's range: gradient norm and clipping
    category = categorise(event.kind, event.name, scope, is_gemm=is_gemm)
    if category == "elementwise and norms" and event.op in ("aten::copy_", "aten::cat", "aten::fill_"):
        types = next((c.args.get("Input type", []) for c in enclosing if c.name == "aten::copy_"), [])
        return category if len(set(types[:2])) == 2 else "device copies"  # a cast is elementwise work
    return category


def _scope(call: _Call, forward: _Forward) -> tuple[str, str]:
    """(scope, phase) of a launched kernel; "recompute" is a forward inside an autograd node."""
    node = _backward_call(call)
    if node is None:
        return _path(call), "forward"
    for enclosing in call.up():
        if enclosing is node:
            break
        # A module, or an operator that records its own backward, inside the backward: gradient checkpointing.
        recorded = enclosing.category == "cpu_op" and enclosing.args.get("Sequence number", -1) >= 0
        if (recorded and not enclosing.args.get("Fwd thread id")) or _names_a_place(enclosing):
            return _path(call, node), "recompute"
    origin = forward.operator_of(node)
    if origin is None:
        return _operator(call), "backward"
    return _path(origin, _backward_call(origin)), "backward"


def _names_a_place(call: _Call) -> bool:
    return call.category == "user_annotation" or _MODULE.match(call.name) is not None


def _path(call: _Call, inside: _Call | None = None) -> str:
    """Marked ranges and modules around a call, the outermost first, or else `_operator`; inside: an autograd node."""
    names: list[str] = []
    for enclosing in call.up():
        if enclosing is inside:
            break
        if enclosing.category == "user_annotation" and not _STEP.match(enclosing.name):
            if not _OPTIMIZER_STEP.match(enclosing.name):
                names.append(enclosing.name)
        elif match := _MODULE.match(enclosing.name):
            names.append(match.group(1))
    names = [name for index, name in enumerate(names) if index == 0 or name != names[index - 1]]
    return "/".join(reversed(names)) if names else _operator(call)


def _operator(call: _Call) -> str:
    """The outermost aten operator around a call, or else the outermost of any kind; "" without one."""
    names = [c.name for c in call.up() if c.category == "cpu_op" and c.name.startswith("aten::")]
    if names:
        return names[-1].removeprefix("aten::")
    nodes = [c.name for c in call.up() if c.category == "cpu_op"]
    return nodes[-1].removeprefix("autograd::engine::evaluate_function: ") if nodes else ""


# ---- work


def _add_work(event: Event, operators: list[_Call]) -> None:
    """Sets a kernel's shape, dtype, FLOPs and bytes from the innermost operator with recorded shapes."""
    shaped = [c for c in operators if c.args.get("Input Dims")]
    attention = [c for c in shaped if c.name.startswith("aten::_scaled_dot_product_")]
    operator = next(iter(attention or shaped), None)
    if operator is None:
        return
    arrays = operand_arrays(operator.args)
    if not arrays:
        return
    dims = [shape for shape, _, _ in arrays]
    dtype = result = arrays[0][1]
    event.dtype = SHORT_DTYPES.get(dtype, dtype)
    event.shape = ", ".join(in_words(shape, kind) for shape, kind, _ in arrays[:3])
    if operator.main is not None and event.duration_ns <= operator.main.duration_ns:
        return
    if operator.main is not None:
        operator.main.flops = operator.main.moved_bytes = 0.0
    operator.main = event
    read = sum(num_bytes for _, _, num_bytes in arrays)
    out: Sequence[int] = ()
    name = operator.name
    if name in ("aten::mm", "aten::bmm", "aten::_scaled_mm") and len(dims) >= 2:
        event.flops, out = 2.0 * math.prod(dims[0]) * dims[1][-1], (*dims[0][:-1], dims[1][-1])
    elif name in ("aten::addmm", "aten::baddbmm", "aten::addmm_") and len(dims) >= 3:
        event.flops, out = 2.0 * math.prod(dims[1]) * dims[2][-1], (*dims[1][:-1], dims[2][-1])
    elif name == "aten::gather" and len(dims) >= 2:  # what an embedding launches on a GPU
        out = dims[1]
        read = arrays[1][2] + ELEMENT_BYTES[dtype] * math.prod(out)  # only the looked-up rows of the table are read
    elif attention:
        event.flops = attention_flops(name, dims, operator.args)
    if out:
        event.shape += f" -> {in_words(out, dtype)}"
    elif name.endswith("_"):
        out = () if name in _ONLY_WRITE else dims[0]
    else:
        out = max(dims, key=math.prod)
        result = max((kind for _, kind, _ in arrays if kind in FLOATS), key=ELEMENT_BYTES.__getitem__, default=dtype)
    event.moved_bytes = float(read + ELEMENT_BYTES[result] * math.prod(out) * bool(out))


def _peak_memory(rows: list[dict]) -> int:
    """The most bytes allocated on one GPU, from the allocator's events (profile_memory=True); else 0."""
    peak = 0
    for row in rows:
        if row.get("name") == "[memory]":
            args = row.get("args") or {}
            if args.get("Device Type") == 1:
                peak = max(peak, int(args.get("Total Allocated", 0)))
    return peak
