"""The join of a trace's kernels with the HLO instructions that launched them.

A trace names the instruction of a kernel, except inside CUDA graphs ("command buffers"), where every kernel has the
graph's name. XLA also compiles one kernel for all equal fusions and names it after the first. The join therefore sorts
instructions and kernels into classes that say which instruction can launch which kernel. Within a class, the n-th
kernel of an execution belongs to the n-th instruction of the class in the schedule. The trace may lack the beginning of
the first execution and the end of the last one. If the counts of a class do not match, only the stretch between two
assigned kernels is searched. A library's helper kernels belong to the call of the main kernel near them.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Hashable, Iterator, Sequence

from jaxtune.profile.hlo import Instruction, Module
from jaxtune.profile.scopes import is_attention_kernel, is_gemm_kernel

_TRIED = 16  # how many cuts of the trace are tried that explain the number of launches of each class equally well
_Counts = collections.Counter[Hashable]
_MANGLED = re.compile(r"[^A-Za-z0-9_]")
# Helper kernels that a library launches with its main one: (pattern of the name, whether the main kernel comes after).
_SATELLITES = (
    (re.compile(r"splitKreduce|convert_dq|fmha_reduce_head|cublasLt.*(reduce|epilogue)", re.I), False),
    (re.compile(r"^memset|compute_dot_do_o|cudnn::fusion", re.I), True),
)


@dataclasses.dataclass(slots=True)
class Launch:
    """One kernel or copy of a trace, for `join`."""

    name: str  # of the kernel or copy
    hlo_op: str  # the HLO instruction that the trace names, or a CUDA graph's name; "" if it names none
    is_copy: bool  # True: a copy (cudaMemcpy); False: a kernel or a memset
    instruction: Instruction | None = None  # set by the join: the instruction that launched it; None if not found
    # set by the join: the number of the program's execution in the trace, from 0, by which xplane.py lists its runs; if
    # unknown, that of the launch before
    execution: int = 0
    main: bool = True  # set by the join: False for a helper kernel; FLOPs are booked on the instruction's main kernel


def join(module: Module, launches: Sequence[Launch]) -> None:
    """Finds the instruction of each launch, and sets `instruction`, `execution` and `main` in place.

    launches: all kernels and copies of the program, by start, over all its executions.
    """
    schedule = module.launches()
    by_name = module.by_name
    kernel_owner = {_MANGLED.sub("_", name): instruction for name, instruction in by_name.items()}
    classes = _Classes()
    class_positions: dict[Hashable, list[int]] = collections.defaultdict(list)
    for index, instruction in enumerate(schedule):
        class_positions[classes.class_of(instruction)].append(index)

    class_launches: dict[Hashable, list[int]] = collections.defaultdict(list)
    unassigned = []
    for index, launch in enumerate(launches):
        if _satellite(launch.name) is not None:
            launch.main = False
            continue
        key = _class_of_launch(launch, by_name, kernel_owner, classes)
        if key is None or key not in class_positions:
            unassigned.append(index)
        else:
            class_launches[key].append(index)

    guesses = _guesses(class_positions, class_launches, len(schedule))
    if all(launch.hlo_op in by_name for launch in launches):  # a CPU's trace, which names every instruction
        guesses = itertools.islice(guesses, 1)
    executions, positions = max(guesses, key=lambda guess: len(_in_order(guess[1])), default=(1, {}))
    unassigned += [index for indices in class_launches.values() for index in indices if index not in positions]
    position = [
        positions.get(index, -1) for index in range(len(launches))
    ]  # index in the schedule repeated `executions` times
    unassigned += _drop_disorder(position)
    _fill(position, sorted(unassigned), launches, schedule, executions, by_name, kernel_owner, classes)
    _attach_satellites(position, launches, schedule)
    execution = 0
    for index, launch in enumerate(launches):
        if position[index] >= 0:
            launch.instruction = schedule[position[index] % len(schedule)]
            execution = position[index] // len(schedule)
        launch.execution = execution
        if launch.hlo_op in by_name:
            launch.instruction = by_name[launch.hlo_op]


class _Classes:
    """The class of an instruction: a key that is equal for instructions that may launch the same kernel."""

    def __init__(self):
        self._keys: dict[int, Hashable] = {}

    def class_of(self, instruction: Instruction) -> Hashable:
        if id(instruction) not in self._keys:
            self._keys[id(instruction)] = self._key(instruction)
        return self._keys[id(instruction)]

    def _key(self, instruction: Instruction) -> Hashable:
        """ "gemm" for library products and fusions around one, ("fusion", fingerprint), or (opcode, name)."""
        if instruction.opcode in ("async-start", "fusion") and instruction.called:
            assert instruction.computation is not None and instruction.computation.module is not None
            called = instruction.computation.module.computation(instruction.called[0])
            if instruction.opcode == "async-start":
                inner = [i for i in called.instructions if i.opcode != "parameter"]
                return self.class_of(inner[-1]) if inner else "async"
            # A vendor product that reads or writes a slice in place is a fusion around its custom call.
            if any(i.opcode == "custom-call" and i.is_gemm for i in called.instructions):
                return "gemm"
            return ("fusion", called.fingerprint)
        if instruction.opcode == "custom-call":
            if instruction.is_gemm:
                return "gemm"
            if "fmha" in instruction.target:
                return "attention backward" if "Backward" in instruction.target else "attention forward"
            return "mosaic" if instruction.is_mosaic else ("custom-call", instruction.target)
        if instruction.opcode.startswith("copy"):
            return "copy"
        return (instruction.opcode, instruction.name)


def _satellite(name: str) -> bool | None:
    """For a library's helper kernel: True if its main kernel comes after it, False if before; else None."""
    for pattern, before in _SATELLITES:
        if pattern.search(name):
            return before
    return None


