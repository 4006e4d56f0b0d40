"""The optimised HLO of a program in a trace, made from its HloProto in an XPlane file: a `Module` of Computations of
Instructions with Shapes. launches.py joins kernels with its `launches`, of which xplane.py reads FLOPs (`flops`), bytes
(`moved_bytes`) and scopes. `launches` repeats those of a loop as often as it runs (`trip_count`), as the trace does.
`peak_buffers` gives the buffers at the memory peak. Opcodes in SILENT launch nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

# PrimitiveType of xla_data.proto, by number: (name, bits of an element).
_TYPES = {
    1: ("pred", 8),
    2: ("s8", 8),
    3: ("s16", 16),
    4: ("s32", 32),
    5: ("s64", 64),
    6: ("u8", 8),
    7: ("u16", 16),
    8: ("u32", 32),
    9: ("u64", 64),
    10: ("f16", 16),
    11: ("f32", 32),
    12: ("f64", 64),
    15: ("c64", 64),
    16: ("bf16", 16),
    18: ("c128", 128),
    19: ("f8e5m2", 8),
    20: ("f8e4m3fn", 8),
    21: ("s4", 4),
    22: ("u4", 4),
    23: ("f8e4m3b11fnuz", 8),
    24: ("f8e5m2fnuz", 8),
    25: ("f8e4m3fnuz", 8),
    26: ("s2", 2),
    27: ("u2", 2),
    28: ("f8e4m3", 8),
    29: ("f8e3m4", 8),
    32: ("f4e2m1fn", 4),
    33: ("f8e8m0fnu", 8),
}
# Opcodes that launch nothing on the device.
SILENT = frozenset(
    (
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "opt-barrier",
        "partition-id",
        "replica-id",
        "add-dependency",
        "domain",
        "copy-done",
        "async-done",
        "async-update",
        "all-reduce-done",
        "all-gather-done",
        "reduce-scatter-done",
        "collective-permute-done",
    )
)
_LAST_COMPILED = 63  # fields of HloInstructionProto with a larger number do not change the kernel


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape and dtype of an array, or a tuple of shapes, as an instruction takes or gives them."""

    dtype: str  # as HLO writes it, such as "bf16"; "tuple" for a tuple, "?" for an unknown type
    dims: tuple[int, ...] = ()  # empty for a scalar and for a tuple
    bits: int = 0  # of one element; 0 for a tuple, a token and an unknown type
    parts: tuple[Shape, ...] | None = None  # the shapes of a tuple; None for an array

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, rounded up, or of a tuple's arrays; 0 for an unknown type. moved_bytes sums them."""
        if self.parts is not None:
            return sum(part.num_bytes for part in self.parts)
        return math.ceil(math.prod(self.dims) * self.bits / 8)

    def __str__(self) -> str:
        """The shape as HLO's text has it, such as "bf16[8,64]", or "(f32[8], s32[])" for a tuple."""
        if self.parts is not None:
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(eq=False)
class Instruction:
    """One instruction of an optimised HLO module, with the fields of its HloInstructionProto that are used here. Its
    Module makes it."""

    name: str  # unique within the module, such as "fusion.12"
    opcode: str  # as HLO writes it, such as "dot" or "fusion"
    shape: Shape  # of the result
    id: int  # unique within the module
    scope: str = ""  # the op_name of its metadata: named scopes, transformations and the JAX primitive
    operands: tuple[int, ...] = ()  # ids of the instructions whose results it takes
    called: tuple[int, ...] = ()  # ids of the computations that it calls: a fusion's body, a loop's body and condition
    target: str = ""  # custom_call_target, the library function of a custom call; "" for other instructions
    config: bytes = b""  # backend_config, JSON in bytes
    contracting: tuple[int, ...] = ()  # contracting dimensions of a dot's left side
    parameter: int = -1  # which argument of the computation a parameter is, from 0; -1 for other instructions
    computation: Computation | None = None  # the computation that it is part of; None until that is made

    @property
    def operand_shapes(self) -> list[Shape]:
        """The operands' shapes, in order, without those outside its computation. Work is counted by them."""
        assert self.computation is not None
        by_id = self.computation.by_id
        return [by_id[i].shape for i in self.operands if i in by_id]

    @property
    def is_gemm(self) -> bool:
        """Whether it is a matrix product: a dot, or a library's custom call with "matmul" or "gemm" in its target. A
        fusion around one is none. `flops`, `moved_bytes`, launches.py's classes and xplane.py's categories use it."""
        return self.opcode == "dot" or "matmul" in self.target or "gemm" in self.target.lower()

    @property
    def is_mosaic(self) -> bool:
        """Whether it calls a Pallas kernel of Mosaic GPU. All are one class of launches.py; `flops` asks the scope."""
        return "mosaic_gpu" in self.target


