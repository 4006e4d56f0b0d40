"""Which formats represent the weights of quantisation-aware training exactly, on the grid that training rounded them
to."""

from __future__ import annotations

from jaxtune.models.decoder import Decoder
from jaxtune.models.fake_quant import FakeQuant
from jaxtune.models.files.quant import qat_spec
from jaxtune.models.lora import has_adapter
from jaxtune.pallas.formats import exports

_GGUF_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # by outtype


def grid_of_export(model: Decoder) -> FakeQuant | None:
    """The grid to which quantisation-aware training (QAT) rounded the model's weights, after an adapter is merged if
    there is one; None without QAT."""
    return qat_spec(model) if has_adapter(model) else model.qat


def require_held(model: Decoder, to: str, outtype: str | None) -> None:
    """Raises ValueError if a format would round the weights of quantisation-aware training again, which would lose what
    was trained for.

    Args:
      model: the model to export.
      to: the name of the format, one of export_model's.
      outtype: the type of a GGUF file's weights, such as bf16; None for other formats.
    """
    grid = grid_of_export(model)
    if grid is None or to in ("adapter", "gguf-adapter"):
        return
    what = f"{to} in {outtype}" if outtype else to
    if to in exports() or (outtype and outtype not in _GGUF_DTYPES):
        raise ValueError(
            f"export: to = {what!r} rounds weights to a grid of its own, and quantisation-aware training rounded this "
            f"model's to another ({grid}): take w4a16, which stores that grid, or merged, or gguf in bf16 or f32"
        )
    dtype = _GGUF_DTYPES[outtype] if outtype else model.dtype
    exactly = to == "w4a16"  # its readers multiply codes and scales in the model's dtype
    if dtype != grid.dtype and (exactly or not grid.represented_by(dtype)):
        raise ValueError(
            f"export: to = {what!r} in {dtype} cannot represent weights that quantisation-aware training rounded to "
            f"{grid}: take {grid.dtype} ({'outtype, --outtype' if outtype else 'dtype, --dtype'})"
        )


def notes_on_adapter(model: Decoder) -> tuple[str, ...]:
    """Notes for the user of an adapter that is exported alone. After quantisation-aware training there is one, which
    says that other programs do not round the merged weights as training did; without it there is none."""
    grid = grid_of_export(model)
    if grid is None:
        return ()
    return (
        f"it is the adapter before rounding: quantisation-aware training rounded merged weights to {grid}, as jaxtune "
        "does when it loads the adapter and other programs do not: serve the merged model there (--to w4a16 or merged)",
    )
