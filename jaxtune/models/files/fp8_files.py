"""How checkpoints store weights in FP8.

Two layouts are read and written, bit for bit. `quant_method: fp8` (Qwen, DeepSeek): beside `X.weight` in F8_E4M3 lies
`X.weight_scale_inv`, a scale for each 128 x 128 numbers, by which, despite its name, they are multiplied.
`quant_method: compressed-tensors` with `format: float-quantized` (vLLM's llm-compressor): `X.weight_scale`, one for
each row ("channel") or for the whole matrix ("tensor"). Both leave activations to be quantised as they come.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.files import shards
from jaxtune.models.files.digests import Digest
from jaxtune.models.files.file_plan import FileTensor, Piece
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import LARGEST, LEAST_SCALE, MATRIX, ROW, TILE, Block, scale_shape

_CODES = "F8_E4M3"
_SCALES = {"weight_scale_inv": "fp8", "weight_scale": "compressed-tensors"}
_ADVICE = "use the 16-bit original, or a checkpoint of one of these kinds"


@dataclasses.dataclass(frozen=True)
class FP8Entry(shards.TensorEntry):
    """A tensor [out, in] of a checkpoint in e4m3, or one [E, out, in] in pieces that lie one after the other;
    `size_bytes` is the sum of its parts'."""

    parts: tuple[tuple[shards.TensorEntry, shards.TensorEntry], ...]  # (codes, scales) of each piece
    block: Block


def check_config(settings: Mapping[str, Any]) -> None:
    """Refuses a quantization_config that says of FP8 what is not read here.

    Raises:
      ValueError: by key and value.
    """
    method = settings.get("quant_method")
    if method == "fp8":
        known = {"activation_scheme": ("dynamic", None), "fmt": ("e4m3", None)}
        size = settings.get("weight_block_size")
        if size is not None and list(size) != list(TILE):
            raise ValueError(f"config.json: quantization_config.weight_block_size = {size}: must be {list(TILE)}")
    else:
        known = {
            "format": ("float-quantized",),
            "kv_cache_scheme": (None,),
            "quantization_status": ("compressed", None),
        }
        for name, group in (settings.get("config_groups") or {}).items():
            _check_group(f"config_groups.{name}", group)
    for key, values in known.items():
        if settings.get(key) not in values:
            raise ValueError(
                f"config.json: quantization_config.{key} = {settings.get(key)!r}: of {method!r} only "
                f"{values[0]!r} is supported; {_ADVICE}"
            )


def _check_group(where: str, group: Any) -> None:
    """Refuses weights that are not e4m3 by rows, matrices or 128 x 128, and activations with a stored scale."""
    weights, inputs = (group.get(key) or {} for key in ("weights", "input_activations"))
    wanted: list[tuple[str, Any, tuple]] = [
        ("weights.type", weights.get("type"), ("float",)),
        ("weights.num_bits", weights.get("num_bits"), (8,)),
        ("weights.strategy", weights.get("strategy"), ("channel", "tensor", "block")),
        ("weights.symmetric", weights.get("symmetric", True), (True,)),
        ("input_activations.dynamic", inputs.get("dynamic", True), (True,)),
    ]
    for key, value, allowed in wanted:
        if value not in allowed:
            raise ValueError(
                f"config.json: quantization_config.{where}.{key} = {value!r}: must be "
                f"{' or '.join(map(repr, allowed))}; {_ADVICE}"
            )


def gather_fp8(entries: Mapping[str, shards.TensorEntry]) -> dict[str, shards.TensorEntry]:
    """The entries, with codes and scales of each tensor in FP8 in one FP8Entry under the name of its weight.

    Raises:
      ValueError: a scale without a weight in FP8, a weight without a scale, or scales that do not fit it.
    """
    whole = dict(entries)
    for name, codes in entries.items():
        if codes.dtype != _CODES or not name.endswith(".weight"):
            continue
        found = [key for key in _SCALES if f"{name[:-6]}{key}" in entries]
        if len(found) != 1:
            raise ValueError(
                f"{codes.file}: {name} is stored as {_CODES} and has {len(found)} scales; it must have one of "
                f"{', '.join(f'{name[:-6]}{key}' for key in _SCALES)}"
            )
        scales = whole.pop(f"{name[:-6]}{found[0]}")
        whole[name] = _entry(name, codes, scales)
    for name in list(whole):
        if name.rsplit(".", 1)[-1] in _SCALES:
            raise ValueError(f"{whole[name].file}: {name} is there, but no weight in {_CODES} beside it")
    return whole


def _entry(name: str, codes: shards.TensorEntry, scales: shards.TensorEntry) -> FP8Entry:
    block = None
    if len(codes.shape) == 2:
        # A small matrix is one block of 128 x 128: the scale's name tells it from one for the whole matrix.
        shapes: dict[Block, tuple] = {MATRIX: ((), (1,)), TILE: (scale_shape(codes.shape, TILE),)}
        if scales.name.endswith(".weight_scale"):
            shapes = {MATRIX: ((), (1,), (1, 1)), ROW: ((codes.shape[0], 1), (codes.shape[0],))} | shapes
        block = next((kind for kind, known in shapes.items() if scales.shape in known), None)
    if block is None or scales.dtype not in shards.DTYPES:
        raise ValueError(
            f"{scales.file}: {scales.name} is {scales.dtype}{list(scales.shape)}, which is no scale of {name} "
            f"{list(codes.shape)}: it must be a float for the matrix, for each row, or for each 128 x 128 numbers"
        )
    for part in (codes, scales):
        shards.check_size(part)
    size = codes.size_bytes + scales.size_bytes
    return FP8Entry(name, codes.dtype, codes.shape, codes.file, codes.offset, size, ((codes, scales),), block)


