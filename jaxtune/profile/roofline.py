"""What the step loses against what the device can do, in plain words."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from jaxtune.profile.ceilings import Ceilings
from jaxtune.profile.trace import Event

EIGHT_BIT = ("f8", "s8", "u8", "float8", "c10::Float8")
# Idle stretches below this are launches that came late; longer ones are waits for the host.
LAUNCH_GAP_NS = 20_000


@dataclasses.dataclass
class Loss:
    """`won_ms` a step would be won if `text`'s cause were gone."""

    what: str
    won_ms: float
    text: str


def floor_ns(flops: float, moved_bytes: float, dtype: str, ceilings: Ceilings) -> tuple[float, str]:
    """(least time, "compute" or "memory") of an operator on this device."""
    peak = ceilings.gemm_fp8_tflops if dtype.startswith(EIGHT_BIT) else ceilings.gemm_bf16_tflops
    compute = flops / (peak * 1e3) if peak else 0.0
    memory = moved_bytes / (ceilings.copy_tbps * 1e3) if ceilings.copy_tbps else 0.0
    return max(compute, memory), "compute" if compute >= memory else "memory"


def losses(
    events: Sequence[Event], num_steps: int, idle_ms: float, ceilings: Ceilings, *, waits: Sequence[str] = ()
) -> list[Loss]:
    """Every loss, the largest first. A moment counts in one of them only."""
    scale = 1 / 1e6 / num_steps
    recompute = 0.0
    thick: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * 4)  # category: time, floor, flops, all
    thin = [0.0, 0.0, 0]
    passes: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    transfers: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    helpers = 0.0
    for event in events:
        time = event.self_ns
        if event.phase == "recompute":
            recompute += time
        elif event.category in ("gemm", "attention", "moe"):
            floor, bound = floor_ns(event.flops, event.moved_bytes, event.dtype, ceilings)
            if not event.flops:
                if event.category == "attention":
                    thick["attention"][0] += time
                else:
                    helpers += time
            elif bound == "memory":
                thin[0] += time
                thin[1] += floor
                thin[2] += 1
            else:
                row = thick[event.category]
                row[0] += time
                row[1] += min(floor, time)
                row[2] += event.flops
        elif event.category in ("copies to device", "copies to host", "collectives"):
            row = transfers[event.category]
            row[0] += time
            row[1] += event.duration_ns
            row[2] += event.moved_bytes
        else:
            row = passes[_place(event)]
            row[0] += time
            row[1] += event.moved_bytes
            row[2] += min(time, floor_ns(0.0, event.moved_bytes, event.dtype, ceilings)[0])
    out = []
    if recompute:
        won = recompute * scale
        out.append(Loss("recompute", won, f"Recomputing the forward for the backward takes {won:.1f} ms a step: kept in memory or offloaded under compute, it is won."))  # fmt: skip
    for category, (time, floor, flops, _) in thick.items():
        won = (time - floor) * scale
        rate = flops / time / 1e3 if time else 0.0
        name = {"gemm": "The large matrix products", "attention": "Attention", "moe": "The experts' products"}[category]
        out.append(Loss(category, won, f"{name} take{'s' if category == 'attention' else ''} {time * scale:.1f} ms at {rate:.0f} TFLOP/s, where this device reaches {ceilings.gemm_bf16_tflops:.0f} in bf16 ({ceilings.source}): {won:.1f} ms would be won at that speed."))  # fmt: skip
    if thin[0]:
        won = thin[0] * scale
        out.append(Loss("thin products", won, f"{thin[2] / num_steps:.0f} thin products (adapters and the like) take {won:.1f} ms, bound by memory traffic and not by their FLOPs: fused into the products beside them, up to {won:.1f} ms are won."))  # fmt: skip
    for place, (time, moved, floor) in passes.items():
        won = time * scale
        speed = f" at {moved / time / 1e3:.2f} TB/s" if moved else ""
        more = f" ({(time - floor) * scale:.1f} ms of it by reaching {ceilings.copy_tbps:.1f} TB/s)" if moved and ceilings.copy_tbps and time - floor > 0.1 * time else ""  # fmt: skip
        out.append(Loss(f"passes over memory: {place}", won, f"Elementwise passes over memory in {place} take {won:.1f} ms{speed}: fused into their neighbours, up to {won:.1f} ms are won{more}."))  # fmt: skip
    for category, (exposed, whole, moved) in transfers.items():
        won = exposed * scale
        out.append(Loss(category, won, f"{category[0].upper() + category[1:]} take {whole * scale:.1f} ms ({moved * scale / 1e3:.2f} GB), of which {won:.1f} ms do not run under compute: overlapped, they are won."))  # fmt: skip
    if idle_ms:
        where = f" {waits[0]}" if waits else ""
        out.append(Loss("idle", idle_ms, f"The device waits {idle_ms:.1f} ms a step for its next launch:{where} with launches ahead of the device, it is won."))  # fmt: skip
    if helpers:
        out.append(Loss("helpers", helpers * scale, f"Helper kernels of products take {helpers * scale:.1f} ms."))
    return sorted((loss for loss in out if loss.won_ms > 0), key=lambda loss: -loss.won_ms)


def _place(event: Event) -> str:
    if event.category in ("loss", "optimizer", "dequantise"):
        return {"loss": "the loss", "optimizer": "the optimizer", "dequantise": "dequantising"}[event.category]
    parts = [p for p in event.scope.split("/") if p]
    return "/".join(parts[:2]) if parts else "unnamed places"
