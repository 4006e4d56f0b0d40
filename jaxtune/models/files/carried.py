"""What a checkpoint holds beside the text model: it stays where it lies, and is saved again as it is, in 16 bits where
it is stored in few: the config of what is saved says then that none of it is quantised."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.models.config import Carried, DecoderConfig
from jaxtune.models.files import file_plan, shards, stored_weights
from jaxtune.models.files.file_plan import Planned
from jaxtune.models.files.stored_weights import StoredEntry
from jaxtune.models.registry import config_from_hf, is_carried, whole_tensor_name

_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
SKIPPED = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")  # of quantisation: what has none


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
    for entry in _gathered(beside):
        if not isinstance(entry, StoredEntry):
            shards.check_entry(entry)
    rest = {name: entry for name, entry in entries.items() if not is_carried(name, config.family)}
    if hf is whole:
        return rest, Carried(beside, None)
    files = [beside[0].file.parent / name for name in _PROCESSORS]
    processors = tuple((file.name, file.read_bytes()) for file in files if file.exists())
    return rest, Carried(beside, json.dumps(whole), processors)


def stored_in(beside: Carried | None) -> set[str]:
    """The formats of those tensors that are stored in few bits."""
    return {entry.word for entry in _gathered(beside.tensors if beside else ()) if isinstance(entry, StoredEntry)}


def _gathered(tensors: tuple[shards.TensorEntry, ...]) -> Iterable[shards.TensorEntry]:
    return stored_weights.gather({entry.name: entry for entry in tensors}).values()


def _in_16_bits(entry: StoredEntry) -> jax.Array:
    weight, _ = stored_weights.read(entry, "bfloat16")
    return jax.tree.map(jnp.asarray, weight).decode("bfloat16")


def with_carried(planned: Planned, carried: Carried | None) -> Planned:
    """hf.checkpoint_tensors' plan of a text model, with the names that the whole has, and with what is carried.

    Raises:
      ValueError: a carried tensor that is not where it was.
    """
    if carried is None:
        return dict(planned)
    rename = whole_tensor_name if carried.config is not None else str
    found = {}
    for file in {entry.file for entry in carried.tensors}:
        with contextlib.suppress(OSError):
            found |= {(file, name): entry for name, entry in shards.read_header(file).items()}
    whole = {name: group.renamed(rename) for name, group in planned.items()}
    for entry in carried.tensors:
        if found.get((entry.file, entry.name)) != entry:
            raise ValueError(
                f"save_pretrained: {entry.name} is saved as it lies in {entry.file}, from which the model came, and "
                "it is not there any more; put the folder back"
            )
    for entry in _gathered(carried.tensors):
        packed = isinstance(entry, StoredEntry)
        make = functools.partial(_in_16_bits if packed else shards.read_tensor, entry)
        dtype = shards.DTYPES["BF16" if packed else entry.dtype]
        whole[entry.name] = file_plan.one(entry.name, entry.shape, dtype, make, lambda tensor: tensor)
    return whole


def whole_config(
    hf: Mapping[str, Any], own: Mapping[str, Any], config: DecoderConfig, carried: Carried | None
) -> dict[str, Any]:
    """config.json of a model with what is carried.

    Args:
      hf: that of the text part, as it would be saved alone. own: the family's own. config: of the text part.
    """
    if carried is None:
        return dict(hf)
    if carried.config is None:
        return _with_skipped(dict(hf), carried, str)
    whole = json.loads(carried.config)
    text = dict(whole["text_config"])
    if config_from_hf(whole) != config:
        text.pop("rope_parameters", None)
        text |= {key: value for key, value in own.items() if key != "architectures" and not key.endswith("_token_id")}
    dtypes = {key: hf[key] for key in ("dtype", "torch_dtype") if key in hf}
    whole |= {key: value for key, value in dtypes.items() if key in whole or key not in text}
    text |= {key: value for key, value in dtypes.items() if key in text}
    for name in ("auto_map", "quantization_config", "qat"):
        whole.pop(name, None)
        if name in hf:
            whole[name] = hf[name]
    whole |= {"text_config": text, "tie_word_embeddings": config.tie_embeddings}
    return _with_skipped(whole, carried, whole_tensor_name)


def _with_skipped(config: dict[str, Any], carried: Carried, name_of: Callable[[str], str]) -> dict[str, Any]:
    """config.json, whose quantisation says that what is carried has none. name_of: what the config's own names become.

    Readers differ: some go by whole names of linears, some by what names begin with, compressed-tensors by whole names
    and regular expressions.
    """
    quantization = dict(config.get("quantization_config", {}))
    linears = [entry for entry in carried.tensors if entry.name.endswith(".weight") and len(entry.shape) == 2]
    plain = sorted(entry.name.removesuffix(".weight") for entry in linears)
    whole = sorted({"mtp" if entry.name.startswith("mtp.") else "model.visual" for entry in carried.tensors})
    for key in set(SKIPPED) & set(quantization):
        begins = [rf"re:.*\b{part.removeprefix('model.')}\..*" for part in whole] if key == "ignore" else whole
        quantization[key] = [*map(name_of, quantization[key]), *begins, *plain]
        config["quantization_config"] = quantization
    return config
