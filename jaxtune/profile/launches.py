"""The join of a trace's kernels (`Launch`) with the HLO instructions that launched them (`join`), from which they get
scopes and work. xplane.py calls it for each program of a trace.

A trace names the instruction of a kernel, except inside CUDA graphs ("command buffers"), where every kernel has the
graph's name. XLA also compiles one kernel for all equal fusions and names it after the first. The join therefore sorts
instructions and kernels into classes that say which kind of instruction can launch which kernel. Within a class, the
n-th kernel of a program's execution belongs to the n-th instruction of this class in the schedule. The trace may lack
the beginning of the first execution and the end of the last one. Where the counts of a class do not match, only the
stretch between two kernels that are already assigned is searched. A library's helper kernels belong to the call of the
main kernel near them.
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
    """One kernel or copy of a trace, and the HLO instruction that launched it, which `join` finds. xplane.py makes one
    for each event of a program, passes them to `join`, and then reads what `join` has set."""

    name: str  # of the kernel or copy
    hlo_op: str  # the HLO instruction that the trace names, or a CUDA graph's name; "" if it names none
    is_copy: bool  # True: a copy (cudaMemcpy); False: a kernel or a memset
    instruction: Instruction | None = None  # set by the join: the instruction that launched it; None if not found
    # set by the join: the number of the program's execution in the trace, from 0, by which xplane.py lists its runs; if
    # unknown, that of the launch before
    execution: int = 0
    main: bool = True  # set by the join: False for a helper kernel; FLOPs are booked on the instruction's main kernel


def join(module: Module, launches: Sequence[Launch]) -> None:
    """Finds the HLO instruction that launched each kernel of one program, and sets `instruction` (None if it is not
    found), `execution` and `main` of each launch. Scopes, FLOPs and bytes of kernels are then read from the
    instruction. Where the trace names an instruction of the program, it is that one.

    Args:
      module: the program.
      launches: all its kernels and copies in the trace, in order of their starts, over all its executions.
    """
    schedule = module.launches()
    known = module.by_name
    kernel_owner = {_MANGLED.sub("_", name): instruction for name, instruction in known.items()}
    classes = _Classes()
    wanted: dict[Hashable, list[int]] = collections.defaultdict(list)
    for index, instruction in enumerate(schedule):
        wanted[classes.of(instruction)].append(index)

    seen: dict[Hashable, list[int]] = collections.defaultdict(list)
    rest = []
    for index, launch in enumerate(launches):
        if _satellite(launch.name) is not None:
            launch.main = False
            continue
        key = _class_of_launch(launch, known, kernel_owner, classes)
        if key is None or key not in wanted:
            rest.append(index)
        else:
            seen[key].append(index)

    guesses = _guesses(wanted, seen, len(schedule))
    if all(launch.hlo_op in known for launch in launches):  # a CPU's trace, which names every instruction
        guesses = itertools.islice(guesses, 1)
    executions, placed = max(guesses, key=lambda guess: len(_in_order(guess[1])), default=(1, {}))
    rest += [index for indices in seen.values() for index in indices if index not in placed]
    position = [
        placed.get(index, -1) for index in range(len(launches))
    ]  # index in the schedule repeated `executions` times
    rest += _drop_disorder(position)
    _fill(position, sorted(rest), launches, schedule, executions, known, kernel_owner, classes)
    _attach_satellites(position, launches, schedule)
    last = 0
    for index, launch in enumerate(launches):
        if position[index] >= 0:
            launch.instruction = schedule[position[index] % len(schedule)]
            last = position[index] // len(schedule)
        launch.execution = last
        if launch.hlo_op in known:
            launch.instruction = known[launch.hlo_op]


class _Classes:
    """Finds the class of an instruction: a key that is equal for instructions that may launch the same kernel, such as
    equal fusions, for which XLA compiles one kernel. `join` makes one such object for a program, and matches kernels
    with instructions within a class."""

    def __init__(self):
        self._keys: dict[int, Hashable] = {}

    def of(self, instruction: Instruction) -> Hashable:
        """The class of an instruction: equal hashable keys mean that one kernel may come from either instruction. It is
        computed at the first call and kept, by the identity of the instruction."""
        if id(instruction) not in self._keys:
            self._keys[id(instruction)] = self._key(instruction)
        return self._keys[id(instruction)]

    def _key(self, instruction: Instruction) -> Hashable:
        """Computes the class of an instruction. It is "gemm" for a custom call of a library's product (such as
        cuBLAS's) and for a fusion around one; ("fusion", fingerprint of its body) for any other fusion, such as a
        product that XLA compiles itself; "attention forward", "attention backward" or "mosaic"
        for such custom calls and ("custom-call", target) for others; "copy" for copies; for an async-start the class of
        what it starts; and (opcode, name) for all others, so that each is a class of its own."""
        if instruction.opcode in ("async-start", "fusion") and instruction.called:
            assert instruction.computation is not None and instruction.computation.module is not None
            called = instruction.computation.module.computation(instruction.called[0])
            if instruction.opcode == "async-start":
                inner = [i for i in called.instructions if i.opcode != "parameter"]
                return self.of(inner[-1]) if inner else "async"
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
    """Whether a kernel's name is that of a helper kernel, which a library launches beside its main one, such as a
    memset or the reduction of a split product (_SATELLITES): True if its main kernel comes after it, False if before,
    and None if it is no helper but a main kernel. `join` leaves helpers out of its counts, and _attach_satellites
    assigns them to the calls of their main kernels."""
    for pattern, before in _SATELLITES:
        if pattern.search(name):
            return before
    return None


def _class_of_launch(launch: Launch, known, kernel_owner, classes: _Classes) -> Hashable | None:
    """Finds the class of the instructions that may have launched a kernel or copy, a key that is equal for instructions
    of which one kernel may come from any (_Classes); None if it is unknown. `join` matches launches with instructions
    within a class.

    If the trace names an instruction of the program, it is the class of that one. Otherwise it is "copy" for a copy,
    the class of the instruction that XLA named the kernel after, or what a kernel's name says of its kind: "mosaic",
    "gemm", "attention forward" or "attention backward".

    Args:
      launch: the kernel or copy.
      known: {name: instruction} of the program.
      kernel_owner: {name of a kernel that XLA compiled: the instruction that it is named after}.
      classes: gives the class of an instruction.
    """
    if launch.hlo_op in known:
        return classes.of(known[launch.hlo_op])
    if launch.is_copy:
        return "copy"
    owner = kernel_owner.get(launch.name)
    if owner is not None:
        return classes.of(owner)
    if launch.name.endswith("_mosaic_gpu_kernel"):  # whatever its own name
        return "mosaic"
    if is_attention_kernel(launch.name):
        return "attention backward" if re.search(r"bprop|bwd|backward", launch.name) else "attention forward"
    if is_gemm_kernel(launch.name):
        return "gemm"
    return None


def _guesses(wanted, seen, size: int) -> Iterator[tuple[int, dict[int, int]]]:
    """Guesses how often the program ran within the trace, and which instruction each launch belongs to, from the
    numbers of launches of each class (a key of instructions that may launch the same kernel, see _Classes). The numbers
    of executions for which most launches speak come first; one more than the first of them is tried too. For each,
    there is one guess for each place at which the trace may have been cut (_cuts). `join` takes the guess that places
    most launches in order; in a trace that names every instruction, the first.

    Args:
      wanted: {class: the positions of its instructions in the schedule, ascending}.
      seen: {class: indices of its launches in the trace, ascending}.
      size: the number of instructions in the schedule.
    Yields:
      (the number of executions, including those that the trace cuts; {index of a launch: position in the schedule
        repeated for each execution}), the second for those classes whose launches it explains exactly.
    """
    votes: collections.Counter[int] = collections.Counter()
    for key, indices in seen.items():
        votes[math.ceil(len(indices) / len(wanted[key]))] += len(indices)
    counts = [count for count, _ in votes.most_common(3)]
    for executions in dict.fromkeys([*counts, *(count + 1 for count in counts[:1])]):
        lacks = {key: len(wanted[key]) * executions - len(indices) for key, indices in seen.items()}
        lacks = {key: count for key, count in lacks.items() if 0 <= count <= 2 * len(wanted[key])}
        order = [key for _, key in sorted((place, key) for key in lacks for place in wanted[key])]
        for before, after in _cuts(lacks, order, _first_place(lacks, order, seen)):
            placed = {}
            for key in (key for key, lack in lacks.items() if lack == before[key] + after[key]):
                places = wanted[key]
                for count, index in enumerate(seen[key], before[key]):
                    placed[index] = count // len(places) * size + places[count % len(places)]
            yield executions, placed


def _first_place(lacks: dict[Hashable, int], order: list[Hashable], seen: dict[Hashable, list[int]]) -> int:
    """The position among the launches of one execution at which the trace probably begins, an index into `order`, near
    which _cuts looks first. Each class that occurs once in the schedule votes for the position that explains where its
    first launch is in the trace; without such classes it is 0.

    Args:
      lacks: {class: how many of its launches the trace lacks}.
      order: the class of each instruction, in the order of the schedule, of the classes in `lacks`.
      seen: {class: indices of its launches in the trace, ascending}.
    """
    launched = {index: rank for rank, index in enumerate(sorted(index for key in lacks for index in seen[key]))}
    often = collections.Counter(order)
    votes = collections.Counter(
        (place - launched[seen[key][0]]) % len(order) for place, key in enumerate(order) if often[key] == 1
    )
    return max(votes, key=lambda place: votes[place], default=0)


def _cuts(lacks: dict[Hashable, int], order: list[Hashable], first: int) -> Iterator[tuple[_Counts, _Counts]]:
    """Where the trace may have cut the first and the last execution, from how many launches of each class are missing.
    `_guesses` makes a guess from each.

    Args:
      lacks: {class: how many of its launches are missing in all}.
      order: the class of each instruction, in the order of the schedule, of the classes in `lacks`.
      first: the position in `order` at which the trace may begin; cuts near it are tried first.
    Yields:
      ({class: launches missing at the beginning}, {class: missing at the end}): first the case of nothing missing, then
        at most 16 of the cuts that explain `lacks` best; none of these if nothing is missing, or as much as two whole
        executions.
    """
    total, size = sum(lacks.values()), len(order)
    yield collections.Counter(), collections.Counter()
    if not 0 < total < 2 * size:
        return
    leads = range(max(0, total - size), min(total, size) + 1)
    unexplained = collections.Counter(lacks)
    unexplained.subtract(order[: leads[0]] + order[size - total + leads[0] :])
    wrong = [sum(map(abs, unexplained.values()))]
    for lead in leads[:-1]:  # one more at the beginning, one fewer at the end
        wrong.append(wrong[-1])
        for key, change in ((order[lead], -1), (order[size - total + lead], 1)):
            wrong[-1] += abs(unexplained[key] + change) - abs(unexplained[key])
            unexplained[key] += change
    least = min(wrong)
    alike = [lead for lead, count in zip(leads, wrong) if count == least]
    for lead in sorted(alike, key=lambda lead: min((lead - first) % size, (first - lead) % size))[:_TRIED]:
        yield collections.Counter(order[:lead]), collections.Counter(order[size - total + lead :])


def _in_order(position: dict[int, int]) -> list[int]:
    """Finds a longest sequence of launches whose positions in the schedule increase, as they do if the launches ran in
    its order; returns their indices, ascending. The longer it is, the better a guess of the positions: `join` chooses
    among guesses by it, and _drop_disorder finds wrong positions. position: {index of a launch: its position in the
    schedule repeated for each execution}."""
    tails: list[int] = []
    tail_index: list[int] = []
    before: dict[int, int] = {}
    for index, place in sorted(position.items()):
        at = bisect.bisect_left(tails, place)
        if at == len(tails):
            tails.append(place)
            tail_index.append(index)
        else:
            tails[at] = place
            tail_index[at] = index
        if at:
            before[index] = tail_index[at - 1]
    out = tail_index[-1:]
    while out and out[-1] in before:
        out.append(before[out[-1]])
    return out[::-1]


def _drop_disorder(position: list[int]) -> list[int]:
    """Sets those positions to -1, in place, that are wrong because launches run in the order of the schedule: those
    that differ by more than 64 from both their neighbours in a longest increasing subsequence. Returns the indices of
    these launches, for which `join` then looks for a free place between their neighbours (_fill). position: for each
    launch its position in the schedule repeated for each execution, or -1 if it has none."""
    dropped = []
    places = _in_order({index: place for index, place in enumerate(position) if place >= 0})
    keep = set(places)
    kept = [position[i] for i in places]
    for index, place in enumerate(position):
        if place >= 0 and index not in keep:
            # Concurrent kernels of a graph swap places with near neighbours, so only positions far off are dropped.
            near = bisect.bisect_left(places, index)
            around = [kept[i] for i in (near - 1, near) if 0 <= i < len(kept)]
            if all(abs(place - other) > 64 for other in around):
                position[index] = -1
                dropped.append(index)
    return dropped


def _fill(position, rest, launches, schedule, executions, known, kernel_owner, classes) -> None:
    """Assigns launches that counting could not assign: each gets the first free place in the schedule, between the
    places of its nearest neighbours that had one before, whose instruction may have launched it. That is an instruction
    of its class; for a launch of unknown class, a custom call; for a copy, a copy, an async-start or an instruction
    with "dynamic" in its name. Without such a place a launch keeps -1.

    Args:
      position: for each launch its place in the schedule repeated for each execution, or -1; changed in place.
      rest: the indices, ascending, of the launches to assign: those of unknown class or one that no instruction has,
        those of classes whose launches are not as many as the schedule's instructions explain, and those whose place
        was out of order (_drop_disorder). Helper kernels are not among them.
      launches: all kernels and copies of the program in the trace, in the order of their starts.
      schedule: the program's instructions that start work on the device, in the order in which they run.
      executions: how often the program ran.
      known: {name: instruction} of the program.
      kernel_owner: {name of a kernel that XLA compiled: the instruction that it is named after}.
      classes: finds the class of an instruction (_Classes); that of a launch follows from its names (_class_of_launch).
    """
    taken = {place for place in position if place >= 0}
    before = list(position)
    for index in range(1, len(before)):
        before[index] = before[index] if before[index] >= 0 else before[index - 1]
    after = list(position)
    for index in range(len(after) - 2, -1, -1):
        after[index] = after[index] if after[index] >= 0 else after[index + 1]
    total = executions * len(schedule)
    for index in rest:
        key = _class_of_launch(launches[index], known, kernel_owner, classes)
        first = max(before[index] if index else -1, -1)
        last = after[index] if after[index] >= 0 else total
        for place in range(max(first, 0), min(last, total)):
            instruction = schedule[place % len(schedule)]
            if key is None:
                fits = instruction.opcode == "custom-call"
            elif key == "copy":  # XLA also runs fusions that only move data as copies
                fits = instruction.opcode.startswith(("copy", "async-start")) or "dynamic" in instruction.name
            else:
                fits = classes.of(instruction) == key
            if place not in taken and fits:
                position[index] = place
                taken.add(place)
                break


def _attach_satellites(position, launches, schedule) -> None:
    """Gives each helper kernel (launch.main is False), such as the reduction of a split product, the position of the
    custom call that it belongs to: the nearest one after it, or before it, as its name tells, among six launches that
    are no helpers and have a position already. A helper of attention belongs to an attention call. Without one its
    position stays -1.

    Args:
      position: for each launch its place in the schedule repeated for each execution, or -1; changed in place.
      launches: all kernels and copies of the program in the trace, in the order of their starts.
      schedule: the program's instructions that start work on the device, in the order in which they run.
    """
    main = [i for i, launch in enumerate(launches) if launch.main and position[i] >= 0]
    for index, launch in enumerate(launches):
        if launch.main:
            continue
        before = _satellite(launch.name)
        near = bisect.bisect_left(main, index)
        order = range(near, min(near + 6, len(main))) if before else range(near - 1, max(near - 7, -1), -1)
        attention = is_attention_kernel(launch.name)
        for at in order:
            instruction = schedule[position[main[at]] % len(schedule)]
            if instruction.opcode != "custom-call":
                continue
            if attention and "fmha" not in instruction.target:
                continue
            position[index] = position[main[at]]
            break
