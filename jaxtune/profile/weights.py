"""The linear that a product belongs to, by its weight.

XLA keeps the path of every argument, such as "frozen['layers'][3]['mlp']['up_proj']['weight'].value", so that products
are named whether or not the program names its parts.
"""

from __future__ import annotations

import re

from jaxtune.profile.hlo import Instruction

# Opcodes that XLA puts between a weight and its product.
_PASSING = frozenset(
    (
        "bitcast",
        "bitcast-convert",
        "convert",
        "copy",
        "transpose",
        "reshape",
        "slice",
        "concatenate",
        "copy-done",
        "copy-start",
        "get-tuple-element",
        "fusion",
    )
)
_KEY = re.compile(r"\['?([A-Za-z_]\w*)'?\]|\.([A-Za-z_]\w*)")
# Keys in a path that come after the linear's own name.
_LEAVES = frozenset(
    ("weight", "kernel", "bias", "value", "raw_value", "w", "lora", "a", "b", "lora_a", "lora_b", "scale")
)
_INDICES = ("s32", "u32", "s64", "u64", "pred")
_DEPTH = 5


def linear_of(product: Instruction) -> str:
    """The linear whose weight a product multiplies by, "up_proj" or "q_proj+k_proj"; "" if no operand is a weight. Of
    several the largest counts.
    """
    computation = product.computation
    if computation is None:
        return ""
    best: tuple[int, list[str]] = (0, [])
    for operand in product.operands:
        names = []
        source = computation.by_id.get(operand)
        if source is not None:
            names = list(dict.fromkeys(_names(source, 0)))
        if names and source is not None and source.shape.num_bytes > best[0]:
            best = source.shape.num_bytes, names
    names = best[1]
    return "+".join(names[:3]) + ("+..." if len(names) > 3 else "")


def _names(instruction: Instruction, depth: int) -> list[str]:
    """Linears whose weights an instruction's result is made from; [] if anything else goes into it."""
    if instruction.opcode == "parameter":
        if len(instruction.shape.dims) < 2 or instruction.shape.dtype in _INDICES:
            return []
        keys = [first or second for first, second in _KEY.findall(instruction.scope)]
        while keys and keys[-1] in _LEAVES:
            keys.pop()
        return keys[-1:]
    if instruction.opcode not in _PASSING or depth == _DEPTH or instruction.computation is None:
        return []
    by_id = instruction.computation.by_id
    out: list[str] = []
    for operand in instruction.operands:
        source = by_id.get(operand)
        names = [] if source is None else _names(source, depth + 1)
        if not names:
            return []
        out += names
    return out
