"""The optimised HLO of a program in a trace, made from its HloProto: instructions with shapes, their FLOPs and bytes,
what the program launches, and the buffers at its memory peak.
"""

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
    """The shape and dtype of an array, or a tuple of shapes."""

    dtype: str  # as HLO writes it, such as "bf16"; "tuple" for a tuple, "?" for an unknown type
    dims: tuple[int, ...] = ()  # empty for a scalar and for a tuple
    bits: int = 0  # of one element; 0 for a tuple, a token and an unknown type
    tuple_shapes: tuple[Shape, ...] | None = None  # the shapes of a tuple; None for an array

    @property
    def num_bytes(self) -> int:
        """Rounded up; 0 for an unknown type."""
        if self.tuple_shapes is not None:
            return sum(shape.num_bytes for shape in self.tuple_shapes)
        return math.ceil(math.prod(self.dims) * self.bits / 8)

    def __str__(self) -> str:
        """As in HLO's text: "bf16[8,64]", or "(f32[8], s32[])"."""
        if self.tuple_shapes is not None:
            return f"({', '.join(map(str, self.tuple_shapes))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(eq=False)
class Instruction:
    """One instruction of an optimised HLO module."""

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
        """Without operands of other computations."""
        assert self.computation is not None
        by_id = self.computation.by_id
        return [by_id[i].shape for i in self.operands if i in by_id]

    @property
    def is_gemm(self) -> bool:
        """A dot, or a library's product; a fusion around one is none."""
        return self.opcode == "dot" or "matmul" in self.target or "gemm" in self.target.lower()

    @property
    def is_mosaic(self) -> bool:
        """A Pallas kernel of Mosaic GPU."""
        return "mosaic_gpu" in self.target


@dataclasses.dataclass(eq=False)
class Computation:
    """One computation of a module: the entry, a loop's body, a fusion's body."""

    name: str  # unique within the module
    id: int  # unique within the module, as Instruction.called refers to it
    instructions: list[Instruction]  # in the order in which they run; as in the proto if it has no schedule
    module: Module | None = None  # the module that it is part of

    @functools.cached_property
    def by_id(self) -> dict[int, Instruction]:
        return {i.id: i for i in self.instructions}

    @functools.cached_property
    def fingerprint(self) -> int:
        """Equal for computations for which XLA compiles one kernel (Module.fingerprint)."""
        assert self.module is not None
        return self.module.fingerprint(self.id)


class Module:
    """One optimised HLO program. Computations are converted when asked for, because a program has hundreds and few are
    looked at. ValueError: the proto has no module; KeyError: no entry.
    """

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
            ids = {computation.name: computation.id for computation in module.computations}
            self.entry_id = ids[module.entry_computation_name]

    def computation(self, id: int) -> Computation:
        if id not in self._made:
            self._made[id] = _computation(self._protos[id], self._schedule.get(id), self)
        return self._made[id]

    def fingerprint(self, id: int) -> int:
        """A hash, in this process, that is equal for computations that differ in names and metadata only: XLA compiles
        one kernel for them.
        """
        row_of, rows = {}, []
        for proto in self._protos[id].instructions:
            called = tuple(self.fingerprint(inner) for inner in proto.called_computation_ids)
            operands = tuple(row_of.get(operand, -1) for operand in proto.operand_ids)
            row_of[proto.id] = len(rows)
            rows.append((*_compiled(proto), called, operands))
        return hash(tuple(rows))

    @property
    def entry(self) -> Computation:
        return self.computation(self.entry_id)

    def launches(self) -> list[Instruction]:
        """The instructions that start work on the device, in order: a loop's as often as it runs, and all branches."""
        return list(self._launches(self.entry, 0))

    def _launches(self, computation: Computation, depth: int) -> Iterator[Instruction]:
        """The instructions that launch something, in the order in which they run; depth: of nested
        calls, at most 16.
        """
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
        """{name: instruction} of those that start work on the device, not inside fusions."""
        out, visited = {}, set()
        queue = [self.entry_id]
        while queue:
            id = queue.pop()
            if id in visited:
                continue
            visited.add(id)
            for instruction in self.computation(id).instructions:
                if instruction.opcode in ("while", "call", "conditional"):
                    queue += instruction.called
                elif instruction.opcode not in SILENT:
                    out[instruction.name] = instruction
        return out

    def peak_buffers(self) -> list[tuple[int, Instruction | None, str]]:
        """(bytes, instruction, kind) of the buffers that are live at the memory peak, the largest first.

        kind is "argument", "output", "temporary", "constant" or "fragmentation". The instruction is None in the row of
        an allocation's rest: unused bytes, or smaller values that share it; 0 bytes if there is no rest.
        """
        return _peak_buffers(self._buffers, self)

    @functools.cached_property
    def _every_instruction(self) -> dict[int, Instruction]:
        return {i.id: i for id in self._protos for i in self.computation(id).instructions}


def trip_count(loop: Instruction) -> int:
    """How often a while loop runs, as the compiler noted it; else 1."""
    try:
        return int(json.loads(loop.config)["known_trip_count"]["n"])
    except (ValueError, KeyError, TypeError):
        return 1


def _compiled(proto: Any) -> tuple:
    """The fields of an HloInstructionProto that decide which kernel is compiled."""
    fields = (proto.opcode, proto.parameter_number, proto.custom_call_target, proto.backend_config)
    messages = (proto.shape, proto.dot_dimension_numbers)
    undeclared = [(field.field_number, field.data) for field in UnknownFieldSet(proto)]
    return (
        *fields,
        *(message.SerializeToString() for message in messages),
        *(o for o in undeclared if o[0] <= _LAST_COMPILED),
    )


