"""Quantised weights: the formats in which they are stored, encoded and decoded.

A format is a file of this folder with a subclass of `Stored` and a declaration `FORMAT`, and an entry in
jaxtune/pallas/format_names.py. FORMATS is the table of all formats, {name: Format}, which the reading and writing of
models, precision maps, the planner, exports, quantisation-aware training, `jaxtune sensitivity` and jaxtune.compat use.
Functions look things up in it: `layouts` returns the layouts in checkpoints of all formats, `load_in` the names of the
formats in which a loaded model can have weights, `kept_layout` the layout of weights that stay as files have them,
`exports` the formats to which a model can be exported, and `format_of` the format of a weight. The package also exports
the classes of weights (NF4, FP4 and their base FourBit, FP8, MXFP4, NVFP4, their interface Stored), Format and the
classes of which it consists (Layout, Export), and `dense`, which returns the array of a weight that may be quantised.
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
    """The layouts of all formats, in the order of FORMATS, in which the loader of checkpoints asks each of them whether
    it is the one that config.json names, and which of the tensors are stored in it. A layout describes how files store
    a format's weights; a format may have several."""
    return [layout for each in FORMATS.values() for layout in each.layouts]


def load_in() -> list[str]:
    """The values that the option model.load_in accepts beside None: the names of the formats to which weights can be
    quantised when a model is loaded, such as "nf4", and of those in which weights stay if files store them so
    (format_names.KEPT). The loader checks the option by it, and the reader of adapters the format that they record."""
    return list(FORMATS)


def kept_layout(name: str) -> Layout | None:
    """The layout in checkpoints whose weights stay quantised in a model if model.load_in names their format, `name`,
    although loading decodes them otherwise (Layout.kept_on_request); None for formats to which loading quantises. Plans
    of models that are not loaded make the weights' shapes by it, and errors name it."""
    return next((each for each in FORMATS[name].layouts if each.kept_on_request), None)


def exports() -> dict[str, Format]:
    """{name, a value of the option --to of `jaxtune export`: format} for all formats to which a model can be exported.
    The table of targets in jaxtune/export has the same names and others; it takes from here those to which loading
    quantises too, and has functions of its own for MXFP4."""
    return {each.export.name: each for each in FORMATS.values() if each.export is not None}


def format_of(weight: Stored | type[Stored] | Layout) -> Format:
    """Returns the format to which a quantised weight, a class of quantised weights, or a layout belongs, an entry of
    FORMATS. Its callers read the format's name, or choose the layout in which a weight is written.

    Raises:
      ValueError: a class, or the class of a weight, that belongs to no format.
      StopIteration: a layout that belongs to no format. It must be an object of `layouts`, not another of its class.
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
    "kept_layout",
    "layouts",
    "load_in",
]
