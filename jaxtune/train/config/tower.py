"""Which parts of a model's tower train: what model.tower says."""

from __future__ import annotations

from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import copy_structure, freeze, get_peft_model, with_trained_tower
from jaxtune.train.config.checks import ConfigError
from jaxtune.train.config.model import AdapterConfig, ModelConfig


def with_trained_parts(model: Decoder, config: ModelConfig, adapter: AdapterConfig | None, seed: int) -> Decoder:
    """A new model over the same arrays, which may be shapes: with a new adapter, or the weights that train. Raises
    ValueError for an adapter that does not fit the model, or that leaves out a tower that is to train.
    """
    if adapter is not None:
        model = get_peft_model(model, **adapter.settings, seed=seed, exclude_modules=left_out(model, config.tower))
        adapted = model.vision is not None and model.vision.trains
        if config.tower not in (None, "frozen") and not adapted:
            raise ConfigError(
                f"model.tower = {config.tower!r}: adapter.target_modules = {adapter.target_modules!r} names none of "
                f"its linears: add {_examples(model)}, or set all-linear"
            )
        return model
    if model.vision is None or (config.tower is None and config.from_config is not None):
        return model
    model = copy_structure(model)
    assert model.vision is not None
    model.vision = freeze(model.vision)
    layers, merger = _trained(config.tower)
    return with_trained_tower(model, layers, merger) if layers or merger else model


def left_out(model: Decoder, tower: str | None) -> list[str] | None:
    """Names of the tower's modules that no adapter gets; None for a model without a tower."""
    if model.vision is None:
        return None
    layers, merger = _trained(tower)
    names = [name for name, _ in model.vision.linears(not layers, not merger)]
    return [*names, *model.vision.unadapted]


def _examples(model: Decoder) -> str:
    assert model.vision is not None
    names = {".".join(name.split(".")[-2:]) for name, _ in model.vision.linears()}
    return " or ".join(sorted(names)[:3])


def _trained(tower: str | None) -> tuple[bool, bool]:
    """Whether (layers, merger) train."""
    return tower in ("layers", "all"), tower in ("merger", "all")
