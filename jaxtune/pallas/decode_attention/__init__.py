"""Attention of one new token per row over a key/value cache, and the layout of that cache."""

from jaxtune.pallas.decode_attention.api import decode_attention
from jaxtune.pallas.decode_attention.cache import cache_capacity, cache_of, written
from jaxtune.pallas.decode_attention.chunk import chunk_attention, chunk_written

__all__ = ["cache_capacity", "cache_of", "chunk_attention", "chunk_written", "decode_attention", "written"]
