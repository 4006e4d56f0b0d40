"""Exporting: a model in, a folder out that another program loads, written whole and read back before it is there."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtune.export import adapters, folders, gguf_file, gguf_tensors, grids, w4a16
from jaxtune.export.architectures import architecture, hyperparameters
from jaxtune.export.gguf_tokenizer import strips_as_phi3, tokenizer_fields
from jaxtune.models.adapters.merge import merged_weights
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.folders import new_folder, require_new, require_space
from jaxtune.models.files.weights import Weights
from jaxtune.models.lora import has_adapter

_METADATA_BYTES = 64 << 20  # tokenizer, template and headers take less
_DEFAULT_OUTTYPE = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclasses.dataclass(frozen=True)
class Exported:
    """What an export wrote. files: names in the folder. notes: what its reader should know, a sentence each."""

    folder: Path
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


def export_model(
    model: Decoder,
    path: str | os.PathLike,
    to: str = "merged",
    *,
    tokenizer: Any = None,
    outtype: str | None = None,
    name: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> Exported:
    """Writes a model, or its adapter, in the format of another program.

    The folder appears whole or not at all: it is written beside, read back and compared with the model, and then gets
    its name. Nothing is fetched from anywhere.

    Args:
      path: a folder that does not exist or is empty.
      to: of FORMATS. An adapter is merged first, but for those that hold the adapter alone.
      tokenizer: goes with the model; gguf needs it.
      outtype: of gguf: f32, f16, bf16, q8_0 or q4_0; None: the model's own dtype.
      name: general.name of a GGUF file; None: the folder's.
      max_shard_bytes: of folders with safetensors: above this the weights are cut into shards.
    Raises:
      ValueError: a format, or a model that the format cannot hold, such as weights that QAT put on another grid; a
        folder in use; a disk without room.
      ArithmeticError: what was read back is not what was meant; nothing is left of it.
    """
    if to not in FORMATS:
        raise ValueError(f"export: to = {to!r} is unknown; it can be {', '.join(FORMATS)}")
    if outtype is not None and not to.startswith("gguf"):
        raise ValueError(f"export: outtype = {outtype!r} is of gguf; {to} has none")
    if outtype is not None and outtype not in gguf_file.OUTTYPES:
        raise ValueError(f"export: outtype = {outtype!r} is unknown; it can be {', '.join(gguf_file.OUTTYPES)}")
    job = _Job(require_new(path, "export"), tokenizer, outtype, name or Path(path).name, max_shard_bytes)
    if to.startswith("gguf") and model.config.num_labels is not None:
        raise ValueError(f"export: to = {to!r}: GGUF has no model that scores texts (a reward model); take merged")
    grids.require_held(model, to, (outtype or _DEFAULT_OUTTYPE[model.dtype]) if to == "gguf" else None)
    done = FORMATS[to](model, job)
    alone = to in ("adapter", "gguf-adapter")
    return dataclasses.replace(done, notes=done.notes + grids.notes_on_adapter(model)) if alone else done


@dataclasses.dataclass(frozen=True)
class _Job:
    path: Path
    tokenizer: Any
    outtype: str | None
    name: str
    max_shard_bytes: int


def _whole(model: Decoder) -> Weights:
    return merged_weights(model) if has_adapter(model) else Weights(model)


def _gguf(model: Decoder, job: _Job) -> Exported:
    gguf_file.require_gguf()
    arch = architecture(model.config)
    outtype = job.outtype or _DEFAULT_OUTTYPE[model.dtype]
    keys, notes = hyperparameters(model.config, arch)
    tokens, name = tokenizer_fields(job.tokenizer, model.config.vocab_size, arch.ends), job.name
    named, strips = re.search("phi-?3", name, re.IGNORECASE), strips_as_phi3(job.tokenizer)
    if bool(named) != strips:
        name = f"{name} (Phi-3)" if strips else re.sub("(phi)-?3", r"\1_3", name, flags=re.IGNORECASE)
        notes.append(
            f"general.name is {name!r}: where it has phi-3 or phi3 in it llama.cpp drops line breaks after marks and "
            f"needs Phi-3's tokens, and this tokenizer is {'' if strips else 'not '}such a one"
        )
    fields = {
        "general.type": "model",
        "general.name": name,
        "general.file_type": gguf_file.OUTTYPES[outtype][1],
        "general.quantization_version": 2,
        **{f"{arch.name}.{key}": value for key, value in keys.items()},
        **tokens,
    }
    sources = gguf_tensors.of_model(_whole(model), arch)
    tensors = gguf_tensors.all_tensors(sources)
    short = [tensor for tensor in tensors if not tensor.plain and gguf_file.stored_type(tensor, outtype) == "F16"]
    if short and outtype.startswith("q"):
        notes.append(f"{len(short)} tensors are kept in f16: their rows are not whole blocks of {outtype}")
    return _write_gguf(job, f"model-{outtype}.gguf", arch.name, fields, sources, outtype, notes)


def _gguf_adapter(model: Decoder, job: _Job) -> Exported:
    gguf_file.require_gguf()
    if job.outtype not in (None, "f32"):
        raise ValueError(f"export: outtype = {job.outtype!r}: adapters are written in f32, as they were trained")
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


def _write_gguf(job: _Job, file: str, arch: str, fields, sources, outtype: str, notes: list[str]) -> Exported:
    size = gguf_file.size_bytes(gguf_tensors.all_tensors(sources), outtype)
    require_space(job.path.parent, size + _METADATA_BYTES)
    with new_folder(job.path, "export") as folder:
        written = gguf_file.write(folder / file, arch, fields, sources, outtype)
        gguf_file.verify(folder / file, arch, fields, written)
    return Exported(job.path, (file,), tuple(notes))


def _folder(write: Callable) -> Callable[[Decoder, _Job], Exported]:
    def export(model: Decoder, job: _Job) -> Exported:
        with new_folder(job.path, "export") as folder:
            notes = write(model, folder, job.tokenizer, job.max_shard_bytes)
            files = sorted(file.name for file in folder.iterdir())
        return Exported(job.path, tuple(files), tuple(notes))

    return export


FORMATS: dict[str, Callable[[Decoder, _Job], Exported]] = {
    "merged": _folder(lambda model, *rest: folders.write_merged(_whole(model), *rest)),
    "bnb-4bit": _folder(lambda model, *rest: folders.write_bnb(_whole(model), *rest)),
    "fp8": _folder(lambda model, *rest: folders.write_fp8(_whole(model), *rest)),
    "w4a16": _folder(lambda model, *rest: w4a16.write(_whole(model), *rest)),
    "mxfp4": _folder(lambda model, *rest: folders.write_mxfp4(_whole(model), *rest)),
    "adapter": _folder(lambda model, folder, tokenizer, _: adapters.write(model, folder, tokenizer)),
    "gguf": _gguf,
    "gguf-adapter": _gguf_adapter,
}
