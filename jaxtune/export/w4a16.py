"""Exports in four bits for vLLM: compressed-tensors' `pack-quantized` with 16-bit activations (w4a16), and
`int-quantized` with activations rounded to int8 by token (w4a8). jaxtune does not load such folders.

A group of a row is codes of -8..7 times its scale, as QAT rounds it (fake_quant.int4). A linear X has `X.weight_packed`
int32[out, in / 8], eight codes plus 8 each, the first in the lowest bits, `X.weight_scale` [out, in / group] in the
model's dtype and `X.weight_shape` int64[2]; with w4a8 `X.weight` int8[out, in] and `X.weight_scale`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtune.export import folders
from jaxtune.models import hf
from jaxtune.models.files.file_plan import FileTensor, Group, Piece
from jaxtune.models.files.weights import Weights
from jaxtune.models.lora import experts, linears, name_matches
from jaxtune.models.placement import partition
from jaxtune.models.qat.fake_quant import int4_codes, int4_scales
from jaxtune.pallas.formats.layout import SERVED_IN_16_BITS

GROUP = 128
_PACKED = 8  # codes in an int32


def write(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int, activations: bool = False) -> list[str]:
    """Writes linears and experts in int4, those of QAT exactly in its groups, others rounded in groups of 128, and
    verifies the folder. SERVED_IN_16_BITS, rows that are not whole groups, routers, embeddings and head stay in the
    model's dtype. Returns notes.

      weights: the model, adapters merged.
      folder: exists and is empty.
      tokenizer: a Hugging Face tokenizer; None: none is written.
      max_shard_bytes: of one file.
      activations: servers round activations to 8 bits too (w4a8).

    Raises ValueError for experts in one tensor, no whole groups, or weights that left QAT's grid; ArithmeticError if
    codes do not decode to the weights, or files differ.
    """
    weights = weights.dequantized()
    model = weights.model
    exact, group = model.qat is not None, (model.qat.group_size if model.qat else None) or GROUP
    kind, planned = "w4a8" if activations else "w4a16", hf.checkpoint_tensors(weights)
    dense = [
        name
        for name, linear in linears(model)
        if linear.quantizable and not any(name_matches(name, pattern) for pattern in SERVED_IN_16_BITS)
    ]
    names = [f"{name}.weight" for name in dense] + [name for name, _ in experts(model)]
    packed, unpacked = [], []
    for name in names:
        if any(len(tensor.shape) != 2 for tensor in planned[name].tensors.values()):
            raise ValueError(
                f"{kind}: the experts of {model.config.family!r} are stored as one tensor, which compressed-tensors "
                "does not pack; take fp8 or mxfp4"
            )
        pieces = []
        for piece in planned[name].pieces:
            ((key, tensor),) = piece.tensors.items()  # one linear, or one expert's
            linear = key.removesuffix(".weight")
            if tensor.shape[1] % group:
                unpacked.append(linear)
                pieces.append(piece)
            else:
                packed.append(linear)
                pieces.append(_piece(linear, tensor, group, model.dtype, exact, kind))
        planned[name] = Group(planned[name].make, tuple(pieces))
    if not packed:
        raise ValueError(f"{kind}: no linear has whole groups of {group} columns; take fp8")
    tensors = {key: tensor for group in planned.values() for key, tensor in group.tensors.items()}
    matrix_keys = {key for key, tensor in tensors.items() if len(tensor.shape) == 2}
    plain = {key.removesuffix(".weight") for key in matrix_keys if key.endswith(".weight")} - {
        "model.embed_tokens",
        *packed,
    }
    ignored = sorted({model.config.head.name, *plain})
    extra = {"quantization_config": quantization_config(group, ignored, activations)}
    folders.write_planned(weights, folder, tokenizer, max_shard_bytes, planned, extra, loads=False)
    return (
        [f"{len(unpacked)} linears are kept in 16 bits: their rows are not whole groups of {group}"] if unpacked else []
    )


def quantization_config(group: int, ignored: list[str], activations: bool) -> dict[str, Any]:
    """config.json's entry.

    group: numbers of a row that share a scale.
    ignored: names of modules in 16 bits.
    activations: servers round activations to 8 bits too (w4a8).
    """
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if activations else "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs if activations else None,
                "output_activations": None,
            }
        },
        "ignore": ignored,
    }


def _piece(name: str, tensor: FileTensor, group: int, dtype: str, exact: bool, kind: str) -> Piece:
    """The tensors in place of a linear's weight [out, in]; encoded and checked when they are written."""

    def cut(value: Any) -> tuple[np.ndarray, np.ndarray]:
        """(codes, scales) of the matrix. ValueError if the model says that it is on the grid, and it is not."""
        weight = jnp.asarray(tensor.array_of(value))
        codes, scales, off = _encode(weight, group, dtype)
        if exact and off:
            raise ValueError(
                f"{kind}: {off} groups of {name} are not on the grid (int4 in groups of {group}, {dtype}) to which the "
                'model says its weights were rounded ("qat" in config.json): they were changed since; remove "qat" to '
                "have them rounded"
            )
        packed = _pack(np.asarray(codes))
        _check(f"{kind}: {name}", packed, np.asarray(scales), weight, group, exact)
        return packed if kind == "w4a16" else np.asarray(codes), np.asarray(scales)

    (out_size, in_size), shape = tensor.shape, np.asarray(tensor.shape, np.int64)
    packed, scales = (out_size, in_size // _PACKED), (out_size, in_size // group)
    if kind == "w4a8":
        tensors = {
            f"{name}.weight": FileTensor((out_size, in_size), np.dtype(np.int8), lambda encoded: encoded[0]),
            f"{name}.weight_scale": FileTensor(scales, jnp.dtype(dtype), lambda encoded: encoded[1]),
        }
        return Piece(tensors, cut)
    tensors = {
        f"{name}.weight_packed": FileTensor(packed, np.dtype(np.int32), lambda encoded: encoded[0]),
        f"{name}.weight_scale": FileTensor(scales, jnp.dtype(dtype), lambda encoded: encoded[1]),
        f"{name}.weight_shape": FileTensor((2,), shape.dtype, lambda _: shape),
    }
    return Piece(tensors, cut)


def _encode(weight: jax.Array, group: int, dtype: str) -> tuple[jax.Array, jax.Array, int]:
    """(codes int8[out, in], scales [out, in / group] in dtype, groups in which codes * scales are not the weight)."""
    groups = weight.astype(jnp.float32).reshape(len(weight), -1, group)
    first = int4_scales(groups, dtype)
    bits = {2: jnp.int16, 4: jnp.int32}[first.dtype.itemsize]
    best = None
    for step in (0, 1, -1):
        scale = lax.bitcast_convert_type(lax.bitcast_convert_type(first, bits) + bits(step), first.dtype)
        scale = jnp.where(first == 0, first, scale)
        wide = scale.astype(jnp.float32)
        codes = int4_codes(groups, wide)
        error = jnp.square((codes * wide).astype(dtype).astype(jnp.float32) - groups).sum(-1, keepdims=True)
        if best is None:
            best = codes, scale, error
        else:
            better = (error == 0) & (best[2] > 0)
            best = tuple(jnp.where(better, new, old) for new, old in zip((codes, scale, error), best, strict=True))
    assert best is not None
    codes, scale, error = best
    return codes.astype(jnp.int8).reshape(weight.shape), scale[..., 0], int((error > 0).sum())


def _pack(codes: np.ndarray) -> np.ndarray:
    """int8[out, in] of -8..7 -> int32[out, in / 8]."""
    digits = (codes.astype(np.int32) + 8).astype(np.uint32).reshape(len(codes), -1, _PACKED)
    return (digits << (4 * np.arange(_PACKED, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)


def unpack(packed: np.ndarray, scales: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """float32[out, in] from a linear's three tensors of w4a16.

    packed: int32[out, in / 8], eight codes each, the first in the lowest bits.
    scales: [out, groups].
    shape: int64[2], (out, in).
    """
    codes = (packed.view(np.uint32)[..., None] >> (4 * np.arange(_PACKED, dtype=np.uint32))) & 15
    codes = codes.reshape(len(packed), -1)[:, : int(shape[1])].astype(np.float32) - 8
    return codes * np.repeat(scales.astype(np.float32), codes.shape[1] // scales.shape[1], axis=1)


def _check(name: str, packed: np.ndarray, scales: np.ndarray, weight: jax.Array, group: int, exact: bool) -> None:
    """ArithmeticError unless a linear unpacks to the weight within half a step of its group, or with `exact` to the
    same numbers.
    """
    unpacked = unpack(packed, scales, np.asarray(weight.shape))
    steps = np.repeat(scales.astype(np.float32), group, axis=1)
    # The extreme numbers of a group can be off by 8 times the rounding error of the scale.
    allowed = 0.0 if exact else (0.5 + 8 * float(jnp.finfo(scales.dtype).eps)) * steps + 1e-12
    unpacked = unpacked.astype(scales.dtype).astype(np.float32) if exact else unpacked
    if not (np.abs(unpacked - partition.on_host(weight).astype(np.float32)) <= allowed).all():  # also for NaN
        raise ArithmeticError(f"{name} is not the model's weight in steps of its groups")
