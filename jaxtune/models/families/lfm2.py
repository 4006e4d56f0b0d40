"""LFM2 and LFM2.5: gated short convolutions, attention with normed queries and keys in some layers, and MLPs."""

from __future__ import annotations

from jaxtune.models import values
from jaxtune.models.families.common import Config, Family, Fields, Key
from jaxtune.models.families.common.lfm2 import DEFAULTS, KEYS, MODULES, NORMS, tied


def _prepared(hf: Config) -> Fields:
    """intermediate_size as the MLP has it: two thirds of it, times a factor, up to a multiple, unless it is said to be
    right as it stands.
    """
    size = hf["intermediate_size"] if hf["block_ff_dim"] is None else hf["block_ff_dim"]
    if hf["block_auto_adjust_ff_dim"]:
        size, multiple = int(int(2 * size / 3) * hf["block_ffn_dim_multiplier"]), hf["block_multiple_of"]
        size = -(-size // multiple) * multiple
    return {**tied(hf), "intermediate_size": size}


FAMILY = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    (
        *KEYS,
        Key("block_ff_dim", (), values.whole, None, null=None),
        Key("block_multiple_of", (), values.whole, 256),
        Key("block_ffn_dim_multiplier", (), values.positive, 1.0),
        Key("block_auto_adjust_ff_dim", (), values.boolean, True, written=lambda config: False),
    ),
    defaults=DEFAULTS | {"intermediate_size": 12288},
    fields={"qk_norm": "head", "activation": "silu", "module_names": MODULES},
    prepare=_prepared,
    norms=NORMS,
)
