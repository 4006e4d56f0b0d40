"""Rotary bases in config.json: rope_parameters (transformers 5), or rope_theta and rope_scaling (transformers 4).
`Rotary` (one base) and `RotaryByType` (one for each type of layer) are the entries of families' tables that read and
write them. `check_parameters` checks the values, `rope_parameters` gathers them from a file as one flat dict,
`rope_config` makes a RopeConfig of that dict, and `rope_to_hf` makes rope_scaling of a RopeConfig. PARTIAL_ROTARY is a
further entry, of families that can rotate a part of each head."""

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
_numbers = functools.partial(values.items, of=values.positive)
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
}


def check_parameters(key: str, value: Any) -> None:
    """Check (Key.check) of rope_parameters or rope_scaling (`value`), which is one object, or one object for each type
    of layer; raises ValueError for a value that is no object, or a parameter whose value is not allowed. Parameters
    that are null or not known are allowed. key: what the error calls `value`."""
    values.mapping(key, value)
    for name, check in _CHECKS.items():
        if value.get(name) is not None:
            check(f"{key}.{name}", value[name])
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            check_parameters(f"{key}.{name}", inner)


def rope_parameters(hf: Config, layer_type: str | None = None) -> Fields:
    """Returns the rotary parameters of a config.json as one flat dict, such as {"rope_type": "linear", "rope_theta":
    1e4, "factor": 2.0}, from the keys of transformers 4 or 5. rope_type is always in it; parameters that are null are
    left out. Rotary and RotaryByType read a file by it.

    If rope_scaling and rope_parameters are both there, rope_scaling is taken and rope_parameters ignored, as in
    transformers, unless the latter has an object for `layer_type`. If what is taken lacks rope_theta or
    partial_rotary_factor, the config.json's own key of that name gives it.

    Args:
      hf: the config.json.
      layer_type: whose object to take if rope_parameters has one for this type of layer; of full layers, the entries of
        rope_scaling then replace those of the object. Without such an object the result is the same for every type.
        None: rope_parameters is one object for all layers.
    Raises:
      ValueError: rope_parameters has objects for types of layers, and layer_type is None.
    """
    scaling, parameters = (hf.get(key) or {} for key in ("rope_scaling", "rope_parameters"))
    both = scaling or parameters
    if layer_type is None and (nested := [key for key, value in parameters.items() if isinstance(value, Mapping)]):
        raise ValueError(
            f"config.json: rope_parameters has an object for {', '.join(map(repr, nested))}; a model with one rotary "
            "base has the parameters themselves there"
        )
    if layer_type is not None and isinstance(parameters.get(layer_type), Mapping):
        both = {**parameters[layer_type], **(scaling if layer_type == FULL else {})}
    given = {key: hf[key] for key in ("rope_theta", "partial_rotary_factor") if hf.get(key) is not None}
    given |= {key: value for key, value in both.items() if value is not None}
    given["rope_type"] = given.get("rope_type") or given.get("type") or "default"
    return given


