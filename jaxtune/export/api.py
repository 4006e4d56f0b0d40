"""Export of a model, or of its adapter alone, into a folder that another program loads: `export_model`, and FORMATS,
which has a function for each format. `require_format` checks the arguments before a model is loaded, and Exported is
the result. The folder is complete and verified before it gets its name.

Each entry of FORMATS is called with (model, `_Job`: the other arguments of export_model). `_folder` makes the entries
for folders of safetensors and JSON files, PEFT's among them, those of some quantised formats through `_stored`; the
others are `_gguf` and `_gguf_adapter`, which write by `_write_gguf`. `_whole` gives the weights that exports of a whole
model write. Each weight is made when it is written: an adapter is merged into it, and `_finite` refuses it if one of
its numbers is not finite.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxtune.export import adapters, folders, gguf_file, gguf_tensors, grids, w4a16
from jaxtune.export.architectures import architecture, hyperparameters
from jaxtune.export.gguf_programs import Compiling
from jaxtune.export.gguf_tokenizer import strips_as_phi3, tokenizer_fields
from jaxtune.export.gguf_types import OUTTYPES, is_short, not_trained, stored_types
from jaxtune.export.modelfile import MODELFILE, modelfile
from jaxtune.models.adapters.merge import merged_weights
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.folders import new_folder, require_new, require_space
from jaxtune.models.files.reading import are_finite, compile_are_finite
from jaxtune.models.files.weights import Weights, tensors_of
from jaxtune.models.lora import has_adapter
from jaxtune.pallas.format_names import KEPT
from jaxtune.pallas.formats import Format, Stored, exports
from jaxtune.system import processes

_METADATA_BYTES = 64 << 20  # room reserved for tokenizer, template and headers
_DEFAULT_OUTTYPE = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclasses.dataclass(frozen=True)
class Exported:
    """What `export_model` wrote, and what the user should know of it."""

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
) -> Exported:
    """Writes a model, or its adapter, in the format of another program.

    The folder appears complete or not at all: it is written under another name, read back, every byte of its tensors
    is compared with what was written, and then it is renamed. Nothing is downloaded.

    Args:
      model: the model, with or without an adapter.
      path: a folder that does not exist or is empty.
      to: one of FORMATS: "merged", a Hugging Face folder in the model's dtype; a quantised one ("bnb-4bit", "fp8",
        "nvfp4", "nvfp4-nvfp4", "int8", "w4a16", "w4a8", "mxfp4" or "mxfp4-mxfp4"); "gguf"; or "adapter" or
        "gguf-adapter", which contain the adapter alone. In all others an adapter, if there is one, is merged first. The
        model itself is not changed.
      tokenizer: written into the folder or the GGUF file, but not by gguf-adapter; None: none is. gguf needs it.
      outtype: for gguf: f32, f16, bf16, q8_0, q6_k, q4_k_m or q4_0; None: the model's own dtype. After
        quantisation-aware training in q4_0 or q8_0, that type stores the numbers of the training. gguf-adapter is
        always f32 (None or "f32"), and other formats take None.
      name: general.name of a GGUF file; None: the folder's name. gguf changes it, with a note, if llama.cpp would take
        the tokenizer for one of another kind because of it.
      max_shard_bytes: for safetensors folders of whole models: weights above this size are divided into shards.
    Returns:
      the folder, its files and notes for the user.
    Raises:
      ValueError: an unknown format or outtype; a model that the format cannot represent, such as weights that QAT
        rounded to another grid, or a model without an adapter in formats of adapters; gguf without a tokenizer or
        without the gguf package; a folder in use; a disk without room; max_shard_bytes that is not positive; with
        "adapter", a value that is not finite.
      ArithmeticError: what was read back differs from what was written; a weight of the model, merged or not, is not
        finite (save_pretrained writes it); a value decodes to one further off than rounding explains; or the merged
        weights do not compute what the adapter does. The temporary folder is removed.
    """
    require_format(path, to, outtype)
    folder = Path(path).resolve()
    job = _Job(folder, tokenizer, outtype, name or folder.name, max_shard_bytes)
    if to.startswith("gguf") and not model.config.head.is_text:
        raise ValueError(f"export: to = {to!r}: {model.config.head.what}, for which GGUF has no place; take merged")
    grids.require_representable(model, to, (outtype or _DEFAULT_OUTTYPE[model.dtype]) if to == "gguf" else None)
    done = FORMATS[to](model, job)
    alone = to in ("adapter", "gguf-adapter")
    return dataclasses.replace(done, notes=done.notes + grids.notes_on_adapter(model)) if alone else done


def require_format(path: str | os.PathLike, to: str, outtype: str | None) -> None:
    """Raises ValueError for arguments with which no model can be exported: an unknown format or type of weights, a
    folder in use, or, for the two formats of GGUF, no gguf package. export_model calls it first, and `jaxtune export`
    also before it loads the model, which takes longer.

    Args:
      path: the folder that is to be written; it must not exist, or be empty, and no disk may be mounted there.
      to: the name of the format.
      outtype: the type of a GGUF file's weights, one of OUTTYPES; None: it is not chosen. It must be None for formats
        other than GGUF, and None or "f32" for gguf-adapter.
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
    """The arguments of one call of `export_model`, as every entry of FORMATS gets them beside the model. `to` is not
    among them, because it chooses the entry."""

    path: Path  # the folder to write, absolute
    tokenizer: Any  # None: there is none
    # the type of a GGUF file's weights, a key of OUTTYPES such as "q4_k_m"; None: the model's own dtype. gguf-adapter
    # writes float32 whatever it is, and formats other than GGUF have None
    outtype: str | None
    name: str  # general.name of a GGUF file; _gguf may change it
    max_shard_bytes: int  # weights above this size are divided into several safetensors files


