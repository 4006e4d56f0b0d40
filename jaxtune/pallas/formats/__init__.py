"""Weights in few bits: what is stored of a tensor, and the tensor of it. All are `Stored`."""

from jaxtune.pallas.formats.four_bit import FP4, NF4, FourBit, dense
from jaxtune.pallas.formats.mxfp4 import MXFP4
from jaxtune.pallas.formats.stored import Stored

__all__ = ["FP4", "MXFP4", "NF4", "FourBit", "Stored", "dense"]
