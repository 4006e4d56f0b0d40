"""What a checkpoint holds beside the text model: it stays where it lies, and is saved again as it is."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from typing import Any

from jaxtune.models import shards
from jaxtune.models.config import Carried, DecoderConfig
from jaxtune.models.registry import config_from_hf, is_carried, whole_tensor_name

_SKIPPED = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")  # of quantisation: what has none


def divide(
    entries: Mapping[str, shards.TensorEntry], config: DecoderConfig, hf: Mapping[str, Any], whole: Mapping[str, Any]
) -> tuple[dict[str, shards.TensorEntry], Carried | None]:
    """(the text model's tensors, what is carried, or None).

    Args:
      hf: config.json of the text part. whole: that of the folder; the same object where it is no more than that.
    """
    beside = tuple(entry for name, entry in entries.items() if is_carried(name, config.family))
    if not beside:
        return dict(entries), None
    for entry in beside:
        shards.check_entry(entry)
    rest = {name: entry for name, entry in entries.items() if not is_carried(name, config.family)}
    return rest, Carried(beside, None if hf is whole else json.dumps(whole))


def with_carried(planned: Mapping[str, Mapping[str, tuple]], carried: Carried | None) -> dict[str, dict[str, tuple]]:
    """hf.checkpoint_tensors' plan of a text model, with the names that the whole has, and with what is carried.

    Raises:
      ValueError: a carried tensor that is not where it was.
    """
    if carried is None:
        return {name: dict(parts) for name, parts in planned.items()}
    rename = whole_tensor_name if carried.config is not None else str
    found = {}
    for file in {entry.file for entry in carried.tensors}:
        with contextlib.suppress(OSError):
            found |= {(file, name): entry for name, entry in shards.read_header(file).items()}
    whole = {name: {rename(key): part for key, part in parts.items()} for name, parts in planned.items()}
    for entry in carried.tensors:
        if found.get((entry.file, entry.name)) != entry:
            raise ValueError(
                f"save_pretrained: {entry.name} is saved as it lies in {entry.file}, from which the model came, and "
                "it is not there any more; put the folder back"
            )
        fetch = functools.partial(shards.read_tensor, entry)
        whole[entry.name] = {entry.name: (entry.shape, shards.DTYPES[entry.dtype], fetch)}
    return whole


def whole_config(
    hf: Mapping[str, Any], own: Mapping[str, Any], config: DecoderConfig, carried: Carried | None
) -> dict[str, Any]:
    """config.json of a model with what is carried.

    Args:
      hf: that of the text part, as it would be saved alone. own: the family's own. config: of the text part.
    """
    if carried is None or carried.config is None:
        return dict(hf)
    whole = json.loads(carried.config)
    text = dict(whole["text_config"])
    if config_from_hf(whole) != config:
        text.pop("rope_parameters", None)
        text |= {key: value for key, value in own.items() if key != "architectures" and not key.endswith("_token_id")}
    dtype = "dtype" if "dtype" in hf else "torch_dtype"
    if "dtype" in text:
        text["dtype"] = hf[dtype]
    for name in ("auto_map", "quantization_config", "qat"):
        whole.pop(name, None)
        if name in hf:
            whole[name] = hf[name]
    quantization = dict(whole.get("quantization_config", {}))
    for key in set(_SKIPPED) & set(quantization):
        quantization[key] = [*map(whole_tensor_name, quantization[key]), "model.visual"]
        whole["quantization_config"] = quantization
    return whole | {"text_config": text, dtype: hf[dtype], "tie_word_embeddings": config.tie_embeddings}
