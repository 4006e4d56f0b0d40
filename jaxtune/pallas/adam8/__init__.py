"""Adam's update of a tensor whose two moments are stored in 8 bits. adam_update, a kernel for Hopper GPUs, and
plain_update, by XLA on any device, return the step's direction and the new moments; adam_update writes these in place
of the old ones if they are donated. refusal says why the kernel cannot update a tensor: the optimizer
(train/optimizer/adam8.py) asks it for each tensor with 8-bit moments, and calls plain_update if there is a reason."""

from jaxtune.pallas.adam8.api import adam_update, plain_update, refusal

__all__ = ["adam_update", "plain_update", "refusal"]
