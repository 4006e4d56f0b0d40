"""What one layer's backward takes beside what is kept, as the planner predicts it (memory.py).

Fitted to programs compiled for an H200; benchmarks/train/predictions.py records how well it holds.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxtune.models.config import DecoderConfig
from jaxtune.models.stack import LayerPlan
from jaxtune.pallas.dispatch import compile_for
from jaxtune.pallas.gated import api as gated


def gated_in_place(shape: DecoderConfig, dtype, length: int) -> bool:
    """On a Hopper GPU, the gradients of gate and up and the activation take the place of what they are made of."""
    with compile_for((9, 0)):
        refusals = gated.implementations(dtype, length * shape.intermediate_size, shape.activation)
        return shape.moe is None and refusals["mosaic"]() is None


def backward_bytes(
    plan: LayerPlan, size: Mapping[str, float], tiles: int, in_place: bool, expert_rows: float, expert_bytes: float
) -> float:
    """Bytes of what a layer recomputes and makes, but for what is offloaded.

    Args:
      size: {residual: bytes}, of gate and up those of a tile. tiles: that the MLP runs over.
      in_place: as gated_in_place says. expert_rows, expert_bytes: as in memory.Anatomy.
    """
    dropped = {name: size[name] for name in plan.named("recompute")}
    if in_place:
        around = (1.6 if tiles == 1 else 2.0) * size["layer_input"]
        return max(_at_the_mlp(dropped, size) + around, _at_the_attention(dropped, size))
    # At the MLP's backward: the activation, its gradient, and those of gate and up; half-ready gradients around it.
    work = 2 * (size["gate"] + size["up"]) + 0.6 * size["layer_input"] + 0.7 * size["query"]
    # Of experts likewise, and sorted rows; or gradients of gate_up and of sorted rows, and a decoded weight.
    sorted_rows = expert_rows * size["gate_up"]
    work += max(2 * size["gate_up"] + 1.25 * sorted_rows, size["gate_up"] + sorted_rows + 1.1 * expert_bytes)
    if "gate_up" in dropped:  # the sorted rows stay from there (stack.py), if not at the very peak
        work += 0.8 * sorted_rows
    if tiles > 1:
        work += 0.2 * size["layer_input"]
    return work + sum(dropped.values())


def _at_the_mlp(dropped: Mapping[str, float], size: Mapping[str, float]) -> float:
    """Gate, up and the activation's gradient, which are replaced."""
    work = sum(dropped.values()) + (size["gate"] + size["up"]) / 2
    if "attention_out" not in dropped and "lse" not in dropped:  # then query, key and value are not made before
        work -= sum(dropped.get(name, 0.0) for name in ("query", "key", "value"))
    return work


def _at_the_attention(dropped: Mapping[str, float], size: Mapping[str, float]) -> float:
    """Later, with nothing left of the MLP: the attention's gradients."""
    work = sum(dropped.values()) - dropped.get("gate", 0.0) - dropped.get("up", 0.0)
    return work + 2 * size["query"] + size["key"] + size["value"] + 0.5 * size["layer_input"]
