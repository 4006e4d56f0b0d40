"""x A^T of the adapters of one to three linears that share a few rows x, by one Triton kernel; and what all products of
few rows need to know of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.quant_matmul.few_sizes import padded
from jaxtune.pallas.quant_matmul.lora_weights import LoraWeights

MOST_RANK = 64
_TILE = 16  # rows of x, and ranks, of a program
_STAGES = 4  # steps of the kernel in flight
_MOST_WEIGHTS = 3


def padded_rank(loras: Sequence[LoraWeights | None]) -> int:
    """RANK of kernels: the next power of two of the largest rank, at least 16; 0 without adapters."""
    most = max((lora.a.shape[0] for lora in loras if lora is not None), default=0)
    return padded(most) if most else 0


def text(loras: Sequence[LoraWeights | None]) -> str:
    """Such as ", adapters of ranks 16, 8, 0", or "": of calls that share a check at first use."""
    if not padded_rank(loras):
        return ""
    ranks = ", ".join(str(0 if lora is None else lora.a.shape[0]) for lora in loras)
    gated = ", gated" if any(lora is not None and lora.gate is not None for lora in loras) else ""
    return f", adapters of ranks {ranks}{gated}"


def refusal(loras: Sequence[LoraWeights | None]) -> str | None:
    """Why the kernels cannot add these adapters' products, or None."""
    if any(lora is not None and lora.row_scale is not None for lora in loras):
        return "DoRA"
    rank = padded_rank(loras)
    return f"adapters of rank {rank}; up to {MOST_RANK}" if rank > MOST_RANK else None


def small_adapters(
    loras: Sequence[LoraWeights | None], rows: int, sizes: Sequence[int], columns: int, dtype, factor: float = 1.0
) -> list[LoraWeights | None]:
    """Random adapters for checks, of the same ranks: of weights [size, columns], A times `factor`, gates in part 0."""
    draw = np.random.default_rng(1)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(draw.standard_normal(shape), dtype)

    def small(lora: LoraWeights, size: int) -> LoraWeights:
        rank, gate = lora.a.shape[0], None
        if lora.gate is not None:
            gate = jnp.maximum(normal(rows, rank, dtype=jnp.float32), 0).at[1:2].set(0)
        return LoraWeights(factor * normal(rank, columns), 0.1 * normal(size, rank), scale=0.5, gate=gate)

    return [lora and small(lora, size) for lora, size in zip(loras, sizes, strict=False)]


def exact(x: jax.Array, lora: LoraWeights | None) -> jax.Array | float:
    """What an adapter adds to a product of x, in float32."""
    if lora is None:
        return 0.0
    multiply = dispatch.exactly(lambda one, other: one.astype(jnp.float32) @ other.astype(jnp.float32).T)
    return multiply(multiply(x, lora.a) * (lora.scale if lora.gate is None else lora.gate), lora.b)


def depth_of(inner: int) -> int:
    """Columns of a step of the kernel, of x [N, inner], a multiple of 128."""
    return next(depth for depth in (512, 256, 128) if inner % depth == 0)


def columns_of_check(loras: Sequence[LoraWeights | None], inner: int, multiple: int, steps: int) -> int:
    """Columns of a check of products of x [N, inner]: `steps` times `multiple`, with adapters as many as their kernel
    needs.
    """
    if not padded_rank(loras):
        return steps * multiple
    depth = depth_of(inner)
    while steps * multiple < (_STAGES + 2) * depth or depth_of(steps * multiple) != depth:
        steps += 1
    return steps * multiple


def gates_of(loras: Sequence[LoraWeights | None], count: int) -> list[jax.Array]:
    """Three arrays float32[count, rank], the factors of the adapters' columns; [] if no adapter has a gate."""
    if all(lora is None or lora.gate is None for lora in loras):
        return []
    gates: list[jax.Array | None] = [None] * _MOST_WEIGHTS
    for index, lora in enumerate(loras):
        if lora is not None:
            rank = lora.a.shape[0]
            gate = jnp.float32(lora.scale) if lora.gate is None else lora.gate.reshape(-1, rank).astype(jnp.float32)
            gates[index] = jnp.broadcast_to(gate, (count, rank))
    stand_in = next(gate for gate in gates if gate is not None)
    return [stand_in if gate is None else gate for gate in gates]


def arrays_of(x: jax.Array, loras: Sequence[LoraWeights | None]) -> tuple[list[jax.Array], dict]:
    """(arrays, constants) of a kernel that adds the adapters' products: x A^T, then three B; RANK and each weight's."""
    ranks = [0 if lora is None else lora.a.shape[0] for lora in (*loras, None, None, None)[:_MOST_WEIGHTS]]
    names = ("FIRST_RANK", "SECOND_RANK", "THIRD_RANK")
    constants: dict = {"RANK": padded_rank(loras), **dict(zip(names, ranks, strict=True))}
    if not constants["RANK"]:
        return [], constants | dict.fromkeys(("thin", "first_b", "second_b", "third_b"))
    sides = [None if lora is None else lora.b.astype(x.dtype) for lora in loras]
    stand_in = next(side for side in sides if side is not None)
    sides += [None] * (_MOST_WEIGHTS - len(sides))
    return [thin(x, loras), *(stand_in if side is None else side for side in sides)], constants


def thin(x: jax.Array, loras: Sequence[LoraWeights | None]) -> jax.Array:
    """x A^T, rounded, times the adapter's scale or each row's gate, rounded: [N, weights x padded_rank] in x's dtype, 0
    where an adapter has no such rank. x: [N, in] of 16 bits, a multiple of 128.
    """
    from jaxtune.pallas.quant_matmul import few_thin_kernels

    (count, inner), rank = x.shape, padded_rank(loras)
    arrays, gates, settings = [], gates_of(loras, count), {}
    for name, lora in zip(("first", "second", "third"), (*loras, None, None), strict=False):
        arrays.append(x if lora is None else lora.a.astype(x.dtype))
        settings[f"{name.upper()}_RANK"] = 0 if lora is None else lora.a.shape[0]
        settings[f"{name.upper()}_SCALE"] = 1.0 if lora is None else float(lora.scale)
        if not gates:
            settings[f"{name}_gate"] = None
    (out,) = compat.triton_graph_call(
        few_thin_kernels.thin_kernel,
        (x, *arrays, *gates),
        [jax.ShapeDtypeStruct((count, len(loras) * rank), x.dtype)],
        (-(-count // _TILE), len(loras) * rank // _TILE),
        warps=4,
        stages=_STAGES,
        COUNT=count,
        INNER=inner,
        RANK=rank,
        WIDTH=len(loras) * rank,
        TILE=_TILE,
        DEPTH=depth_of(inner),
        STAGES=_STAGES,
        GATED=int(bool(gates)),
        **settings,
    )
    return out
