"""Models in GGUF files. The gguf package parses them and decodes their blocks."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from jaxtune.models.config import DecoderConfig
from jaxtune.models.families.common.key import Config, Fields
from jaxtune.models.files import headers
from jaxtune.models.files.gguf_config import config_of
from jaxtune.models.files.gguf_metadata import Metadata
from jaxtune.models.files.gguf_names import (
    ARCHITECTURES,
    GATE_UP,
    HEADS,
    ROPE_FREQUENCIES,
    ROPE_LONG,
    ROPE_SHORT,
    Architecture,
    Names,
    gate_and_up,
    heads_of,
    in_halves,
)
from jaxtune.models.files.tensor_entries import listed
from jaxtune.models.registry import family
from jaxtune.system.extras import install

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

Combine = Callable[[list[np.ndarray]], np.ndarray]  # of a tensor's sources in a file


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A parsed file, whose tensors' bytes stay mapped."""

    file: Path
    fields: Config
    tensors: Mapping[str, ReaderTensor]


@dataclasses.dataclass(frozen=True)
class GgufEntry(headers.TensorEntry):
    """A tensor of the model in a GGUF file; dtype and size_bytes are those of its decoded numbers."""

    assemble: Callable[[], np.ndarray]


def opened(file: Path) -> _Opened:
    """Parses a GGUF file, cached while it is the same. Raises ValueError for a damaged file, one of several parts, or
    without the gguf package.
    """
    stat = os.stat(file)
    return _parsed(file, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _parsed(file: Path, size: int, changed: int) -> _Opened:
    """The file as gguf reads it; ValueError for a damaged one, or without the package."""
    try:
        import gguf
    except ImportError:
        raise ValueError(f"{file}: reading GGUF files needs the gguf package: {install('gguf')}") from None
    try:
        parsed = gguf.GGUFReader(file)
        fields = {key: field.contents() for key, field in parsed.fields.items()}
    except Exception as error:  # numpy's and struct's, by where the file ends
        message = " ".join(str(error).split())[:200]
        raise ValueError(f"{file}: not a whole GGUF file: {type(error).__name__}: {message}; fetch it again") from None
    if int(fields.get("split.count") or 1) > 1:
        raise ValueError(f"{file}: one part of {fields['split.count']}: join them with llama-gguf-split --merge")
    tensors = {tensor.name: tensor for tensor in parsed.tensors}
    if HEADS[0] not in tensors:
        raise ValueError(f"{file}: no {HEADS[0]} in it: an adapter or another part of a model; give the model's file")
    for tensor in tensors.values():
        if tensor.data.nbytes != tensor.n_bytes:
            raise ValueError(f"{file}: ends before {tensor.name} does; fetch it again")
    return _Opened(file, fields, tensors)


def metadata(file: Path) -> Metadata:
    parsed = opened(file)
    shapes = {name: tuple(int(size) for size in tensor.shape[::-1]) for name, tensor in parsed.tensors.items()}
    return Metadata(
        str(file), parsed.fields, shapes, lambda name: _decoded(parsed.tensors[name]), _tied(parsed.tensors)
    )


def read_gguf_config(file: Path) -> Fields:
    return config_of(metadata(file))


def end_tokens(file: Path) -> list[int]:
    """Ids of tokens that end a text, a turn or a message."""
    fields = opened(file).fields
    ids = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(int(number) for number in ids if number is not None))


def _tied(tensors: Mapping[str, ReaderTensor]) -> bool:
    """Whether there is no head, or one with the embedding's bytes."""
    embedding, head = (tensors.get(name) for name in HEADS)
    if head is None or embedding is None:
        return True
    return head.tensor_type == embedding.tensor_type and np.array_equal(head.data, embedding.data)


def _decoded(tensor: ReaderTensor) -> np.ndarray:
    """Plain types stay as they are, others become float32."""
    import gguf

    shape = tuple(int(size) for size in tensor.shape[::-1])
    if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
        return np.ascontiguousarray(tensor.data).view(ml_dtypes.bfloat16).reshape(shape)
    if tensor.tensor_type in (gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32):
        return np.asarray(tensor.data).reshape(shape)
    return gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)


