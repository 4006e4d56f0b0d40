"""The RMS norm of each head of queries or keys, and their rotation by position, in one pass over memory, with a
derivative (`normed_heads`); and the two in plain JAX (`normed`, of which `inverse_rms` is a part, and `rotated`).
Attention whose queries and keys are normed calls it in training and in prefills."""

from jaxtune.pallas.normed_heads.api import normed_heads
from jaxtune.pallas.normed_heads.reference import inverse_rms, normed, rotated

__all__ = ["inverse_rms", "normed", "normed_heads", "rotated"]