@dataclasses.dataclass(eq=False)
class Computation:
    """One computation of a module, such as the entry, a loop's body or a fusion's body. Module.computation makes it."""

    name: str  # unique within the module
    id: int  # unique within the module, as Instruction.called refers to it
    instructions: list[Instruction]  # in the order in which they run; as in the proto if it has no schedule
    module: Module | None = None  # the module that it is part of

    @functools.cached_property
    def by_id(self) -> dict[int, Instruction]:
        """{id: instruction} of this computation's instructions, in which operands are looked up by their ids."""
        return {i.id: i for i in self.instructions}

    @functools.cached_property
    def fingerprint(self) -> int:
        """A hash that is equal for computations that differ in names and metadata only, for which XLA compiles one
        kernel: Module.fingerprint, kept. Fusions with equal ones form a class of launches.py."""
        assert self.module is not None
        return self.module.fingerprint(self.id)


class Module:
    """One optimised HLO program of a trace, made from an HloProto (messages.py): what it launches (`launches`), by name
    the instructions that start work, and the buffers at its memory peak. Its computations become Computation objects
    when they are asked for, because a program has hundreds and few are looked at. `name` is the program's name,
    `entry_id` its entry computation's id. Raises ValueError if the proto has no module, KeyError if it has no entry."""

    def __init__(self, proto: Any):
        if not proto.HasField("hlo_module"):
            raise ValueError("an HLO proto without a module")
        module = proto.hlo_module
        self.name, self.entry_id = module.name, module.entry_computation_id
        self._protos = {computation.id: computation for computation in module.computations}
        self._schedule = {entry.key: entry.value.instruction_ids for entry in module.schedule.sequences}
        self._made: dict[int, Computation] = {}
        self._buffers = proto.buffer_assignment
        if self.entry_id not in self._protos:
            named = {computation.name: computation.id for computation in module.computations}
            self.entry_id = named[module.entry_computation_name]

    def computation(self, id: int) -> Computation:
        """The computation with this id. It is converted from the proto at the first call and kept."""
        if id not in self._made:
            self._made[id] = _computation(self._protos[id], self._schedule.get(id), self)
        return self._made[id]

    def fingerprint(self, id: int) -> int:
        """A hash, in this process, of the computation with this id, which is computed from the proto. It is equal for
        computations that differ in names and metadata only, for which XLA compiles one kernel."""
        place, rows = {}, []
        for proto in self._protos[id].instructions:
            called = tuple(self.fingerprint(inner) for inner in proto.called_computation_ids)
            operands = tuple(place.get(operand, -1) for operand in proto.operand_ids)
            place[proto.id] = len(rows)
            rows.append((*_compiled(proto), called, operands))
        return hash(tuple(rows))

    @property
    def entry(self) -> Computation:
        """The computation that the program starts with, from which `launches` proceeds."""
        return self.computation(self.entry_id)

    def launches(self) -> list[Instruction]:
        """The instructions that start work on the device, in the order in which they run, for launches.join. Those of a
        loop occur as often as it runs (trip_count, 1 if unknown), and those of all branches of a conditional occur."""
        return list(self._launches(self.entry, 0))

    def _launches(self, computation: Computation, depth: int) -> Iterator[Instruction]:
        """Yields the instructions of one computation, and of those that it calls, that start work on the device (not
        SILENT): a loop's as often as it runs (trip_count), and a conditional's of all branches. depth: the number of
        calls from the entry to this computation; deeper than 16, nothing is yielded."""
        for instruction in computation.instructions:
            opcode = instruction.opcode
            if opcode in SILENT or depth > 16:
                continue
            if opcode == "while":
                body = [self.computation(id) for id in instruction.called]
                for _ in range(trip_count(instruction)):
                    for called in reversed(body):  # called is (body, condition); the condition runs first
                        yield from self._launches(called, depth + 1)
            elif opcode in ("call", "conditional"):
                for id in instruction.called:
                    yield from self._launches(self.computation(id), depth + 1)
            else:
                yield instruction

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """{name: instruction} of every instruction that starts work on the device, in the entry, loop bodies and called
        computations, but not inside fusions. `join` finds by it those that a trace names."""
        out, seen = {}, set()
        queue = [self.entry_id]
        while queue:
            id = queue.pop()
            if id in seen:
                continue
            seen.add(id)
            for instruction in self.computation(id).instructions:
                if instruction.opcode in ("while", "call", "conditional"):
                    queue += instruction.called
                elif instruction.opcode not in SILENT:
                    out[instruction.name] = instruction
        return out

    def peak_buffers(self) -> list[tuple[int, Instruction | None, str]]:
        """The buffers that are live when the program needs the most device memory, the largest first, for xplane.py:
        (bytes, instruction, kind). kind is "argument", "output", "temporary", "constant" or "fragmentation". The
        instruction is the one whose result is in the buffer; None for unused bytes of an allocation ("fragmentation")
        and for smaller values that share an allocation with a listed one. Bytes may be 0."""
        return _peak_buffers(self._buffers, self)

    @functools.cached_property
    def _every_instruction(self) -> dict[int, Instruction]:
        """{id: instruction} of all instructions of all computations, for the buffers, which name instructions by id."""
        return {i.id: i for id in self._protos for i in self.computation(id).instructions}


