"""What a step loses compared with the device's ceilings (`losses`, a list of `Loss`), in milliseconds and as sentences,
the least time of an operator by the roofline model (`floor_ns`), and the rate with which a product is compared
(`product_ceiling`). report.py uses it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from jaxtune.profile.device import Ceilings
from jaxtune.profile.timeline import length, union
from jaxtune.profile.trace import Event

_EIGHT_BIT = ("f8", "s8", "u8", "float8", "c10::Float8")
_FLOAT32 = ("f32", "float32", "fp32")  # XLA's, torch's and a short name; torch also says "float" alone
TRANSFER_CATEGORIES = ("copies to device", "copies to host", "collectives")
# Idle stretches shorter than this are late launches; longer ones are waits for the host.
LAUNCH_GAP_NS = 20_000


@dataclasses.dataclass
class Loss:
    """One reason why a step takes longer than it could on this device, with the time that would be saved without it.
    The text and the HTML page of a report show the sentences of the three largest; its JSON has all."""

    what: str  # the loss's short name, such as "GEMM", "idle" or "passes over memory: layer/mlp"
    won_ms: float  # milliseconds a step that would be saved without it
    text: str  # a sentence with its size and its remedy


def product_ceiling(dtype: str, ceilings: Ceilings) -> tuple[str, float]:
    """The rate with which a matrix product is compared, by `floor_ns` and in the sentences of `losses`: (the precision
    in words, TFLOP/s, which is 0 where unknown). dtype: the operands', as XLA or torch names it. ceilings: the device's
    rates.

    Operands of eight bits, also XLA's s8 and u8, get ("FP8", the rate of FP8). Those of float32 get ("TF32", half of
    the rate of bfloat16), because XLA and cuBLAS compute them in TF32 by default; that rate is not measured, but is
    half of bfloat16's by NVIDIA's data sheets on every card of compute capability 8.0 and above. All others, such as
    float16, get ("bf16", the rate of bfloat16).
    """
    if dtype.startswith(_EIGHT_BIT):
        return "FP8", ceilings.gemm_fp8_tflops
    if dtype.startswith(_FLOAT32) or dtype == "float":
        return "TF32", ceilings.gemm_bf16_tflops / 2
    return "bf16", ceilings.gemm_bf16_tflops


def floor_ns(flops: float, moved_bytes: float, dtype: str, ceilings: Ceilings) -> tuple[float, str]:
    """The least time that an operator could take on this device, by the roofline model: that of its FLOPs or that of
    its bytes at the device's ceilings, whichever is longer. The report's "of ceiling" and its losses are computed from
    it, and `_kind` asks it whether memory limits a product.

    Args:
      flops: its floating-point operations.
      moved_bytes: the bytes that it reads and writes in the device's memory.
      dtype: of its operands, which chooses the rate of its FLOPs as product_ceiling does (8 bits: FP8; float32: TF32;
        all others, unknown ones included: bf16).
      ceilings: the device's rates; one that is 0 (unknown) limits nothing.
    Returns:
      (the time in ns, "compute" if its FLOPs take longer, as is also said if both times are equal, else "memory"; "" if
        it has FLOPs and their rate is unknown, and then the time is that of its bytes)
    """
    _, peak = product_ceiling(dtype, ceilings)
    memory = moved_bytes / (ceilings.copy_tbps * 1e3) if ceilings.copy_tbps else 0.0
    if flops and not peak:
        return memory, ""
    compute = flops / (peak * 1e3) if flops else 0.0
    return max(compute, memory), "compute" if compute >= memory else "memory"


def losses(
    events: Sequence[Event], num_steps: int, idle_ms: float, ceilings: Ceilings, *, wait: str = ""
) -> list[Loss]:
    """Finds every loss of a step, the largest first, for the report's list of what could be saved. The comparison of
    two profiles does not use them. A moment of the step counts in one loss only. Large matrix products, attention and
    experts lose the time beyond that of their FLOPs at the ceiling, copies over the host link and collectives the time
    that the step waits for them, and all others their whole time: whatever is recomputed, thin products (limited by
    memory), passes over memory, and idle time. Matrix products, attention and experts lose nothing where the device's
    rate for their operands is unknown (0), such as that of FP8 on an A100. Nor does one of these three kinds if none of
    its kernels has known FLOPs, as with Pallas attention.

    Args:
      events: those of the captured steps, with `self_ns` set.
      num_steps: how many steps they come from.
      idle_ms: idle ms per step.
      ceilings: the device's rates.
      wait: words on the device's longest wait for a launch, which begin with a space, because they are appended to a
        word of the sentence on idle time; "" without one.
    """
    per_step = 1e-6 / num_steps
    kinds: dict[str, list[Event]] = collections.defaultdict(list)
    for event in events:
        kinds[_kind(event, ceilings)].append(event)
    out = []
    for kind, members in kinds.items():
        ms = sum(e.self_ns for e in members) * per_step
        if ms <= 0:
            continue
        if kind == "recompute":
            text = f"Recomputing the forward for the backward takes {ms:.1f} ms: won where memory or the host link can "
            out.append(Loss(kind, ms, text + "keep what is recomputed."))
        elif kind in _PRODUCTS:
            out.append(_slow_products(kind, members, ms, per_step, ceilings))
        elif kind == "thin products":
            count = len(members) / num_steps
            text = f"{count:.0f} thin products (adapters and alike) take {ms:.1f} ms, bound by memory: "
            out.append(
                Loss(kind, ms, text + f"up to {ms:.1f} ms are won by fusing them into the products beside them.")
            )
        elif kind in TRANSFER_CATEGORIES:
            whole = length(union([(e.start_ns, e.end_ns) for e in members])) * per_step
            moved = sum(e.moved_bytes for e in members) / num_steps / 1e9
            size = f" ({moved:.2f} GB)" if moved else ""
            text = f"{kind.capitalize()} take {whole:.1f} ms{size}, for which the step waits {ms:.1f} ms: won by "
            out.append(Loss(kind, ms, text + "overlapping them with compute."))
        else:
            out.append(_passes(kind, members, ms, per_step, ceilings))
    if idle_ms > 0:
        text = f"The device waits {idle_ms:.1f} ms a step for its next launch{wait}: won with launches ahead of it."
        out.append(Loss("idle", idle_ms, text))
    return sorted((loss for loss in out if loss.won_ms > 0), key=lambda loss: -loss.won_ms)


_PRODUCTS = {"GEMM": "The large matrix products take", "attention": "Attention takes", "MoE": "The experts take"}


def _kind(event: Event, ceilings: Ceilings) -> str:
    """The name of the loss in which an event's time counts; `losses` groups the events by it. It is "recompute" for
    every event of that phase, transfers included. Otherwise it is the event's category for transfers, attention and
    experts, "thin products" for matrix products with FLOPs that memory limits by `ceilings` (the device's rates),
    "GEMM" for other products, "the loss", "the optimizer" or "dequantising". For all other events, which pass over
    memory, it is the first two parts of their scope, or "unnamed places" if they have none."""
    if event.phase == "recompute":
        return "recompute"
    if event.category in TRANSFER_CATEGORIES or event.category in ("attention", "MoE"):
        return event.category
    if event.category == "GEMM":
        # A product's helper kernels (the reduction of a split, a memset) have no FLOPs of their own.
        thin = event.flops and floor_ns(event.flops, event.moved_bytes, event.dtype, ceilings)[1] == "memory"
        return "thin products" if thin else "GEMM"
    if event.category in ("loss", "optimizer"):
        return f"the {event.category}"
    if event.category == "dequantise":
        return "dequantising"
    return "/".join([part for part in event.scope.split("/") if part][:2]) or "unnamed places"


def _slow_products(kind: str, events: Sequence[Event], ms: float, per_step: float, ceilings: Ceilings) -> Loss:
    """The Loss of matrix products, attention or experts, with its sentence: the ms per step that would be saved if
    these kernels did their FLOPs at the device's ceiling; their bytes do not count. If no kernel of `events` has FLOPs
    and a known ceiling, that is 0, and the sentence says that it is unknown. If some have, a kernel without FLOPs, such
    as a helper, counts whole, and one whose own ceiling is unknown (0), such as that of FP8, not at all.

    Args:
      kind: "GEMM", "attention" or "MoE".
      events: the events of this kind, of all captured steps.
      ms: their time in milliseconds per step.
      per_step: the factor from nanoseconds, summed over all captured steps, to milliseconds per step.
      ceilings: the device's rates.
    """
    flops = sum(e.flops for e in events)
    rate = flops / sum(e.self_ns for e in events) / 1e3
    least = 0.0
    spent: dict[tuple[str, float], float] = collections.defaultdict(float)  # nanoseconds by ceiling
    for event in events:
        floor, bound = floor_ns(event.flops, 0.0, event.dtype, ceilings)
        # A kernel can be faster than a ceiling measured on another shape; then it loses nothing.
        least += min(event.self_ns, floor) if bound else event.self_ns
        if event.flops:
            spent[product_ceiling(event.dtype, ceilings)] += event.self_ns
    won = ms - least * per_step
    by_time = sorted(spent, key=lambda ceiling: -spent[ceiling])
    peaks = ", ".join(f"{f'{peak:.0f}' if peak else 'unknown'} in {name}" for name, peak in by_time)
    text = f"{_PRODUCTS[kind]} {ms:.1f} ms at {rate:.0f} TFLOP/s, where the device's ceiling is "
    text += f"{peaks} ({ceilings.source}): {won:.1f} ms are won at that speed."
    if not any(peak for _, peak in spent):
        won, text = 0.0, f"{_PRODUCTS[kind]} {ms:.1f} ms; what could be won is unknown."
    return Loss(kind, won, text)


def _passes(place: str, events: Sequence[Event], ms: float, per_step: float, ceilings: Ceilings) -> Loss:
    """The loss of element-wise passes over memory in one part of the model, `place`: all their time, because fusing
    them into their neighbours would save it.

    Args:
      place: the part of the model, as `_kind` names it: the first two parts of a scope, "the loss", "the optimizer",
        "dequantising" or "unnamed places".
      events: its events, of all captured steps.
      ms: their time in milliseconds per step.
      per_step: the factor from nanoseconds, summed over all captured steps, to milliseconds per step.
      ceilings: the device's rates; that of copies is compared in the sentence and does not change the loss.
    """
    moved = sum(e.moved_bytes for e in events)
    text = f"Passes over memory in {place} take {ms:.1f} ms"
    if moved:
        text += f" at {moved / sum(e.self_ns for e in events) / 1e3:.2f} TB/s"
    text += f": up to {ms:.1f} ms are won by fusing them into their neighbours"
    slow = ms - sum(min(e.self_ns, floor_ns(0.0, e.moved_bytes, e.dtype, ceilings)[0]) for e in events) * per_step
    if moved and ceilings.copy_tbps and slow > 0.1 * ms:
        text += f", {slow:.1f} ms by reaching {ceilings.copy_tbps:.1f} TB/s"
    return Loss(f"passes over memory: {place}", ms, text + ".")
