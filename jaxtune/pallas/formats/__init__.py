"""Weights in few bits: what is stored of a tensor, and the tensor of it. All of one protocol: `shape`, `ndim`, `size`,
`dtype`, `nbytes`, `problem()`, `decode(dtype)`, and where they are made here, `encode`."""

from jaxtune.pallas.formats.four_bit import FP4, NF4, FourBit, dense
from jaxtune.pallas.formats.mxfp4 import MXFP4

__all__ = ["FP4", "MXFP4", "NF4", "FourBit", "dense"]
