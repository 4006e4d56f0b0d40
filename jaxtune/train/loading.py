"""Loads the model, the adapter and the tokenizer that a config asks for. `loading` loads the weights in a thread while
rows are read and programs compiled; the train command uses it. `load_model` waits for them; `jaxtune evaluate` and
`jaxtune sensitivity` use it. `adapted` gives a loaded model its head and adapter."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxtune.models.adapters.adapter_files import load_adapter
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.files.quant import compute_in_fp8
from jaxtune.models.hf import Pretrained, model_from_config
from jaxtune.models.lora import get_peft_model
from jaxtune.models.placement import partition
from jaxtune.models.reward import with_head
from jaxtune.train.config import TrainConfig
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.teachers import load_teacher, open_teacher, require_same_tokens, with_teacher
from jaxtune.train.planning import cost
from jaxtune.train.planning.host_table import left_on_host
from jaxtune.train.planning.meshes import mesh_of


def load_model(config: TrainConfig) -> tuple[Decoder, Any]:
    """Loads what a config asks for, the model with its adapter (and the teacher of a distillation, as `loading` does)
    and the tokenizer: (model with its arrays, tokenizer). It waits until the weights are loaded. `jaxtune evaluate` and
    `jaxtune sensitivity` call it; a run uses `loading`, and the other commands load models by other means. Raises
    ValueError as `loading` does, and if the weights or the adapter cannot be loaded."""
    with loading(config, trains=False) as (weights, tokenizer, model):
        return model if weights is None else weights.result(), tokenizer


@contextlib.contextmanager
def loading(config: TrainConfig, trains: bool = True) -> Iterator[tuple[Future[Decoder] | None, Any, Decoder]]:
    """A context that loads the model with its adapter, and the tokenizer, that a config asks for. It gives (weights,
    tokenizer, model). The train command uses it, also for --check and --plan, and so does `load_model`. In a
    distillation the teacher that the config names is attached to the model, unless its log-probabilities are stored
    before the run, or it is the model itself with its adapter off.

    Usually a thread loads the weights while the caller tokenises rows and compiles programs: `weights` is the future of
    the model, and `model` has jax.ShapeDtypeStruct in place of its arrays.
    In three cases `weights` is None, and `model` has its arrays: the model is made from a config with random weights;
    its adapter comes from a file; its checkpoint or its teacher's stores quantised weights, whose shapes only its bytes
    show. The tables of embeddings that a plan may have on the host are left there (left_on_host), unless no step is
    made (trains=False), because only plans of steps have them there.

    Leaving the context cancels the loading that is in progress. Raises ValueError on entering if there is no tokenizer,
    if the teacher's gives a token another id, or if a checkpoint cannot be opened or, in these three cases, loaded;
    errors of the thread are raised by `weights.result()`.
    """
    wanted, teacher = config.model, open_teacher(config)

    def tokenizer(folder: Path | None) -> Any:
        """The run's tokenizer, that of the model's folder `folder` unless model.tokenizer names another. Raises
        ValueError if there is none, or the teacher's differs from it."""
        made = _tokenizer(config, folder)
        require_same_tokens(made, teacher)
        return made

    if wanted.from_config is not None:
        key = jax.random.key(config.seed)
        made = adapted(model_from_config(wanted.from_config, key, "float32"), config)
        yield None, tokenizer(None), with_teacher(made, load_teacher(teacher))
        return
    assert wanted.path is not None
    pretrained = Pretrained(
        wanted.path, config.dtype, wanted.load_in, precision=config.components, positions=wanted.positions
    )
    stored = replace(config, model=replace(wanted, load_in=wanted.load_in or pretrained.stored_in))
    runs = objective_of(config).reference_runs
    chosen, _ = mesh_of(config, lambda: cost.abstract_model(pretrained.config, stored), reference_runs=runs)
    mesh = None if chosen.divides_tensors is None else partition.make_mesh(*chosen.sizes)
    cancelled = threading.Event()

    def load() -> Decoder:
        """Loads and returns the model with its weights, its adapter and its teacher; it runs in the thread, or at once
        if the shapes are not known without it."""
        stay = left_on_host(config, pretrained.config.tie_embeddings) if trains and mesh is None else []
        model = adapted(pretrained.load(cancelled, mesh, stay), config)
        return with_teacher(model, load_teacher(teacher, cancelled, mesh))

    packed = pretrained.packed or (teacher is not None and teacher.packed)
    if packed or (config.adapter is not None and config.adapter.path is not None):
        yield None, tokenizer(pretrained.folder), load()
        return
    with ThreadPoolExecutor(1, "weights") as pool:
        try:
            # Loading starts first. No variable here refers to the model, so that the trainer can free what it copies.
            yield (
                pool.submit(load),
                tokenizer(pretrained.folder),
                cost.abstract_model(pretrained.config, config),
            )
        finally:
            cancelled.set()


def _tokenizer(config: TrainConfig, folder: Path | None) -> Any:
    """The tokenizer in the folder config.model.tokenizer, or, if that is not set, in the model's folder `folder` (None
    for a model that is made from a config). `loading` asks for it. Raises ValueError if there is none."""
    wanted = config.model
    if wanted.tokenizer is not None:
        tokenizer = load_tokenizer(Path(wanted.tokenizer).expanduser())
        if tokenizer is None:
            raise ValueError(f"model.tokenizer = {wanted.tokenizer!r}: no folder with tokenizer files")
        return tokenizer
    tokenizer = None if folder is None else load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"model.path = {wanted.path!r} has no tokenizer files: set model.tokenizer to a folder")
    return tokenizer


def adapted(model: Decoder, config: TrainConfig) -> Decoder:
    """Returns the loaded `model` as `config` asks for a run: with matrix products in FP8 (model.compute), a new head if
    the objective needs one of another kind, and the adapter from adapter.path or a new one. `loading` calls it. It
    shares the arrays of `model` (but not a head that is replaced), which is returned itself if nothing of this is asked
    for. Raises ValueError if the model cannot be changed so."""
    if config.model.compute == "fp8":
        model = compute_in_fp8(model)
    model = with_head(model, objective_of(config).head, config.seed)
    if config.adapter is None:
        return model
    if config.adapter.path is not None:
        return load_adapter(model, config.adapter.path)
    return get_peft_model(model, **config.adapter.settings, seed=config.seed)
