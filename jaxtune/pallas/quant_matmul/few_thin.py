"""x A^T of the adapters of one to three linears that share a few rows x, by one Triton kernel: what `coded` and
`fp8_few` multiply by B in the kernels of their products.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.quant_matmul.lora_weights import LoraWeights

MOST_RANK = 64
_TILE = 16  # rows of x, and ranks, of a program
_MOST_WEIGHTS = 3


def padded_rank(loras: Sequence[LoraWeights | None]) -> int:
    """The next power of two of the largest rank, at least 16; 0 without adapters."""
    most = max((lora.a.shape[0] for lora in loras if lora is not None), default=0)
    return max(_TILE, 1 << (most - 1).bit_length()) if most else 0


def refusal(loras: Sequence[LoraWeights | None]) -> str | None:
    """Why the kernels cannot add these adapters' products, or None."""
    if any(lora is not None and lora.row_scale is not None for lora in loras):
        return "DoRA"
    rank = padded_rank(loras)
    return f"adapters of rank {rank}; up to {MOST_RANK}" if rank > MOST_RANK else None


def small_adapter(draw: np.random.Generator, shape: tuple[int, ...], rank: int, dtype) -> LoraWeights:
    """A random adapter of a weight [out, in], for checks."""
    a, b = (jnp.asarray(0.05 * draw.standard_normal(size), dtype) for size in ((rank, shape[1]), (shape[0], rank)))
    return LoraWeights(a, b, scale=0.5)


def exact(x: jax.Array, lora: LoraWeights | None) -> jax.Array | float:
    """What an adapter adds to a product of x, in float32."""
    if lora is None:
        return 0.0
    multiply = dispatch.exactly(lambda one, other: one.astype(jnp.float32) @ other.astype(jnp.float32).T)
    return multiply(lora.scale * multiply(x, lora.a), lora.b)


def arrays_of(x: jax.Array, loras: Sequence[LoraWeights | None]) -> tuple[list[jax.Array], dict]:
    """(arrays, constants) of a kernel that adds the adapters' products: x A^T, then three B; RANK and each weight's.

    x: [N, in], a multiple of 128. loras: an adapter or None for each weight; (): none.
    """
    ranks = [0 if lora is None else lora.a.shape[0] for lora in (*loras, None, None, None)[:_MOST_WEIGHTS]]
    names = ("FIRST_RANK", "SECOND_RANK", "THIRD_RANK")
    constants: dict = {"RANK": padded_rank(loras), **dict(zip(names, ranks, strict=True))}
    if not constants["RANK"]:
        return [], constants | dict.fromkeys(("thin", "first_b", "second_b", "third_b"))
    sides = [None if lora is None else lora.b.astype(x.dtype) for lora in loras]
    some = next(side for side in sides if side is not None)
    sides += [None] * (_MOST_WEIGHTS - len(sides))
    return [thin(x, loras), *(some if side is None else side for side in sides)], constants


def thin(x: jax.Array, loras: Sequence[LoraWeights | None]) -> jax.Array:
    """x A^T, rounded, times the adapter's scale or each row's gate, rounded: [N, weights x padded_rank] in x's dtype, 0
    where an adapter has no such rank.

    x: [N, in] of 16 bits, a multiple of 128. loras: an adapter or None for each weight, at least one.
    """
    from jaxtune.pallas.quant_matmul import few_thin_kernels

    (count, inner), rank = x.shape, padded_rank(loras)
    arrays, gates, settings = [], [], {}
    gated = any(lora is not None and lora.gate is not None for lora in loras)
    for name, lora in zip(("first", "second", "third"), (*loras, None, None), strict=False):
        arrays.append(x if lora is None else lora.a.astype(x.dtype))
        settings[f"{name.upper()}_RANK"] = 0 if lora is None else lora.a.shape[0]
        settings[f"{name.upper()}_SCALE"] = 1.0 if lora is None else float(lora.scale)
        if gated and lora is not None:
            gate = jnp.float32(lora.scale) if lora.gate is None else lora.gate.astype(jnp.float32)
            gate = gate.reshape(-1, lora.a.shape[0]) if gate.ndim else gate
            gates.append(jnp.broadcast_to(gate, (count, lora.a.shape[0])))
        elif gated:
            gates.append(jnp.zeros((1, 1), jnp.float32))
        else:
            settings[f"{name}_gate"] = None
    (out,) = compat.triton_graph_call(
        few_thin_kernels.thin_kernel,
        (x, *arrays, *gates),
        [jax.ShapeDtypeStruct((count, len(loras) * rank), x.dtype)],
        (-(-count // _TILE), len(loras) * rank // _TILE),
        warps=4,
        stages=4,
        COUNT=count,
        INNER=inner,
        RANK=rank,
        WIDTH=len(loras) * rank,
        TILE=_TILE,
        DEPTH=next(depth for depth in (512, 256, 128) if inner % depth == 0),
        STAGES=4,
        GATED=int(gated),
        **settings,
    )
    return out