def gguf_entries(
    file: Path, config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, headers.TensorEntry]:
    """{Hugging Face's name: entry} of the model's tensors. Raises ValueError for tensors that are missing, not the
    model's, of another shape, or in a type that gguf does not decode.

      file: the GGUF file.
      config: of the model, from the same file.
      shapes: {Hugging Face's name: shape} of the model's tensors.
    """
    parsed, arch = opened(file), ARCHITECTURES[config.family]
    names, used_names, missing = Names(arch, config.num_layers), {ROPE_FREQUENCIES, ROPE_LONG, ROPE_SHORT}, []
    used_names |= {names.find(f"{prefix}weight") or "" for prefix in family(config.family).unused_tensors(config)}
    if config.tie_embeddings:
        used_names.add(HEADS[1])
    entries: dict[str, headers.TensorEntry] = {}
    for name, shape in shapes.items():
        sources, combine = _sources(name, shape, config, arch, names)
        used_names |= set(sources)
        if absent := [source for source in sources if source not in parsed.tensors]:
            missing += absent
            continue
        entries[name] = _entry(parsed, name, shape, sources, combine)
    unexpected = parsed.tensors.keys() - used_names
    for problem, tensors in (("lacks", missing), ("has, and this family does not,", unexpected)):
        if tensors:
            raise ValueError(f"{file}: {problem} {listed(tensors)}; take the model's safetensors folder")
    return entries


def _sources(
    name: str, shape: tuple[int, ...], config: DecoderConfig, arch: Architecture, names: Names
) -> tuple[list[str], Combine | None]:
    """(the file's tensors that make a tensor of the model, how to combine them; None: as it is)."""
    moe = config.moe
    if ".experts." in name and moe is not None and not name.endswith("per_expert_scale"):
        bias = name.endswith("_bias")
        module, ending = name.removesuffix("_bias"), ".bias" if bias else ".weight"
        turned = moe.transposed and not bias
        if arch.fused_experts or not module.endswith(GATE_UP):
            return [names(module + ending)], _turned if turned else None
        stem, half = module.removesuffix("gate_up_proj"), (shape[-1] if turned or bias else shape[1]) // 2
        rows = gate_and_up(moe.interleaved, half)
        combine = functools.partial(_joined, rows=rows, turned=turned)
        return [names(f"{stem}{projection}_proj{ending}") for projection in ("gate", "up")], combine
    heads = heads_of(config, arch, name)
    if heads is not None:
        return [names(name)], lambda arrays: in_halves(arrays[0], heads)
    if config.norm_offset and name.endswith("norm.weight"):
        offset = np.float32(config.norm_offset)
        return [names(name)], lambda arrays: arrays[0].astype(np.float32) - offset
    return [names(name)], None


def _turned(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0].swapaxes(1, 2)


def _joined(arrays: list[np.ndarray], rows: tuple[slice, slice], turned: bool) -> np.ndarray:
    gate, up = arrays
    gate_up = np.empty((gate.shape[0], 2 * gate.shape[1], *gate.shape[2:]), np.result_type(gate, up))
    gate_up[:, rows[0]], gate_up[:, rows[1]] = gate, up
    return gate_up.swapaxes(1, 2) if turned else gate_up


def _entry(
    parsed: _Opened, name: str, shape: tuple[int, ...], sources: list[str], combine: Combine | None
) -> GgufEntry:
    """The entry of a tensor that is one or several of the file's; a wrong shape raises when it is read."""
    tensors = [parsed.tensors[source] for source in sources]
    kinds = {tensor.tensor_type.name for tensor in tensors}
    for tensor in tensors:
        _require_decodable(parsed.file, tensor)
    changed = combine is not None and name.endswith("norm.weight")
    dtype = kinds.pop() if len(kinds) == 1 and kinds <= headers.DTYPES.keys() and not changed else "F32"

    def assemble() -> np.ndarray:
        arrays = [_decoded(tensor).astype(headers.DTYPES[dtype], copy=False) for tensor in tensors]
        array = arrays[0] if combine is None else combine(arrays)
        if array.shape != shape:
            raise ValueError(f"{parsed.file}: {name} is {list(array.shape)}, and the model's is {list(shape)}")
        return np.ascontiguousarray(array)

    size = int(np.prod(shape)) * headers.DTYPES[dtype].itemsize
    return GgufEntry(name, dtype, shape, parsed.file, int(tensors[0].data_offset), size, assemble)


def _require_decodable(file: Path, tensor: ReaderTensor) -> None:
    """Refuses a type that gguf does not decode, by the first row."""
    if tensor.tensor_type.name in headers.DTYPES:
        return
    import gguf

    try:
        gguf.dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(
            f"{file}: {tensor.name} is stored as {tensor.tensor_type.name}, which the gguf package does not decode; "
            "take a file in f16, bf16, q8_0, q4_0, q4_1, q4_k or q6_k"
        ) from None


def reader(entry: GgufEntry) -> Callable[[int, int], np.ndarray]:
    """(start, stop) -> these bytes of the tensor, which is decoded once."""
    decoded = functools.cache(lambda: entry.assemble().reshape(-1).view(np.uint8))
    return lambda start, stop: decoded()[start:stop]
