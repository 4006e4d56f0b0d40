"""Memory of each phase of a run, such as load, resume, step, evaluate, save and export. The table of phases is printed
before step 0, so that a phase that will not fit is known before the last step.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx

from jaxtune.models.adapters.merge import merge_bytes
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.byte_files import IN_FLIGHT_BYTES
from jaxtune.models.files.quant import parameters
from jaxtune.models.generation.slot_plan import PREFILL_TOKENS, SlotPlan, fewer_slots
from jaxtune.models.generation.structure import takes_cache
from jaxtune.models.lora import has_adapter, matrices
from jaxtune.models.placement import partition
from jaxtune.models.programs.compiling import out_of_memory
from jaxtune.pallas.format_names import LOADED
from jaxtune.pallas.formats import Stored
from jaxtune.system import processes, timing
from jaxtune.system.invocation import spelled
from jaxtune.train.config import CheckpointConfig, DataConfig, ExportConfig
from jaxtune.train.folder.array_files import READ_AT_ONCE_BYTES
from jaxtune.train.objectives.objective import Column, ReferenceColumn
from jaxtune.train.planning.devices import Device, pool_bytes
from jaxtune.train.planning.forecasts import Forecast
from jaxtune.train.planning.forward import forward_bytes
from jaxtune.train.planning.movables import MOVABLES
from jaxtune.train.planning.parts import STATES, StepParts
from jaxtune.train.planning.plan import StepPlan

_LESS_SAVED = (
    "a smaller model or, where it is host memory that is short, XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=N in the "
    "environment, which has the step pin at most N GiB of it"
)
# Bytes per number while a matrix is encoded: it exists in 16 bits, in float32 and as codes.
_ENCODING_BYTES = 2.0 + 4.0 + 1.0


_SHORTER = {
    "answers": "a smaller objective.max_completion_length, or fewer objective.slots",
    "generate": "a smaller evaluation.max_new_tokens",
}


@dataclasses.dataclass(frozen=True)
class Phase:
    # The phase's name in the report and in errors.
    name: str
    # Bytes on each device.
    device_bytes: float
    # Bytes of host memory in this process, in addition to Python and its libraries.
    host_bytes: float
    # What helps if it does not fit, for the message: mostly a change of the config, or a device with more memory.
    remedy: str


class OutOfDeviceMemory(ValueError):
    """Device memory ran out in a phase of a run; the message says what helps. Commands print it without a traceback."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """How held-out questions are answered: how many at a time, and how long they are."""

    # Number of questions that are answered at a time.
    rows: int
    # Tokens of the longest prompt and of the longest answer, each rounded up to a power of two.
    prompt: int
    answer: int

    def __str__(self) -> str:
        return f"sampling: {self.rows} slots of {self.prompt + self.answer:,} tokens"

    def bytes(self, costs: StepParts, device: Device) -> float:
        """Device bytes beside the weights: the layers' states, such as caches, and the pass over the prompts."""
        kinds = zip(costs.layers.kinds, costs.layers.kind_counts, strict=True)
        states = sum(count * kind.state_bytes(self.prompt, self.answer) for kind, count in kinds)
        prefill = forward_bytes(costs, self.rows * self.prompt, self.rows, device)
        return self.rows * states + prefill


def questions_at_a_time(
    costs: StepParts, device: Device, budget_bytes: float | None, prompt: int, answer: int, most: int = 32
) -> Sampled:
    """`most` questions at a time, or fewer that fit beside all weights (without optimizer states), or 1, which may not.
    prompt, answer: tokens of the longest. budget_bytes: of device memory; None: no limit.
    """
    prompt, answer = (
        1 << (tokens - 1).bit_length() for tokens in (prompt, answer)
    )  # generate pads lengths to powers of two
    sampled = Sampled(most, prompt, answer)
    while sampled.rows > 1 and budget_bytes is not None:
        if costs.frozen_bytes + costs.trained_bytes + sampled.bytes(costs, device) <= budget_bytes:
            break
        sampled = dataclasses.replace(sampled, rows=fewer_slots(sampled.rows))
    return sampled


