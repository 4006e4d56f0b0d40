"""Adam's update of a tensor whose two moments are stored in 8 bits, in place: adam_update, by a kernel for Hopper GPUs
or by XLA; plain_update, by XLA alone; and refusal, which says why the kernel cannot serve a tensor."""

from jaxtune.pallas.adam8.api import adam_update, plain_update, refusal

__all__ = ["adam_update", "plain_update", "refusal"]
