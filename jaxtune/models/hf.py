"""Loads models from Hugging Face folders and saves them, a few tensors at a time, so that host memory never has a model
twice.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.models.adapters import trained_over
from jaxtune.models.adapters.adapter_config import base_of
from jaxtune.models.adapters.adapter_files import Ahead, load_adapter
from jaxtune.models.adapters.trained_over import TrainedOver
from jaxtune.models.components import of_tensors, resolved, set_compute
from jaxtune.models.config import Source
from jaxtune.models.decoder import Decoder, abstract_decoder
from jaxtune.models.files import expert_files, file_plan, load_memory, passthrough, quant, shards, stored_weights
from jaxtune.models.files.digests import base_digest, random_digest
from jaxtune.models.files.file_plan import Group, Planned
from jaxtune.models.files.folders import new_folder, require_new
from jaxtune.models.files.gguf_reading import gguf_entries
from jaxtune.models.files.model_folder import (
    INDEX,
    WEIGHTS,
    is_gguf,
    load_tokenizer,
    read_config,
    read_generation_config,
    read_json,
    resolve_folder,
    save_companions,
    weight_entries,
    write_json,
)
from jaxtune.models.files.positions import stretched
from jaxtune.models.files.reading import read_tensors
from jaxtune.models.files.stored_weights import StoredEntry
from jaxtune.models.files.tensor_entries import dtype_name, is_kept_packed, listed, match, weight_name
from jaxtune.models.files.weights import Weights, tensors_of
from jaxtune.models.lora import freeze, matrices
from jaxtune.models.placement import partition
from jaxtune.models.placement.streams import declared_as_placed, host_shardings, streamed_layers
from jaxtune.models.precision import DTYPES
from jaxtune.models.registry import (
    config_from_hf,
    family,
    is_nested,
    tensor_names,
    text_config,
    text_tensor_name,
    tower_config,
)
from jaxtune.pallas.formats import FORMATS, Stored, format_of
from jaxtune.system import terminal, timing
from jaxtune.system.disk import require_room

_ROUTERS = (".mlp.gate.weight", ".router.proj.weight")  # endings of the names of routers that files may quantise
_DTYPE = "bfloat16"  # the default

# (a model's shapes, the bytes of device memory that its weights leave free or None if unknown, waits for the tokenizer)
type Beside = Callable[[Decoder, float | None, Callable[[], Tokenizer | None]], object]


# ---- loading


class Pretrained:
    """A checkpoint folder whose config and weight headers have been read and checked, before any tensor is read. The
    errors are those of from_pretrained.

      path: a folder, a hub name or a GGUF file; no PEFT folder.
      dtype: of weights and compute: "bfloat16", "float16" or "float32".
      load_in: the format to which linears and experts are quantised; None: only `precision` quantises. Beside weights
        that stay quantised (`packed`) nothing else is quantised.
      max_length: tokens of the longest row, which must have positions; None: not checked.
      precision: {pattern over names: dtype or format}, which cannot name weights that are `packed`.
      positions: {"rope_scaling", "max_position_embeddings"} in place of the files' (files/positions.py).
      pictures: whether the tower is loaded too.

    Attributes:
      packed: whether the checkpoint has quantised weights that stay so in the model.
      stored_in: the format of these; None if `packed` is False.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        dtype="bfloat16",
        load_in: str | None = None,
        max_length: int | None = None,
        precision: Mapping[str, str] = types.MappingProxyType({}),
        positions: Mapping[str, Any] = types.MappingProxyType({}),
        pictures: bool = False,
    ):
        quant.check_load_in(load_in)
        self._dtype = dtype_name(dtype)
        self.folder = folder = resolve_folder(path)
        outer, stretch = read_config(folder), {key: value for key, value in positions.items() if value is not None}
        try:
            outer = stretched(outer, stretch.get("rope_scaling"), stretch.get("max_position_embeddings"))
            hf = text_config(outer)
            self.config = config = config_from_hf(hf)
            self.tower = tower = tower_config(outer) if pictures else None
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        self._require_positions(max_length)
        entries = {} if is_gguf(folder) else weight_entries(folder)
        if entries and config.num_layers > len(entries):
            raise ValueError(
                f"{folder}: config.json: num_hidden_layers = {config.num_layers}: the weights are {len(entries)} "
                "tensors, fewer than one a layer; correct it, or fetch the weights again"
            )
        model = abstract_decoder(config, self._dtype, tower)
        words = resolved(model, precision)
        set_compute(model, words)
        self._graph, state = nnx.split(model)
        name_of = tensor_names(model)
        self._variables = {name_of(where): (where, variable) for where, variable in nnx.to_flat_state(state)}
        shapes = {name: variable.get_value().shape for name, (_, variable) in self._variables.items()}
        if is_gguf(folder):
            entries = gguf_entries(folder, config, shapes)
        entries, passthrough_parts = passthrough.divide(entries, config, hf, outer, tower)
        generation = read_generation_config(folder)
        positions_text = json.dumps(stretch) if stretch else None
        nested = tower is not None or is_nested(outer)
        self._source = Source(os.fspath(path), json.dumps(hf), generation, passthrough_parts, nested, positions_text)
        if hf is not outer:
            renamed = {text_tensor_name(name, tower): entry for name, entry in entries.items()}
            dropped = tuple(name for name in entries if text_tensor_name(name, tower) is None)
            self._source = dataclasses.replace(self._source, dropped=dropped)
            entries = {name: entry for name, entry in renamed.items() if name is not None}
        unused = family(config.family).unused_tensors(config)
        entries = stored_weights.gather({name: entry for name, entry in entries.items() if not name.startswith(unused)})
        if config.moe is not None:
            files = family(config.family).expert_files
            entries = expert_files.gather_experts(entries, files, config.moe.num_experts)
        self._entries = entries = match(shapes, entries, config.tie_embeddings, folder)
        self._quantizable = {weight_name(name) for name, matrix in matrices(model) if matrix.quantizable}
        packed = self._kept_packed(load_in)
        self._kept, self.packed = frozenset(packed), bool(packed)
        formats = {name: entry.format_name for name, entry in entries.items() if isinstance(entry, StoredEntry)}
        self.stored_in = min((formats[name] for name in packed), default=None)
        quant.check_stored(folder, hf, formats, packed, load_in, passthrough.stored_in(passthrough_parts))
        # The 16-bit weights of a checkpoint that has quantised ones were left so on purpose.
        words = words if packed else resolved(model, precision, load_in)
        named = of_tensors(model, words, {name: where for name, (where, _) in self._variables.items()})
        self._encoded = {name: word for name, word in named.items() if word in FORMATS}
        if packed and (wrong := packed & named.keys() or self._encoded.keys()):
            clause = "which" if wrong <= packed else "in a format, beside weights that"
            raise ValueError(
                f"{folder}: precision names {listed(wrong)}, {clause} the checkpoint itself stores quantised: leave it "
                "out of the map, or take the 16-bit original"
            )
        self._dtypes = {name: DTYPES[word] for name, word in named.items() if word in DTYPES}
        # Weights that are quantised on loading are no longer on the grid to which QAT rounded them.
        self._qat = None if self._encoded else quant.grid_of(f"{folder / 'config.json'}", outer)

    def _require_positions(self, max_length: int | None) -> None:
        most = self.config.context_length
        if max_length is not None and not 0 < max_length <= most:
            raise ValueError(
                f"max_length {max_length} does not fit {self.folder}, which was made for {most} positions: "
                "rope_scaling, such as {'rope_type': 'yarn', 'factor': 2.0}, or max_position_embeddings gives it more"
            )

    def _kept_packed(self, load_in: str | None) -> set[str]:
        """Names of the weights that stay quantised as they are stored."""
        packed = {name for name, entry in self._entries.items() if is_kept_packed(entry, load_in)}
        # Linears in transformers 4 (the first) or also in 5; here they are small arrays that stay in 16 bits.
        packed -= {name for name in packed if self.config.moe is not None and name.endswith(_ROUTERS)}
        packed -= {name for name in packed if self._in_tower(name)}  # which computes in 16 bits
        if odd := packed - self._quantizable:
            raise ValueError(f"{self.folder}: {listed(odd)} is quantised; only linears of layers can be")
        return packed

    def device_bytes(self, load_in: str | None = None, stay: Collection[str] = ()) -> int:
        """The bytes of the whole model on one device, from the files' headers.

        load_in: None: as `load` returns it; a format: with all linears and experts in it.
        stay: names of tensors in host memory, not counted.
        """
        shapes = {name: v.get_value().shape for name, (_, v) in self._variables.items() if name not in stay}
        encoded = self._encoded if load_in is None else dict.fromkeys(self._quantizable, load_in)
        return load_memory.load_bytes(shapes, self._entries, self._dtype, encoded, self._kept, self._dtypes)

    def streaming(self, level: int) -> list[str]:
        """Names of the matrices in the layers that stream at a level (`streamed_layers`)."""
        layers = {("layers", index) for index in streamed_layers(level, self.config.num_layers)}
        variables = self._variables.items()
        return [name for name, (path, v) in variables if path[:2] in layers and v.get_value().ndim > 1]

    @property
    def source(self) -> Source:
        """Of the model that `load` makes."""
        return self._source

    def _in_tower(self, name: str) -> bool:
        return self._variables[name][0][0] == "vision"

    def load(
        self,
        cancelled: threading.Event | None = None,
        mesh: jax.sharding.Mesh | None = None,
        stay: Collection[str] = (),
        level: int = 0,
    ) -> Decoder:
        """Reads the weights. They are all trainable, or all frozen if any is quantised; a tower's are frozen.

          cancelled: once another thread sets it, the load ends early with a CancelledError.
          mesh: the devices over which the model is divided; a divided tensor is never whole anywhere, unless it is
            quantised. None: the default device has the model.
          stay: Hugging Face names of tensors that stay in host memory, as numpy arrays, unless they are stored
            quantised.
          level: of how many layers the matrices go to pinned host memory and stream; without a mesh.

        Raises ValueError for numbers that are not finite and, without a mesh, for too little memory on the first
        device.
        """
        stay = [name for name in stay if not isinstance(self._entries.get(name), StoredEntry)]
        pinned = {name: functools.partial(host_shardings, self._variables[name][1]) for name in self.streaming(level)}
        if mesh is None:
            how = next(iter(self._encoded.values()), None) or self.stored_in or self._dtype
            elsewhere = [*stay, *pinned]
            nf4 = None if self.packed or how == "nf4" else functools.partial(self.device_bytes, "nf4", elsewhere)
            with timing.phase("devices"):
                load_memory.require_room(self.folder, self.device_bytes(None, elsewhere), how, nf4)

        def where(name: str, tensor):
            if mesh is None:
                return None
            _, variable = self._variables[name]
            return partition.shardings(variable.replace(tensor), mesh).get_value()

        forms = self._encoded, self._kept
        # A text model is the same base with and without its tower.
        text, tower = ({n: e for n, e in self._entries.items() if self._in_tower(n) == of} for of in (False, True))
        arrays, digest = read_tensors(text, self._dtype, *forms, cancelled, where, self._dtypes, stay, pinned)
        if tower:
            arrays |= read_tensors(tower, self._dtype, *forms, cancelled, where, self._dtypes, stay)[0]
        model = self._model(arrays)
        model.base_fingerprint, model.base_digest = digest.sampled.hex(), base_digest(self.config, digest.whole)
        return model

    def shapes(self) -> Decoder | None:
        """The model that `load` makes on one device, as jax.ShapeDtypeStructs; None if the checkpoint stores quantised
        weights, whose shapes only their bytes show.
        """
        if self.packed:
            return None

        def of(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct | Stored:
            if name in self._encoded:
                return load_memory.encoded_shapes(shape, self._dtype, self._encoded[name])
            return jax.ShapeDtypeStruct(shape, self._dtypes.get(name, self._dtype))

        return self._model({name: of(name, v.get_value().shape) for name, (_, v) in self._variables.items()})

    def _model(self, values: Mapping[str, object]) -> Decoder:
        """values: {name: array, or its shape}."""
        state = nnx.from_flat_state([(path, v.replace(values[name])) for name, (path, v) in self._variables.items()])
        model = nnx.merge(self._graph, declared_as_placed(state))
        if self.packed or self._encoded:
            model = freeze(model)
        elif model.vision is not None:
            model.vision = freeze(model.vision)
        model.source, model.qat = self._source, self._qat
        return model


def from_pretrained(
    path: str | os.PathLike,
    dtype=None,
    load_in: str | None = None,
    max_length: int | None = None,
    precision: Mapping[str, str] | None = None,
    rope_scaling: Mapping[str, object] | None = None,
    max_position_embeddings: int | None = None,
    pictures: bool = False,
    beside: Beside | None = None,
    streamed: Callable[[Pretrained], int] | None = None,
) -> tuple[Decoder, Any]:
    """Loads a causal language model in Hugging Face's format, a model that scores texts, or an adapter with the base
    that it names, to the default device: (model, tokenizer or None).

    With an adapter only that is trainable; else all weights are, or none if any is quantised. Of a model with a vision
    tower only the text part is loaded, unless it is asked for (`pictures`); save_pretrained copies the towers and
    multi-token prediction layers of Qwen3-Next, Qwen3.5 and Gemma 4 from their files, and drops those of other models.
    For an adapter, None stands for what its folder records of its training.

      path: a folder with config.json and safetensors, a hub name (the local cache comes first), a GGUF file, whose
        numbers are decoded, or a PEFT folder.
      dtype: of weights and compute: "bfloat16" (default), "float16" or "float32".
      load_in: a format to which linears and experts of the layers are quantised (jaxtune/pallas/formats), such as "nf4"
        (bitsandbytes with double quantisation) or "fp8" (e4m3 with a scale per row). A checkpoint stored quantised
        stays so, and another format is refused; but MXFP4 is decoded unless load_in is "mxfp4". "stored" (default):
        only `precision` quantises.
      max_length: tokens of the longest row; more than the model's positions is refused. None: not checked.
      precision: modules stored and computed otherwise (models/precision.py), such as {"lm_head": "fp32", "layers.0.*":
        "bf16"}.
      rope_scaling, max_position_embeddings: in place of config.json's, for longer documents, as in transformers:
        {"rope_type": "yarn", "factor": 4.0}.
      pictures: True loads the tower of Qwen3.5 and 3.6, too, frozen and in 16 bits or `dtype`, so that the model reads
        pictures; an adapter's names are then those of the whole model.
      beside: called in a thread while the weights load, such as to compile, with the model as shapes, its adapter's
        too, the bytes of device memory that it leaves free, or None, and a function that waits for the tokenizer; its
        errors are raised at once. Not called for a checkpoint that is stored quantised, whose shapes only its bytes
        show.
      streamed: says, by the files' headers, of how many layers the weights stay in pinned host memory and stream.

    Raises ValueError for an unsupported model; missing, extra or misshaped tensors; a damaged file; pickles; too little
    memory.
    """
    if base_of(path) is not None:
        longer = rope_scaling, max_position_embeddings
        ahead: list[Ahead] = []

        def of_adapted(shapes: Decoder, room: float | None, tokenizer: Callable[[], Tokenizer | None]) -> None:
            assert beside is not None
            ahead.append(Ahead(shapes, path))
            beside(ahead[0].shapes, room, tokenizer)

        settings = dtype, load_in, max_length, precision, *longer, pictures
        model, tokenizer = load_base(path, *settings, None if beside is None else of_adapted, streamed)
        return ahead[0].over(model) if ahead else load_adapter(model, path), tokenizer
    positions = {"rope_scaling": rope_scaling, "max_position_embeddings": max_position_embeddings}
    pretrained = Pretrained(path, dtype or _DTYPE, _format(load_in), max_length, precision or {}, positions, pictures)
    return _loaded(pretrained, (pretrained.folder,), beside, streamed)


def load_base(
    adapter: str | os.PathLike,
    dtype=None,
    load_in: str | None = None,
    max_length: int | None = None,
    precision: Mapping[str, str] | None = None,
    rope_scaling: Mapping[str, object] | None = None,
    max_position_embeddings: int | None = None,
    pictures: bool = False,
    beside: Beside | None = None,
    streamed: Callable[[Pretrained], int] | None = None,
) -> tuple[Decoder, Any]:
    """Loads an adapter's base without the adapter, as it was in training if the adapter's folder records that: (base,
    the adapter folder's tokenizer, else the base's, or None). FP8 products of training are FP8 again, unless load_in is
    another format. Errors are those of from_pretrained.

      adapter: a PEFT folder, which names the base.
      dtype: of weights and compute: "bfloat16", "float16" or "float32".
      load_in: the format to which linears and experts are quantised, such as "nf4"; "stored": none.
      max_length: tokens of the longest row; more than the base's positions is refused. None: not checked.
      precision: {pattern over names: dtype or format} of modules stored and computed otherwise.
      rope_scaling, max_position_embeddings: in place of config.json's, for longer documents.
      pictures: whether the tower is loaded too.
      beside, streamed: as for from_pretrained.

    dtype, load_in and precision that are None, and rope_scaling and max_position_embeddings if both are, stand for what
    the folder records of the training, else for the base's own.
    """
    folder = Path(adapter).expanduser()
    base, over = base_of(adapter), trained_over.read(folder) or TrainedOver()
    assert base is not None
    base_format = over.load_in if load_in is None else _format(load_in)
    dtype = dtype_name(dtype or over.dtype or _DTYPE)
    words = over.words(dtype, base_format) if precision is None else precision
    positions = {"rope_scaling": rope_scaling, "max_position_embeddings": max_position_embeddings}
    if rope_scaling is None and max_position_embeddings is None:
        positions = over.positions
    pretrained = Pretrained(base, dtype, base_format, max_length, words, positions, pictures)
    in_fp8 = over.compute == "fp8" and base_format == over.load_in
    changed = quant.compute_in_fp8 if in_fp8 else _unchanged
    return _loaded(pretrained, (folder, pretrained.folder), beside, streamed, changed)


def _format(load_in: str | None) -> str | None:
    return None if load_in == "stored" else load_in


def _unchanged(model: Decoder) -> Decoder:
    return model


def _loaded(
    pretrained: Pretrained,
    tokenizers: Sequence[Path],
    beside: Beside | None,
    streamed: Callable[[Pretrained], int] | None,
    changed: Callable[[Decoder], Decoder] = _unchanged,
) -> tuple[Decoder, Any]:

    def first() -> Any:
        return next((tokenizer for folder in tokenizers if (tokenizer := load_tokenizer(folder)) is not None), None)

    cancelled = threading.Event()

    def call_beside(room: float | None) -> None:
        try:
            if beside is not None and (shapes := pretrained.shapes()) is not None:
                beside(changed(shapes), room, tokenizer.result)
        except BaseException:
            cancelled.set()
            raise

    pool = ThreadPoolExecutor(2, "beside loading")
    try:
        tokenizer = pool.submit(first)  # importing transformers takes seconds
        with timing.phase("devices"):
            free = load_memory.free_bytes()
        ends = pool.submit(call_beside, None if free is None else float(free - pretrained.device_bytes()))
        try:
            model = changed(pretrained.load(cancelled, level=0 if streamed is None else streamed(pretrained)))
        except CancelledError:
            ends.result()  # raises why
            raise
        with timing.phase("wait", "the tokenizer"):
            loaded = tokenizer.result()
        with timing.phase("wait", "programs"):
            ends.result()
        return model, loaded
    finally:
        pool.shutdown(wait=False)  # an error of loading is raised at once


def model_from_config(
    config: str | os.PathLike | Mapping[str, Any], key: jax.Array, dtype="float32", pictures: bool = False
) -> Decoder:
    """A model with random weights, all trainable, for training from scratch. It records config and key, so that runs
    and adapters recognise it.

      config: a config.json (its path or folder), or its parsed content.
      key: draws the weights.
      dtype: of the weights as stored.
      pictures: whether the model has the config's tower, so that it reads pictures; it is saved with the processors'
        configs of the config's folder.

    Raises ValueError for an unsupported config, or one that asks for quantisation.
    """
    folder = None
    if isinstance(config, Mapping):
        outer, where = dict(config), "a config"
    else:
        file = Path(config)
        json_file = file.is_file() and not is_gguf(file)
        outer, where = read_json(file) if json_file else read_config(file), os.fspath(config)
        folder = file.parent if json_file else file
    hf, tower = text_config(outer), tower_config(outer) if pictures else None
    if hf.get("quantization_config"):
        raise ValueError(f"{where}: a model with random weights is not quantised; remove quantization_config")
    model = Decoder(config_from_hf(hf), key, dtype_name(dtype), tower)
    model.source = Source(path=where, config=json.dumps(hf))
    if tower is not None:
        passthrough_files = passthrough.around_tower(outer, folder)
        model.source = dataclasses.replace(model.source, passthrough=passthrough_files, nested=True)
    model.base_digest = random_digest(model.config, key, model.dtype)
    return model


# ---- saving


def hf_config_of(model: Decoder, tokenizer=None) -> dict[str, Any]:
    """The config.json to save: the one that the model was made from, or a new one if the model's config has changed
    since, with the model's dtype, architectures, quantisation and QAT grid. With a vision tower's passthrough tensors
    it is the config of the whole model.

      tokenizer: gives ids of special tokens that the config lacks.

    Raises ValueError for several quantised formats, or a QAT grid that model.dtype cannot represent.
    """
    new_hf = family(model.config.family).to_hf(model.config)
    source = json.loads(model.source.config) if model.source is not None else {}
    if source and config_from_hf(source) == model.config:
        hf = source
    else:
        hf = new_hf | {key: source[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in source}
    # auto_map names code files, which are not saved.
    hf = {key: value for key, value in hf.items() if key not in ("auto_map", "quantization_config", "qat")}
    hf["architectures"] = new_hf["architectures"]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if hf.get(key) is None and tokenizer is not None:
            hf[key] = getattr(tokenizer, key, None)
    padding = getattr(tokenizer, "pad_token_id", None)
    if padding is not None and not model.config.head.is_text:
        hf["pad_token_id"] = padding  # the scored token is the last that is not this one
    hf |= dict.fromkeys({"dtype", "torch_dtype"} & hf.keys() or {"torch_dtype"}, model.dtype)
    qat = quant.qat_config(model)
    if qat is not None:
        hf["qat"] = qat
    quantization = quant.quantization_config(model)
    if quantization is not None:
        files = family(model.config.family).expert_files
        if files is not None and files.module:  # routers are linears in transformers 4 and in vLLM
            modules = dict.fromkeys((files.module, "mlp", dict(model.config.module_names).get("mlp", "mlp")))
            gates = [f"model.layers.{i}.{m}.gate" for m in modules for i in range(model.config.num_layers)]
            for key in set(passthrough.SKIPPED) & set(quantization):
                quantization[key] = [*quantization[key], *gates]
        hf["quantization_config"] = quantization
    return passthrough.whole_config(
        hf, new_hf, model.config, None if model.source is None else model.source.passthrough
    )


def _group(name: str, value: Any, make: Callable[[], Any], dtype: np.dtype, files) -> Group:
    """The file tensors as which one tensor is written. ValueError for experts that the family cannot store."""
    if isinstance(value, Stored):
        pieces = None
        if ".experts." in name and not format_of(value).layout(value).whole_experts:
            if files is None:
                raise ValueError(
                    f"save_pretrained: {name} is quantised, and no checkpoint of this family stores its experts so: "
                    "use dequantize first (jaxtune.models.files.quant)"
                )
            pieces = expert_files.pieces_of(name, value.shape, files)
        return stored_weights.group(name, value, make, pieces)
    if files is not None and ".experts." in name and not files.quantised_only:
        return Group(make, expert_files.split_experts(name, value, dtype, files))
    if files is not None and files.module:
        name = name.replace(".mlp.", f".{files.module}.")
    return file_plan.single_tensor_group(name, value.shape, dtype, make, lambda tensor: tensor.astype(dtype))


def save_pretrained(
    model: Decoder, path: str | os.PathLike, tokenizer=None, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Writes a model as a Hugging Face folder that transformers loads. The folder, new or empty before, appears
    complete or not at all.

    Weights are in model.dtype, quantised ones in their format's layout: NF4 as bitsandbytes has it (experts as in
    transformers 4, because 5 has no 4-bit experts), FP8 as Qwen's or compressed-tensors'. Tensors are computed one at a
    time; host memory also has those that wait to be written (256 MiB, or one larger tensor).

      path: the folder.
      tokenizer: saved with the model; None: none is.
      max_shard_bytes: larger weights are divided into several files with an index.

    Raises ValueError for adapters that are not merged, a model prepared for QAT, weights or a config that files cannot
    express, a path in use, or too little space.
    """
    save_weights(Weights(model), path, tokenizer, max_shard_bytes)


def save_weights(
    weights: Weights, path: str | os.PathLike, tokenizer=None, max_shard_bytes: int = 5_000_000_000
) -> None:
    """save_pretrained for a model some of whose tensors are computed only when they are written (Weights), so that a
    model with merged adapters need not be in memory whole.

      weights: the model, with functions that compute some of its tensors.
      path: the folder, new or empty before.
      tokenizer: a Hugging Face tokenizer, saved with the model; None: none is.
      max_shard_bytes: of one file; a tensor that is larger has a file of its own.
    """
    planned = checkpoint_tensors(weights)
    require_room(require_new(path, "save_pretrained").parent, file_plan.size_bytes(planned))
    with new_folder(path, "save_pretrained") as folder:
        write_checkpoint(folder, planned, hf_config_of(weights.model, tokenizer), max_shard_bytes)
        write_companions(folder, weights.model, tokenizer)


def checkpoint_tensors(weights: Weights) -> Planned:
    """Plans all tensors of a checkpoint, passthrough tensors included, in the order of the files: {Hugging Face's name
    of a model's tensor: the Group of its file tensors}. Nothing is computed yet.

    Raises ValueError as save_pretrained does, and for a passthrough tensor that its file no longer has.
    """
    model = weights.model
    quant.check_written(model)
    files = family(model.config.family).expert_files
    planned = {
        name: _group(name, variable.get_value(), weights.maker(name, variable), jnp.dtype(model.dtype), files)
        for name, variable in tensors_of(model).items()
    }
    parts = None if model.source is None else model.source.passthrough
    return passthrough.with_passthrough(planned, parts, None if model.vision is None else model.vision.config)


def write_checkpoint(
    folder: Path, planned: Planned, hf: Mapping[str, Any], max_shard_bytes: int
) -> dict[str, shards.Written]:
    """Writes weights, their index if there are several files, and config.json (`hf`), and shows progress. Returns
    {tensor's name in the files: shape, dtype and checksums}.

      folder: exists, and has no weights yet.
      planned: from checkpoint_tensors; one tensor is computed at a time.
      hf: the content of config.json.
      max_shard_bytes: of one file; a tensor that is larger has a file of its own.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes = {max_shard_bytes}: must be positive")
    sizes = {name: group.size_bytes for name, group in planned.items()}
    files = shards.plan_shards(sizes.items(), max_shard_bytes)
    weight_map, written = {}, {}
    with terminal.progress(f"writing {folder.name}", sum(sizes.values())) as advanced:
        for number, names in enumerate(files, 1):
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else WEIGHTS
            tensors = [(key, t.shape, t.dtype) for name in names for key, t in planned[name].tensors.items()]
            arrays = itertools.chain.from_iterable(planned[name].arrays() for name in names)
            written |= shards.write_file(folder / file, tensors, lambda _, turn=arrays: next(turn)[1], {}, advanced)
            weight_map |= dict.fromkeys((key for key, *_ in tensors), file)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)
    write_json(folder / "config.json", hf)
    return written


def write_companions(folder: Path, model: Decoder, tokenizer: Any) -> None:
    """Writes generation_config.json and processors' configs as the source had them, and the tokenizer's files.

    folder: the saved model's.
    model: the one whose source's files are written.
    tokenizer: a Hugging Face tokenizer; None: none is written.
    """
    save_companions(folder, model.source.companions if model.source is not None else (), tokenizer)
