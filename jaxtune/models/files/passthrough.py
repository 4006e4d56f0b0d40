"""Passthrough tensors: those of a checkpoint that are not the text model's, such as a vision tower's.

They are not loaded; saving the model copies them from the original files. Quantised ones are decoded to 16 bits,
and the saved config says that none of them is quantised. `divide` takes them out when a model is loaded, and
`stored_in` names the formats of the quantised ones; `with_passthrough` and `whole_config` add them and what config.json
says about them when the model is saved.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.models.config import DecoderConfig, Passthrough
from jaxtune.models.files import file_plan, headers, shards, stored_weights
from jaxtune.models.files.file_plan import Planned
from jaxtune.models.files.stored_weights import StoredEntry
from jaxtune.models.registry import config_from_hf, is_passthrough, whole_tensor_name

_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
SKIPPED = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")  # quantization_config's lists of plain modules


def divide(
    entries: Mapping[str, headers.TensorEntry], config: DecoderConfig, hf: Mapping[str, Any], whole: Mapping[str, Any]
) -> tuple[dict[str, headers.TensorEntry], Passthrough | None]:
    """Separates the tensors of a checkpoint into those of the text model and the passthrough tensors, when it is
    loaded; no data of tensors are read, except small ones that say how quantised tensors are stored.

    Args:
      entries: {name: entry} of all tensors of the checkpoint.
      config: of the text model, whose family says which names are passthrough tensors'.
      hf: config.json of the text part.
      whole: config.json of the folder; the same object as `hf` where it describes a text model alone.
    Returns:
      ({name: entry} of the text model's tensors, the Passthrough with the others). The Passthrough is None if there are
        no others. If `hf` is not `whole`, it also has the text of `whole` and the folder's configs of image and video
        processors.
    Raises:
      ValueError: a passthrough tensor that cannot be copied, as its dtype is not one of 16- or 32-bit floats and it is
        in no known format, its size does not fit its shape, or codes or scales of a quantised one are missing.
    """
    beside = tuple(entry for name, entry in entries.items() if is_passthrough(name, config.family))
    if not beside:
        return dict(entries), None
    for entry in _gathered(beside):
        if not isinstance(entry, StoredEntry):
            headers.check_entry(entry)
    rest = {name: entry for name, entry in entries.items() if not is_passthrough(name, config.family)}
    if hf is whole:
        return rest, Passthrough(beside, None)
    files = [beside[0].file.parent / name for name in _PROCESSORS]
    processors = tuple((file.name, file.read_bytes()) for file in files if file.exists())
    return rest, Passthrough(beside, json.dumps(whole), processors)


def stored_in(beside: Passthrough | None) -> set[str]:
    """Names of the formats, such as "fp8", in which the quantised ones of the passthrough tensors `beside` are stored;
    an empty set if none is quantised, or for None, a model without such tensors. A quantization_config may name these
    formats although no weight of the model is in them (quant.check_stored)."""
    return {
        entry.format_name for entry in _gathered(beside.tensors if beside else ()) if isinstance(entry, StoredEntry)
    }


def _gathered(tensors: tuple[headers.TensorEntry, ...]) -> Iterable[headers.TensorEntry]:
    """The entries of passthrough tensors (`tensors`, as files have them), with all tensors of each quantised weight,
    such as codes and scales, combined to one StoredEntry. By them tensors are checked when the model is loaded
    (`divide`, `stored_in`), and planned when it is saved (`with_passthrough`). Raises ValueError if some of these are
    missing or do not fit."""
    return stored_weights.gather({entry.name: entry for entry in tensors}).values()


def _in_16_bits(entry: StoredEntry) -> jax.Array:
    """The quantised passthrough tensor of this entry, read from its file and decoded to bfloat16, in which it is saved,
    on the default device. with_passthrough plans the call. Passthrough tensors are those that jaxtune does not compute
    with, such as a vision tower's."""
    weight, _ = stored_weights.read(entry, "bfloat16")
    return jax.tree.map(jnp.asarray, weight).decode("bfloat16")


def with_passthrough(planned: Planned, passthrough: Passthrough | None) -> Planned:
    """A text model's plan of tensors to write (`planned`), extended by the passthrough tensors, which follow the text
    model's; a copy of `planned` if `passthrough` is None. A passthrough tensor is read from its original file when it
    is written; it keeps its name and dtype, and a quantised one is decoded to bfloat16. If the text model is nested in
    a whole model, its tensors get their names in that.

    Raises:
      ValueError: a passthrough tensor that is no longer in the file that the model was loaded from, at the same place.
    """
    if passthrough is None:
        return dict(planned)
    rename = whole_tensor_name if passthrough.config is not None else str
    found = {}
    for file in {entry.file for entry in passthrough.tensors}:
        with contextlib.suppress(OSError):
            found |= {(file, name): entry for name, entry in headers.read_header(file).items()}
    whole = {name: group.renamed(rename) for name, group in planned.items()}
    for entry in passthrough.tensors:
        if found.get((entry.file, entry.name)) != entry:
            raise ValueError(
                f"save_pretrained: {entry.name} is copied from {entry.file}, from which the model was loaded, but it "
                "is not there any more; put the folder back"
            )
    for entry in _gathered(passthrough.tensors):
        packed = isinstance(entry, StoredEntry)
        make = functools.partial(_in_16_bits if packed else shards.read_tensor, entry)
        dtype = headers.DTYPES["BF16" if packed else entry.dtype]
        whole[entry.name] = file_plan.one(entry.name, entry.shape, dtype, make, lambda tensor: tensor)
    return whole


def whole_config(
    hf: Mapping[str, Any], own: Mapping[str, Any], config: DecoderConfig, passthrough: Passthrough | None
) -> dict[str, Any]:
    """config.json of a saved model that includes passthrough tensors. If the text model was nested in a whole model, it
    is the config.json of the folder from which the model was loaded, with what was changed since: the text part's
    config, dtypes, quantisation, "qat", auto_map and tie_word_embeddings. Otherwise it is `hf`. In both, the lists of
    unquantised modules that quantization_config has, if any, also name the passthrough tensors.

    Args:
      hf: config.json of the text model as it would be saved alone, with all that saving adds, such as dtype and
        quantization_config.
      own: the keys of config.json that the family writes for `config` (Family.to_hf), and no others. Where the text
        part's config has changed, they replace the folder's, except architectures and ids of special tokens.
      config: the config of the text model. If it is still that of the folder, `own` is not used.
      passthrough: the tensors, with the folder's config.json if the text model is nested in it; None: the model has no
        such tensors, and a copy of `hf` is returned.
    """
    if passthrough is None:
        return dict(hf)
    if passthrough.config is None:
        return _with_skipped(dict(hf), passthrough, str)
    whole = json.loads(passthrough.config)
    text = dict(whole["text_config"])
    if config_from_hf(whole) != config:
        for name in ("rope_parameters", "per_layer_config"):  # what `own` says in another spelling
            text.pop(name, None)
        text |= {key: value for key, value in own.items() if key != "architectures" and not key.endswith("_token_id")}
    dtypes = {key: hf[key] for key in ("dtype", "torch_dtype") if key in hf}
    whole |= {key: value for key, value in dtypes.items() if key in whole or key not in text}
    text |= {key: value for key, value in dtypes.items() if key in text}
    for name in ("auto_map", "quantization_config", "qat"):
        whole.pop(name, None)
        if name in hf:
            whole[name] = hf[name]
    whole |= {"text_config": text, "tie_word_embeddings": config.tie_embeddings}
    return _with_skipped(whole, passthrough, whole_tensor_name)


def _module(name: str) -> str:
    """The module, in the whole model, that contains the passthrough tensor of this name: mtp, model.visual,
    model.vision_tower, ... `_with_skipped` writes it into quantization_config's lists of modules that are not
    quantised."""
    first, _, rest = name.partition(".")
    return first if first == "mtp" else f"model.{rest.partition('.')[0] if first == 'model' else first}"


def _with_skipped(config: dict[str, Any], passthrough: Passthrough, name_of: Callable[[str], str]) -> dict[str, Any]:
    """The config.json of the model, `config`, in which quantization_config, if there is one, also lists the modules of
    the passthrough tensors as not quantised, because they are saved in 16 bits. `config` is changed and returned.

    Only the lists (SKIPPED) that the entry already has are extended. Readers interpret them differently: some match
    whole names of linears, some match prefixes, and compressed-tensors (the list "ignore") matches whole names and
    regular expressions. So each list gets the modules of the passthrough tensors, as regular expressions in "ignore",
    and after them the name of each passthrough matrix, without ".weight", as that of a linear.

    name_of: maps the module names that the lists already contain to names in the saved model.
    """
    quantization = dict(config.get("quantization_config", {}))
    linears = [entry for entry in passthrough.tensors if entry.name.endswith(".weight") and len(entry.shape) == 2]
    plain = sorted(entry.name.removesuffix(".weight") for entry in linears)
    whole = sorted({_module(entry.name) for entry in passthrough.tensors})
    for key in set(SKIPPED) & set(quantization):
        begins = [rf"re:.*\b{part.removeprefix('model.')}\..*" for part in whole] if key == "ignore" else whole
        quantization[key] = [*map(name_of, quantization[key]), *begins, *plain]
        config["quantization_config"] = quantization
    return config
