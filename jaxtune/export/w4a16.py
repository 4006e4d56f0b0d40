"""Weights in four bits, activations in 16, for vLLM: compressed-tensors' `pack-quantized`.

The numbers of a group of a row are codes of -8..7 times its scale, as quantisation-aware training rounds them
(fake_quant.int4): a model that was trained so is stored as it is. Beside `X.weight_packed` int32[out, in / 8], each of
which holds eight codes plus 8, the first in its lowest bits, lie `X.weight_scale` [out, in / group] and
`X.weight_shape` int64[2].
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
from jaxtune.models.fake_quant import int4_codes, int4_scales
from jaxtune.models.files.file_plan import FileTensor, Group, Piece
from jaxtune.models.files.weights import Weights
from jaxtune.models.lora import experts, linears, name_matches
from jaxtune.models.placement import partition

GROUP = 128
_PACKED = 8  # codes in an int32


def write(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Linears and experts in int4; folders.KEPT stay in 16 bits, and what does not fit whole groups, as a note says.

    Raises:
      ValueError: a model that the format does not hold; weights that are not on the grid on which QAT put the model's.
    """
    weights = weights.dequantized()
    model = weights.model
    exact, group = model.qat is not None, GROUP if model.qat is None else model.qat.group_size
    planned = hf.checkpoint_tensors(weights)
    dense = [name for name, _ in linears(model) if not any(name_matches(name, kept) for kept in folders.KEPT)]
    names = [f"{name}.weight" for name in dense] + [name for name, _ in experts(model)]
    packed, left = [], []
    for name in names:
        if any(len(tensor.shape) != 2 for tensor in planned[name].tensors.values()):
            raise ValueError(
                f"w4a16: the experts of {model.config.family!r} are stored as one tensor, which compressed-tensors "
                "does not pack; take fp8 or mxfp4"
            )
        pieces = []
        for piece in planned[name].pieces:
            ((key, tensor),) = piece.tensors.items()  # one linear, or one of an expert
            linear = key.removesuffix(".weight")
            if tensor.shape[1] % group:
                left.append(linear)
                pieces.append(piece)
            else:
                packed.append(linear)
                pieces.append(_piece(linear, tensor, group, model.dtype, exact))
        planned[name] = Group(planned[name].make, tuple(pieces))
    if not packed:
        raise ValueError(f"w4a16: no linear has whole groups of {group} columns; take fp8")
    tensors = {key: tensor for group in planned.values() for key, tensor in group.tensors.items()}
    others = {key for key, tensor in tensors.items() if len(tensor.shape) == 2}
    plain = {key.removesuffix(".weight") for key in others if key.endswith(".weight")} - {"model.embed_tokens"}
    ignored = sorted({model.config.head_name, *plain})
    says = {"quantization_config": quantization_config(group, ignored)}
    folders.write_planned(weights, folder, tokenizer, max_shard_bytes, planned, says, loads=False)
    return [f"{len(left)} linears are kept in 16 bits: their rows are not whole groups of {group}"] if left else []


def quantization_config(group: int, ignored: list[str]) -> dict[str, Any]:
    """What config.json says. ignored: modules that stay in 16 bits."""
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
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ignored,
    }