def _merged(model: Decoder) -> Weights:
    """The weights of a model for an export: if it has an adapter, the adapter is merged into them (quantised weights
    are then decoded), else they are unchanged. A merged weight is made only when it is written, so that the merged
    model is never in memory as a whole. Raises what `_whole` does, except that no weight need be
    finite."""
    return merged_weights(model) if has_adapter(model) else Weights(model)


def _whole(model: Decoder) -> Weights:
    """The weights of a model for an export (`_merged`), of which each is looked over when it is made. All entries of
    FORMATS call it but those of adapters and `_gguf`, whose encoder looks over what it encodes.

    Raises:
      ValueError: a model that is prepared for QAT and has no adapter.
      ArithmeticError: the merged logits, which are verified here, are not those of the model with its adapter. Each
        weight raises it when it is made, before it is encoded, if it is not finite (`_finite`) or merged wrongly.
    """
    weights = _merged(model)
    variables, like = tensors_of(weights.model), _like(model)
    made = {
        name: functools.partial(_finite, name, weights.maker(name, variable), model.dtype)
        for name, variable in variables.items()
    }
    if like is not None:
        _compile_checks([variable.get_value() for variable in variables.values()], model.dtype, like.sharding)
    return Weights(weights.model, made)


def _compile_checks(tensors: Iterable[object], dtype: str, where: jax.sharding.Sharding | None) -> None:
    """Begins to compile, in threads, the programs by which `_finite` looks over tensors, one for each form. where: the
    sharding of their arrays, of which tensors that are yet to be made have only shapes; None: the default device."""
    found = {}
    for tensor in tensors:
        form = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tensor)
        leaves, tree = jax.tree.flatten(form)
        found[tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)] = form
    compilers = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="jaxtune-compile")
    for form in found.values():
        compilers.submit(compile_are_finite, form, dtype)
    compilers.shutdown(wait=False)


def _finite(name: str, make: Callable[[], jax.Array | Stored], dtype: str) -> jax.Array | Stored:
    """Makes a tensor of the model that is exported, and returns it. Its numbers are looked over on the device, because
    most formats have a code for any number, which would hide a broken one.

    Args:
      name: Hugging Face's name of the tensor, for the message.
      make: computes the tensor, an array or quantised.
      dtype: that in which the numbers of an array must be finite.
    Raises:
      ArithmeticError: a number is not finite in `dtype`, or, of a quantised tensor, in its own.
    """
    tensor = make()
    if not all(processes.all_of(bool(all(jax.device_get(are_finite(tensor, dtype)))))):
        wider = ", or load it in bfloat16 or float32 (dtype, --dtype)" if dtype == "float16" else ""
        raise ArithmeticError(
            f"export: {name} has values that are not finite in {dtype}, so the model is broken: take an earlier "
            f"checkpoint of its training, or load it anew{wider}; save_pretrained writes it as it is"
        )
    return tensor


def _gguf(model: Decoder, job: _Job) -> Exported:
    """Writes a model as one GGUF file with its tokenizer for llama.cpp, and verifies it by reading it back; the entry
    "gguf" of FORMATS. If the model has an adapter, each weight is merged with it as it is written; `model` itself is
    not changed. llama.cpp treats a tokenizer as Phi-3's if the model's name has phi-3 or phi3 in it: such a name is
    changed where the tokenizer is of another kind, and " (Phi-3)" is added where it is of that kind and the name does
    not say so; a note tells the user. job: the folder and the options of the export. The file's name is
    model-OUTTYPE.gguf. Another note says how many tensors have a type other than the outtype because of their rows'
    length, one names the matrices that are rounded here although quantisation-aware training rounded only the others to
    the type, and those of `hyperparameters` say where llama.cpp computes the model differently.

    Raises:
      ValueError: llama.cpp would compute another model or does not support this kind of tokenizer; there is no
        tokenizer; the disk has no room; weights left the grid that the model's `qat` names.
      ArithmeticError: what was read back differs from what was written; a value is not finite, or too large for f16; or
        the merged weights do not compute what the adapter does.
    """
    arch = architecture(model.config)
    outtype = job.outtype or _DEFAULT_OUTTYPE[model.dtype]
    keys, notes = hyperparameters(model.config, arch)
    sizes = {f"{arch.name}.{key}": value for key, value in keys.items()}
    sources = gguf_tensors.of_model(_merged(model), arch)
    tensors = gguf_tensors.all_tensors(sources)
    kinds = stored_types(tensors, outtype, arch.name, sizes)
    with Compiling(sources, kinds, _like(model)) as compiling:  # it takes longer than what comes before the writing
        tokens = tokenizer_fields(job.tokenizer, model.config.vocab_size, arch.ends, arch.shown)
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
        if others := not_trained(tensors, kinds):
            notes.append(
                f"{', '.join(others)}: rounded now, to {', '.join(sorted({kinds[name] for name in others}))}, because "
                "quantisation-aware training left them as they were; all other matrices are stored as it saw them"
            )
        file = f"model-{outtype}.gguf"
        text, more = modelfile(model, job.tokenizer, file)
        texts = {MODELFILE: text}
        return _write_gguf(job, file, arch.name, fields, sources, outtype, notes + more, compiling.wait, texts)


