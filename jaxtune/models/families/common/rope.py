"""Rotary bases in config.json: rope_parameters (transformers 5), or rope_theta and rope_scaling (transformers 4)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from jaxtune.models import values
from jaxtune.models.config import DecoderConfig, RopeConfig
from jaxtune.models.families.common.key import Check, Config, Fields, Key

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
_KINDS = ("default", "linear", "llama3", "longrope", "proportional", "yarn")
ORIGINAL_POSITIONS = "original_max_position_embeddings"

above_one = functools.partial(values.number, above=1)
_numbers = functools.partial(values.items, check=values.positive)
_POSITIVE = (
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)
_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("rope_type", "type"), values.text),
    "rope_theta": above_one,
    **dict.fromkeys(_POSITIVE, values.positive),
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), values.not_negative),
    ORIGINAL_POSITIONS: values.whole,
    **dict.fromkeys(("short_factor", "long_factor"), _numbers),
    "truncate": values.boolean,
    "mrope_section": functools.partial(values.items, check=functools.partial(values.whole, least=0)),
}


def check_parameters(key: str, value: Any) -> None:
    """Key.check of rope_parameters and rope_scaling, one object or one for each type of layer. Null and unknown
    parameters are allowed.
    """
    values.mapping(key, value)
    for name, check in _CHECKS.items():
        if value.get(name) is not None:
            check(f"{key}.{name}", value[name])
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            check_parameters(f"{key}.{name}", inner)


def by_type(parameters: Config | None) -> dict[str, Fields]:
    """The objects of a file's rope_parameters for types of layers, {type: parameters}; {} if it has none."""
    return {name: dict(value) for name, value in (parameters or {}).items() if isinstance(value, Mapping)}


def rope_parameters(hf: Config, layer_type: str | None = None) -> Fields:
    """The rotary parameters as one flat dict with rope_type, without nulls, from the keys of transformers 4 or 5.

    rope_scaling goes before rope_parameters, as in transformers, unless the latter has an object for `layer_type`; for
    full layers rope_scaling then replaces entries of that. rope_theta and partial_rotary_factor may be keys of their
    own.

    Raises ValueError for objects by type of layer if layer_type is None.
    """
    scaling, parameters = (hf.get(key) or {} for key in ("rope_scaling", "rope_parameters"))
    source, nested = scaling or parameters, by_type(parameters)
    if layer_type is None and nested:
        raise ValueError(
            f"config.json: rope_parameters has an object for {', '.join(map(repr, nested))}; a model with one rotary "
            "base has the parameters themselves there"
        )
    if layer_type in nested:
        source = {**nested[layer_type], **(scaling if layer_type == FULL else {})}
    flat = {key: hf[key] for key in ("rope_theta", "partial_rotary_factor") if hf.get(key) is not None}
    flat |= {key: value for key, value in source.items() if value is not None}
    flat["rope_type"] = flat.get("rope_type") or flat.get("type") or "default"
    return flat


