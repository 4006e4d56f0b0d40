"""What a step loses in time compared with the device's ceilings. A Loss is one of time; events of the category "loss"
compute the cross-entropy or another objective.
"""

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
    """One reason why a step takes longer than it could on this device."""

    what: str  # the loss's short name, such as "GEMM", "idle" or "passes over memory: layer/mlp"
    saved_ms: float  # milliseconds a step that would be saved without it
    text: str  # a sentence with its size and its remedy


def product_ceiling(dtype: str, ceilings: Ceilings) -> tuple[str, float]:
    """(precision, TFLOP/s or 0) with which a product of operands of `dtype` is compared.

    float32 is ("TF32", half of bf16's rate): XLA and cuBLAS compute it so by default, and NVIDIA's data sheets have
    half from compute capability 8.0 on. Eight bits, s8 and u8 too, are FP8; all others bf16.
    """
    if dtype.startswith(_EIGHT_BIT):
        return "FP8", ceilings.gemm_fp8_tflops
    if dtype.startswith(_FLOAT32) or dtype == "float":
        return "TF32", ceilings.gemm_bf16_tflops / 2
    return "bf16", ceilings.gemm_bf16_tflops


def floor_ns(flops: float, moved_bytes: float, dtype: str, ceilings: Ceilings) -> tuple[float, str]:
    """(least ns, "compute" or "memory") by the roofline model: FLOPs or bytes at the ceilings, whichever takes longer;
    (ns of the bytes, "") if there are FLOPs and their rate is unknown.

      flops: of the operation, a multiply-add as two.
      moved_bytes: to and from device memory.
      dtype: of the operands, which chooses the rate (product_ceiling).
      ceilings: of the device; 0 is unknown.
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
    """Every loss of a step, the largest first; a moment counts in one only.

    Large products, attention and experts lose the time beyond their FLOPs at the ceiling (nothing if that or their
    FLOPs are unknown), transfers the time that the step waits for them, all others their whole time.

      events: of the captured steps, with `self_ns`.
      num_steps: over which times are divided.
      idle_ms: per step.
      ceilings: of the device; 0 is unknown.
      wait: words on the longest wait, which begin with a space.
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
            transfer_ms = length(union([(e.start_ns, e.end_ns) for e in members])) * per_step
            moved = sum(e.moved_bytes for e in members) / num_steps / 1e9
            size = f" ({moved:.2f} GB)" if moved else ""
            text = f"{kind.capitalize()} take {transfer_ms:.1f} ms{size}, for which the step waits {ms:.1f} ms: won by "
            out.append(Loss(kind, ms, text + "overlapping them with compute."))
        else:
            out.append(_passes(kind, members, ms, per_step, ceilings))
    if idle_ms > 0:
        text = f"The device waits {idle_ms:.1f} ms a step for its next launch{wait}: won with launches ahead of it."
        out.append(Loss("idle", idle_ms, text))
    return sorted((loss for loss in out if loss.saved_ms > 0), key=lambda loss: -loss.saved_ms)


_PRODUCTS = {"GEMM": "The large matrix products take", "attention": "Attention takes", "MoE": "The experts take"}


def _kind(event: Event, ceilings: Ceilings) -> str:
    """The loss in which an event's time counts; recompute comes before its category."""
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
    return "/".join([name for name in event.scope.split("/") if name][:2]) or "unnamed places"


def _slow_products(kind: str, events: Sequence[Event], ms: float, per_step: float, ceilings: Ceilings) -> Loss:
    """The loss of products beyond their FLOPs at the ceiling, in ms per step; per_step: from ns of all steps."""
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


def _passes(scope: str, events: Sequence[Event], ms: float, per_step: float, ceilings: Ceilings) -> Loss:
    """The loss of element-wise passes over memory in a scope: all their time, because fusing them would save it."""
    moved = sum(e.moved_bytes for e in events)
    text = f"Passes over memory in {scope} take {ms:.1f} ms"
    if moved:
        text += f" at {moved / sum(e.self_ns for e in events) / 1e3:.2f} TB/s"
    text += f": up to {ms:.1f} ms are won by fusing them into their neighbours"
    slow = ms - sum(min(e.self_ns, floor_ns(0.0, e.moved_bytes, e.dtype, ceilings)[0]) for e in events) * per_step
    if moved and ceilings.copy_tbps and slow > 0.1 * ms:
        text += f", {slow:.1f} ms by reaching {ceilings.copy_tbps:.1f} TB/s"
    return Loss(f"passes over memory: {scope}", ms, text + ".")
