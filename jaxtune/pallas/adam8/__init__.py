"""Adam's update of a tensor whose two moments are stored in 8 bits."""

from jaxtune.pallas.adam8.api import adam_update, plain_update, refusal

__all__ = ["adam_update", "plain_update", "refusal"]
