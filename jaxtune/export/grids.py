"""Weights that quantisation-aware training put on a grid: which formats hold them as they are."""

from __future__ import annotations

from jaxtune.models.decoder import Decoder
from jaxtune.models.fake_quant import FakeQuant
from jaxtune.models.files.quant import qat_spec
from jaxtune.models.lora import has_adapter

_GGUF_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # of outtypes


def grid_of_export(model: Decoder) -> FakeQuant | None:
    """The grid on which the weights lie once an adapter is merged; None where there is none."""
    return qat_spec(model) if has_adapter(model) else model.qat


def require_held(model: Decoder, to: str, outtype: str | None) -> None:
    """Raises ValueError where a format would round weights again that QAT put on a grid: what was trained for would be
    lost.

    Args:
      to, outtype: of export_model; the outtype of a GGUF file is known.
    """
    grid = grid_of_export(model)
    if grid is None or to in ("adapter", "gguf-adapter"):
        return
    what = f"{to} in {outtype}" if outtype else to
    if to in ("bnb-4bit", "fp8", "mxfp4") or outtype in ("q8_0", "q4_0"):
        raise ValueError(
            f"export: to = {what!r} rounds weights to a grid of its own, and quantisation-aware training put this "
            f"model's on another ({grid}): take w4a16, which holds that grid, or merged, or gguf in bf16 or f32"
        )
    dtype = _GGUF_DTYPES[outtype] if outtype else model.dtype
    exactly = to == "w4a16"  # which multiplies codes and scales in the model's dtype
    if dtype != grid.dtype and (exactly or not grid.held_by(dtype)):
        raise ValueError(
            f"export: to = {what!r} in {dtype} does not hold weights that quantisation-aware training rounded to "
            f"{grid}: take {grid.dtype} ({'outtype, --outtype' if outtype else 'dtype, --dtype'})"
        )


def notes_on_adapter(model: Decoder) -> tuple[str, ...]:
    """What the reader of an adapter alone should know."""
    grid = grid_of_export(model)
    if grid is None:
        return ()
    return (
        f"it is the adapter before rounding: quantisation-aware training rounded merged weights to {grid}, as jaxtune "
        "does when it loads the adapter and other programs do not: serve the merged model there (--to w4a16 or merged)",
    )
