"""Exports a model, or its adapter alone, into a folder that another program loads. Each weight is made when it is
written: an adapter is merged into it, and numbers that are not finite are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxtune.export import adapters, folders, gguf_file, gguf_tensors, grids, left_out, w4a16
from jaxtune.export.architectures import architecture, hyperparameters
from jaxtune.export.gguf_programs import Compiling
from jaxtune.export.gguf_tokenizer import strips_as_phi3, tokenizer_fields
from jaxtune.export.gguf_types import OUTTYPES, is_short, not_trained, stored_types
from jaxtune.export.modelfile import MODELFILE, modelfile
from jaxtune.models.adapters.merge import merged_weights
from jaxtune.models.decoder import Decoder
from jaxtune.models.files import model_card
from jaxtune.models.files.folders import new_folder, require_new
from jaxtune.models.files.reading import are_finite, compile_are_finite
from jaxtune.models.files.weights import Weights, tensors_of
from jaxtune.models.lora import has_adapter
from jaxtune.pallas.format_names import KEPT
from jaxtune.pallas.formats import Format, Stored, exports
from jaxtune.system import processes
from jaxtune.system.disk import require_room
from jaxtune.system.files import atomic_write

_METADATA_BYTES = 64 << 20  # room reserved for tokenizer, template and headers
_DEFAULT_OUTTYPE = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclasses.dataclass(frozen=True)
class Exported:
    """What `export_model` wrote."""

    folder: Path  # absolute
    files: tuple[str, ...]  # names of the files in the folder
    notes: tuple[str, ...] = ()  # what users of the folder should know, of one or more sentences each


def export_model(
    model: Decoder,
    path: str | os.PathLike,
    to: str = "merged",
    *,
    tokenizer: Any = None,
    outtype: str | None = None,
    name: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    facts: model_card.Facts | None = None,
) -> Exported:
    """Writes a model, or its adapter, in the format of another program. The model is not changed; nothing is
    downloaded. The folder is written under another name, read back, compared byte by byte and renamed: it appears
    complete or not at all.

    Args:
      path: a folder that does not exist or is empty.
      to: "merged", a Hugging Face folder in the model's dtype; a quantised one ("bnb-4bit", "fp8", "nvfp4",
        "nvfp4-nvfp4", "int8", "w4a16", "w4a8", "mxfp4", "mxfp4-mxfp4"); "gguf"; or "adapter" or "gguf-adapter", the
        adapter alone. In all others an adapter is merged.
      tokenizer: written too, but not by gguf-adapter; gguf needs it.
      outtype: for gguf: f32, f16, bf16, q8_0, q6_k, q4_k_m or q4_0; None: the model's dtype. q4_0 or q8_0 after QAT in
        that type stores the training's numbers.
      name: general.name of a GGUF file; None: the folder's. Changed, with a note, if llama.cpp would take the tokenizer
        for another kind.
      max_shard_bytes: larger weights are divided into several safetensors files.
      facts: of the training, for the card (README.md); None: the base's name, and what the folder's run recorded.
    Raises:
      ValueError: an unknown format or outtype; a model that the format cannot represent, such as QAT on another grid;
        no adapter, tokenizer or gguf package where needed; a folder in use; a full disk.
      ArithmeticError: what was read back differs; a weight is not finite, decodes further off than rounding explains,
        or is merged wrongly.
    """
    require_format(path, to, outtype)
    folder = Path(path).resolve()
    job = _Job(folder, tokenizer, outtype, name or folder.name, max_shard_bytes)
    if to.startswith("gguf") and not model.config.head.is_text:
        raise ValueError(
            f"export: to = {to!r}: {model.config.head.description}, for which GGUF has no place; take merged"
        )
    grids.require_representable(model, to, (outtype or _DEFAULT_OUTTYPE[model.dtype]) if to == "gguf" else None)
    exported = _with_card(FORMATS[to](model, job), facts or _facts(model), to)
    alone = to in ("adapter", "gguf-adapter")
    return dataclasses.replace(exported, notes=exported.notes + grids.notes_on_adapter(model)) if alone else exported


def _facts(model: Decoder) -> model_card.Facts:
    path = "" if model.source is None else model.source.path
    facts = model_card.of_folder(Path(path).expanduser())
    return facts if facts["base"] else {**facts, "base": path}


def _with_card(exported: Exported, facts: model_card.Facts, to: str) -> Exported:
    model_card.write(exported.folder, {**facts, "tags": [*dict.fromkeys((*facts["tags"], to))]}, to)
    record = {"card": facts, "made": model_card.made()}
    atomic_write(exported.folder / model_card.RECORD, json.dumps(record, indent=1) + "\n", durable=False)
    return dataclasses.replace(exported, files=(*exported.files, model_card.NAME, model_card.RECORD))


def require_format(path: str | os.PathLike, to: str, outtype: str | None) -> None:
    """Raises ValueError for a format, outtype or path with which no model can be exported, or without the gguf package
    if it is needed.

      path: of the new folder.
      to: the format's word, a key of FORMATS.
      outtype: of a GGUF file; None: the default of the format.
    """
    if to not in FORMATS:
        raise ValueError(f"export: to = {to!r} is unknown; it can be {', '.join(FORMATS)}")
    if outtype is not None and not to.startswith("gguf"):
        raise ValueError(f"export: outtype = {outtype!r} is an option of gguf; {to} has none")
    if outtype is not None and outtype not in OUTTYPES:
        raise ValueError(f"export: outtype = {outtype!r} is unknown; it can be {', '.join(OUTTYPES)}")
    if outtype not in (None, "f32") and to == "gguf-adapter":
        raise ValueError(f"export: outtype = {outtype!r}: adapters are written in f32, as they were trained")
    require_new(path, "export")
    if to.startswith("gguf"):
        gguf_file.require_gguf()


@dataclasses.dataclass(frozen=True)
class _Job:
    """The arguments of one export, beside the model."""

    path: Path  # the folder to write, absolute
    tokenizer: Any  # None: there is none
    # the type of a GGUF file's weights, a key of OUTTYPES such as "q4_k_m"; None: the model's own dtype. gguf-adapter
    # writes float32 whatever it is, and formats other than GGUF have None
    outtype: str | None
    name: str  # general.name of a GGUF file; _gguf may change it
    max_shard_bytes: int  # weights above this size are divided into several safetensors files


def _merged(model: Decoder) -> Weights:
    """The weights, merged with an adapter when each is written, quantised ones then decoded."""
    return merged_weights(model) if has_adapter(model) else Weights(model)


def _whole(model: Decoder) -> Weights:
    """_merged, each weight checked when it is made."""
    weights = _merged(model)
    variables, like = tensors_of(weights.model), _like(model)
    makers = {
        name: functools.partial(_finite, name, weights.maker(name, variable), model.dtype)
        for name, variable in variables.items()
    }
    if like is not None:
        _compile_checks([variable.get_value() for variable in variables.values()], model.dtype, like.sharding)
    return Weights(weights.model, makers)


def _compile_checks(tensors: Iterable[object], dtype: str, where: jax.sharding.Sharding | None) -> None:
    """Begins to compile in threads what `_finite` runs. where: the tensors' sharding."""
    forms = {}
    for tensor in tensors:
        form = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tensor)
        leaves, tree = jax.tree.flatten(form)
        forms[tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)] = form
    compilers = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="jaxtune-compile")
    for form in forms.values():
        compilers.submit(compile_are_finite, form, dtype)
    compilers.shutdown(wait=False)