def stacked(
    fields: tuple[str, str, tuple[int, ...], Path, int, int], parts: tuple[FP8Entry, ...], together: int
) -> FP8Entry:
    """The entry of a tensor [E, out, in] in pieces, `together` of which make the rows of one expert.

    Raises:
      ValueError: pieces in blocks of different kinds, or whose blocks would run from one piece into the next.
    """
    first = parts[0]
    rows, blocks = first.shape[0], {part.block for part in parts}
    if len(blocks) > 1 or len({part.parts[0][1].dtype for part in parts}) > 1:
        raise ValueError(f"{first.file}: {fields[0]}: the scales of its experts' matrices are of different kinds")
    if together > 1 and (first.block == MATRIX or (first.block == TILE and rows % TILE[0])):
        raise ValueError(
            f"{first.file}: {first.name} has {rows} rows in FP8 blocks that would run into those of the matrix beside "
            "it: such experts can only be loaded from 16 bits"
        )
    return FP8Entry(*fields, tuple(piece for part in parts for piece in part.parts), first.block)


def read_fp8(entry: FP8Entry, dtype_name: str) -> tuple[FP8, Digest]:
    """(the tensor, its leaves numpy arrays; the digest of all its parts).

    dtype_name: the dtype that it decodes to where nothing else is asked for.

    Raises:
      ValueError: a scale that is not positive, or makes numbers that the dtype cannot hold.
    """
    codes = [shards.read_tensor(part) for part, _ in entry.parts]
    scales = [shards.read_tensor(part) for _, part in entry.parts]
    for (code, scale), part in zip(zip(codes, scales, strict=True), entry.parts, strict=True):
        _check_scales(part[1], scale.astype(np.float32), code, entry.block, dtype_name)
    read = zip(entry.parts, zip(codes, scales, strict=True), strict=True)
    digest = Digest.joined(Digest.of(part.name, array) for parts, pair in read for part, array in zip(parts, pair))
    pieces = [scale.reshape(scale_shape(code.shape, entry.block)) for code, scale in zip(codes, scales, strict=True)]
    shape = (*entry.shape[:-2], *scale_shape(entry.shape, entry.block))
    leaves: list[Any] = [np.concatenate(codes).reshape(entry.shape), np.concatenate(pieces).reshape(shape)]
    return FP8(*leaves, block=entry.block, dtype_name=dtype_name), digest


def _check_scales(
    entry: shards.TensorEntry, scales: np.ndarray, codes: np.ndarray, block: Block, dtype_name: str
) -> None:
    """Scales that are not finite are the loader's to refuse; one of 0 is right where all of its block is 0."""
    most = min(float(jnp.finfo(dtype_name).max), float(np.finfo(np.float32).max)) / LARGEST
    wrong = np.isfinite(scales) & ~((scales >= LEAST_SCALE) & (scales <= most))
    zeros = wrong & (scales == 0)
    if zeros.any():
        sizes: Any = codes.view(np.uint8) & 0x7F  # without their signs
        where: Any = zeros.reshape(scale_shape(codes.shape, block))
        if not (np.asarray(FP8(sizes, where, block).scales_of_numbers()) * sizes).any():
            wrong &= ~zeros
    if wrong.any():
        values = ", ".join(f"{value:.4g}" for value in np.unique(scales[wrong])[:4])
        raise ValueError(
            f"{entry.file}: {entry.name}: {wrong.sum()} of {wrong.size} scales cannot be right ({values}): in "
            f"{dtype_name} a scale must be from {LEAST_SCALE:.4g} to {most:.4g}, or 0 of numbers that are "
            f"all 0; fetch the file again{', or load in bfloat16' if dtype_name == 'float16' else ''}"
        )


def checkpoint_tensors(name: str, weight: FP8) -> dict[str, FileTensor]:
    """What a checkpoint stores for a weight [out, in], of which no more than the shapes need be known."""
    key = "weight_scale_inv" if weight.block == TILE else "weight_scale"
    shape = (1,) if weight.block == MATRIX else tuple(weight.scales.shape)
    scales = FileTensor(shape, np.dtype(weight.scales.dtype), lambda w: w.scales.reshape(shape))
    return {
        name: FileTensor(tuple(weight.shape), np.dtype(weight.codes.dtype), lambda w: w.codes),
        f"{name.removesuffix('weight')}{key}": scales,
    }


def split_experts(weight: FP8, rows: int, pieces: list[tuple[str, int, int]]) -> tuple[Piece, ...]:
    """As checkpoint_tensors, of a matrix of all experts. pieces: (name, expert, first row) of `rows` rows each."""
    high = weight.block[0] or rows

    def piece(whole: FP8, expert: int, at: int) -> FP8:
        scales = whole.scales[expert, at // high : at // high + -(-rows // high)]
        return dataclasses.replace(whole, codes=whole.codes[expert, at : at + rows], scales=scales)

    found = []
    for name, expert, at in pieces:
        cut = functools.partial(piece, expert=expert, at=at)
        found.append(Piece(checkpoint_tensors(name, jax.eval_shape(cut, weight)), cut))
    return tuple(found)


def quantization_config(weights: Mapping[str, Any], head: str) -> dict[str, Any]:
    """What config.json says of a model with weights in FP8. weights: all matrices by name. head: the name of the
    model's head."""
    first = next(weight for weight in weights.values() if isinstance(weight, FP8))
    plain = [head, *(name for name, weight in weights.items() if not isinstance(weight, FP8))]
    if first.block == TILE:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(TILE),
            "modules_to_not_convert": plain,
        }
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    strategy = "tensor" if first.block == MATRIX else "channel"
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": strategy, "dynamic": False},
        "input_activations": number | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": plain,
    }
