"""The RMS norm of each head of queries or keys, and their rotation by position, in one pass over memory, with a
derivative (`normed_heads`); and the two in plain JAX (`normed`, `rotated`). Attention whose queries and keys are normed
calls it in training and in prefills."""

from jaxtune.pallas.normed_heads.api import normed_heads
from jaxtune.pallas.normed_heads.reference import normed, rotated

__all__ = ["normed", "normed_heads", "rotated"]