def trip_count(loop: Instruction) -> int:
    """How often a while loop, the instruction `loop`, runs, if the compiler has noted it in its config; else 1.
    Module.launches repeats the launches of the loop's body so often, because a trace has as many kernels."""
    try:
        return int(json.loads(loop.config)["known_trip_count"]["n"])
    except (ValueError, KeyError, TypeError):
        return 1


def _compiled(proto: Any) -> tuple:
    """The values of those fields of an HloInstructionProto that decide which kernel the computation around it becomes,
    hashable, for Module.fingerprint, which adds operands and called computations itself: without these, names, ids and
    metadata, but with every field up to _LAST_COMPILED that messages.py does not declare."""
    known = (proto.opcode, proto.parameter_number, proto.custom_call_target, proto.backend_config)
    parts = (proto.shape, proto.dot_dimension_numbers)
    others = [(field.field_number, field.data) for field in UnknownFieldSet(proto)]
    return *known, *(part.SerializeToString() for part in parts), *(o for o in others if o[0] <= _LAST_COMPILED)


def _computation(proto: Any, order: Any, module: Module) -> Computation:
    """Makes a Computation of `module` from its HloComputationProto, `proto`. order: ids of its instructions in the
    order in which they run, or None if it has no schedule, and then the proto's order is kept."""
    instructions = [_instruction(one) for one in proto.instructions]
    if order:
        by_id = {i.id: i for i in instructions}
        instructions = [by_id[i] for i in order if i in by_id]
    computation = Computation(proto.name, proto.id, instructions, module)
    for instruction in instructions:
        instruction.computation = computation
    return computation


def _instruction(proto: Any) -> Instruction:
    """Makes an Instruction from its HloInstructionProto, `proto`; _computation sets its field `computation`."""
    return Instruction(
        name=proto.name,
        opcode=proto.opcode,
        shape=_shape(proto.shape),
        id=proto.id,
        scope=proto.metadata.op_name,
        operands=tuple(proto.operand_ids),
        called=tuple(proto.called_computation_ids),
        target=proto.custom_call_target,
        config=proto.backend_config,
        contracting=tuple(proto.dot_dimension_numbers.lhs_contracting_dimensions),
        parameter=proto.parameter_number if proto.opcode == "parameter" else -1,
    )


def _shape(proto: Any) -> Shape:
    """Makes a Shape from its ShapeProto, `proto`; an unknown element type gets the dtype "?" and no bits."""
    number = proto.element_type
    if number == 13:
        return Shape("tuple", parts=tuple(map(_shape, proto.tuple_shapes)))
    dtype, bits = _TYPES.get(number, ("token" if number == 17 else "?", 0))
    return Shape(dtype, tuple(proto.dimensions), bits)


# ---- work


