"""Quantised weights: the formats in which they are stored, encoded and decoded.

A format is a file of this folder with a subclass of `Stored` and a declaration `FORMAT`, and an entry in
jaxtune/pallas/format_names.py. Reading and writing models, the planner, exports, the configuration and jaxtune.compat
all use the table FORMATS, and the functions `layouts`, `load_in`, `exports` and `format_of`, which look things up in
it. The package also exports the classes of weights, and `dense`, which returns the array of a weight that may be
quantised.
"""

import importlib

from jaxtune.pallas import format_names
from jaxtune.pallas.formats.four_bit import FP4, NF4, FourBit
from jaxtune.pallas.formats.fp8 import FP8
from jaxtune.pallas.formats.layout import Export, Format, Layout
from jaxtune.pallas.formats.mxfp4 import MXFP4
from jaxtune.pallas.formats.nvfp4 import NVFP4
from jaxtune.pallas.formats.stored import Stored, dense

# {name: format}, the formats to which weights can be quantised first, then those that are only read and written.
FORMATS: dict[str, Format] = {
    name: importlib.import_module(f"{__name__}.{file}").FORMAT
    for name, file in (format_names.LOADED | format_names.READ).items()
}


def layouts() -> list[Layout]:
    """The layouts of all formats, in the order of FORMATS, in which the loader of checkpoints asks each of them whether
    it stores a checkpoint's tensors. A layout describes how files store a format's weights; a format may have
    several."""
    return [layout for each in FORMATS.values() for layout in each.layouts]


def load_in() -> list[str]:
    """The values that the option model.load_in accepts: the names of the formats to which weights can be quantised when
    a model is loaded, such as "nf4"."""
    return [name for name in FORMATS if name not in format_names.READ]


def exports() -> dict[str, Format]:
    """{name, a value of the option --to of `jaxtune export`: format} for all formats to which a model can be
    exported."""
    return {each.export.name: each for each in FORMATS.values() if each.export is not None}


def format_of(weight: Stored | type[Stored] | Layout) -> Format:
    """Returns the format to which a quantised weight, a class of quantised weights, or a layout belongs, an entry of
    FORMATS. Its callers then have the format's name, its layouts, or its numbers for the planner.

    Raises:
      ValueError: a class, or the class of a weight, that belongs to no format.
      StopIteration: a layout that belongs to no format.
    """
    if isinstance(weight, Layout):
        return next(each for each in FORMATS.values() if weight in each.layouts)
    kind = weight if isinstance(weight, type) else type(weight)
    found = next((each for each in FORMATS.values() if kind in each.kinds), None)
    if found is None:
        raise ValueError(f"{kind.__name__} belongs to no format of jaxtune.pallas.formats.FORMATS")
    return found


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
    "layouts",
    "load_in",
]
