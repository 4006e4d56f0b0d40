"""Adam's update of a tensor whose two moments are stored in 8 bits: adam_update, by a kernel for Hopper GPUs and in
place; plain_update, by XLA on any device; and refusal, which says why the kernel cannot update a tensor. The optimizer
(train/optimizer/adam8.py) asks refusal for each tensor and calls one of the two."""

from jaxtune.pallas.adam8.api import adam_update, plain_update, refusal

__all__ = ["adam_update", "plain_update", "refusal"]