def _class_of_launch(launch: Launch, by_name, kernel_owner, classes: _Classes) -> Hashable | None:
    """The class of the instructions that may have launched a kernel; None if unknown."""
    if launch.hlo_op in by_name:
        return classes.class_of(by_name[launch.hlo_op])
    if launch.is_copy:
        return "copy"
    owner = kernel_owner.get(launch.name)
    if owner is not None:
        return classes.class_of(owner)
    if launch.name.endswith("_mosaic_gpu_kernel"):  # whatever its own name
        return "mosaic"
    if is_attention_kernel(launch.name):
        return "attention backward" if re.search(r"bprop|bwd|backward", launch.name) else "attention forward"
    if is_gemm_kernel(launch.name):
        return "gemm"
    return None


def _guesses(class_positions, class_launches, size: int) -> Iterator[tuple[int, dict[int, int]]]:
    """Guesses (executions, {launch: position in the schedule repeated for each}) of the classes that they explain
    exactly.

      class_positions: {class: positions in the schedule, ascending}.
      class_launches: {class: indices of launches, ascending}.
      size: of the schedule.
    """
    votes: collections.Counter[int] = collections.Counter()
    for key, indices in class_launches.items():
        votes[math.ceil(len(indices) / len(class_positions[key]))] += len(indices)
    counts = [count for count, _ in votes.most_common(3)]
    for executions in dict.fromkeys([*counts, *(count + 1 for count in counts[:1])]):
        lacks = {key: len(class_positions[key]) * executions - len(indices) for key, indices in class_launches.items()}
        lacks = {key: count for key, count in lacks.items() if 0 <= count <= 2 * len(class_positions[key])}
        order = [key for _, key in sorted((position, key) for key in lacks for position in class_positions[key])]
        for before, after in _cuts(lacks, order, _first_place(lacks, order, class_launches)):
            guess = {}
            for key in (key for key, lack in lacks.items() if lack == before[key] + after[key]):
                positions = class_positions[key]
                for count, index in enumerate(class_launches[key], before[key]):
                    guess[index] = count // len(positions) * size + positions[count % len(positions)]
            yield executions, guess


def _first_place(lacks: dict[Hashable, int], order: list[Hashable], class_launches: dict[Hashable, list[int]]) -> int:
    """The index into `order` at which the trace probably begins: classes that occur once in the schedule vote."""
    launched = {
        index: rank for rank, index in enumerate(sorted(index for key in lacks for index in class_launches[key]))
    }
    occurrences = collections.Counter(order)
    votes = collections.Counter(
        (position - launched[class_launches[key][0]]) % len(order)
        for position, key in enumerate(order)
        if occurrences[key] == 1
    )
    return max(votes, key=lambda position: votes[position], default=0)


