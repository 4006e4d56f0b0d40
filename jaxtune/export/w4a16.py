"""Exports of weights in four bits for vLLM (`write`; `quantization_config` makes the entry of config.json, and `unpack`
decodes a linear for the check): compressed-tensors' `pack-quantized` format with activations in 16 bits (w4a16), and
its `int-quantized` format with activations that servers round to int8 by token (w4a8).

The numbers of a group within a row are codes of -8..7 times the group's scale, as quantisation-aware training rounds
them (fake_quant.int4). Weights that were trained so are stored exactly. `_piece` describes the tensors of a linear,
which `_encode` quantises, `_pack` packs and `_check` compares with the weight. The format has three tensors for a
linear X: `X.weight_packed` int32[out, in / 8], each of which contains eight codes plus 8, the first in its lowest bits;
`X.weight_scale` [out, in / group], in the model's dtype; and `X.weight_shape` int64[2]. With w4a8 it has two: the codes
`X.weight` int8[out, in], and `X.weight_scale`. api.py calls `write`; jaxtune itself does not load such folders.
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
from jaxtune.pallas.formats.layout import SERVED_IN_16_BITS

GROUP = 128
_PACKED = 8  # codes in an int32


def write(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int, activations: bool = False) -> list[str]:
    """For export_model's formats w4a16 and w4a8: writes a model into a folder in compressed-tensors' pack-quantized
    format, or its int-quantized one: the weights of linears and experts in int4, with a scale for each group of
    neighbouring weights of a row.

    Quantised weights are decoded first. If the model was trained with QAT, its weights are stored exactly, in the
    groups of QAT; otherwise they are rounded here, in groups of 128. The folder is verified by reading it back. Linears
    named in SERVED_IN_16_BITS stay in the model's dtype, as do linears whose rows cannot be divided into whole groups,
    routers, embeddings and the head.

    Args:
      weights: the model's weights.
      folder: an empty folder.
      tokenizer: written too; None: none is written.
      max_shard_bytes: weights above this size are divided into several files.
      activations: True: config.json says that servers round activations to int8 by token (w4a8); False: they do not
        (w4a16).
    Returns:
      notes for the user: one sentence with the number of linears (of experts, each expert's) whose rows are not whole
        groups; [] if there are none.
    Raises:
      ValueError: the format cannot represent the model (its experts are one tensor, or no linear has whole groups); the
        model says that QAT rounded its weights, and they were changed since; the disk has no room.
      ArithmeticError: what was packed does not decode to the model's weights, or what was read back differs from what
        was written.
    """
    weights = weights.dequantized()
    model = weights.model
    exact, group = model.qat is not None, (model.qat.group_size if model.qat else None) or GROUP
    to, planned = "w4a8" if activations else "w4a16", hf.checkpoint_tensors(weights)
    dense = [
        name
        for name, linear in linears(model)
        if linear.quantizable and not any(name_matches(name, kept) for kept in SERVED_IN_16_BITS)
    ]
    names = [f"{name}.weight" for name in dense] + [name for name, _ in experts(model)]
    packed, left = [], []
    for name in names:
        if any(len(tensor.shape) != 2 for tensor in planned[name].tensors.values()):
            raise ValueError(
                f"{to}: the experts of {model.config.family!r} are stored as one tensor, which compressed-tensors "
                "does not pack; take fp8 or mxfp4"
            )
        pieces = []
        for piece in planned[name].pieces:
            ((key, tensor),) = piece.tensors.items()  # one linear, or one expert's
            linear = key.removesuffix(".weight")
            if tensor.shape[1] % group:
                left.append(linear)
                pieces.append(piece)
            else:
                packed.append(linear)
                pieces.append(_piece(linear, tensor, group, model.dtype, exact, to))
        planned[name] = Group(planned[name].make, tuple(pieces))
    if not packed:
        raise ValueError(f"{to}: no linear has whole groups of {group} columns; take fp8")
    tensors = {key: tensor for group in planned.values() for key, tensor in group.tensors.items()}
    others = {key for key, tensor in tensors.items() if len(tensor.shape) == 2}
    plain = {key.removesuffix(".weight") for key in others if key.endswith(".weight")} - {"model.embed_tokens", *packed}
    ignored = sorted({model.config.head.name, *plain})
    says = {"quantization_config": quantization_config(group, ignored, activations)}
    folders.write_planned(weights, folder, tokenizer, max_shard_bytes, planned, says, loads=False)
    return [f"{len(left)} linears are kept in 16 bits: their rows are not whole groups of {group}"] if left else []


def quantization_config(group: int, ignored: list[str], activations: bool) -> dict[str, Any]:
    """The quantization_config of config.json in compressed-tensors' form, by which readers such as vLLM know the
    format: "pack-quantized", or with `activations` (w4a8) "int-quantized". `group` is how many numbers of a row share a
    scale, `ignored` are the names of the modules that stay in 16 bits, and `activations` says whether servers round
    activations to int8 by token."""
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


def _piece(name: str, tensor: FileTensor, group: int, dtype: str, exact: bool, to: str) -> Piece:
    """Describes the tensors that files store in place of the weight of one linear, or of one expert. They are encoded
    and compared with the weight (`_check`) when the file is written, which raises ArithmeticError if the codes do not
    decode to it within the rounding.

    Args:
      name: the linear's name.
      tensor: its weight [out, in], not quantised, as a tensor of the file; `group` must divide `in`, which the caller
        checks.
      group: how many numbers of a row share a scale.
      dtype: of the scales, the model's.
      exact: True: quantisation-aware training rounded the weight to this grid already, and a number that is not on it
        is a ValueError when the tensors are made. False: the weight is rounded here.
      to: "w4a16", whose codes are packed eight in a number, or "w4a8", whose codes are int8.
    """

    def cut(whole: Any) -> tuple[np.ndarray, np.ndarray]:
        weight = jnp.asarray(tensor.of(whole))
        codes, scales, off = _encode(weight, group, dtype)
        if exact and off:
            raise ValueError(
                f"{to}: {off} groups of {name} are not on the grid (int4 in groups of {group}, {dtype}) to which the "
                'model says its weights were rounded ("qat" in config.json): they were changed since; remove "qat" to '
                "have them rounded"
            )
        packed = _pack(np.asarray(codes))
        _check(f"{to}: {name}", packed, np.asarray(scales), weight, group, exact)
        return packed if to == "w4a16" else np.asarray(codes), np.asarray(scales)

    (out_size, in_size), shape = tensor.shape, np.asarray(tensor.shape, np.int64)
    packed, scales = (out_size, in_size // _PACKED), (out_size, in_size // group)
    if to == "w4a8":
        tensors = {
            f"{name}.weight": FileTensor((out_size, in_size), np.dtype(np.int8), lambda found: found[0]),
            f"{name}.weight_scale": FileTensor(scales, jnp.dtype(dtype), lambda found: found[1]),
        }
        return Piece(tensors, cut)
    tensors = {
        f"{name}.weight_packed": FileTensor(packed, np.dtype(np.int32), lambda found: found[0]),
        f"{name}.weight_scale": FileTensor(scales, jnp.dtype(dtype), lambda found: found[1]),
        f"{name}.weight_shape": FileTensor((2,), shape.dtype, lambda _: shape),
    }
    return Piece(tensors, cut)


def _encode(weight: jax.Array, group: int, dtype: str) -> tuple[jax.Array, jax.Array, int]:
    """Quantises a linear's weight [out, in] to int4. Returns (codes int8[out, in], scales [out, in / group] in dtype,
    the number of groups in which codes * scales, rounded to dtype, are not the weight). After QAT, `_piece` raises
    ValueError if that number is not 0. group: how many numbers of a row share a scale. dtype: of the scales, the
    model's (of 16 bits, or float32).

    For weights that are on such a grid already, the scale is recovered from the extreme values of the group
    (fake_quant.int4_scales), which were themselves rounded; the result may be a neighbour of the scale. Where a
    neighbour gives the exact weights, it is taken. The function is not jitted, because XLA would remove the rounding to
    dtype within one program.
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
    """Packs codes int8[out, in] of -8..7 into int32[out, in / 8], as w4a16 files store them: eight codes plus 8, four
    bits each, the first in the lowest bits."""
    places = (codes.astype(np.int32) + 8).astype(np.uint32).reshape(len(codes), -1, _PACKED)
    return (places << (4 * np.arange(_PACKED, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)


def unpack(packed: np.ndarray, scales: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """Decodes the weight of a linear, float32[out, in], from the three tensors that a w4a16 file has for it, as its
    readers do. The export compares the result with the weight (`_check`): exactly after QAT, else within half a step
    and the scale's rounding. Tests decode written files with it. packed: int32[out, in / 8]; each number has eight
    codes plus 8, four bits each, the first in the lowest bits (`_pack`). scales: [out, in / group]. shape: int64[2],
    which is (out, in)."""
    codes = (packed.view(np.uint32)[..., None] >> (4 * np.arange(_PACKED, dtype=np.uint32))) & 15
    codes = codes.reshape(len(packed), -1)[:, : int(shape[1])].astype(np.float32) - 8
    return codes * np.repeat(scales.astype(np.float32), codes.shape[1] // scales.shape[1], axis=1)


def _check(name: str, packed: np.ndarray, scales: np.ndarray, weight: jax.Array, group: int, exact: bool) -> None:
    """Unpacks a linear as the readers of w4a16 do and compares it with the model's weight. `_piece` calls it for each
    linear that is written, for w4a8 with the same codes packed.

    Args:
      name: the format and the linear's name, for the message.
      packed: int32[out, in / 8], its codes, eight in a number.
      scales: [out, in / group], the scales of its groups.
      weight: the model's weight [out, in].
      group: how many numbers of a row share a scale.
      exact: True: any difference is an error, after rounding to the model's dtype. False: differences by rounding to
        int4 are none.
    Raises:
      ArithmeticError: a number is further from the weight than half a step of its group plus the rounding of the scale;
        with `exact`, any difference.
    """
    found = unpack(packed, scales, np.asarray(weight.shape))
    steps = np.repeat(scales.astype(np.float32), group, axis=1)
    # The extreme numbers of a group can be off by 8 times the rounding error of the scale.
    allowed = 0.0 if exact else (0.5 + 8 * float(jnp.finfo(scales.dtype).eps)) * steps + 1e-12
    found = found.astype(scales.dtype).astype(np.float32) if exact else found
    if not (np.abs(found - partition.on_host(weight).astype(np.float32)) <= allowed).all():  # also for NaN
        raise ArithmeticError(f"{name} is not the model's weight in steps of its groups")