def _finite(name: str, make: Callable[[], jax.Array | Stored], dtype: str) -> jax.Array | Stored:
    """Makes a tensor; ArithmeticError unless it is finite, as most formats have a code for any number."""
    tensor = make()
    if not all(processes.all_of(bool(all(jax.device_get(are_finite(tensor, dtype)))))):
        wider = ", or load it in bfloat16 or float32 (dtype, --dtype)" if dtype == "float16" else ""
        raise ArithmeticError(
            f"export: {name} has values that are not finite in {dtype}, so the model is broken: take an earlier "
            f"checkpoint of its training, or load it anew{wider}; save_pretrained writes it as it is"
        )
    return tensor


def _gguf(model: Decoder, job: _Job) -> Exported:
    """Writes a model as model-OUTTYPE.gguf with its tokenizer."""
    left_out.require_untrained(model, "gguf")
    arch = architecture(model.config)
    outtype = job.outtype or _DEFAULT_OUTTYPE[model.dtype]
    keys, notes = hyperparameters(model.config, arch)
    sizes = {f"{arch.name}.{key}": value for key, value in keys.items()}
    sources = gguf_tensors.of_model(_merged(model), arch)
    tensors = gguf_tensors.all_tensors(sources)
    kinds = stored_types(tensors, outtype, arch.name, sizes)
    with Compiling(sources, kinds, _like(model)) as compiling:  # it takes longer than what comes before the writing
        tokens = tokenizer_fields(job.tokenizer, model.config.vocab_size, arch.ends, arch.shown_tokens)
        name = _name(job, notes)
        fields = {
            "general.type": "model",
            "general.name": name,
            "general.file_type": OUTTYPES[outtype][1],
            "general.quantization_version": 2,
            **sizes,
            **tokens,
        }
        if short := [kinds[tensor.name] for tensor in tensors if is_short(tensor, outtype)]:
            notes.append(
                f"{len(short)} tensors have rows that are not whole blocks of {outtype}: they are stored in "
                f"{', '.join(sorted(set(short)))}"
            )
        if fresh := not_trained(tensors, kinds):
            notes.append(
                f"{', '.join(fresh)}: rounded now, to {', '.join(sorted({kinds[name] for name in fresh}))}, because "
                "quantisation-aware training left them as they were; all other matrices are stored as it saw them"
            )
        file = f"model-{outtype}.gguf"
        missing = left_out.note(model)
        text, more_notes = modelfile(model, job.tokenizer, file, missing)
        notes = [*notes, *missing, *more_notes]
        return _write_gguf(job, file, arch.name, fields, sources, outtype, notes, compiling.wait, {MODELFILE: text})


