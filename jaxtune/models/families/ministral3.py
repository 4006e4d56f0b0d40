"""Ministral 3: Mistral with yarn, and queries that are scaled by their position."""

from __future__ import annotations

import dataclasses

from jaxtune.models.config import DecoderConfig
from jaxtune.models.families.common import Config, Family, Fields, OneWindow, Rotary
from jaxtune.models.families.common.rope import ORIGINAL_POSITIONS, rope_config, rope_to_hf

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL_POSITIONS: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_GROWTH = ("llama_4_scaling_beta", ORIGINAL_POSITIONS)  # the keys of the queries' factor, for any kind of rotary base


class _Rotary(Rotary):
    """Rotary, with the factor on queries (RopeConfig.llama_4_scaling_beta)."""

    def read(self, hf: Config, fields: Config) -> Fields:
        parameters = self.parameters_of(hf)
        for key in _GROWTH:
            if parameters.get(key) is None:
                raise ValueError(f"config.json: rope_parameters of a 'ministral3' model lack {key!r}")
        rope = dataclasses.replace(rope_config(hf, parameters), **{key: parameters[key] for key in _GROWTH})
        return {"rotary": (rope,)}

    def write(self, config: DecoderConfig) -> Fields:
        [rope] = config.rotary
        scaling = rope_to_hf(rope) or {"rope_type": "default"}
        return {"rope_theta": rope.theta, "rope_scaling": scaling | {key: getattr(rope, key) for key in _GROWTH}}


FAMILY = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    (_Rotary(_ROPE), OneWindow()),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    text_of=("mistral3",),
)
