"""Adam's update with 8-bit moments, in place."""

from jaxtune.pallas.adam8.api import adam_update, plain_update, refusal

__all__ = ["adam_update", "plain_update", "refusal"]
