"""Weights in few bits: what is stored of a tensor, and the tensor of it. All are `Stored`."""

from jaxtune.pallas.formats.four_bit import FP4, NF4, FourBit
from jaxtune.pallas.formats.fp8 import FP8
from jaxtune.pallas.formats.mxfp4 import MXFP4
from jaxtune.pallas.formats.stored import Stored, dense

__all__ = ["FP4", "FP8", "MXFP4", "NF4", "FourBit", "Stored", "dense"]