def _name(job: _Job, notes: list[str]) -> str:
    """general.name of a GGUF file: the job's name, changed as `_gguf` says, and then with a note in `notes`."""
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
    """The dtype of a model's weights, and where they are, for programs that are compiled before the weights are there;
    None if they are on several devices."""
    array = next(leaf for leaf in jax.tree.leaves(nnx.state(model)) if isinstance(leaf, jax.Array))
    if len(array.sharding.device_set) > 1:
        return None
    return jax.ShapeDtypeStruct((), model.dtype, sharding=array.sharding if array.committed else None)


def _gguf_adapter(model: Decoder, job: _Job) -> Exported:
    """Writes a model's LoRA adapter as a GGUF file in float32 for llama.cpp's --lora, and verifies it by reading it
    back; the entry "gguf-adapter" of FORMATS. job: the folder and the options of the export, of which it uses `path`
    and `name`. The file's name is adapter-f32.gguf. The result has no notes; after QAT, export_model adds that of
    grids.notes_on_adapter: llama.cpp does not round merged weights as the training did.

    Raises:
      ValueError: the model has no adapter, or one that llama.cpp cannot apply; llama.cpp would compute another base;
        the disk has no room.
      ArithmeticError: what was read back differs from what was written, or a value is not finite.
    """
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
    """Writes the folder of an export to GGUF: the file, which it verifies by reading it back, and `texts`, {name:
    content}.

    Args:
      job: the export's arguments, of which it uses `path`.
      file: the name of the file.
      arch: llama.cpp's name of the architecture.
      fields: metadata, {key: value}, without general.architecture, which is `arch`.
      sources: the gguf_tensors.Sources that make the tensors, in the order of the file.
      outtype: the type of the weights, one of OUTTYPES.
      notes: sentences for the user, which the result contains.
      ready: see gguf_file.write.
    Raises:
      ValueError: the disk has no room; the job's folder is in use; a value is not on the grid to which the model says
        that QAT rounded it.
      ArithmeticError: what was read back differs from what was written, or the type cannot represent a value.
    """
    tensors = gguf_tensors.all_tensors(sources)
    size = gguf_file.size_bytes(tensors, stored_types(tensors, outtype, arch, fields))
    require_space(job.path.parent, size + _METADATA_BYTES)
    with new_folder(job.path, "export") as folder:
        written = gguf_file.write(folder / file, arch, fields, sources, outtype, ready)
        gguf_file.verify(folder / file, arch, fields, written)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return Exported(job.path, (file, *texts), tuple(notes))


def _folder(write: Callable) -> Callable[[Decoder, _Job], Exported]:
    """Makes an entry of FORMATS for a format that is a folder of safetensors and JSON files: every format but the two
    of GGUF.

    Args:
      write: called with (model, an empty temporary folder, tokenizer, max_shard_bytes): writes the files and returns
        notes.
    Returns:
      the export function (model, job) -> Exported. It has `write` fill a temporary folder, which is renamed to the
        job's path at the end; if `write` raises, the temporary folder is removed and the error raised again.
    """

    def export(model: Decoder, job: _Job) -> Exported:
        with new_folder(job.path, "export") as folder:
            notes = write(model, folder, job.tokenizer, job.max_shard_bytes)
            files = sorted(file.name for file in folder.iterdir())
        return Exported(job.path, tuple(files), tuple(notes))

    return export


def _stored(to: Format) -> Callable[[Decoder, _Job], Exported]:
    """Makes the entry of FORMATS for a quantised format that folders.write_stored writes without further arguments,
    such as bitsandbytes' NF4 or FP8: a function (model, job) that quantises the model, with its adapter merged if it
    has one, and writes the folder. to: the format."""
    return _folder(lambda model, *rest: folders.write_stored(to, _whole(model), *rest))


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
