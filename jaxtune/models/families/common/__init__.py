"""The classes of a family's declaration, such as Family, Key and LayerTypes; docs/extending.md shows how to add a
family.
"""

from jaxtune.models.families.common.family import Family
from jaxtune.models.families.common.key import FLOAT, Config, Conversion, Entry, Fields, Key, Record
from jaxtune.models.families.common.layers import LayerType, LayerTypes, MLPFirst, MLPLayers, OneWindow
from jaxtune.models.families.common.names import ExpertFiles, tensor_name
from jaxtune.models.families.common.rope import Rotary, RotaryByAxis, RotaryByType

__all__ = [
    "FLOAT",
    "Config",
    "Conversion",
    "Entry",
    "ExpertFiles",
    "Family",
    "Fields",
    "Key",
    "LayerType",
    "LayerTypes",
    "MLPFirst",
    "MLPLayers",
    "OneWindow",
    "Record",
    "Rotary",
    "RotaryByAxis",
    "RotaryByType",
    "tensor_name",
]