def flops(instruction: Instruction) -> int:
    """FLOPs of the products in an instruction, two for each multiply-add; 0 where shapes do not tell. The report's
    TFLOP/s and lost time, and the category of a fusion, depend on it. Products are those of is_gemm, and those inside a
    fusion. A cuDNN attention call counts 2 products of length x length a head in the forward, 5 in the backward, half
    if its mask is causal; packed rows count as one document each, which is too much. Of Pallas kernels only Mosaic's
    `grouped_matmul` and `fp8_matmul` count (x [., K] is the first operand, [rows, N] the result, rows that fill up
    tiles included); others, attention among them, are 0."""
    operands = instruction.operand_shapes
    if instruction.is_mosaic:
        out = _first(instruction.shape).dims
        named = instruction.scope.split("/")[-2:-1] in (["grouped_matmul"], ["fp8_matmul"])
        return 2 * math.prod(out[-2:]) * operands[0].dims[-1] if named and operands else 0
    if instruction.opcode == "dot":
        return _dot_flops(instruction.shape, operands, instruction.contracting)
    if instruction.is_gemm:
        contracting = _cublas_contracting(instruction)
        return _dot_flops(_first(instruction.shape), operands, contracting)
    if instruction.target.startswith("__cudnn$fmha"):
        return _attention_flops(instruction, operands)
    if instruction.opcode == "fusion":
        module = instruction.computation and instruction.computation.module
        if module is not None:
            inner = (i for id in instruction.called for i in module.computation(id).instructions)
            return sum(flops(i) for i in inner if i.is_gemm or i.opcode == "fusion")
    return 0


def _first(shape: Shape) -> Shape:
    """The shape of a call's first result: the first shape of a tuple's, or an array's as it is. Library calls return
    their result in a tuple with a workspace."""
    return shape.parts[0] if shape.parts else shape


def _dot_flops(out: Shape, operands: list[Shape], contracting: tuple[int, ...]) -> int:
    """FLOPs of a matrix product: 2 x elements of the result x elements that are summed for each. out: the result's
    shape. operands: the operands' shapes. contracting: the left one's dimensions that are summed over; () gives 0."""
    if not operands:
        return 0
    lhs = operands[0].dims
    if not contracting or max(contracting) >= len(lhs):
        return 0
    return 2 * math.prod(out.dims) * math.prod(lhs[i] for i in contracting)


def _cublas_contracting(instruction: Instruction) -> tuple[int, ...]:
    """The dimensions of a cuBLAS call's left operand that are summed over, by its config; () if that lacks them."""
    try:
        numbers = json.loads(instruction.config)["gemm_backend_config"]["dot_dimension_numbers"]
        return tuple(int(i) for i in numbers["lhs_contracting_dimensions"])
    except (ValueError, KeyError, TypeError):
        return ()


def _attention_flops(instruction: Instruction, operands: list[Shape]) -> int:
    """FLOPs of a cuDNN attention call: 2 products of length x length a head in the forward, 5 in the backward, half if
    its mask is causal. Packed rows count as one document each, which is too much. 0 if query or key has not four
    dimensions. operands: the shapes of the call's operands, query and key [B, T, heads, D] first."""
    query, key = operands[0].dims, operands[1].dims
    if len(query) != 4 or len(key) != 4:
        return 0
    try:
        config = json.loads(instruction.config)["cudnn_fmha_backend_config"]
        causal = "CAUSAL" in config.get("mask_type", "")
    except (ValueError, KeyError, TypeError):
        causal = False
    rows, length, heads, head_dim = query  # [B, T, heads, D], the layout of jax.nn's call
    products = 5 if "Backward" in instruction.target else 2
    dense = products * 2 * rows * heads * length * key[1] * head_dim
    return dense // 2 if causal else dense


def moved_bytes(instruction: Instruction) -> int:
    """Bytes that an instruction reads and writes, for the report's TB/s and lost time: each operand and result
    once, cuBLAS's workspace not. Of an operand that a fusion only slices or gathers from, the slices count; of one that
    it updates in place, the update. An asynchronous start counts its result alone, because that includes the operands;
    only all-reduce-start counts as other instructions do."""
    if instruction.opcode in ("all-gather-start", "collective-permute-start", "copy-start", "async-start"):
        return instruction.shape.num_bytes  # the result of these includes their operands
    workspace = 0
    if instruction.shape.parts and instruction.is_gemm:
        workspace = instruction.shape.parts[-1].num_bytes  # cuBLAS's scratch, declared as an s8 output
    total = max(instruction.shape.num_bytes - workspace, 0)
    shapes = instruction.operand_shapes
    module = instruction.computation and instruction.computation.module
    if instruction.opcode != "fusion" or module is None or len(instruction.called) != 1:
        return total + sum(shape.num_bytes for shape in shapes)
    inner = module.computation(instruction.called[0])
    users: dict[int, list[Instruction]] = {}
    for user in inner.instructions:
        for operand in user.operands:
            users.setdefault(operand, []).append(user)
    for parameter in inner.instructions:
        if parameter.opcode != "parameter" or parameter.parameter >= len(shapes):
            continue
        whole = shapes[parameter.parameter].num_bytes
        used_by = users.get(parameter.id, [])
        if used_by and all(u.opcode in ("slice", "dynamic-slice", "gather") for u in used_by):
            whole = min(whole, sum(u.shape.num_bytes for u in used_by))
        elif used_by and all(u.opcode == "dynamic-update-slice" and u.operands[0] == parameter.id for u in used_by):
            updates = sum(inner.by_id[u.operands[1]].shape.num_bytes for u in used_by)
            total -= max(whole - updates, 0)  # the output is the operand, written in place
            whole = 0
        total += whole
    return max(total, 0)