def _computation(proto: Any, order: Any, module: Module) -> Computation:
    """A Computation; order: ids in the order in which they run, or None."""
    instructions = [_instruction(instruction_proto) for instruction_proto in proto.instructions]
    if order:
        by_id = {i.id: i for i in instructions}
        instructions = [by_id[i] for i in order if i in by_id]
    computation = Computation(proto.name, proto.id, instructions, module)
    for instruction in instructions:
        instruction.computation = computation
    return computation


def _instruction(proto: Any) -> Instruction:
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
    number = proto.element_type
    if number == 13:
        return Shape("tuple", tuple_shapes=tuple(map(_shape, proto.tuple_shapes)))
    dtype, bits = _TYPES.get(number, ("token" if number == 17 else "?", 0))
    return Shape(dtype, tuple(proto.dimensions), bits)


# ---- work


def flops(instruction: Instruction) -> int:
    """FLOPs of the products in an instruction or fusion, two for each multiply-add; 0 where shapes do not tell.

    cuDNN attention counts 2 products of length x length a head in the forward, 5 in the backward, half if causal;
    packed rows count as one document, which is too much. Of Pallas kernels `grouped_matmul` and `fp8_matmul` count.
    """
    operands = instruction.operand_shapes
    if instruction.is_mosaic:
        out = _first(instruction.shape).dims
        counts = instruction.scope.split("/")[-2:-1] in (["grouped_matmul"], ["fp8_matmul"])
        return 2 * math.prod(out[-2:]) * operands[0].dims[-1] if counts and operands else 0
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
    """The first result: library calls return it in a tuple with a workspace."""
    return shape.tuple_shapes[0] if shape.tuple_shapes else shape


def _dot_flops(out: Shape, operands: list[Shape], contracting: tuple[int, ...]) -> int:
    """2 x elements of the result x elements that are summed for each. contracting: the left side's dimensions."""
    if not operands:
        return 0
    lhs = operands[0].dims
    if not contracting or max(contracting) >= len(lhs):
        return 0
    return 2 * math.prod(out.dims) * math.prod(lhs[i] for i in contracting)


def _cublas_contracting(instruction: Instruction) -> tuple[int, ...]:
    try:
        numbers = json.loads(instruction.config)["gemm_backend_config"]["dot_dimension_numbers"]
        return tuple(int(i) for i in numbers["lhs_contracting_dimensions"])
    except (ValueError, KeyError, TypeError):
        return ()


def _attention_flops(instruction: Instruction, operands: list[Shape]) -> int:
    """See `flops`; 0 without query and key [B, T, heads, D]."""
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
    """Bytes that an instruction reads and writes: each operand and result once, without cuBLAS's workspace.

    Of an operand that a fusion only slices the slices count, of one that it updates in place the update. An
    asynchronous start but all-reduce-start counts its result, which includes the operands.
    """
    if instruction.opcode in ("all-gather-start", "collective-permute-start", "copy-start", "async-start"):
        return instruction.shape.num_bytes  # the result of these includes their operands
    workspace = 0
    if instruction.shape.tuple_shapes and instruction.is_gemm:
        workspace = instruction.shape.tuple_shapes[-1].num_bytes  # cuBLAS's scratch, declared as an s8 output
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
        num_bytes = shapes[parameter.parameter].num_bytes
        readers = users.get(parameter.id, [])
        if readers and all(u.opcode in ("slice", "dynamic-slice", "gather") for u in readers):
            num_bytes = min(num_bytes, sum(u.shape.num_bytes for u in readers))
        elif readers and all(u.opcode == "dynamic-update-slice" and u.operands[0] == parameter.id for u in readers):
            updates = sum(inner.by_id[u.operands[1]].shape.num_bytes for u in readers)
            total -= max(num_bytes - updates, 0)  # the output is the operand, written in place
            num_bytes = 0
        total += num_bytes
    return max(total, 0)


# ---- memory


def _peak_buffers(assignment: Any, module: Module) -> list[tuple[int, Instruction | None, str]]:
    """Module.peak_buffers of a BufferAssignmentProto, without host allocations."""
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
        assigned = [assigned_buffer.logical_buffer_id for assigned_buffer in allocation.assigned]
        kind = (
            "argument"
            if allocation.is_entry_computation_parameter
            else "constant"
            if allocation.is_constant
            else "output"
            if allocation.maybe_live_out
            else "temporary"
        )
        buffer_ids = set(assigned)
        trace = next((t for t in traces if len(assigned) > 1 and any(b in buffer_ids for _, b, _ in t)), None)
        if trace is not None:
            live = _fullest([e for e in trace if e[1] in buffer_ids], sizes)
            out += [(sizes.get(b, 0), instructions.get(defined.get(b, -1)), kind) for b in live]
            out.append((max(0, size - sum(sizes.get(b, 0) for b in live)), None, "fragmentation"))
        else:
            largest = max(assigned, key=lambda b: sizes.get(b, 0), default=-1)
            largest_bytes = min(size, sizes.get(largest, size))
            out.append((largest_bytes, instructions.get(defined.get(largest, -1)), kind))
            out.append((size - largest_bytes, None, kind))  # smaller values that share the allocation
    return sorted(out, key=lambda row: -row[0])


def _fullest(events: list[tuple[int, int, int]], sizes: dict[int, int]) -> list[int]:
    """The buffers in a simulated heap when it first has the most bytes.

    events: (kind, buffer, the buffer whose memory it shares); kind 0 allocates, 1 frees, 2 shares.
    """
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
