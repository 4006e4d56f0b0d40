"""Ministral 3: Mistral with yarn, and queries that are scaled by their position; `_Rotary` reads and writes both.

FAMILY, which models/registry.py lists by its model_type, declares how their config.json is checked, read and written,
and how checkpoints name their tensors.
"""

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
    """The entry of Ministral 3's table (key.Entry) for its rotary base: Rotary, with the factor on queries
    (RopeConfig.llama_4_scaling_beta). rope_scaling or rope_parameters of a file must have the factor's two keys; a file
    with neither gets the defaults (_ROPE)."""

    def read(self, hf: Config, fields: Config) -> Fields:
        """{"rotary": a tuple with the one RopeConfig} of the config.json `hf`. `fields` is not used, but all Entries
        take it. Raises ValueError if the file has rotary parameters, but not both keys of the queries' factor
        (llama_4_scaling_beta, original_max_position_embeddings), or if others are missing or do not fit the head."""
        given = self.given(hf)
        for key in _GROWTH:
            if given.get(key) is None:
                raise ValueError(f"config.json: rope_parameters of a 'ministral3' model lack {key!r}")
        rope = dataclasses.replace(rope_config(hf, given), **{key: given[key] for key in _GROWTH})
        return {"rotary": (rope,)}

    def write(self, config: DecoderConfig) -> Fields:
        """Returns the two keys of config.json that describe the rotary embedding of `config`: {"rope_theta": its base,
        "rope_scaling": a dict with its scaling and the two numbers by which queries grow with their position,
        llama_4_scaling_beta and original_max_position_embeddings}."""
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
