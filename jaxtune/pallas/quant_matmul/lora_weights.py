"""Adapters as arguments of products."""

from __future__ import annotations

import dataclasses

import jax

from jaxtune.pallas.arguments import FLOATS, Arguments


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraWeights:
    """A low-rank adapter scale * b a of a weight [out, in]; products add scale * (x a^T) b^T, never storing the sum."""

    a: jax.Array  # [r, in]; cast to x's dtype on use
    b: jax.Array  # [out, r]; cast to x's dtype on use
    # float32[out] or None (no factor); multiplies the output, weight and adapter, before the bias is added: DoRA's
    # magnitude of each output divided by the norm of its row of the weight
    row_scale: jax.Array | None = None
    # alpha / r, or alpha / sqrt(r) for rsLoRA
    scale: float = dataclasses.field(default=1.0, metadata=dict(static=True))
    # float32[..., r] of each token in place of the scale, or [r] of all: where it is 0 a column adds nothing, so that
    # several adapters side by side are one, of which each token takes its own; not differentiable
    gate: jax.Array | None = None


def check_adapter(check: Arguments, index: int, lora: LoraWeights, out: str) -> None:
    """Checks what all products' adapters have, of the weight number `index`. out: the name of its rows' number."""
    name = f"loras[{index}]"
    check.is_a(name, lora, LoraWeights, "a LoraWeights or None")
    check.array(f"{name}.a", lora.a, f"r_{index} in", FLOATS)
    check.array(f"{name}.b", lora.b, f"{out} r_{index}", FLOATS)
    check.number(f"{name}.scale", lora.scale)
    if lora.gate is not None:
        check.array(f"{name}.gate", lora.gate, f"... r_{index}", FLOATS)
