"""Rotary position embedding: tables that are computed once per batch, and the rotation, which is computed in fp32.

The two halves of a head are rotated as pairs (GPT-NeoX order, as in most Hugging Face checkpoints), or neighbouring
numbers if a family interleaves them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.config import DecoderConfig, RopeConfig


class RotaryFrequencies(NamedTuple):
    """The angles by which a rotary base turns the pairs of a head from one position to the next."""

    short: np.ndarray  # float32[rotary_dim / 2], the inverse frequencies
    long: np.ndarray | None  # the same for documents longer than the original context (longrope), or None
    scale: float  # factor on cos and sin


def rotary_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> RotaryFrequencies:
    """The inverse frequencies of a rotary base.

    The formulas are those of transformers' modeling_rope_utils: llama3 from the Llama 3.1 reference code, longrope from
    arXiv 2402.13753, yarn from arXiv 2309.00071. Those of "proportional" (Gemma 4) cover the whole head, and are 0 for
    dimensions that are not rotated.

    Args:
      rope: the base.
      head_dim: size of a head.
      max_positions: the model's max_position_embeddings, the original context of a base that names none.
    Raises:
      ValueError: an unknown kind of base.
    """
    if rope.kind == "proportional":
        turning = int(rope.partial_rotary_factor * head_dim // 2)
        exponents = np.arange(0, 2 * turning, 2) / head_dim
        turned = (1.0 / rope.theta**exponents).astype(np.float32) / np.float32(rope.factor)
        whole = np.concatenate([turned, np.zeros(head_dim // 2 - turning, np.float32)])
        return RotaryFrequencies(whole, None, 1.0)
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
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

        low, high = turns_to_dim(rope.beta_fast), turns_to_dim(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
        return RotaryFrequencies(base / rope.factor * ramp + base * (1 - ramp), None, scale)
    raise ValueError(f"rope kind {rope.kind!r} is unknown")


def rotary_table(
    rope: RopeConfig, head_dim: int, max_positions: int, positions: jax.Array, lengths: jax.Array | None = None
):
    """The table by which queries and keys are rotated: (cos, sin), each float32[B, T, rotary_dim / 2].

    With llama_4_scaling_beta a third array follows, the factor on queries, float32[B, T, 1].

    Args:
      rope: the base.
      head_dim: size of a head.
      max_positions: the model's max_position_embeddings.
      positions: int32[B, T].
      lengths: int32 that broadcasts to [B, T], the length of each token's document. longrope uses its long factors for
        documents past the original context, whatever they are packed with. (transformers decides for a whole batch,
        which is the same for a batch of one document.) None: each row is one document.
    """
    short, long, scale = rotary_frequencies(rope, head_dim, max_positions)
    frequencies = jnp.asarray(short, jnp.float32)
    if long is not None:
        if lengths is None:
            lengths = positions.max(axis=-1, keepdims=True) + 1
        is_long = lengths > (rope.original_max_position_embeddings or max_positions)
        frequencies = jnp.where(is_long[..., None], jnp.asarray(long, jnp.float32), frequencies)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    table = jnp.cos(angles) * scale, jnp.sin(angles) * scale
    if not rope.llama_4_scaling_beta:
        return table
    turns = jnp.floor(positions[..., None] / (rope.original_max_position_embeddings or max_positions))
    return *table, 1.0 + rope.llama_4_scaling_beta * jnp.log(1.0 + turns)


def rotate(x: jax.Array, table, interleaved: bool = False) -> jax.Array:
    """Queries or keys x [B, T, heads, D] rotated by their positions, in x's dtype; dimensions past the table's remain.

    Args:
      table: from rotary_table; None: x is returned unchanged.
      interleaved: whether numbers (2i, 2i + 1) are pairs, and not (i, i + half).
    """
    return x if table is None else _rotated(interleaved, x, *table[:2])


def scaled_by_position(query: jax.Array, table) -> jax.Array:
    """The query [B, T, heads, D] times the third array of its table (from rotary_table), the factor on queries by
    position, which is first cast as in transformers; unchanged if there is no table or no third array."""
    if table is None or len(table) < 3:
        return query
    return query * table[2][:, :, None, :].astype(query.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotated(interleaved, x, cos, sin):
    """x [B, T, heads, D] rotated by cos and sin [B, T, rotary_dim / 2], with a derivative of its own (_rotated_bwd says
    why). interleaved: whether numbers (2i, 2i + 1) are pairs, and not (i, i + half)."""
    half = cos.shape[-1]
    cos, sin = (part[:, :, None, :] for part in (cos, sin))
    if interleaved:
        pairs = x[..., : 2 * half].reshape(*x.shape[:-1], half, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    parts = [(first * cos - second * sin).astype(x.dtype), (second * cos + first * sin).astype(x.dtype)]
    if interleaved:
        parts = [jnp.stack(parts, axis=-1).reshape(*x.shape[:-1], 2 * half)]
    if x.shape[-1] > 2 * half:
        parts.append(x[..., 2 * half :])
    return jnp.concatenate(parts, axis=-1)


def _rotated_fwd(interleaved, x, cos, sin):
    """The forward rule of `_rotated`, with its arguments: (the rotated x, the residuals (cos, sin)). interleaved is
    static."""
    return _rotated(interleaved, x, cos, sin), (cos, sin)


def _rotated_bwd(interleaved, table, dout):
    """The backward rule of `_rotated`: (dout [B, T, heads, D] rotated by the opposite angle, None, None), in one pass
    over memory; jax.vjp would pad the gradients of slices and add them. table: (cos, sin) of the forward. interleaved:
    as in the forward."""
    cos, sin = table
    return _rotated(interleaved, dout, cos, -sin), None, None


_rotated.defvjp(_rotated_fwd, _rotated_bwd)


def rotary_tables(config: DecoderConfig, positions: jax.Array, lengths: jax.Array | None = None):
    """A tuple with a table, as from rotary_table, for each of the decoder's rotary bases (LayerSpec.rotary is an index
    to them). config: of the decoder.

    positions: int32[B, T]; lengths: int32 that broadcasts to [B, T], the length of each token's document, or None if
    each row is one document.
    """
    limit = config.max_position_embeddings
    return tuple(
        rotary_table(rope, rope.head_dim or config.head_dim, limit, positions, lengths) for rope in config.rotary
    )
