"""The two products of an adapter's backward that read an output's gradient, in one pass over it."""

from jaxtune.pallas.thin_pair.api import implementations, thin_pair, thin_pairs

__all__ = ["implementations", "thin_pair", "thin_pairs"]
