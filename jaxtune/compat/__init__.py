"""Unsloth's and TRL's names, as thin maps onto jaxtune, so that a script written for them runs here.

    from jaxtune.compat import FastLanguageModel, SFTConfig, SFTTrainer, train_on_responses_only

Argument names and defaults are those of unsloth 2026.10 and trl 1.16 as Unsloth sets them. An argument is followed,
or is an error that names it when it is not at the one value that changes nothing: never ignored.

jaxtune's modules are values: training returns a new one. Those scripts expect `model` itself to change, so their model
is a `CompatModel`, which holds the current module: `SFTTrainer.train` puts the trained module into it, and whoever
holds the model sees the trained weights. `model.module` is a plain `jaxtune.Decoder` for everything else.
"""

from jaxtune.compat.model import CompatModel, FastLanguageModel, is_bfloat16_supported
from jaxtune.compat.trainer import SFTConfig, SFTTrainer, train_on_responses_only

__all__ = [
    "CompatModel",
    "FastLanguageModel",
    "SFTConfig",
    "SFTTrainer",
    "is_bfloat16_supported",
    "train_on_responses_only",
]
