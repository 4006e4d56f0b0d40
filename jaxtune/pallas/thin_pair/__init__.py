"""The two products of an adapter's backward that read the gradient of an output, in one pass over it (`thin_pair`). The
backward of quant_matmul calls it."""

from jaxtune.pallas.thin_pair.api import implementations, thin_pair

__all__ = ["implementations", "thin_pair"]
