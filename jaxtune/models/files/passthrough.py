"""Passthrough tensors: those of a checkpoint that are not the text model's, such as a vision tower's. They are not
loaded; saving copies them from the original files, quantised ones decoded to 16 bits.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.models.config import DecoderConfig, Passthrough
from jaxtune.models.files import file_plan, headers, shards, stored_weights
from jaxtune.models.files.file_plan import Planned
from jaxtune.models.files.stored_weights import StoredEntry
from jaxtune.models.registry import config_from_hf, is_passthrough, stored_tensor_name, whole_tensor_name
from jaxtune.models.vision.tower import TowerConfig
from jaxtune.system.files import read_plain

_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
SKIPPED = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")  # quantization_config's lists of plain modules


def divide(
    entries: Mapping[str, headers.TensorEntry],
    config: DecoderConfig,
    hf: Mapping[str, Any],
    folder_config: Mapping[str, Any],
    tower: TowerConfig | None = None,
) -> tuple[dict[str, headers.TensorEntry], Passthrough | None]:
    """({name: entry} of the tensors to load, a Passthrough with the others or None). Raises ValueError for a
    passthrough tensor that cannot be copied.

      entries: {name: entry} of all tensors in the folder.
      config: of the text model; its family decides which tensors pass through.
      hf, folder_config: config.json of the text part and of the folder, one object for a text model. Otherwise the
        Passthrough also has `folder_config` and the configs of image and video processors.
      tower: the one that is loaded with the text model; None: none is.
    """
    passing = {name for name in entries if is_passthrough(name, config.family, tower)}
    passthrough_entries = tuple(entry for name, entry in entries.items() if name in passing)
    if not passthrough_entries and tower is None:
        return dict(entries), None
    for entry in _gathered(passthrough_entries):
        if not isinstance(entry, StoredEntry):
            headers.check_entry(entry)
    loaded = {name: entry for name, entry in entries.items() if name not in passing}
    if hf is folder_config:
        return loaded, Passthrough(passthrough_entries, None)
    folder = next(iter(entries.values())).file.parent
    return loaded, Passthrough(passthrough_entries, json.dumps(folder_config), _processors(folder))


def _processors(folder: Path) -> tuple[tuple[str, bytes], ...]:
    """(name, content) of the files that describe how pictures become the tower's inputs."""
    files = [folder / name for name in _PROCESSORS]
    return tuple((file.name, read_plain(file)) for file in files if file.exists())


def around_tower(folder_config: Mapping[str, Any], folder: Path | None) -> Passthrough:
    """What is saved beside a whole model's tensors: its config.json, and the processors' configs in `folder`."""
    return Passthrough((), json.dumps(folder_config), () if folder is None else _processors(folder))


def stored_in(passthrough: Passthrough | None) -> set[str]:
    """Formats, such as "fp8", of quantised passthrough tensors, which quantization_config may name."""
    return {
        entry.format_name
        for entry in _gathered(passthrough.tensors if passthrough else ())
        if isinstance(entry, StoredEntry)
    }


def _gathered(tensors: tuple[headers.TensorEntry, ...]) -> Iterable[headers.TensorEntry]:
    return stored_weights.gather({entry.name: entry for entry in tensors}).values()


def _in_16_bits(entry: StoredEntry) -> jax.Array:
    weight, _ = stored_weights.read(entry, "bfloat16")
    return jax.tree.map(jnp.asarray, weight).decode("bfloat16")


def with_passthrough(planned: Planned, passthrough: Passthrough | None, tower: TowerConfig | None = None) -> Planned:
    """A plan of tensors to write with the passthrough tensors after the text model's, quantised ones in bfloat16; a
    nested text model's get their names in the whole model. Raises ValueError if the original file has changed.
    """
    if passthrough is None:
        return dict(planned)
    rename = functools.partial(stored_tensor_name, tower=tower) if passthrough.config is not None else str
    current_entries = {}
    for file in {entry.file for entry in passthrough.tensors}:
        with contextlib.suppress(OSError):
            current_entries |= {(file, name): entry for name, entry in headers.read_header(file).items()}
    extended = {name: group.renamed(rename) for name, group in planned.items()}
    for entry in passthrough.tensors:
        if current_entries.get((entry.file, entry.name)) != entry:
            raise ValueError(
                f"save_pretrained: {entry.name} is copied from {entry.file}, from which the model was loaded, but it "
                "is not there any more; put the folder back"
            )
    for entry in _gathered(passthrough.tensors):
        is_quantised = isinstance(entry, StoredEntry)
        make = functools.partial(_in_16_bits if is_quantised else shards.read_tensor, entry)
        dtype = headers.DTYPES["BF16" if is_quantised else entry.dtype]
        extended[entry.name] = file_plan.single_tensor_group(
            entry.name, entry.shape, dtype, make, lambda tensor: tensor
        )
    return extended


def whole_config(
    hf: Mapping[str, Any], family_keys: Mapping[str, Any], config: DecoderConfig, passthrough: Passthrough | None
) -> dict[str, Any]:
    """config.json of a saved model with its passthrough tensors: `hf`, or, of a nested text model, the original
    folder's with what changed. Lists of unquantised modules also name the passthrough tensors.

      hf: config.json of the text model as saved alone.
      family_keys: keys that the family writes (Family.to_hf), for a text part whose config has changed.
      config: of the text model as saved.
      passthrough: from `divide`; None: `hf` is returned.
    """
    if passthrough is None:
        return dict(hf)
    if passthrough.config is None:
        return _with_skipped(dict(hf), passthrough, str)
    folder_config = json.loads(passthrough.config)
    text = dict(folder_config["text_config"])
    if config_from_hf(folder_config) != config:
        for name in ("rope_parameters", "per_layer_config"):  # what `family_keys` says in another spelling
            text.pop(name, None)
        text |= {
            key: value
            for key, value in family_keys.items()
            if key not in ("architectures", *(["model_type"] if "model_type" in text else []))
            and not key.endswith("_token_id")
        }
    dtypes = {key: hf[key] for key in ("dtype", "torch_dtype") if key in hf}
    folder_config |= {key: value for key, value in dtypes.items() if key in folder_config or key not in text}
    text |= {key: value for key, value in dtypes.items() if key in text}
    for name in ("auto_map", "quantization_config", "qat"):
        folder_config.pop(name, None)
        if name in hf:
            folder_config[name] = hf[name]
    folder_config |= {"text_config": text, "tie_word_embeddings": config.tie_embeddings}
    return _with_skipped(folder_config, passthrough, whole_tensor_name)


def module_of(name: str) -> str:
    """The module of the whole model that contains a tensor beside the text model's: mtp, model.visual, ..."""
    first, _, tail = name.partition(".")
    return first if first == "mtp" else f"model.{tail.partition('.')[0] if first == 'model' else first}"


def _with_skipped(config: dict[str, Any], passthrough: Passthrough, name_of: Callable[[str], str]) -> dict[str, Any]:
    """Lists the passthrough modules as unquantised in quantization_config of `config`, which is changed."""
    quantization = dict(config.get("quantization_config", {}))
    linears = [entry for entry in passthrough.tensors if entry.name.endswith(".weight") and len(entry.shape) == 2]
    plain = sorted(entry.name.removesuffix(".weight") for entry in linears)
    modules = sorted({module_of(entry.name) for entry in passthrough.tensors})
    for key in set(SKIPPED) & set(quantization):
        begins = [rf"re:.*\b{module.removeprefix('model.')}\..*" for module in modules] if key == "ignore" else modules
        quantization[key] = [*map(name_of, quantization[key]), *begins, *plain]
        config["quantization_config"] = quantization
    return config