def _name(job: _Job, notes: list[str]) -> str:
    """general.name, with or without phi-3 in it, by which llama.cpp chooses Phi-3's tokenizer."""
    name = job.name
    named, strips = re.search("phi-?3", name, re.IGNORECASE), strips_as_phi3(job.tokenizer)
    if bool(named) != strips:
        name = f"{name} (Phi-3)" if strips else re.sub("(phi)-?3", r"\1_3", name, flags=re.IGNORECASE)
        notes.append(
            f"general.name is {name!r}: if it contains phi-3 or phi3, llama.cpp drops line breaks after special tokens "
            f"and needs Phi-3's tokens, and this tokenizer is {'' if strips else 'not '}of that kind"
        )
    return name


def _like(model: Decoder) -> jax.ShapeDtypeStruct | None:
    """The weights' dtype and place, for programs compiled ahead; None if they are on several devices."""
    array = next(leaf for leaf in jax.tree.leaves(nnx.state(model)) if isinstance(leaf, jax.Array))
    if len(array.sharding.device_set) > 1:
        return None
    return jax.ShapeDtypeStruct((), model.dtype, sharding=array.sharding if array.committed else None)


def _gguf_adapter(model: Decoder, job: _Job) -> Exported:
    """Writes a LoRA adapter as adapter-f32.gguf for llama.cpp's --lora."""
    left_out.require_untrained(model, "gguf-adapter")
    arch = architecture(model.config)
    sources, alpha = gguf_tensors.of_adapter(model, arch)
    fields = {
        "general.type": "adapter",
        "general.name": job.name,
        "general.file_type": 0,
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
    }
    return _write_gguf(job, "adapter-f32.gguf", arch.name, fields, sources, "f32", [])


def _write_gguf(
    job: _Job,
    file: str,
    arch: str,
    fields,
    sources,
    outtype: str,
    notes: list[str],
    ready=lambda _: None,
    texts: Mapping[str, str] = types.MappingProxyType({}),
) -> Exported:
    """Writes a GGUF file, reads it back, and adds `texts`."""
    tensors = gguf_tensors.all_tensors(sources)
    size = gguf_file.size_bytes(tensors, stored_types(tensors, outtype, arch, fields))
    require_room(job.path.parent, size + _METADATA_BYTES)
    with new_folder(job.path, "export") as folder:
        written = gguf_file.write(folder / file, arch, fields, sources, outtype, ready)
        gguf_file.verify(folder / file, arch, fields, written)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return Exported(job.path, (file, *texts), tuple(notes))


def _folder(write: Callable) -> Callable[[Decoder, _Job], Exported]:
    """An entry of FORMATS. write: (model, temporary folder, tokenizer, max_shard_bytes) -> notes."""

    def export(model: Decoder, job: _Job) -> Exported:
        with new_folder(job.path, "export") as folder:
            notes = write(model, folder, job.tokenizer, job.max_shard_bytes)
            files = sorted(file.name for file in folder.iterdir())
        return Exported(job.path, tuple(files), tuple(notes))

    return export


def _stored(format: Format) -> Callable[[Decoder, _Job], Exported]:
    return _folder(lambda model, *arguments: folders.write_stored(format, _whole(model), *arguments))


FORMATS: dict[str, Callable[[Decoder, _Job], Exported]] = {
    "merged": _folder(lambda model, *rest: folders.write_merged(_whole(model), *rest)),
    **{name: _stored(to) for name, to in exports().items() if to.name not in KEPT},
    "w4a16": _folder(lambda model, *rest: w4a16.write(_whole(model), *rest)),
    "w4a8": _folder(lambda model, *rest: w4a16.write(_whole(model), *rest, activations=True)),
    "nvfp4-nvfp4": _folder(lambda model, *rest: folders.write_nvfp4_activations(_whole(model), *rest)),
    "mxfp4": _folder(lambda model, *rest: folders.write_mxfp4(_whole(model), *rest)),
    "mxfp4-mxfp4": _folder(lambda model, *rest: folders.write_mxfp4(_whole(model), *rest, activations=True)),
    "adapter": _folder(lambda model, folder, tokenizer, _: adapters.write(model, folder, tokenizer)),
    "gguf": _gguf,
    "gguf-adapter": _gguf_adapter,
}