def prefill_bytes(costs: StepParts, device: Device) -> float:
    """Device bytes of a sampler's prefill beside weights and caches, of 2,048 tokens or a prompt with pictures; of
    divided weights two layers are whole.
    """
    tokens = PREFILL_TOKENS if costs.tower is None else max(PREFILL_TOKENS, costs.shape.length)
    divided = dataclasses.replace(costs.divided, whole=0)
    return forward_bytes(costs, tokens, 0, device) + divided.gathered_bytes(sum(costs.layers.kind_counts), True)[1]


def loading_bytes(model: Decoder, itemsize: int, quantized: bool) -> tuple[float, float]:
    """(device, host) bytes that loading takes beside the weights. model: may be abstract. itemsize: bytes of an
    unquantised number. quantized: whether loading quantises.
    """
    largest = max(
        (m.stored_weight.size for _, m in matrices(model) if isinstance(m.stored_weight, Stored) or m.lora is None),
        default=0,
    )
    encoding = _ENCODING_BYTES * largest if quantized else 0.0
    # While a tensor is loaded it exists both as it was read and as it was cast.
    arriving = float(min(IN_FLIGHT_BYTES, parameters(nnx.state(model)) * itemsize))
    return max(2.0 * arriving, encoding), arriving


def phases_of(
    model: Decoder,
    loaded_tensors: Any,
    costs: StepParts,
    forecast: Forecast,
    device: Device,
    load_in: str | None,
    data: DataConfig,
    checkpoint: CheckpointConfig,
    export: ExportConfig,
    weight_parts: int = 1,
    sampled: Sampled | None = None,
    slots: Mapping[str, SlotPlan] = MappingProxyType({}),
    rows_before: Column | None = None,
    exact: bool = False,
) -> list[Phase]:
    """The phases of a run in their order, without a teacher's pass.

    loaded_tensors: trainable tensors in the dtypes in which they were loaded.
    forecast: of the step.
    load_in: the format in which loading stores the weights.
    weight_parts: devices over which weights are divided.
    sampled: how held-out questions are answered at the end; None: none are.
    slots: {phase: memory plan of the rows in which it samples between steps}.
    rows_before: a column of the rows that is computed before step 0.
    exact: whether answers are sampled so, as of Sampler.
    """
    plan, weights = forecast.plan, costs.frozen_bytes
    trained, states = costs.trained_bytes, costs.fixed[STATES]
    start = partition.bytes_per_device(loaded_tensors, weight_parts)
    local_devices = max(costs.shape.devices // processes.count(), 1)  # devices whose host memory is this process's
    hosted_bytes, saved = local_devices * forecast.host_bytes, min(local_devices, weight_parts) * costs.saved_bytes
    # XLA lets its pool grow no further.
    pinned = min(pool_bytes(hosted_bytes), max(hosted_bytes, local_devices * device.host_bytes))
    forward = forward_bytes(costs, costs.shape.tokens(plan.micro_batches), plan.chunk_tokens, device)
    between = costs.fixed_bytes(plan.micro_batches)
    step = forecast.peak_bytes
    less_rows = "fewer rows_per_step, or more micro_batches"

    loading, arriving = loading_bytes(model, costs.shape.dtype.itemsize, load_in in LOADED)
    phases = [
        Phase("load", weights + start + loading, arriving, "model.load_in=nf4"),
        Phase("resume", weights + trained + states, min(saved, READ_AT_ONCE_BYTES), "a device with more memory"),
    ]
    if isinstance(rows_before, ReferenceColumn):
        copies = costs.moved.copied_bytes
        phases.append(Phase("reference", weights + copies + trained + states + forward, 0.0, less_rows))
    phases.append(Phase("step", step, pinned, less_rows))
    if data.eval is not None or data.eval_rows:
        of_held_out = dataclasses.replace(costs, tower=costs.held_out)
        evaluation = forward_bytes(of_held_out, costs.shape.tokens(plan.micro_batches), plan.chunk_tokens, device)
        phases.append(Phase("evaluate", between + costs.held_out_bytes + evaluation, 0.0, less_rows))
    for name, slot_plan in slots.items():
        sampler = slot_plan.bytes + slot_plan.converted_bytes + slot_plan.prefix_bytes
        shorter = _SHORTER[name]
        if name == "answers" and takes_cache(model, slot_plan.cache, exact):
            shorter += ", or objective.cache=fp8"
        phases.append(Phase(name, between + sampler + prefill_bytes(costs, device), 0.0, shorter))
    if checkpoint.saves:
        # What the step pinned stays pinned while a copy of the state is written.
        phases.append(Phase("save", between, pinned + saved, _LESS_SAVED))
    if sampled is not None:
        asking = weights + trained + start + sampled.bytes(costs, device)
        phases.append(Phase("sample", asking, 0.0, "a smaller evaluation.max_new_tokens"))
    adapted = has_adapter(model)
    if export.merged or (export.adapter and adapted):
        merging, host = merge_bytes(_streaming(model, plan)) if export.merged else (0, 0)
        phases.append(
            Phase(
                "export",
                weights + trained + start + merging,
                pinned + start + host,
                f"export.merged=false, then `{spelled('export')}` on a machine with more memory",
            )
        )
    return phases


def _streaming(model: Decoder, plan: StepPlan) -> Decoder:
    """The model with the variables declared that stream under a plan."""
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    for word, movable in MOVABLES.items():
        if movable.last_resort:
            frozen = movable.declared(model, frozen, plan.level(word))
    return nnx.merge(graph, trainable, frozen)


def phase_lines(
    phases: Sequence[Phase],
    budget_bytes: float | None,
    host_bytes: float | None,
    sampled: Sampled | None = None,
    slots: Mapping[str, SlotPlan] = MappingProxyType({}),
) -> list[str]:
    """The table of phases: one line for all, warnings, and how answers are sampled. budget_bytes: of a device; None: no
    limit. host_bytes: of this machine; None: unknown. slots: as for `phases_of`.
    """
    device = ", ".join(f"{phase.name} {phase.device_bytes / 1e9:.2f}" for phase in phases)
    host = ", ".join(f"{phase.name} {phase.host_bytes / 1e9:.2f}" for phase in phases if phase.host_bytes >= 1e7)
    room = "" if budget_bytes is None else f" of {budget_bytes / 1e9:.2f}"
    lines = [f"  memory of each phase: {device} GB{room}; in host memory {host or 'nothing'}{' GB' if host else ''}"]
    lines += phase_warnings(phases, budget_bytes, host_bytes)
    lines += [] if sampled is None else [f"  {sampled}"]
    return lines + [f"  sampling in phase {name}: {slot_plan}" for name, slot_plan in slots.items()]


def phase_warnings(phases: Sequence[Phase], budget_bytes: float | None, host_bytes: float | None) -> list[str]:
    """A line, with the remedy, for each phase and memory, of device or host, that is too small; nothing is refused.
    budget_bytes, host_bytes: as for `phase_lines`.
    """
    lines = []
    for phase in phases:
        for need, room, side in (
            (phase.device_bytes, budget_bytes, "device"),
            (phase.host_bytes, host_bytes, "host"),
        ):
            if room is not None and need > room:
                lines.append(
                    f"warning: {phase.name} will need {need / 1e9:.2f} GB of {room / 1e9:.2f} GB of {side} memory: "
                    f"{phase.remedy}"
                )
    return lines


@contextlib.contextmanager
def phase(name: str, remedy: str, total: int = 0) -> Iterator[timing.Phase]:
    """A `timing.phase` that turns the allocator's error into OutOfDeviceMemory with `name` and `remedy`."""
    try:
        with timing.phase(name, total=total) as work:
            yield work
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        first_line = (str(error).splitlines() or [""])[0]
        raise OutOfDeviceMemory(f"{name} ran out of device memory ({first_line}): {remedy}") from error
