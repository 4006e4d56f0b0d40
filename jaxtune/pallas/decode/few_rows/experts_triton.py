"""Products of few tokens with the matrices of their experts as a Triton kernel for Hopper, whose programs find each
expert's tokens in `choice` themselves.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, one_order
from jaxtune.pallas.decode.few_rows.triton import Tile, rows_refusal
from jaxtune.pallas.grouped_matmul import GroupedLora
from jaxtune.pallas.quant_matmul.few_sizes import NUMBERS, padded
from jaxtune.pallas.quant_matmul.few_thin import MOST_RANK

MOST_CHOICES = 16  # experts of a token, because a program loads the choices of all tokens at once
# Tokens multiplied at once: fewer spare nothing, because the matrix's bytes take longer; sums of more do not fit the
# registers.
_LEAST_SLOTS, _MOST_SLOTS = 32, 64
# Of gate and up, each of this many rows, and of down, if the hidden size is divisible by 128 and if not. Two programs
# or more fit the shared memory of a multiprocessor, so that one starts while another multiplies.
_GATED, _DOWN, _DOWN_FEW = Tile(64, 64, 4, 4), Tile(128, 64, 4, 3), Tile(64, 64, 4, 6)


def gated_refusal(x, gate_up, experts_per_token: int, activation: str, lora: GroupedLora | None) -> str | None:
    """Why the kernel of `experts_gated` does not support a call, or None."""
    if activation not in NUMBERS:
        return f"activation {activation}"
    return _refusal(len(x), x.dtype, gate_up, experts_per_token, gate_up.shape[1] // 2, lora)


def down_refusal(count: int, dtype, down, experts_per_token: int, lora: GroupedLora | None) -> str | None:
    """Why the kernel of `experts_down` does not support a call of `count` tokens in `dtype`, or None."""
    return _refusal(count, dtype, down, experts_per_token, down.shape[1], lora)


def _refusal(
    count: int, dtype, weight, experts_per_token: int, rows_of_each: int, lora: GroupedLora | None
) -> str | None:
    """Why the kernel does not support a call, or None."""
    reason = rows_refusal(count, dtype, (weight,), fewest=2)
    if reason is not None:
        return reason
    if experts_per_token > MOST_CHOICES:
        return f"{experts_per_token} experts a token; up to {MOST_CHOICES}"
    if lora is not None and lora.a.shape[1] > MOST_RANK:
        return f"adapters of rank {lora.a.shape[1]}; up to {MOST_RANK}"
    if rows_of_each % _GATED.rows or weight.shape[2] % _GATED.depth:
        return (
            f"matrices of {rows_of_each} rows and {weight.shape[2]} columns; multiples of {_GATED.rows} and "
            f"{_GATED.depth}"
        )
    return None


def slots(choice, experts: int) -> int:
    """Tokens that a program multiplies at once: four times an expert's average, as a power of two from 32 to 64, and at
    most `padded` of all.
    """
    count, experts_per_token = choice.shape
    return min(padded(count), padded(max(_LEAST_SLOTS, -(-4 * count * experts_per_token // experts))), _MOST_SLOTS)


def multiplied(x, weight, choice, factors, tile: Tile, at_once: int, activation: int, lora: GroupedLora | None = None):
    """Runs expert_kernel with any tile.

    x, weight: [N * k, in], [E, out, in]; with an activation [N, in], [E, 2 out, in], gate first.
    choice: int32[N, k]. factors: float32[N, k], the router's; without an activation not read.
    at_once: tokens multiplied at once, a power of two of at least 16.
    activation: 0: none, result [k, N, out] in `partial_dtype`; 1 (silu) or 2 (gelu_tanh): [N * k, out] in x's dtype.
    """
    from jaxtune.pallas.decode.few_rows import experts_kernels

    (count, experts_per_token), (experts, size, inner) = choice.shape, weight.shape
    sides = 2 if activation else 1
    size //= sides
    shape, dtype = (
        ((count * experts_per_token, size), x.dtype)
        if activation
        else ((experts_per_token, count, size), partial_dtype(x.dtype))
    )
    if lora is None:
        adapters, absent = [], {"a": None, "b": None}
    else:
        adapters, absent = [lora.a.astype(x.dtype), lora.b.astype(x.dtype)], {}
    (out,) = compat.triton_graph_call(
        experts_kernels.expert_kernel,
        (x, weight, choice, factors, *adapters),
        (jax.ShapeDtypeStruct(shape, dtype),),
        (size // tile.rows, experts + 1),
        warps=tile.warps,
        stages=tile.stages,
        COUNT=count,
        CHOICES=experts_per_token,
        EXPERTS=experts,
        INNER=inner,
        SIZE=size,
        ROWS=tile.rows,
        DEPTH=tile.depth,
        TOKENS=padded(count),
        PLACES=1 << (experts_per_token - 1).bit_length(),
        SLOTS=at_once,
        ACTIVATION=activation,
        STAGES=tile.stages,
        RANK=0 if lora is None else MOST_RANK,
        A_RANK=0 if lora is None else lora.a.shape[1],
        READ_RANK=0 if lora is None else lora.read_rank,
        SCALE=1.0 if lora is None else float(lora.scale),
        **absent,
    )
    return out


def partial_dtype(dtype):
    """Of experts_down's results for h in `dtype`: in one order each product is rounded, as routing's are."""
    return dtype if one_order.is_exact() else jnp.float32


def down_tile(hidden: int) -> Tile:
    """The tile of `experts_down`: 128 rows if they divide `hidden`, else 64."""
    return _DOWN_FEW if hidden % _DOWN.rows else _DOWN


def _with(lora: GroupedLora | None, tile: Tile, at_once: int) -> Tile:
    """`tile` for these adapters, which need shared memory and registers."""
    if lora is None:
        return tile
    return dataclasses.replace(tile, stages=min(tile.stages, 3), warps=8 if at_once == _MOST_SLOTS else tile.warps)


def experts_gated(x, gate_up, choice, weights, activation, lora):
    """As experts.experts_gated; only if `gated_refusal` is None."""
    slot_count = slots(choice, len(gate_up))
    tile = _with(lora, _GATED, slot_count)
    return multiplied(x, gate_up, choice, weights, tile, slot_count, NUMBERS[activation], lora)


def experts_down(h, down, choice, lora):
    """As experts.experts_down; only if `down_refusal` is None."""
    slot_count = slots(choice, len(down))
    tile = _with(lora, down_tile(down.shape[1]), slot_count)
    return multiplied(h, down, choice, choice, tile, slot_count, 0, lora)