def rope_config(hf: Config, given: Config) -> RopeConfig:
    """The RopeConfig of a config.json's rotary parameters, with the defaults of transformers' modeling_rope_utils. The
    families' entries for rotary bases call it when they read. It does not set head_dim and llama_4_scaling_beta. For
    yarn without attention_factor, mscale and mscale_all_dim give that factor.

    Args:
      hf: the whole config.json, for head_dim, max_position_embeddings and original_max_position_embeddings, of which
        the last takes precedence over the one in `given`.
      given: the rotary parameters, as one flat dict from `rope_parameters`. rope_type is "default", "linear", "llama3",
        "longrope", "proportional" or "yarn".
    Raises:
      ValueError: an unknown kind; a missing parameter without a default; a rotated part of the head, or factors of
        longrope, that do not fit the head; or a value that RopeConfig refuses.
    """
    kind = given["rope_type"]
    if kind not in _KINDS:
        raise ValueError(f"config.json: rope_type {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    positions = hf["max_position_embeddings"]
    rope: Fields = {"theta": float(given.get("rope_theta", 10000.0)), "kind": kind}
    rope["partial_rotary_factor"] = float(given.get("partial_rotary_factor", 1.0))
    dim = int(hf["head_dim"] * rope["partial_rotary_factor"])
    if dim < 2 or dim % 2:
        raise ValueError(
            f"config.json: the rotary dimension, head_dim x partial_rotary_factor, is {dim}: it must be even, not 0"
        )
    if kind == "default":
        return RopeConfig(**rope)

    def number(key):
        """The rotary parameter `key` as a float; raises ValueError if it is missing."""
        if given.get(key) is None:
            raise ValueError(f"config.json: rope_type {kind!r} needs {key!r} beside it")
        return float(given[key])

    if kind == "linear":
        return RopeConfig(**rope, factor=number("factor"))
    if kind == "proportional":
        return RopeConfig(**rope, factor=float(given.get("factor") or 1.0))
    original = hf.get(ORIGINAL_POSITIONS) or given.get(ORIGINAL_POSITIONS) or positions
    rope[ORIGINAL_POSITIONS] = int(original)
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        return RopeConfig(**rope, factor=number("factor"), low_freq_factor=low, high_freq_factor=high)
    rope["factor"] = float(given.get("factor") or positions / original)
    rope["attention_factor"] = given.get("attention_factor")
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            factors = given.get(key)
            if not isinstance(factors, list | tuple) or len(factors) != dim // 2:
                found = len(factors) if isinstance(factors, list | tuple) else factors
                raise ValueError(f"config.json: longrope's {key} must be {dim // 2} numbers, not {found}")
            rope[key] = tuple(float(factor) for factor in factors)
        return RopeConfig(**rope)
    mscale, mscale_all = given.get("mscale"), given.get("mscale_all_dim")
    if rope["attention_factor"] is None and mscale and mscale_all and rope["factor"] > 1:
        log = 0.1 * math.log(rope["factor"])
        rope["attention_factor"] = (mscale * log + 1) / (mscale_all * log + 1)
    rope |= {key: float(given[key]) for key in ("beta_fast", "beta_slow") if given.get(key)}
    return RopeConfig(**rope, truncate=given.get("truncate", True))


def rope_to_hf(rope: RopeConfig) -> Fields | None:
    """The value of rope_scaling in config.json for a RopeConfig (`rope`), a dict such as {"rope_type": "linear",
    "factor": 2.0}; None for the default kind, which needs none. The families' entries for rotary bases call it when
    they write, also for the objects in rope_parameters.

    Three fields are not in it: theta, which the callers write as rope_theta; partial_rotary_factor, which families that
    use it write as a key of its own (PARTIAL_ROTARY), except for the kind "proportional", which has it here; and
    llama_4_scaling_beta, which Ministral 3's entry adds."""
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
    """An entry of families' tables (key.Entry) for a model with one rotary base: reads the keys of config.json about it
    into DecoderConfig.rotary, and writes rope_theta and rope_scaling back, which transformers 4 and 5 both read.
    `given` finds the parameters in a file; a family whose files name them otherwise (Phi-3) overrides it. `keys` and
    `gives` are the keys that it reads and the field that it sets."""

    default: Config = dataclasses.field(default_factory=dict)
    """The rope_parameters of a config.json that has neither rope_parameters nor rope_scaling."""

    keys = (
        Key("rope_theta", (), above_one, None),
        Key("rope_scaling", (), check_parameters, None),
        Key("rope_parameters", (), check_parameters, None),
        Key("partial_rotary_factor", (), values.positive, None),
        Key(ORIGINAL_POSITIONS, (), values.whole, None),
    )
    gives = ("rotary",)

    def given(self, hf: Config) -> Fields:
        """The rotary parameters of a config.json (`hf`) as one flat dict, as `rope_parameters` returns it: those in
        rope_scaling or rope_parameters, or in `default` if the file has neither, and rope_theta and
        partial_rotary_factor where the file has these as keys of their own and the parameters do not name them. `read`
        calls it. Raises ValueError if rope_parameters has an object for each type of layer."""
        says_nothing = not hf["rope_parameters"] and not hf["rope_scaling"]
        return rope_parameters({**hf, "rope_parameters": self.default} if says_nothing else hf)

    def read(self, hf: Config, fields: Config) -> Fields:
        """{"rotary": a tuple with the one RopeConfig} of the config.json `hf`. Raises ValueError for parameters that
        are missing, do not fit the head, or are given for each type of layer. `fields` is not used, but all Entries
        take it."""
        return {"rotary": (rope_config(hf, self.given(hf)),)}

    def write(self, config: DecoderConfig) -> Fields:
        """{"rope_theta": ..., "rope_scaling": ...} for config.json, of the first rotary base of `config`; rope_scaling
        is None for the kind default. partial_rotary_factor is written by another entry (PARTIAL_ROTARY), if the family
        has it. Entries for several bases call this method for the first one."""
        rope = config.rotary[0]
        return {"rope_theta": rope.theta, "rope_scaling": rope_to_hf(rope)}


@dataclasses.dataclass(frozen=True)
class RotaryByType(Rotary):
    """An entry of families' tables (key.Entry) for a model with a rotary base for each type of layer: reads
    rope_parameters, which has one object for each type, into DecoderConfig.rotary, and writes it back. A file without
    such objects gives every type the same base, from the keys that Rotary reads. `given_to` finds the parameters of one
    type in a file, and families whose files have other keys or rules for them override it. The inherited field
    `default` and method `given` are not used."""

    types: tuple[str, ...] = (FULL, SLIDING)
    """The types, in the order of DecoderConfig.rotary, to which LayerSpec.rotary is an index."""

    def given_to(self, layer_type: str, hf: Config) -> Fields:
        """The rotary parameters of the layers of one type as one flat dict, as `rope_parameters` returns it, such as
        {"rope_type": "default", "rope_theta": 1e4}. `read` calls it for each type. Three families override it: Gemma 3
        has a key of its own for sliding layers, Gemma 4 reads an object for each type and nothing else, and in OLMo 3
        an extension that is given for all layers is of full layers only. layer_type: a name in the key layer_types. hf:
        the config.json."""
        return rope_parameters(hf, layer_type)

    def read(self, hf: Config, fields: Config) -> Fields:
        """{"rotary": a tuple with the RopeConfig of each of `types`} by the config.json `hf`; raises ValueError for
        parameters that are missing or do not fit the head. `fields` is not used, but all Entries take it."""
        return {"rotary": tuple(rope_config(hf, self.given_to(name, hf)) for name in self.types)}

    def write(self, config: DecoderConfig) -> Fields:
        """{key: value} of rope_theta and rope_scaling (of the first type's base), and rope_parameters with an object
        for each of `types`, for the config.json of `config`. transformers 5 reads the third. transformers 4 reads the
        first two, and so learns only the first type's base; a family whose class there reads the other base from a key
        of its own (Gemma 3: rope_local_base_freq) overrides this method."""
        # In addition to rope_scaling, which transformers 4 reads; transformers 5 would read a wrong base of sliding
        # layers from that alone.
        parameters = {
            name: {"rope_theta": rope.theta} | (rope_to_hf(rope) or {"rope_type": "default"})
            for name, rope in zip(self.types, config.rotary, strict=True)
        }
        return super().write(config) | {"rope_parameters": parameters}
