"""Loads the model, adapter and tokenizer that a config asks for."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxtune.models.adapters.adapter_files import load_adapter
from jaxtune.models.config import Source
from jaxtune.models.decoder import Decoder
from jaxtune.models.files import load_memory
from jaxtune.models.files.byte_files import IN_FLIGHT_BYTES
from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.heads import Head
from jaxtune.models.hf import Pretrained, model_from_config
from jaxtune.models.placement import partition
from jaxtune.models.reward import with_head
from jaxtune.system import timing, waiting
from jaxtune.train.config import AdapterConfig, MemoryConfig, ModelConfig, TrainConfig
from jaxtune.train.config.tower import with_trained_parts
from jaxtune.train.objectives.checkpoints import Checkpoint, computing
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.teachers import (
    load_teacher,
    open_teacher,
    require_same_pictures,
    require_same_tokens,
    with_teacher,
)
from jaxtune.train.planning import cost
from jaxtune.train.planning.devices import Device, find_device, limit
from jaxtune.train.planning.host_room import HostError, pinnable_bytes
from jaxtune.train.planning.meshes import mesh_of
from jaxtune.train.planning.movables import layers_on_host, left_on_host
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.spec.pictures import reads_pictures, refusal

_MOST_WEIGHTS = 0.8  # of the device's memory: if there are more, plans that fit have some of them elsewhere


@contextlib.contextmanager
def loading(
    config: TrainConfig, trains: bool = True, streams: bool = True
) -> Iterator[tuple[Future[waiting.Handover[Decoder]] | None, Any, Decoder]]:
    """A context of (weights, tokenizer, model), with a distillation's teacher attached unless its values are stored or
    it is the model itself.

    Usually a thread loads: `weights` is a future, and `model` has shapes. `weights` is None and `model` has arrays for
    random weights, an adapter from a file, quantised checkpoints (a teacher's, too), whose shapes only their bytes
    show, and without `trains`. With it, what a plan may have on the host stays there; with `streams` weights may.

    Leaving cancels loading. ValueError without a tokenizer, if the teacher gives a token another id, or if a checkpoint
    cannot be opened or read; the thread's errors come from `weights.result()`.
    """
    model_config, objective = config.model, objective_of(config.objective)
    changes = objective.head, model_config, config.adapter, config.seed
    refused = refusal(objective, config.qat)
    pictures = reads_pictures(model_config, config.data, refused)
    teacher = open_teacher(config.objective, config.dtype, pictures)

    def tokenizer(folder: Path | None, source: Source | None) -> Any:
        loaded = _tokenizer(model_config, folder)
        require_same_tokens(loaded, teacher)
        if pictures and teacher is not None:
            require_same_pictures(loaded, source, teacher.source)
        return loaded

    # No variable here refers to a model's arrays, so that the trainer can free what it copies.
    if model_config.from_config is not None:
        key = jax.random.key(config.seed)
        models = [adapted(model_from_config(model_config.from_config, key, "float32", pictures), *changes)]
        words = tokenizer(None, models[0].source)
        yield None, words, with_teacher(models.pop(), load_teacher(teacher))
        return
    assert model_config.path is not None
    pretrained = Checkpoint(model_config, config.numbers).open(pictures)
    tower = pretrained.tower
    stored = replace(config, model=replace(model_config, load_in=model_config.load_in or pretrained.stored_in))
    with timing.phase("devices"):
        shared = config.shared_by(jax.device_count())
    mesh_config, _ = mesh_of(
        StepSpec.of(shared), lambda: cost.abstract_model(pretrained.config, StepSpec.of(stored, tower=tower).model)
    )
    mesh = None if mesh_config.divides_tensors is None else partition.make_mesh(*mesh_config.sizes)
    alone = partition.mesh_shape(*mesh_config.sizes).size == 1
    cancelled = threading.Event()
    generates = objective.samples or bool(config.evaluation.asking)
    tied = pretrained.config.tie_embeddings and objective.head.is_text
    stay = left_on_host(config.adapter, generates, tied) if trains and mesh is None else []
    # A base that is the reference must not become the model that is scored.
    adaptable = config.adapter is not None or not (trains or objective.reference_is_base)
    able = streams and alone and config.qat is None and not generates and adaptable
    level = streamed_level(config.memory, pretrained, stay) if able else 0
    if level and config.adapter is None:  # an untrained one changes nothing, and all else is frozen
        changes = objective.head, model_config, AdapterConfig(r=1), config.seed

    def load() -> Decoder:
        model = adapted(pretrained.load(cancelled, mesh, stay, level), *changes)
        return with_teacher(model, load_teacher(teacher, cancelled, mesh))

    packed = pretrained.packed or (teacher is not None and teacher.packed)
    if packed or not trains or (config.adapter is not None and config.adapter.path is not None):
        yield None, tokenizer(pretrained.folder, pretrained.source), load()
        return
    with ThreadPoolExecutor(1, "weights") as pool:
        try:
            weights = pool.submit(lambda: waiting.Handover(load()))  # first of all
            shapes = cost.abstract_model(pretrained.config, StepSpec.of(config, tower=tower).model)
            if tower is not None:
                shapes.source = pretrained.source
            with waiting.needing(weights):
                yield weights, tokenizer(pretrained.folder, pretrained.source), shapes
        finally:
            cancelled.set()


def streamed_level(memory: MemoryConfig, pretrained: Pretrained, stay: Sequence[str]) -> int:
    """Of how many layers the matrices are loaded into pinned host memory: memory.plan's, or as many as the host has
    room for if weights take most of the device's memory, from where a plan moves some back. stay: names of tensors in
    other host memory.

    HostError if the host has no room for memory.plan's.
    """
    on_device, layers = float(pretrained.device_bytes(None, stay)), pretrained.config.num_layers
    device = _device()
    beside = pretrained.device_bytes() - on_device + IN_FLIGHT_BYTES
    room = math.inf if device.name == "cpu" else pinnable_bytes(device, beside)

    def pinned(level: int) -> float:
        return _pinned_bytes(pretrained, stay, level)

    asked = 0 if memory.plan is None else min(layers_on_host(memory.plan), layers)
    if memory.plan is None:
        most = limit(memory, device)
        asked = layers if device.link and most is not None and _MOST_WEIGHTS * most < on_device else 0
    level = next(level for level in range(asked, -1, -1) if pinned(level) <= room)
    if memory.plan is not None and level < asked:
        fix = f"streamed={level} or less, or a host with more memory" if level else "a host with more memory"
        raise HostError.of(memory.plan, pinned(asked), room, device, fix)
    return level


def least_streamed_level(pretrained: Pretrained) -> tuple[int, float]:
    """(of the fewest layers that must be in host memory so that rows of a sampler have room, or 0 if the host has none;
    seconds in which their weights cross the link).
    """
    device, layers, weights = _device(), pretrained.config.num_layers, pretrained.device_bytes()
    if not device.link:
        return 0, 0.0
    pinned = [_pinned_bytes(pretrained, (), level) for level in range(layers + 1)]
    arriving = 2 * pinned[-1] / layers
    fits = (load_memory.has_room_to_answer(weights - size + min(arriving, size)) for size in pinned)
    level = next((level for level, fit in enumerate(fits) if fit), 0)
    level = level if pinned[level] <= pinnable_bytes(device, IN_FLIGHT_BYTES) else 0
    return level, pinned[level] / device.link


def _pinned_bytes(pretrained: Pretrained, stay: Sequence[str], level: int) -> float:
    names = [*stay, *pretrained.streaming(level)]
    return float(pretrained.device_bytes(None, stay) - pretrained.device_bytes(None, names))


def _device() -> Device:
    device = jax.local_devices()[0]
    name = "cpu" if device.platform == "cpu" else device.device_kind
    return find_device(name, (device.memory_stats() or {}).get("bytes_limit"))


def _tokenizer(model_config: ModelConfig, folder: Path | None) -> Any:
    """model.tokenizer's, or the one in the model's `folder`."""
    if model_config.tokenizer is not None:
        tokenizer = load_tokenizer(Path(model_config.tokenizer).expanduser())
        if tokenizer is None:
            raise ValueError(f"model.tokenizer = {model_config.tokenizer!r}: no folder with tokenizer files")
        return tokenizer
    tokenizer = None if folder is None else load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"model.path = {model_config.path!r} has no tokenizer files: set model.tokenizer to a folder")
    return tokenizer


def adapted(model: Decoder, head: Head, config: ModelConfig, adapter: AdapterConfig | None, seed: int) -> Decoder:
    """The loaded model as a run needs it: FP8 products (model.compute), the objective's head, adapter, what trains of
    its tower. Shares its arrays; itself if nothing changes. ValueError if it cannot be changed so.
    """
    model = with_head(computing(config, model), head, seed)
    if adapter is not None and adapter.path is not None:
        return load_adapter(model, adapter.path)
    return with_trained_parts(model, config, adapter, seed)
