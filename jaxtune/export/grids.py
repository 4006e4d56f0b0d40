"""Keeps exports from losing quantisation-aware training (QAT), which rounded the model's weights to a grid.
`grid_of_export` finds the grid to which QAT rounded the weights that an export of the model writes.
`require_representable` refuses a format that would round them again, and `quantized` stores them exactly in a format
that has this grid (`exactly` encodes one weight, with scales that `_fitting` finds between the bounds of `_between`).
`notes_on_adapter` warns that other programs do not round a merged adapter as training did (`_served` and `_storing`
name the formats to take instead)."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax import core

from jaxtune.models.decoder import Decoder
from jaxtune.models.fake_quant import FakeQuant
from jaxtune.models.files.quant import qat_spec
from jaxtune.models.files.weights import Weights, not_whole
from jaxtune.models.lora import has_adapter, matrices
from jaxtune.models.placement import partition
from jaxtune.pallas.formats import FORMATS, Stored

_GGUF_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # by outtype


def grid_of_export(model: Decoder) -> FakeQuant | None:
    """The grid to which quantisation-aware training (QAT) rounded the weights that an export of the model writes; None
    if it did not. For a model with an adapter it is the grid to which the adapter's own training rounded the merged
    weights, so None if that was without QAT, even if an earlier QAT rounded the base (model.qat). Without an adapter it
    is model.qat. `require_representable` refuses formats that would round these weights again, and `notes_on_adapter`
    writes its note by it."""
    return qat_spec(model) if has_adapter(model) else model.qat


def require_representable(model: Decoder, to: str, outtype: str | None) -> None:
    """Raises ValueError if a format, or its dtype, cannot represent the weights of quantisation-aware training, so that
    they would be rounded again, which would lose what was trained for. Nothing is raised for a model without such
    training, or for formats of adapters. export_model calls it before it writes anything.

    Args:
      model: the model to export.
      to: the name of the format, one of export_model's.
      outtype: the type of a GGUF file's weights, such as bf16, never None for gguf; None for other formats.
    """
    grid = grid_of_export(model)
    if grid is None or to in ("adapter", "gguf-adapter"):
        return
    what, exact = f"{to} in {outtype}" if outtype else to, grid.exports
    plain = outtype in _GGUF_DTYPES
    quantised = outtype is not None and not plain
    if quantised and outtype == grid.outtype:
        if grid.represented_by(model.dtype):
            return
    elif to not in exact and (to not in ("merged", "gguf") or quantised):
        takes = "".join(f"{name}, which stores that grid, or " for name in _storing(grid))
        raise ValueError(
            f"export: to = {what!r} rounds weights to a grid of its own, and quantisation-aware training rounded this "
            f"model's to another ({grid}): take {takes}merged, or gguf in bf16 or f32"
        )
    dtype = _GGUF_DTYPES[outtype] if plain else model.dtype
    # Readers of quantised formats multiply codes and scales in the model's dtype.
    if dtype != grid.dtype and (to in exact or not grid.represented_by(dtype)):
        raise ValueError(
            f"export: to = {what!r} in {dtype} cannot represent weights that quantisation-aware training rounded to "
            f"{grid}: take {grid.dtype} ({'outtype, --outtype' if plain else 'dtype, --dtype'})"
        )


def notes_on_adapter(model: Decoder) -> tuple[str, ...]:
    """Notes for the user of an adapter that is exported alone. After quantisation-aware training there is one, which
    says that other programs do not round the merged weights as training did; without it there is none. model: the model
    with the adapter."""
    grid = grid_of_export(model)
    if grid is None:
        return ()
    return (
        f"it is the adapter before rounding: quantisation-aware training rounded merged weights to {grid}, as jaxtune "
        "does when it loads the adapter and other programs do not: serve the merged model there (--to "
        f"{_served(grid)})",
    )


def _served(grid: FakeQuant) -> str:
    """The exports of `_storing`, and merged, which all store the weights of a grid exactly, as text that follows --to
    in a note: "w4a16 or merged"."""
    return " or ".join((*_storing(grid), "merged"))


def _storing(grid: FakeQuant) -> tuple[str, ...]:
    """The quantised exports that store the codes and scales of a grid of quantisation-aware training as they are, in
    words for messages, such as "w4a16" or "gguf --outtype q4_0". () if there are none. Merged, and gguf in bf16 or f32,
    have the weights exactly too, and the callers add what they offer of these."""
    return (*grid.exports, *([f"gguf --outtype {grid.outtype}"] if grid.outtype else []))


def quantized(weights: Weights, format: str) -> Weights:
    """Returns the weights with the linears and experts of the layers in a format of quantised weights (a key of
    pallas.formats.FORMATS), each encoded when it is needed; those in another such format are decoded first, and a model
    without QAT that is stored in this format already is returned unchanged. Embeddings, the head, norms, routers, and
    matrices whose rows are not whole blocks of the format (`not_whole`) are not quantised. If the model was trained
    with quantisation-aware training (it has `qat`), its matrices are encoded exactly; those of other models are rounded
    here. The new Weights' model has no `qat`, because the format itself says what its numbers are. folders.write_stored
    calls it.

    Args:
      weights: the model's weights.
      format: the format's name.
    Raises:
      ValueError: when a matrix of a model with such training is encoded: it is not on the format's grid, so it was
        changed since.
    """
    if weights.model.qat is None:
        return weights.quantized(format)
    plain, left = weights.dequantized(), not_whole(weights, format)
    found = plain.changed(
        {
            name: functools.partial(exactly, name, format)
            for name, matrix in matrices(plain.model)
            if matrix.quantizable and name not in left
        }
    )
    found.model.qat = None  # the format itself says what its numbers are
    return found


def exactly(name: str, format: str, weight: jax.Array) -> Stored:
    """Encodes a weight [..., out, in] that was rounded to a format, so that it decodes to the same numbers in its own
    dtype.

    Codes are those that the format's encoder finds, because rounding the products of codes and scales to 16 bits moves
    them far less than the distance of two codes. Scales are changed only in formats with `scale_axes`, and only
    the float32 ones: the encoder's may differ from those of the training, because they follow from the rounded largest
    numbers. Every number allows an interval of scales, those with which its product is rounded to it; the scale is set
    to the middle of what all numbers that share it allow, or to a neighbour (`_fitting`).

    Args:
      name: the matrix's name, for the message.
      format: a key of FORMATS.
      weight: the matrix. Shapes without values, by which the file's header is planned, are only encoded.
    Raises:
      ValueError: the weight is not on such a grid.
    """
    stored = FORMATS[format].encode(weight)
    if isinstance(weight, core.Tracer):
        return stored
    wanted = partition.on_host(weight)
    if stored.scale_axes is not None:
        low, high = _between(wanted)
        wide = np.abs(np.float64(partition.on_host(stored.decode("float32"))))
        with np.errstate(divide="ignore", invalid="ignore"):
            least = np.where(wide > 0, low / wide, 0).max(stored.scale_axes, keepdims=True)
            most = np.where(wide > 0, high / wide, np.inf).min(stored.scale_axes, keepdims=True)
        stored = stored.rescaled(_fitting(stored, np.where(np.isfinite(most), (least + most) / 2, 1.0), wanted))
    off = int((partition.on_host(stored.decode(weight.dtype)) != wanted).sum())
    if off:
        raise ValueError(
            f"export: {off} numbers of {name} are not on the grid of {format} to which the model says its weights were "
            'rounded ("qat" in config.json): they were changed since; remove "qat" to have them rounded'
        )
    return stored


def _fitting(stored: Stored, middle: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The factors by which the scales of an encoded weight are multiplied so that it decodes to `wanted`: those of
    `middle`, or, for a scale with which some numbers are then wrong, the neighbour with which the fewest are, at most
    12 * 2^-24 of the factor away from it. Training may have rounded a product of code and scale that float32 itself had
    rounded to the middle between two numbers of 16 bits; then only very few scales give all its numbers.

    stored: the weight. middle: float64, in the shape of its scales (1 along `scale_axes`), in which the factors are
    returned too: those in the middle of the interval that the numbers of each scale allow (`exactly` computes it).
    wanted: the weight's numbers [..., out, in], in the dtype of the training, 16 or 32 bits. Numbers that stay wrong
    are found by `exactly`, which raises."""

    def wrong(factors: np.ndarray) -> np.ndarray:
        decoded = partition.on_host(stored.rescaled(factors).decode(wanted.dtype))
        return (decoded != wanted).sum(stored.scale_axes, keepdims=True)

    best, off = middle, wrong(middle)
    for step in range(1, 13):
        for moved in (middle * (1 + step * 2.0**-24), middle * (1 - step * 2.0**-24)):
            if off.any():
                count = wrong(moved)
                best, off = np.where(count < off, moved, best), np.minimum(count, off)
    return best


def _between(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bounds (least, most), float64 in the shape of `numbers`, between which magnitudes are rounded to those of
    `numbers`: the middles between each magnitude and its neighbours in the dtype. numbers: of a dtype of 16 or 32
    bits. exactly finds by them the scales that give a weight's numbers."""
    bits = {2: np.int16, 4: np.int32}[numbers.dtype.itemsize]
    size = np.abs(numbers)
    codes = size.view(bits)
    below = np.where(codes > 0, codes - 1, 0).astype(bits).view(numbers.dtype)
    above = (codes + 1).astype(bits).view(numbers.dtype)
    middle = size.astype(np.float64)
    return (middle + below.astype(np.float64)) / 2, (middle + above.astype(np.float64)) / 2
