"""What a run records about its model: what the model is, whatever the config that came with it says."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import adapter_settings, gives_adapter
from jaxtune.models.quant import is_quantized
from jaxtune.train.config import AdapterConfig, TrainConfig


def recorded_config(config: TrainConfig, model: Decoder) -> TrainConfig:
    """The config with `adapter` and `model.load_in` as the model has them: config.yaml and checkpoints hold it.

    A setting that already describes the model stays as it was written ("all-linear" stays that); an adapter that came
    from a folder stays named by it.

    Args:
      model: what trains; its arrays may be shapes.
    Raises:
      ValueError: adapters that no config can describe; a setting that cannot go with the model's adapters.
    """
    adapter, settings = config.adapter, adapter_settings(model)
    if settings is None:
        adapter = None
    elif adapter is None or (adapter.path is None and not gives_adapter(model, _settings_of(adapter))):
        plain: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
        adapter = AdapterConfig(**plain)
    four_bits = is_quantized(model)
    stored_so = model.source is not None and "quantization_config" in json.loads(model.source.config)
    load_in = config.model.load_in
    if not four_bits:
        load_in = None
    elif load_in is None and not stored_so:
        load_in = "nf4"
    return dataclasses.replace(config, adapter=adapter, model=dataclasses.replace(config.model, load_in=load_in))


def _settings_of(adapter: AdapterConfig) -> dict:
    settings = dataclasses.asdict(adapter)
    settings.pop("path")
    return settings
