"""Attention over a key/value cache, of one new token of each row or of a chunk of a prompt; and the cache."""

from jaxtune.pallas.decode.attention.api import decode_attention, implementations
from jaxtune.pallas.decode.attention.cache import as_cached, cache_capacity, cache_of, written
from jaxtune.pallas.decode.attention.chunk import chunk_attention, chunk_written
from jaxtune.pallas.decode.attention.insert import inserted

__all__ = [
    "as_cached",
    "cache_capacity",
    "cache_of",
    "chunk_attention",
    "chunk_written",
    "decode_attention",
    "implementations",
    "inserted",
    "written",
]
