"""RMS norm of each head of queries or keys and rotation by position, in one pass over memory."""

from jaxtune.pallas.normed_heads.api import normed_heads
from jaxtune.pallas.normed_heads.reference import inverse_rms, normed, rotated

__all__ = ["inverse_rms", "normed", "normed_heads", "rotated"]
