"""Keeps exports from losing quantisation-aware training (QAT), which rounded the model's weights to a grid."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax import core

from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import qat_spec
from jaxtune.models.files.weights import Weights, not_whole
from jaxtune.models.lora import has_adapter, matrices
from jaxtune.models.placement import partition
from jaxtune.models.qat.fake_quant import FakeQuant
from jaxtune.pallas.formats import FORMATS, Stored

_GGUF_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # by outtype


def grid_of_export(model: Decoder) -> FakeQuant | None:
    """The grid of the weights that an export writes, or None. With an adapter it is its own training's, whatever the
    base was rounded to.
    """
    return qat_spec(model) if has_adapter(model) else model.qat


def require_representable(model: Decoder, to: str, outtype: str | None) -> None:
    """Raises ValueError if a format or its dtype would round the weights of QAT again. Formats of adapters pass.

    model: without QAT every format passes.
    to: the format's word, such as "merged" or "gguf".
    outtype: of a GGUF file, never None there; None for other formats.
    """
    grid = grid_of_export(model)
    if grid is None or to in ("adapter", "gguf-adapter"):
        return
    title, exact = f"{to} in {outtype}" if outtype else to, grid.exports
    plain = outtype in _GGUF_DTYPES
    quantised = outtype is not None and not plain
    if quantised and outtype == grid.outtype:
        if grid.represented_by(model.dtype):
            return
    elif to not in exact and (to not in ("merged", "gguf") or quantised):
        takes = "".join(f"{name}, which stores that grid, or " for name in _storing(grid))
        raise ValueError(
            f"export: to = {title!r} rounds weights to a grid of its own, and quantisation-aware training rounded this "
            f"model's to another ({grid}): take {takes}merged, or gguf in bf16 or f32"
        )
    dtype = _GGUF_DTYPES[outtype] if plain else model.dtype
    # Readers of quantised formats multiply codes and scales in the model's dtype.
    if dtype != grid.dtype and (to in exact or not grid.represented_by(dtype)):
        raise ValueError(
            f"export: to = {title!r} in {dtype} cannot represent weights that quantisation-aware training rounded to "
            f"{grid}: take {grid.dtype} ({'outtype, --outtype' if plain else 'dtype, --dtype'})"
        )


def notes_on_adapter(model: Decoder) -> tuple[str, ...]:
    """A note after QAT: other programs do not round a merged adapter as training did."""
    grid = grid_of_export(model)
    if grid is None:
        return ()
    return (
        f"it is the adapter before rounding: quantisation-aware training rounded merged weights to {grid}, as jaxtune "
        "does when it loads the adapter and other programs do not: serve the merged model there (--to "
        f"{_served(grid)})",
    )


def _served(grid: FakeQuant) -> str:
    """Such as "w4a16 or merged"."""
    return " or ".join((*_storing(grid), "merged"))


def _storing(grid: FakeQuant) -> tuple[str, ...]:
    """Quantised exports that store a grid exactly, such as "w4a16" or "gguf --outtype q4_0"."""
    return (*grid.exports, *([f"gguf --outtype {grid.outtype}"] if grid.outtype else []))


def quantized(weights: Weights, format: str) -> Weights:
    """Weights with linears and experts in `format`, a key of FORMATS, those of QAT exactly; `qat` becomes None.
    Embeddings, head, norms, routers and rows of no whole blocks stay. A matrix that left QAT's grid raises ValueError
    when it is encoded.
    """
    if weights.model.qat is None:
        return weights.quantized(format)
    plain, skipped = weights.dequantized(), not_whole(weights, format)
    result = plain.changed(
        {
            name: functools.partial(exactly, name, format)
            for name, matrix in matrices(plain.model)
            if matrix.quantizable and name not in skipped
        }
    )
    result.model.qat = None  # the format itself says what its numbers are
    return result


def exactly(name: str, format: str, weight: jax.Array) -> Stored:
    """Encodes a weight [..., out, in] that was rounded to a format, so that it decodes to the same numbers in its own
    dtype. Raises ValueError if it is not on such a grid. Shapes without values are only encoded.

    The encoder's codes are right, because rounding to 16 bits moves numbers far less than the distance of two codes.
    Float32 scales (`scale_axes`) may differ, as they follow from rounded largest numbers: every number allows an
    interval of scales, and the middle of what all allow is taken, or a neighbour.

      name: of the weight, for errors.
      format: its name, such as "int8".
      weight: [..., out, in], or its shape alone while it is traced.
    """
    stored = FORMATS[format].encode(weight)
    if isinstance(weight, core.Tracer):
        return stored
    numbers = partition.on_host(weight)
    if stored.scale_axes is not None:
        low, high = _between(numbers)
        wide = np.abs(np.float64(partition.on_host(stored.decode("float32"))))
        with np.errstate(divide="ignore", invalid="ignore"):
            least = np.where(wide > 0, low / wide, 0).max(stored.scale_axes, keepdims=True)
            most = np.where(wide > 0, high / wide, np.inf).min(stored.scale_axes, keepdims=True)
        stored = stored.rescaled(_fitting(stored, np.where(np.isfinite(most), (least + most) / 2, 1.0), numbers))
    off = int((partition.on_host(stored.decode(weight.dtype)) != numbers).sum())
    if off:
        stored = stored.of_numbers(weight)
        off = int((partition.on_host(stored.decode(weight.dtype)) != numbers).sum())
    if off:
        raise ValueError(
            f"export: {off} numbers of {name} are not on the grid of {format} to which the model says its weights were "
            'rounded ("qat" in config.json): they were changed since; remove "qat" to have them rounded'
        )
    return stored


def _fitting(stored: Stored, middle: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Scales with which a weight decodes to `numbers`: `middle` (float64), or a neighbour within 12 * 2^-24 where it
    fits better.
    """

    def wrong(factors: np.ndarray) -> np.ndarray:
        decoded = partition.on_host(stored.rescaled(factors).decode(numbers.dtype))
        return (decoded != numbers).sum(stored.scale_axes, keepdims=True)

    best, off = middle, wrong(middle)
    for step in range(1, 13):
        for moved in (middle * (1 + step * 2.0**-24), middle * (1 - step * 2.0**-24)):
            if off.any():
                count = wrong(moved)
                best, off = np.where(count < off, moved, best), np.minimum(count, off)
    return best


def _between(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(least, most), float64, between which magnitudes round to those of `numbers`, of 16 or 32 bits."""
    bits = {2: np.int16, 4: np.int32}[numbers.dtype.itemsize]
    size = np.abs(numbers)
    codes = size.view(bits)
    below = np.where(codes > 0, codes - 1, 0).astype(bits).view(numbers.dtype)
    above = (codes + 1).astype(bits).view(numbers.dtype)
    middle = size.astype(np.float64)
    return (middle + below.astype(np.float64)) / 2, (middle + above.astype(np.float64)) / 2
