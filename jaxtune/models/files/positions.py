"""More positions than a checkpoint was made for: its config.json with another rotary scaling."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtune.models.config import RopeConfig
from jaxtune.models.families.common.key import Config, Fields
from jaxtune.models.families.common.rope import FULL, ORIGINAL_POSITIONS, by_type, check_parameters, rope_to_hf
from jaxtune.models.registry import config_from_hf, text_config
from jaxtune.models.rope import rotary_frequencies

_BY_ORIGINAL = ("yarn", "llama3", "longrope")  # kinds whose angles depend on the original context
_POSITIONS = "max_position_embeddings"
# Of a scaling alone; the other rotary parameters stay.
_SCALING = frozenset(
    ("rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow")
    + ("mscale", "mscale_all_dim", "truncate", ORIGINAL_POSITIONS, _POSITIONS)
)


def stretched(hf: Config, scaling: Config | None, positions: int | None) -> Fields:
    """A config.json for longer rows. Of several rotary bases, full attention's changes. Raises ValueError for a scaling
    that cannot be read, or fewer positions than before.

      hf: config.json.
      scaling: the new rope_scaling, such as {"rope_type": "yarn", "factor": 4.0}; None: it stays.
      positions: the new number of positions; None: `factor` times the original context, or what it was if that is more.
    """
    if scaling is None and positions is None:
        return dict(hf)
    text = text_config(dict(hf))
    changed = _text(text, scaling, positions)
    result = dict(hf)
    if isinstance(hf.get("text_config"), Mapping) and text is not hf:
        keys = (_POSITIONS, "rope_scaling", "rope_parameters", ORIGINAL_POSITIONS)
        inner = {key: value for key, value in hf["text_config"].items() if key not in keys}
        return result | {"text_config": inner | {key: changed[key] for key in keys if key in changed}}
    return changed


def _text(hf: Config, scaling: Config | None, positions: int | None) -> Fields:
    """`stretched` for a text model's config.json, with its errors; `hf` is not changed."""
    config, stretched_config = config_from_hf(dict(hf)), dict(hf)
    nested = bool(by_type(stretched_config.get("rope_parameters")))
    first = config.rotary[0]
    if scaling is None:
        stretched_config = _pinned(stretched_config, first, config.max_position_embeddings, nested)
    else:
        check_parameters("model.rope_scaling", scaling)
        kind = scaling.get("rope_type") or scaling.get("type")
        if kind not in ("default", "linear", *_BY_ORIGINAL):
            names = ", ".join(("linear", *_BY_ORIGINAL, "default"))
            raise ValueError(f"model.rope_scaling: rope_type = {kind!r} is not supported; it can be {names}")
        if first.kind in ("proportional", "longrope"):
            raise ValueError(f"model.rope_scaling: this model's rotary base is {first.kind}, which cannot be replaced")
        stretched_config = _scaled(
            stretched_config, dict(scaling) | {"rope_type": kind}, config.max_position_embeddings, nested
        )
    most = config.context_length
    if positions is not None and positions < most:
        raise ValueError(f"model.{_POSITIONS} = {positions}: the model has {most} already; data.length cuts documents")
    factor = float((scaling or {}).get("factor") or 1.0)
    original = int((scaling or {}).get(ORIGINAL_POSITIONS) or config.max_position_embeddings)
    stretched_config[_POSITIONS] = positions or max(config.max_position_embeddings, int(factor * original))
    config_from_hf(stretched_config)  # raises for what is missing in the scaling
    return stretched_config


def _scaled(hf: Fields, scaling: Fields, original: int, nested: bool) -> Fields:
    """Sets the scaling in a config.json. Changes `hf` and `scaling`."""
    if scaling["rope_type"] in _BY_ORIGINAL:
        scaling.setdefault(ORIGINAL_POSITIONS, original)
        if hf.get(ORIGINAL_POSITIONS) is not None:  # which takes precedence
            hf[ORIGINAL_POSITIONS] = scaling[ORIGINAL_POSITIONS]
    parameters = hf.get("rope_parameters")
    before = (parameters.get(FULL, {}) if nested else parameters) if parameters else hf.get("rope_scaling") or {}
    unscaled = {key: value for key, value in before.items() if key not in _SCALING}
    if "llama_4_scaling_beta" in unscaled and before.get(ORIGINAL_POSITIONS) is not None:
        unscaled[ORIGINAL_POSITIONS] = before[ORIGINAL_POSITIONS]  # queries grow from there, whatever the rotary base
    scaling = unscaled | scaling
    if not parameters:
        return hf | {"rope_scaling": scaling}
    hf.pop("rope_scaling", None)
    return hf | {"rope_parameters": {**parameters, FULL: scaling} if nested else scaling}


def _pinned(hf: Fields, rope: RopeConfig, positions: int, nested: bool) -> Fields:
    """Writes out what the scaling derives from the number of positions."""
    scaling = rope_to_hf(rope)
    if scaling is None or rope.kind not in _BY_ORIGINAL:
        return hf
    scaling[ORIGINAL_POSITIONS] = rope.original_max_position_embeddings or positions
    if rope.kind == "longrope" and "attention_factor" not in scaling:
        dims = 2 * len(rope.short_factor)
        scaling["attention_factor"] = rotary_frequencies(rope, int(dims / rope.partial_rotary_factor), positions).scale
    if nested:
        return _scaled(hf, scaling, positions, nested)
    # Keys that this form lacks, such as mscale, stay.
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    return hf | {key: {**(hf.get(key) or {}), **scaling}}
