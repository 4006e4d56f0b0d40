"""Products of few tokens with the matrices of their experts as a Triton kernel, for Hopper GPUs: `experts_gated` by
gate and up, with the activation, and `experts_down` by down. `gated_refusal` and `down_refusal` return the reason why a
call is not supported, or None; experts.py calls these four. Both products choose how many tokens a program multiplies
at once (`slots`) and a tile (`down_tile`; `_with` for adapters), and call `multiplied`, which runs the kernel, also
with other tiles for measurements.

A step of some dozen tokens reads nearly every expert's matrices, and each is multiplied by a handful of tokens. The
kernel's programs find these tokens in `choice` themselves, so no sort precedes it, no buffer has padded rows, and each
result is written where its reader wants it. The kernel's body is in experts_kernels.py, which imports triton and is
imported only when the kernel runs.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat
from jaxtune.pallas.few_rows.triton import ACTIVATIONS, MOST_RANK, Tile, padded, rows_refusal
from jaxtune.pallas.grouped_matmul import GroupedLora

MOST_CHOICES = 16  # experts of a token, because a program loads the choices of all tokens at once
# Tokens multiplied at once: fewer spare nothing, because the matrix's bytes take longer; sums of more do not fit the
# registers.
_LEAST_SLOTS, _MOST_SLOTS = 32, 64
# Of gate and up, each of this many rows, and of down, if the hidden size is divisible by 128 and if not. Two programs
# or more fit the shared memory of a multiprocessor, so that one starts while another multiplies.
_GATED, _DOWN, _DOWN_FEW = Tile(64, 64, 4, 4), Tile(128, 64, 4, 3), Tile(64, 64, 4, 6)


def gated_refusal(x, gate_up, choices: int, activation: str, lora: GroupedLora | None) -> str | None:
    """The reason why the kernel of `experts_gated` does not support a call on this GPU, or None: another activation
    than "silu" and "gelu_tanh", or a reason of `_refusal`.

    Args:
      x: [N, hidden], the tokens.
      gate_up: [E, 2 * inner, hidden], the experts' matrices.
      choices: the number of experts of a token.
      activation: its name.
      lora: the adapters of gate_up, or None.
    """
    if activation not in ACTIVATIONS:
        return f"activation {activation}"
    return _refusal(len(x), x.dtype, gate_up, choices, gate_up.shape[1] // 2, lora)


def down_refusal(count: int, dtype, down, choices: int, lora: GroupedLora | None) -> str | None:
    """The reason why the kernel of `experts_down` does not support a call on this GPU, or None: a reason of `_refusal`.

    Args:
      count: N, the number of tokens.
      dtype: of their rows.
      down: [E, hidden, inner], the experts' matrices.
      choices: the number of experts of a token.
      lora: the adapters of down, or None.
    """
    return _refusal(count, dtype, down, choices, down.shape[1], lora)


def _refusal(count: int, dtype, weight, choices: int, size: int, lora: GroupedLora | None) -> str | None:
    """The reason why the kernel does not support a call, for `gated_refusal` and `down_refusal`, or None: no Hopper GPU
    or no jax-triton, another dtype than 16-bit floats or matrices of another one than the tokens, other than 2 to 128
    tokens, more than 16 experts a token, adapters of a rank above 64, or matrices whose rows or columns are no
    multiples of 64.

    Args:
      count: the number of tokens.
      dtype: of their rows.
      weight: the experts' matrices, [E, rows, columns].
      choices: the number of experts of a token.
      size: the number of rows of a matrix, of gate and up those of one of them.
      lora: the adapters, or None.
    """
    reason = rows_refusal(count, dtype, (weight,), least=2)
    if reason is not None:
        return reason
    if choices > MOST_CHOICES:
        return f"{choices} experts a token; up to {MOST_CHOICES}"
    if lora is not None and lora.a.shape[1] > MOST_RANK:
        return f"adapters of rank {lora.a.shape[1]}; up to {MOST_RANK}"
    if size % _GATED.rows or weight.shape[2] % _GATED.depth:
        return f"matrices of {size} rows and {weight.shape[2]} columns; multiples of {_GATED.rows} and {_GATED.depth}"
    return None


def slots(choice, experts: int) -> int:
    """How many tokens a program multiplies at once: four times as many as choose an expert on average, but at least 32,
    rounded up to a power of two, and at most 64 and `padded` of the number of tokens (which is 16 for up to 16). The
    matrices of experts that more tokens choose are read more than once.

    Args:
      choice: int32[N, k], each token's experts.
      experts: the number of all experts.
    """
    count, choices = choice.shape
    return min(padded(count), padded(max(_LEAST_SLOTS, -(-4 * count * choices // experts))), _MOST_SLOTS)


def multiplied(x, weight, choice, factors, tile: Tile, at_once: int, activation: int, lora: GroupedLora | None = None):
    """Runs the kernel (experts_kernels.expert_kernel), for `experts_gated` and `experts_down`, and with other tiles for
    measurements of them.

    Args:
      x: the tokens [N, in]; without an activation the rows of pairs [N * k, in], that of token t and its choice j at t
        * k + j.
      weight: the experts' matrices, [E, out, in]; with an activation those of gate and up, [E, 2 * out, in].
      choice: int32[N, k], each token's experts.
      factors: float32[N, k], the router's weights; not read without an activation.
      tile: how the work is divided among programs; with an activation they have its rows of gate and of up.
      at_once: how many tokens are multiplied at once, a power of two of at least 16.
      activation: 0: none, the result is float32[k, N, out]. 1 (silu) or 2 (gelu_tanh): it is [N * k, out] in x's dtype.
      lora: the adapters of the experts' matrices, or None.
    """
    from jaxtune.pallas.few_rows import experts_kernels

    (count, choices), (experts, size, inner) = choice.shape, weight.shape
    sides = 2 if activation else 1
    size //= sides
    shape, dtype = ((count * choices, size), x.dtype) if activation else ((choices, count, size), jnp.float32)
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
        CHOICES=choices,
        EXPERTS=experts,
        INNER=inner,
        SIZE=size,
        ROWS=tile.rows,
        DEPTH=tile.depth,
        TOKENS=padded(count),
        PLACES=1 << (choices - 1).bit_length(),
        SLOTS=at_once,
        ACTIVATION=activation,
        STAGES=tile.stages,
        RANK=0 if lora is None else MOST_RANK,
        A_RANK=0 if lora is None else lora.a.shape[1],
        SCALE=1.0 if lora is None else float(lora.scale),
        **absent,
    )
    return out


def down_tile(hidden: int) -> Tile:
    """The tile of `experts_down` for matrices of `hidden` rows: of 128 rows if they divide `hidden`, else of 64. The
    check of the kernel at its first use (experts.py) takes it too."""
    return _DOWN_FEW if hidden % _DOWN.rows else _DOWN


def _with(lora: GroupedLora | None, tile: Tile, at_once: int) -> Tile:
    """`tile` for matrices with the adapters `lora`, or without any if it is None. Adapters leave shared memory for
    fewer steps, at most 3, and their sums for 64 tokens (at_once) do not fit the registers of four warps, so it has
    eight."""
    if lora is None:
        return tile
    return dataclasses.replace(tile, stages=min(tile.stages, 3), warps=8 if at_once == _MOST_SLOTS else tile.warps)


def experts_gated(x, gate_up, choice, weights, activation, lora):
    """Computes activation(gate) * up * weight for each token x [N, hidden] and each of its experts, by one kernel: [N *
    k, inner] in x's dtype, token t's j-th expert at t * k + j, and zeros where `choice` has no expert. gate_up: [E, 2 *
    inner, hidden]. choice: int32[N, k]. weights: float32[N, k]. activation: "silu" or "gelu_tanh". lora: the adapters
    of gate_up, or None. `gated_refusal` says which calls are supported."""
    at_once = slots(choice, len(gate_up))
    tile = _with(lora, _GATED, at_once)
    return multiplied(x, gate_up, choice, weights, tile, at_once, ACTIVATIONS[activation], lora)


def experts_down(h, down, choice, lora):
    """Multiplies each row of h [N * k, inner] by the matrix of its expert, by one kernel: float32[k, N, hidden], the
    products of the tokens' first experts, then of their second, and so on, and zeros where `choice` has no expert.
    down: [E, hidden, inner]. choice: int32[N, k]. lora: the adapters of down, or None. `down_refusal` says which calls
    are supported."""
    at_once = slots(choice, len(down))
    tile = _with(lora, down_tile(down.shape[1]), at_once)
    return multiplied(h, down, choice, choice, tile, at_once, 0, lora)