def rope_config(hf: Config, parameters: Config) -> RopeConfig:
    """The RopeConfig of flat rotary parameters (`parameters`), with the defaults of transformers' modeling_rope_utils,
    without head_dim and llama_4_scaling_beta. original_max_position_embeddings of the config.json goes before that of
    `parameters`.

    Raises ValueError for an unknown kind, a missing parameter, or values that do not fit the head.
    """
    kind = parameters["rope_type"]
    if kind not in _KINDS:
        raise ValueError(f"config.json: rope_type {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    positions = hf["max_position_embeddings"]
    rope: Fields = {"theta": float(parameters.get("rope_theta", 10000.0)), "kind": kind}
    rope["partial_rotary_factor"] = float(parameters.get("partial_rotary_factor", 1.0))
    dim = int(hf["head_dim"] * rope["partial_rotary_factor"])
    if dim < 2 or dim % 2:
        raise ValueError(
            f"config.json: the rotary dimension, head_dim x partial_rotary_factor, is {dim}: it must be even, not 0"
        )
    if kind == "default":
        return RopeConfig(**rope)

    def number(key):
        if parameters.get(key) is None:
            raise ValueError(f"config.json: rope_type {kind!r} needs {key!r} beside it")
        return float(parameters[key])

    if kind == "linear":
        return RopeConfig(**rope, factor=number("factor"))
    if kind == "proportional":
        return RopeConfig(**rope, factor=float(parameters.get("factor") or 1.0))
    original = hf.get(ORIGINAL_POSITIONS) or parameters.get(ORIGINAL_POSITIONS) or positions
    rope[ORIGINAL_POSITIONS] = int(original)
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        return RopeConfig(**rope, factor=number("factor"), low_freq_factor=low, high_freq_factor=high)
    optional = kind == "longrope" and parameters.get("factor") is None
    rope["factor"] = positions / original if optional else number("factor")
    rope["attention_factor"] = parameters.get("attention_factor")
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            factors = parameters.get(key)
            if not isinstance(factors, list | tuple) or len(factors) != dim // 2:
                actual = len(factors) if isinstance(factors, list | tuple) else factors
                raise ValueError(f"config.json: longrope's {key} must be {dim // 2} numbers, not {actual}")
            rope[key] = tuple(float(factor) for factor in factors)
        return RopeConfig(**rope)
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if rope["attention_factor"] is None and mscale and mscale_all and rope["factor"] > 1:
        log = 0.1 * math.log(rope["factor"])
        rope["attention_factor"] = (mscale * log + 1) / (mscale_all * log + 1)
    rope |= {key: float(parameters[key]) for key in ("beta_fast", "beta_slow") if parameters.get(key)}
    return RopeConfig(**rope, truncate=parameters.get("truncate", True))


def rope_to_hf(rope: RopeConfig) -> Fields | None:
    """rope_scaling of a RopeConfig; None for the default kind. It lacks theta, llama_4_scaling_beta, and except for
    "proportional" partial_rotary_factor, which are written elsewhere.
    """
    if rope.kind == "default":
        return None
    scaling: Fields = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "linear":
        return scaling
    if rope.kind == "proportional":
        return scaling | {"partial_rotary_factor": rope.partial_rotary_factor}
    scaling[ORIGINAL_POSITIONS] = rope.original_max_position_embeddings
    if rope.kind == "llama3":
        return scaling | {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.attention_factor is not None:
        scaling["attention_factor"] = rope.attention_factor
    if rope.kind == "longrope":
        return scaling | {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    return scaling | {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}


# Families whose class in transformers can rotate a part of each head have this key in addition to the common ones. They
# always write it; in the other families it must be 1 (Family).
PARTIAL_ROTARY = Key(
    "partial_rotary_factor", (), values.positive, None, written=lambda config: config.rotary[0].partial_rotary_factor
)


@dataclasses.dataclass(frozen=True)
class Rotary:
    """An entry for one rotary base, written as rope_theta and rope_scaling, which transformers 4 and 5 both read."""

    default: Config = dataclasses.field(default_factory=dict)
    """The rope_parameters of a file with neither rope_parameters nor rope_scaling."""

    keys = (
        Key("rope_theta", (), above_one, None),
        Key("rope_scaling", (), check_parameters, None),
        Key("rope_parameters", (), check_parameters, None),
        Key("partial_rotary_factor", (), values.positive, None),
        Key(ORIGINAL_POSITIONS, (), values.whole, None),
    )
    gives = ("rotary",)

    def parameters_of(self, hf: Config) -> Fields:
        """The file's rotary parameters as one flat dict (rope_parameters)."""
        says_nothing = not hf["rope_parameters"] and not hf["rope_scaling"]
        return rope_parameters({**hf, "rope_parameters": self.default} if says_nothing else hf)

    def read(self, hf: Config, fields: Config) -> Fields:
        return {"rotary": (rope_config(hf, self.parameters_of(hf)),)}

    def write(self, config: DecoderConfig) -> Fields:
        rope = config.rotary[0]
        return {"rope_theta": rope.theta, "rope_scaling": rope_to_hf(rope)}


@dataclasses.dataclass(frozen=True)
class RotaryByAxis(Rotary):
    """An entry for one rotary base whose pairs turn by several axes of positions (RopeConfig.sections)."""

    sections: tuple[int, ...] = (11, 11, 10)
    """mrope_section of a file that has none; (): such a file's positions have one axis."""

    def read(self, hf: Config, fields: Config) -> Fields:
        parameters = self.parameters_of(hf)
        sections = tuple(parameters.get("mrope_section", self.sections))
        if len(sections) != 3 and sections != self.sections:
            raise ValueError(f"config.json: mrope_section = {list(sections)}: must have 3 numbers")
        return {"rotary": (dataclasses.replace(rope_config(hf, parameters), sections=sections),)}

    def write(self, config: DecoderConfig) -> Fields:
        written, sections = super().write(config), config.rotary[0].sections
        if sections == self.sections:
            return written
        scaling = (written["rope_scaling"] or {"rope_type": "default"}) | {"mrope_section": list(sections)}
        return written | {"rope_scaling": scaling}


@dataclasses.dataclass(frozen=True)
class RotaryByType(Rotary):
    """An entry for a rotary base of each type of layer, from rope_parameters with an object for each; without these all
    types have the same base. `default` and `parameters_of` are not used.
    """

    types: tuple[str, ...] = (FULL, SLIDING)
    """The order of DecoderConfig.rotary."""

    def parameters_of_type(self, layer_type: str, hf: Config) -> Fields:
        """The rotary parameters of one type of layer as one flat dict (rope_parameters)."""
        return rope_parameters(hf, layer_type)

    def read(self, hf: Config, fields: Config) -> Fields:
        return {"rotary": tuple(rope_config(hf, self.parameters_of_type(name, hf)) for name in self.types)}

    def write(self, config: DecoderConfig) -> Fields:
        """transformers 4 reads the first type's base alone."""
        # In addition to rope_scaling, which transformers 4 reads; transformers 5 would read a wrong base of sliding
        # layers from that alone.
        return super().write(config) | self.written_by_type(config)

    def written_by_type(self, config: DecoderConfig) -> Fields:
        """{"rope_parameters": with an object for each type of layer}."""
        parameters = {
            name: {"rope_theta": rope.theta} | (rope_to_hf(rope) or {"rope_type": "default"})
            for name, rope in zip(self.types, config.rotary, strict=True)
        }
        return {"rope_parameters": parameters}