# ---- memory


def _peak_buffers(assignment: Any, module: Module) -> list[tuple[int, Instruction | None, str]]:
    """The buffers live when the program `module` needs the most device memory, found by replaying `assignment`, the
    compiler's BufferAssignmentProto. Returns (bytes, instruction or None, kind) of each, as Module.peak_buffers does.
    Values that share an allocation over time are replayed by the heap simulator's trace. Those live when the allocation
    is fullest are listed, and its unused rest. Without a trace its largest value is, and the rest as one row. Host
    allocations do not count."""
    sizes = {buffer.id: buffer.size for buffer in assignment.logical_buffers}
    defined = {buffer.id: buffer.defined_at.instruction_id for buffer in assignment.logical_buffers}
    traces = [
        [(event.kind, event.buffer_id, event.share_with_canonical_id) for event in trace.events]
        for trace in assignment.heap_simulator_traces
    ]
    out: list[tuple[int, Instruction | None, str]] = []
    instructions = module._every_instruction
    for allocation in assignment.buffer_allocations:
        if allocation.color:  # a memory space other than the device's: the host
            continue
        size = allocation.size
        assigned = [one.logical_buffer_id for one in allocation.assigned]
        kind = (
            "argument"
            if allocation.is_entry_computation_parameter
            else "constant"
            if allocation.is_constant
            else "output"
            if allocation.maybe_live_out
            else "temporary"
        )
        chosen = set(assigned)
        trace = next((t for t in traces if len(assigned) > 1 and any(b in chosen for _, b, _ in t)), None)
        if trace is not None:
            live = _fullest([e for e in trace if e[1] in chosen], sizes)
            out += [(sizes.get(b, 0), instructions.get(defined.get(b, -1)), kind) for b in live]
            out.append((max(0, size - sum(sizes.get(b, 0) for b in live)), None, "fragmentation"))
        else:
            largest = max(assigned, key=lambda b: sizes.get(b, 0), default=-1)
            known = min(size, sizes.get(largest, size))
            out.append((known, instructions.get(defined.get(largest, -1)), kind))
            out.append((size - known, None, kind))  # smaller values that share the allocation
    return sorted(out, key=lambda row: -row[0])


def _fullest(events: list[tuple[int, int, int]], sizes: dict[int, int]) -> list[int]:
    """Replays the events of a simulated heap and returns the ids of the buffers that are in memory when it first has
    the most bytes. A buffer that shares memory is not listed; the one that owns the memory is, until all that share it
    are freed. events: (kind, buffer, the buffer whose memory it shares), in order; kind 0 allocates, 1 frees, 2 shares.
    sizes: {buffer: bytes}."""
    live: dict[int, int] = {}
    canonical: dict[int, int] = {}
    total = best_total = 0
    best_at = -1
    for index, (kind, buffer, shared) in enumerate(events):
        root = canonical.get(buffer, buffer)
        if kind == 0:
            live[buffer] = 1
            total += sizes.get(buffer, 0)
        elif kind == 2:
            root = canonical.setdefault(buffer, canonical.get(shared, shared))
            if live.get(root, 0) == 0:
                total += sizes.get(root, 0)
            live[root] = live.get(root, 0) + 1
        elif kind == 1 and live.get(root, 0):
            live[root] -= 1
            if live[root] == 0:
                total -= sizes.get(root, 0)
        if total > best_total:
            best_total, best_at = total, index
    live.clear()
    canonical.clear()
    for kind, buffer, shared in events[: best_at + 1]:
        root = canonical.get(buffer, buffer)
        if kind == 0:
            live[buffer] = 1
        elif kind == 2:
            root = canonical.setdefault(buffer, canonical.get(shared, shared))
            live[root] = live.get(root, 0) + 1
        elif live.get(root, 0):
            live[root] -= 1
    return [buffer for buffer, count in live.items() if count]