def _piece(name: str, tensor: FileTensor, group: int, dtype: str, exact: bool) -> Piece:
    """What files hold of a linear [out, in], which `tensor` gives in 16 bits. exact: whether its numbers are said to
    lie on the grid."""

    def cut(whole: Any) -> tuple[np.ndarray, np.ndarray]:
        weight = jnp.asarray(tensor.of(whole))
        codes, scales, off = _encode(weight, group, dtype)
        if exact and off:
            raise ValueError(
                f"w4a16: {off} groups of {name} do not lie on the grid (int4 in groups of {group}, {dtype}) that the "
                'model says its weights are on ("qat" in config.json): they were changed since; remove "qat" to have '
                "them rounded"
            )
        found = _pack(np.asarray(codes)), np.asarray(scales)
        _check(name, *found, weight, group, exact)
        return found

    (out_size, in_size), shape = tensor.shape, np.asarray(tensor.shape, np.int64)
    packed, scales = (out_size, in_size // _PACKED), (out_size, in_size // group)
    tensors = {
        f"{name}.weight_packed": FileTensor(packed, np.dtype(np.int32), lambda found: found[0]),
        f"{name}.weight_scale": FileTensor(scales, jnp.dtype(dtype), lambda found: found[1]),
        f"{name}.weight_shape": FileTensor((2,), shape.dtype, lambda _: shape),
    }
    return Piece(tensors, cut)


def _encode(weight: jax.Array, group: int, dtype: str) -> tuple[jax.Array, jax.Array, int]:
    """(codes int8[out, in], scales [out, in / group] in dtype, how many groups are not what these give).

    Of weights that lie on such a grid, 7 times a scale is rounded, and a seventh of that may be the scale's neighbour:
    where a neighbour gives the very weights, it is taken. Not jitted: in one program XLA would leave out the rounding
    to 16 bits that this is about.
    """
    groups = weight.astype(jnp.float32).reshape(len(weight), -1, group)
    first = int4_scales(groups, dtype)
    bits = {2: jnp.int16, 4: jnp.int32}[first.dtype.itemsize]
    chosen = None
    for step in (0, 1, -1):
        scale = lax.bitcast_convert_type(lax.bitcast_convert_type(first, bits) + bits(step), first.dtype)
        scale = jnp.where(first == 0, first, scale)
        wide = scale.astype(jnp.float32)
        codes = int4_codes(groups, wide)
        error = jnp.square((codes * wide).astype(dtype).astype(jnp.float32) - groups).sum(-1, keepdims=True)
        if chosen is None:
            chosen = codes, scale, error
        else:
            better = (error == 0) & (chosen[2] > 0)
            chosen = tuple(jnp.where(better, new, old) for new, old in zip((codes, scale, error), chosen, strict=True))
    assert chosen is not None
    codes, scale, error = chosen
    return codes.astype(jnp.int8).reshape(weight.shape), scale[..., 0], int((error > 0).sum())


def _pack(codes: np.ndarray) -> np.ndarray:
    """int8[out, in] of -8..7 -> int32[out, in / 8]."""
    places = (codes.astype(np.int32) + 8).astype(np.uint32).reshape(len(codes), -1, _PACKED)
    return (places << (4 * np.arange(_PACKED, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)


def unpack(packed: np.ndarray, scales: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """float32[out, in] of what a file holds of a linear."""
    codes = (packed.view(np.uint32)[..., None] >> (4 * np.arange(_PACKED, dtype=np.uint32))) & 15
    codes = codes.reshape(len(packed), -1)[:, : int(shape[1])].astype(np.float32) - 8
    return codes * np.repeat(scales.astype(np.float32), codes.shape[1] // scales.shape[1], axis=1)


def _check(name: str, packed: np.ndarray, scales: np.ndarray, weight: jax.Array, group: int, exact: bool) -> None:
    """Unpacks a linear as its readers do and compares it with the model's weight; what files have of it is compared
    with these bytes.

    Raises:
      ArithmeticError: a number is further from the weight than half a step of its group, and rounding of the scale; if
        `exact`, than nothing.
    """
    found = unpack(packed, scales, np.asarray(weight.shape))
    steps = np.repeat(scales.astype(np.float32), group, axis=1)
    # The least and the largest of a group lie off the grid by what the scale was rounded by, 8 times.
    allowed = 0.0 if exact else (0.5 + 8 * float(jnp.finfo(scales.dtype).eps)) * steps + 1e-12
    found = found.astype(scales.dtype).astype(np.float32) if exact else found
    if (np.abs(found - partition.on_host(weight).astype(np.float32)) > allowed).any():
        raise ArithmeticError(f"w4a16: {name} is not the model's weight in steps of its groups")
