"""The one file of the harness that knows the engine's inside: what a refactoring of it has to follow.

Everything else in this folder asks for models, runs and programs here, and reads what comes back by the names that
tensors have in files.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_weights import random_tensor
from safetensors.numpy import load_file
from tiny_models import named

from jaxtune.models.adapters.adapter_files import save_adapter
from jaxtune.models.files.quant import quantize
from jaxtune.models.hf import model_from_config, save_pretrained
from jaxtune.models.lora import get_peft_model, has_adapter
from jaxtune.models.registry import config_from_hf
from jaxtune.train.config import MemoryConfig, TrainConfig
from jaxtune.train.data import TokenDataset
from jaxtune.train.planning import choice as choosing
from jaxtune.train.planning import devices
from jaxtune.train.planning.cost import abstract_model, step_cost
from jaxtune.train.planning.forecasts import Forecast, forecast
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.program.leaves import Leaves
from jaxtune.train.trainer import Trainer


def make_model(hf: dict, load_in: str | None = None, adapter: dict | None = None):
    """A float32 model of a config.json with weights that follow from their names alone, and its adapter."""
    # Shapes only: to draw weights that are replaced would compile a program for each shape.
    model = nnx.eval_shape(lambda: model_from_config(hf, jax.random.key(0)))
    for name, variable in named(model).items():
        variable.set_value(jnp.asarray(random_tensor(name, variable.shape)))
    if load_in is not None:
        model = quantize(model, load_in)
    return model if adapter is None else get_peft_model(model, **adapter)


def saved_tensors(model) -> dict[str, np.ndarray]:
    """{name: float32 array} of what a save of the trained part writes: the adapter, or else all weights."""
    model.dtype = "float32"
    with tempfile.TemporaryDirectory() as folder:
        if has_adapter(model):
            save_adapter(model, Path(folder) / "saved")
            return load_file(Path(folder) / "saved" / "adapter_model.safetensors")
        save_pretrained(model, Path(folder) / "saved")
        return load_file(Path(folder) / "saved" / "model.safetensors")


@dataclasses.dataclass(frozen=True)
class Run:
    """gradients: {name: array} of the mean loss of step 1, before clipping. history: the Trainer's lines. weights:
    {name: array} after the last step."""

    gradients: dict[str, np.ndarray]
    history: list[dict]
    weights: dict[str, np.ndarray]


def train(model, config: TrainConfig, rows: TokenDataset, held_out: TokenDataset | None) -> Run:
    """A run of the real Trainer, and the gradients of its first step."""
    trainer = Trainer(model, None, config, rows, held_out)
    state, sums, frozen = trainer.model.first_state(trainer.engine)
    programs = trainer.engine.compile(state, sums, frozen)
    parts, _ = trainer.engine.load_step(0)
    first = trainer.engine.at(programs, 0)
    flat = *reversed(trainer.engine.flat(state, sums)), Leaves.of(frozen)
    sums = trainer.engine.accumulate(first, *flat, parts).tree
    sums = jax.jit(trainer.program.total)(sums, state)[0]
    scale = 1.0 / (np.float32(sums.count) * np.float32(state.loss_scale))
    gradients = jax.tree.map(lambda g: jnp.asarray(np.asarray(g, np.float32) * scale), sums.gradients)
    gradients = saved_tensors(nnx.merge(trainer.model.graph, gradients, frozen))
    trainer.engine.fit = lambda *_: programs  # compiled already
    trained = trainer.train()
    return Run(gradients, trainer.history, saved_tensors(trained))


# ---- plans


def device(name: str):
    """A device as the planner sees it, by its data sheet, whatever was measured on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXTUNE_CACHE", "/nonexistent")
        return devices.find_device(name)


def cost(hf: dict, config: TrainConfig):
    """What the planner knows of a step of a model of this config.json."""
    spec = StepSpec.of(config)
    return step_cost(_abstract(config_from_hf(hf), spec.model), spec)


_abstract = functools.cache(abstract_model)  # seconds each, and only read: the cases of a model share it


def choice(parts, config: TrainConfig, name: str) -> Forecast:
    """The planner's choice on a device of this name.

    Raises:
      PlanError: nothing fits.
    """
    where = device(name)
    return choosing.choose(parts, StepSpec.of(config), where, devices.budget(config.memory, where))


def plan_record(parts, config: TrainConfig, name: str) -> dict:
    """The plan chosen and what is predicted of it, in bytes and seconds; or the smallest need, where nothing fits."""
    try:
        found = choice(parts, config, name)
    except choosing.PlanError as error:
        return {"fits": False, "peak_bytes": error.smallest.peak_bytes, **error.smallest.plan.to_record()}
    return found.plan.to_record() | {
        "peak_bytes": found.peak_bytes,
        "host_bytes": found.host_bytes,
        "step_seconds": found.step_seconds,
        "recompute_seconds": found.recompute_seconds,
        "wait_seconds": found.wait_seconds,
    }


# ---- programs for a GPU that is not there


def compiled_programs(target, hf: dict, config: TrainConfig, rows: TokenDataset, layers: int):
    """({"accumulate": compiled, "update": compiled}, text of the plan) of a run's step on `target`, a
    tests.gpu.aot.target.Target: with `layers` of the model's layers, under the plan that is chosen for all of them, but
    for weights that stay whole: they are gathered again, as those of most layers are where memory is short."""
    found = choice(cost(hf, config), config, target.kind)
    programs, _ = few_layers(target, hf, config, rows, layers, found.plan)
    return programs, found.plan.to_record()


def few_layers(target, hf: dict, config: TrainConfig, rows: TokenDataset, layers: int, plan, resident: int = 0):
    """({"accumulate": compiled, "update": compiled}, (bytes by the compiler, by the planner)) of a step of `layers`
    layers under a StepPlan of all of them; resident: layers whose frozen weights are whole on each device."""
    count = len(plan.residuals.layers)
    kept = tuple(plan.residuals.layers[round(i * (count - 1) / (layers - 1))] for i in range(layers))
    residuals = dataclasses.replace(plan.residuals, layers=kept)
    plan = dataclasses.replace(plan, residuals=residuals).at(whole=0, resident=resident)
    config = dataclasses.replace(
        config,
        micro_batches=plan.micro_batches,
        memory=MemoryConfig(plan=plan.text),
        whole_graphs=False,  # or few layers would be launched otherwise than all
    )
    few = hf | {"num_hidden_layers": layers}
    if "layer_types" in few:
        few["layer_types"] = few["layer_types"][:layers]
    model = abstract_model(config_from_hf(few), StepSpec.of(config).model)
    trainer = Trainer(model, None, config, rows, keeps_model=False)
    planner = trainer.planner
    planner.forecast = forecast(planner.cost, plan, device(target.kind))
    # Tensors of all layers would be too many to be stacked.
    trainer.engine.program = dataclasses.replace(trainer.engine.program, stackable=False)
    trainer.engine.follow_plan()
    trainer.engine.use_mesh(target.mesh(config.mesh.data, config.mesh.fsdp))
    with target.lowering():
        programs = trainer.engine.compile(*trainer.model.first_shapes(trainer.engine))
    peaks = planner.compiled_bytes(programs.accumulate, programs.update), planner.forecast.peak_bytes
    return {"accumulate": programs.accumulate, "update": programs.update}, peaks
