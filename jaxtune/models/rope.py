"""Rotary position embedding: tables of cos and sin, computed once for a batch, and the rotation of queries and keys by
them in fp32. Numbers i of both halves of a head are a pair (GPT-NeoX order, as in most Hugging Face checkpoints), or
neighbouring numbers if a family interleaves them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.config import DecoderConfig, RopeConfig
from jaxtune.models.norm import LayerNorm, RMSNorm
from jaxtune.pallas.normed_heads import normed_heads, rotated


class RotaryFrequencies(NamedTuple):
    """The angles, in radians, by which each pair of a head's numbers turns from one position to the next."""

    # float32[rotary_dim / 2], the angle of each pair (transformers' inv_freq); for the kind "proportional" float32[head
    # dim / 2], with 0 for pairs that are not rotated
    short: np.ndarray
    # the same for documents that are longer than the original context; None for every kind of base but longrope
    long: np.ndarray | None
    scale: float  # the factor by which cos and sin are multiplied; 1 for every kind but longrope and yarn


def rotary_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> RotaryFrequencies:
    """The angles of a rotary base, by the formulas of transformers' modeling_rope_utils: llama3 from Llama 3.1's
    reference code, longrope from arXiv 2402.13753, yarn from arXiv 2309.00071. ValueError for an unknown kind.

      rope: kind and numbers of the rotary base.
      head_dim: numbers of a head, of which partial_rotary_factor are rotated.
      max_positions: max_position_embeddings, the original context if `rope` names none.
    """
    if rope.kind == "proportional":
        turning = int(rope.partial_rotary_factor * head_dim // 2)
        exponents = np.arange(0, 2 * turning, 2) / head_dim
        turned = (1.0 / rope.theta**exponents).astype(np.float32) / np.float32(rope.factor)
        frequencies = np.concatenate([turned, np.zeros(head_dim // 2 - turning, np.float32)])
        return RotaryFrequencies(frequencies, None, 1.0)
    dim = int(head_dim * rope.partial_rotary_factor)
    # Computed in float64: a power in float32 differs in its last bit between processors with and without AVX-512.
    base = (1.0 / rope.theta ** (np.arange(0, dim, 2) / dim)).astype(np.float32)
    original = rope.original_max_position_embeddings or max_positions
    if rope.kind == "default":
        return RotaryFrequencies(base, None, 1.0)
    if rope.kind == "linear":
        return RotaryFrequencies(base / rope.factor, None, 1.0)
    if rope.kind == "llama3":
        wavelength = 2 * np.pi / base
        low, high = original / rope.low_freq_factor, original / rope.high_freq_factor
        smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        mixed = (1 - smooth) * base / rope.factor + smooth * base
        scaled = np.where(wavelength > low, base / rope.factor, base)
        return RotaryFrequencies(np.where((wavelength <= low) & (wavelength >= high), mixed, scaled), None, 1.0)
    if rope.kind == "longrope":
        scale = rope.attention_factor
        if scale is None:
            scale = 1.0 if rope.factor <= 1.0 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
        short = base / np.asarray(rope.short_factor, np.float32)
        return RotaryFrequencies(short, base / np.asarray(rope.long_factor, np.float32), scale)
    if rope.kind == "yarn":
        scale = rope.attention_factor
        if scale is None:
            scale = 1.0 if rope.factor <= 1 else 0.1 * math.log(rope.factor) + 1.0

        def turns_to_dim(turns):
            """The fractional dimension whose pair turns this often within the original context (yarn)."""
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

        low, high = turns_to_dim(rope.beta_fast), turns_to_dim(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
        return RotaryFrequencies(base / rope.factor * ramp + base * (1 - ramp), None, scale)
    raise ValueError(f"rope kind {rope.kind!r} is unknown")


def pair_axes(sections: Sequence[int], pairs: int) -> np.ndarray:
    """int[pairs], the axis of positions by which each rotated pair of a head turns: pair i by axis a, if i % axes == a
    and i < axes * sections[a], else by the first (interleaved M-RoPE, as transformers' Qwen3-VL).
    """
    axes = np.zeros(pairs, np.int32)
    for axis in range(1, len(sections)):
        axes[axis : len(sections) * sections[axis] : len(sections)] = axis
    return axes


def rotary_table(
    rope: RopeConfig, head_dim: int, max_positions: int, positions: jax.Array, lengths: jax.Array | None = None
):
    """(cos, sin), each float32[B, T, rotary_dim / 2], times RotaryFrequencies.scale. With llama_4_scaling_beta a third
    array float32[B, T, 1], the factor on queries: 1 + beta * log(1 + floor(position / original context)).

      rope: kind and numbers of the rotary base.
      head_dim: numbers of a head.
      max_positions: the original context if `rope` names none.
      positions: int32[B, T], each token's position in its document, or int32[B, T, axes] (RopeConfig.sections).
      lengths: int32 that broadcasts to [B, T], the length of each token's document, which selects longrope's long
        factors (transformers decides for a whole batch). None: a row is one document.

    Raises ValueError for positions with other axes than the base has.
    """
    if positions.ndim > 2 and positions.shape[-1] != len(rope.sections):
        raise ValueError(
            f"positions {positions.shape} have {positions.shape[-1]} axes, and the model's {len(rope.sections) or 1}"
        )
    first_axis = positions if positions.ndim == 2 else positions[..., 0]
    short, long, scale = rotary_frequencies(rope, head_dim, max_positions)
    frequencies = jnp.asarray(short, jnp.float32)
    if long is not None:
        if lengths is None:
            lengths = first_axis.max(axis=-1, keepdims=True) + 1
        is_long = lengths > (rope.original_max_position_embeddings or max_positions)
        frequencies = jnp.where(is_long[..., None], jnp.asarray(long, jnp.float32), frequencies)
    turned = first_axis[..., None] if positions.ndim == 2 else positions[..., pair_axes(rope.sections, len(short))]
    angles = turned.astype(jnp.float32) * frequencies
    table = jnp.cos(angles) * scale, jnp.sin(angles) * scale
    if not rope.llama_4_scaling_beta:
        return table
    turns = jnp.floor(first_axis[..., None] / (rope.original_max_position_embeddings or max_positions))
    return *table, 1.0 + rope.llama_4_scaling_beta * jnp.log(1.0 + turns)


def rotate(x: jax.Array, table, interleaved: bool = False) -> jax.Array:
    """Rotates queries or keys in float32, returned in x's dtype. Dimensions beyond rotary_dim, and all if `table` is
    None, stay unchanged.

      x: [B, T, heads, D].
      table: (cos, sin), each float32[B, T, rotary_dim / 2]; further arrays are not read.
      interleaved: True: the numbers 2i and 2i + 1 of a head are a pair; False: i and i + rotary_dim / 2.
    """
    return x if table is None else rotated(interleaved, x, *table[:2])


def rotate_normed(x: jax.Array, norm: RMSNorm | LayerNorm, table, interleaved: bool = False) -> jax.Array:
    """Norms each head of x, and rotates it as `rotate` does; one operation, which has kernels, for an RMSNorm and
    halves.

      x: [B, T, heads, D].
      norm: over the D numbers of a head.
      table: from `rotary_table`; None: no rotation.
      interleaved: pairs are neighbours, not halves of the head.
    """
    in_one = isinstance(norm, RMSNorm) and norm.compute in (None, "float32") and not interleaved
    if table is None or not in_one:
        return rotate(norm(x), table, interleaved)
    assert isinstance(norm, RMSNorm)
    return normed_heads(x, norm.weight[...], table[:2], eps=norm.eps, offset=norm.offset, float32=norm.float32)


def scaled_by_position(query: jax.Array, table) -> jax.Array:
    """The query [B, T, heads, D] times the third array of its rotary table, if it has one; keys get no such factor. The
    factor is first cast to the query's dtype, as in transformers.
    """
    if table is None or len(table) < 3:
        return query
    return query * table[2][:, :, None, :].astype(query.dtype)


def rotary_tables(config: DecoderConfig, positions: jax.Array, lengths: jax.Array | None = None):
    """The rotary tables of a batch, one (rotary_table) for each rotary base; LayerSpec.rotary is an index into them.

    config: its `rotary` has the rotary bases.
    positions: int32[B, T], each token's position in its document, or int32[B, T, axes].
    lengths: int32 that broadcasts to [B, T], the length of each token's document, for longrope; None: a row is one
      document.
    """
    limit = config.max_position_embeddings
    return tuple(
        rotary_table(rope, rope.head_dim or config.head_dim, limit, positions, lengths) for rope in config.rotary
    )