def _cuts(lacks: dict[Hashable, int], order: list[Hashable], first: int) -> Iterator[tuple[_Counts, _Counts]]:
    """({class: launches missing at the beginning}, {class: at the end}): nothing, then at most 16 cuts.

    lacks: {class: missing launches in all}.
    first: where in `order` the trace may begin; cuts near it come first.
    """
    total, size = sum(lacks.values()), len(order)
    yield collections.Counter(), collections.Counter()
    if not 0 < total < 2 * size:
        return
    leads = range(max(0, total - size), min(total, size) + 1)
    unexplained = collections.Counter(lacks)
    unexplained.subtract(order[: leads[0]] + order[size - total + leads[0] :])
    mismatches = [sum(map(abs, unexplained.values()))]
    for lead in leads[:-1]:  # one more at the beginning, one fewer at the end
        mismatches.append(mismatches[-1])
        for key, change in ((order[lead], -1), (order[size - total + lead], 1)):
            mismatches[-1] += abs(unexplained[key] + change) - abs(unexplained[key])
            unexplained[key] += change
    least = min(mismatches)
    best_leads = [lead for lead, count in zip(leads, mismatches) if count == least]
    for lead in sorted(best_leads, key=lambda lead: min((lead - first) % size, (first - lead) % size))[:_TRIED]:
        yield collections.Counter(order[:lead]), collections.Counter(order[size - total + lead :])


def _in_order(position: dict[int, int]) -> list[int]:
    """The longest sequence of launches whose positions increase. position: {launch: its position in the schedule}."""
    tails: list[int] = []
    tail_index: list[int] = []
    predecessor: dict[int, int] = {}
    for index, slot in sorted(position.items()):
        rank = bisect.bisect_left(tails, slot)
        if rank == len(tails):
            tails.append(slot)
            tail_index.append(index)
        else:
            tails[rank] = slot
            tail_index[rank] = index
        if rank:
            predecessor[index] = tail_index[rank - 1]
    out = tail_index[-1:]
    while out and out[-1] in predecessor:
        out.append(predecessor[out[-1]])
    return out[::-1]


def _drop_disorder(position: list[int]) -> list[int]:
    """Sets positions to -1, in place, that differ by more than 64 from a longest increasing subsequence;
    returns them.
    """
    dropped = []
    ordered = _in_order({index: slot for index, slot in enumerate(position) if slot >= 0})
    in_order = set(ordered)
    ordered_slots = [position[i] for i in ordered]
    for index, slot in enumerate(position):
        if slot >= 0 and index not in in_order:
            # Concurrent kernels of a graph swap places with near neighbours, so only positions far off are dropped.
            near = bisect.bisect_left(ordered, index)
            neighbours = [ordered_slots[i] for i in (near - 1, near) if 0 <= i < len(ordered_slots)]
            if all(abs(slot - neighbour) > 64 for neighbour in neighbours):
                position[index] = -1
                dropped.append(index)
    return dropped


def _fill(position, unassigned, launches, schedule, executions, by_name, kernel_owner, classes) -> None:
    """Assigns the launches `unassigned`, in place: each gets the first fitting free place between its neighbours, or
    -1.
    """
    occupied = {slot for slot in position if slot >= 0}
    before = list(position)
    for index in range(1, len(before)):
        before[index] = before[index] if before[index] >= 0 else before[index - 1]
    after = list(position)
    for index in range(len(after) - 2, -1, -1):
        after[index] = after[index] if after[index] >= 0 else after[index + 1]
    total = executions * len(schedule)
    for index in unassigned:
        key = _class_of_launch(launches[index], by_name, kernel_owner, classes)
        first = max(before[index] if index else -1, -1)
        last = after[index] if after[index] >= 0 else total
        for slot in range(max(first, 0), min(last, total)):
            instruction = schedule[slot % len(schedule)]
            if key is None:
                is_candidate = instruction.opcode == "custom-call"
            elif key == "copy":  # XLA also runs fusions that only move data as copies
                is_candidate = instruction.opcode.startswith(("copy", "async-start")) or "dynamic" in instruction.name
            else:
                is_candidate = classes.class_of(instruction) == key
            if slot not in occupied and is_candidate:
                position[index] = slot
                occupied.add(slot)
                break


def _attach_satellites(position, launches, schedule) -> None:
    """Gives each helper kernel, in place, the position of the nearest custom call among six main launches."""
    main = [i for i, launch in enumerate(launches) if launch.main and position[i] >= 0]
    for index, launch in enumerate(launches):
        if launch.main:
            continue
        main_is_after = _satellite(launch.name)
        near = bisect.bisect_left(main, index)
        order = range(near, min(near + 6, len(main))) if main_is_after else range(near - 1, max(near - 7, -1), -1)
        attention = is_attention_kernel(launch.name)
        for candidate in order:
            instruction = schedule[position[main[candidate]] % len(schedule)]
            if instruction.opcode != "custom-call":
                continue
            if attention and "fmha" not in instruction.target:
                continue
            position[index] = position[main[candidate]]
            break
