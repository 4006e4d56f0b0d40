"""Quantised weights: the formats in which they are stored, encoded and decoded.

A format is a file of this folder with a subclass of `Stored` and a declaration `FORMAT`, and an entry in
jaxtune/pallas/format_names.py; FORMATS is the table of all.
"""

import importlib

from jaxtune.pallas import format_names
from jaxtune.pallas.formats.four_bit import FP4, NF4, FourBit
from jaxtune.pallas.formats.fp8 import FP8
from jaxtune.pallas.formats.layout import Export, Format, Layout
from jaxtune.pallas.formats.mxfp4 import MXFP4
from jaxtune.pallas.formats.nvfp4 import NVFP4
from jaxtune.pallas.formats.stored import Stored, dense

# {name: format}: first those to which weights are quantised on loading, then those in which weights only stay.
FORMATS: dict[str, Format] = {
    name: importlib.import_module(f"{__name__}.{file}").FORMAT
    for name, file in (format_names.LOADED | format_names.KEPT).items()
}


def layouts() -> list[Layout]:
    """The layouts of all formats, in the order in which the loader asks them; a format may have several."""
    return [layout for entry in FORMATS.values() for layout in entry.layouts]


def load_in() -> list[str]:
    """The values of model.load_in beside None: formats to which loading quantises, and format_names.KEPT, in which
    weights only stay if files store them so.
    """
    return list(FORMATS)


def kept_layout(name: str) -> Layout | None:
    """The layout whose weights loading decodes unless model.load_in is `name`; None: loading quantises to this."""
    return next((layout for layout in FORMATS[name].layouts if layout.kept_on_request), None)


def exports() -> dict[str, Format]:
    """{value of the option --to of `jaxtune export`: format}, for the formats to which a model can be exported."""
    return {entry.export.name: entry for entry in FORMATS.values() if entry.export is not None}


def format_of(weight: Stored | type[Stored] | Layout) -> Format:
    """The format of a quantised weight, of a class of weights, or of a layout (an object of `layouts`).

    Raises:
      ValueError: a class, or the class of a weight, that belongs to no format.
      StopIteration: a layout that belongs to no format.
    """
    if isinstance(weight, Layout):
        return next(entry for entry in FORMATS.values() if weight in entry.layouts)
    kind = weight if isinstance(weight, type) else type(weight)
    owner = next((entry for entry in FORMATS.values() if kind in entry.kinds), None)
    if owner is None:
        raise ValueError(f"{kind.__name__} belongs to no format of jaxtune.pallas.formats.FORMATS")
    return owner


__all__ = [
    "FORMATS",
    "FP4",
    "FP8",
    "MXFP4",
    "NF4",
    "NVFP4",
    "Export",
    "Format",
    "FourBit",
    "Layout",
    "Stored",
    "dense",
    "exports",
    "format_of",
    "kept_layout",
    "layouts",
    "load_in",
]
