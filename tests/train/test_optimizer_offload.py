"""Optimizer states in host memory: the same run bit for bit, in and out of checkpoints, with little in flight."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from step_costs import costs_of
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec
from jaxtune.models.files.published import PUBLISHED
from jaxtune.models.lora import get_peft_model
from jaxtune.models.placement import partition
from jaxtune.models.registry import config_from_hf
from jaxtune.train.config import (
    AdapterConfig,
    CheckpointConfig,
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from jaxtune.train.optimizer import optimizer_offload
from jaxtune.train.optimizer.optim import make_optimizer, update_bound
from jaxtune.train.planning import choice, fitting, host_room, plan_text
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.forecasts import forecast
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.program.leaves import Leaves
from jaxtune.train.program.step import StepProgram, Sums
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, make_config

pytestmark = pytest.mark.usefixtures("compiled_in_full")  # runs with and without offloading are equal bit for bit
STATES = "optimizer_states"
LARGE = 4000  # bytes: matrices of the tiny model, but not its norms
ROWS = dataset(documents(40))


@pytest.fixture
def small(monkeypatch):
    """The tiny model's matrices count as large; a few of them make a group, and some are larger than one."""
    monkeypatch.setattr(optimizer_offload, "HOSTED_BYTES", LARGE)
    monkeypatch.setattr(optimizer_offload, "GROUP_BYTES", 30_000)


def trainer_of(folder, name="adamw", offload=True, weights=None, **changes) -> Trainer:
    optim = OptimConfig(name=name, learning_rate=1e-2, weight_decay=0.1, offload=offload, weights=weights)
    # Matrices of 4,096 elements and more, which is where adamw_8bit begins to use 8 bits.
    model = tiny_model(layers=(LayerSpec(),), hidden_size=64, intermediate_size=96, head_dim=32)
    return Trainer(model, None, make_config(folder, optim=optim, **changes), ROWS)


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def stepped(trainer: Trainer):
    """(state after two steps, [loss and gradient norm])"""
    state, sums, frozen = trainer.model.first_state(trainer.engine)
    programs = trainer.engine.compile(state, sums, frozen)
    found = []
    state, sums = trainer.engine.flat(state, sums)
    frozen = Leaves.of(frozen)
    for step in range(2):
        parts, _ = trainer.engine.load_step(step)
        state, sums, latest = programs.update(state, trainer.engine.accumulate(programs, sums, state, frozen, parts))
        found.append((float(latest["loss"]), float(latest["grad_norm"])))
    return state.tree, found


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "weights", "devices"), [("adamw_8bit", "fp32", 1), ("adamw", "bf16", 2), ("lion_8bit", "fp32", 1)]
)
def test_losses_weights_and_states_are_those_of_a_run_without(small, tmp_path, name, weights, devices):
    (state, losses), (want, want_losses) = (
        stepped(trainer_of(tmp_path / str(offload), name, offload, weights, mesh=MeshConfig(data=devices)))
        for offload in (True, False)
    )
    assert losses == want_losses and losses[0] != losses[1]
    same(state, want)
    large = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.nbytes >= LARGE]
    # Moments of embedding, head and a layer's matrices; in one byte the smallest of them are small.
    assert len(large) == (1 + 1 + 7) * (1 if name == "lion_8bit" else 2)
    assert {leaf.sharding.memory_kind for leaf in large} == {"pinned_host"}
    assert (jnp.dtype("uint8") in {leaf.dtype for leaf in large}) == name.endswith("8bit")
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.trainable)} == {"device"}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(want.opt_state)} == {"device"}


@pytest.mark.full
def test_a_run_goes_on_bit_for_bit_with_and_without(small, tmp_path):
    """Four steps at once on the host, then their second half again from the checkpoint, on the device; and back."""
    save = CheckpointConfig(every_steps=2, every_minutes=None, keep=3)
    want = trainer_of(tmp_path / "run", "adamw_8bit", True, checkpoint=save).train()
    folder = tmp_path / "run" / "checkpoints"
    for offload in (False, True):
        shutil.rmtree(folder / "step_00000004")
        resumed = trainer_of(tmp_path / "run", "adamw_8bit", offload, checkpoint=save)
        got = resumed.train()
        assert [line["step"] for line in resumed.history] == [3, 4]
        same(nnx.state(got), nnx.state(want))
        notes = resumed.notes()[0]
        assert notes.endswith(", in host memory") == offload


def test_little_is_on_the_device(monkeypatch):
    """States that come, are worked on or go: three groups at most, or a large tensor's, old and new. The rest is on
    the host; nothing comes or goes but between barriers that all work before and after waits for."""
    monkeypatch.setattr(optimizer_offload, "HOSTED_BYTES", 4)
    monkeypatch.setattr(optimizer_offload, "GROUP_BYTES", 1000)
    sizes = [10, 90, 100, 20, 20, 20, 20, 300, 15, 400, 320, 60, 60, 200, 250]  # elements
    tensors = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]

    def work(index, parameter, states, gradient):
        (moment,) = states[0]
        return parameter + jnp.sin(moment), ([moment * gradient],)

    jaxpr = jax.make_jaxpr(lambda p, s, g: optimizer_offload.update_by_tensor(work, p, s, g, offload=True))(
        tensors, (tensors,), tensors
    ).jaxpr
    here: dict = {}  # {variable: bytes} of states on the device
    done, most, both = 0, 0, 0
    ways = set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "device_put":
            for out, given, space in zip(equation.outvars, equation.invars, equation.params["devices"], strict=True):
                if space == jax.memory.Space.Device:
                    here[out] = 4 * out.aval.size
                else:
                    assert given in here  # it has been worked on
                    here[out] = here.pop(given)
                ways.add((space, out))
        elif name == "optimization_barrier":
            both += len({space for space, _ in ways}) == 2
            gone = {out for space, out in ways if space == jax.memory.Space.Host}
            for old, new in zip(equation.invars, equation.outvars, strict=True):
                if old in here:
                    size = here.pop(old)
                    if old not in gone:
                        here[new] = size
            ways = set()
        elif name == "sin":
            assert here[equation.invars[0]] == 4 * sizes[done]  # in their order
            done += 1
        elif name == "mul":
            here.pop(equation.invars[0])
            here[equation.outvars[0]] = 4 * equation.outvars[0].aval.size
        most = max(most, sum(here.values()))
    assert done == len(sizes) and not here
    assert most <= max(3 * 1000, 2 * 4 * max(sizes))
    assert both >= 4  # most groups come while another goes


def program_of(rate: float, by_tensor: bool, **changes) -> StepProgram:
    config = OptimConfig(**changes)
    schedule = optax.constant_schedule(rate)
    optimizer, bound = make_optimizer(config, schedule), update_bound(config, 1.0)
    return StepProgram(nnx.graphdef(nnx.Module()), optimizer, schedule, bound=bound, by_tensor=by_tensor)


@pytest.mark.parametrize(
    ("rate", "gradient", "weight", "moves"),
    [(1e-3, 1.0, 1.0, True), (1e-3, np.inf, 1.0, False), (1e33, 1.0, 1.0, False), (1.0, 1.0, 3e38, False)],
)
@pytest.mark.parametrize("by_tensor", [False, True])
def test_what_could_overflow_is_known_before_it_moves(by_tensor, rate, gradient, weight, moves):
    program = program_of(rate, by_tensor, weight_decay=0.5)
    parameters = {"a": jnp.full((4, 4), weight), "b": jnp.ones(3)}
    state = program.init(parameters, 0)
    gradients = {"a": jnp.ones((4, 4)).at[1, 2].set(gradient), "b": jnp.ones(3)}
    new, _, metrics = program.update(state, Sums(gradients, jnp.float32(1.0), jnp.float32(1.0)))
    assert bool(metrics["finite"]) == moves == bool((new.trainable["a"] != weight).all())
    assert int(new.skipped) == 1 - moves
    if not moves:
        same((new.trainable, new.opt_state), (state.trainable, state.opt_state))


def test_without_clipping_or_adam_there_is_no_bound():
    assert update_bound(OptimConfig(), None) is None
    assert update_bound(OptimConfig(name="adafactor"), 1.0) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(adapter=AdapterConfig()), "optim.offload = True: the states of adapters are small"),
        (dict(max_grad_norm=None), "max_grad_norm = None: optim.offload needs it"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config("out", optim=OptimConfig(offload=True), **changes)


def test_refusals_of_the_optimizer():
    with pytest.raises(ConfigError, match="optim.offload = True: optim.name = sgd keeps its states on the device"):
        OptimConfig(name="sgd", offload=True)


# ---- the planner


def test_what_is_counted_is_what_the_trainer_holds(small, tmp_path):
    trainer = trainer_of(tmp_path)
    state, _, _ = trainer.model.first_state(trainer.engine)
    parts = trainer.planner.cost
    leaves = jax.tree.leaves(state.opt_state)
    on_host = sum(leaf.nbytes for leaf in leaves if leaf.sharding.memory_kind == "pinned_host")
    assert parts.update.hosted_bytes == on_host > 0
    assert parts.fixed["optimizer states"] == sum(leaf.nbytes for leaf in leaves) - on_host


@pytest.mark.full
def test_8b_without_an_adapter():
    """On one H200 AdamW's fp32 states fit nowhere but on a host with 70 GB to pin; that is said."""
    shape = config_from_hf(PUBLISHED["meta-llama/Llama-3.1-8B"])
    config = TrainConfig(model=ModelConfig(path="a shape"), data=DataConfig(train="rows"), steps=9, rows_per_step=2)
    device = dataclasses.replace(find_device("NVIDIA H200", 80e9), host_bytes=100e9, host_memory_bytes=256e9)
    parts = costs_of(shape, config)
    with pytest.raises(choice.PlanError):
        choice.choose(parts, StepSpec.of(config), device, 80e9)
    found = fitting.fitting_settings(shape, StepSpec.of(config), device, 80e9)
    assert "optim.offload=true" in found
    offloaded = dataclasses.replace(config, optim=OptimConfig(offload=True))
    other = costs_of(shape, offloaded)
    assert other.update.hosted_bytes == pytest.approx(8 * parts.update.trained, rel=1e-3)
    assert parts.fixed_bytes(1) - other.fixed_bytes(1) == other.update.hosted_bytes
    plan = choice.choose(other, StepSpec.of(offloaded), device, 80e9)
    assert plan.host_bytes >= other.update.hosted_bytes and plan.host_bytes <= 100e9
    with pytest.raises(
        ValueError, match=r"optim.offload: the states of adamw take 64\.\d GB .* each device, which may pin 60"
    ):
        choice.choose(other, StepSpec.of(offloaded), dataclasses.replace(device, host_bytes=60e9), 80e9)


# ---- an adapter's states, which a plan may have on the host


def adapted(folder, on_host: bool | None = None, name="adamw", **changes) -> Trainer:
    """A run with an adapter, of which the plan has the states on the host or on the device. None: as it chooses."""
    optim = OptimConfig(name=name, learning_rate=1e-2)
    model = tiny_model(layers=(LayerSpec(),), hidden_size=64, intermediate_size=96, head_dim=32)
    model = get_peft_model(model, r=64, lora_alpha=64)
    settings = dict(adapter=AdapterConfig(r=64, lora_alpha=64), micro_batches=2, mesh=MeshConfig(data=1))
    trainer = Trainer(model, None, make_config(folder, optim=optim, **(settings | changes)), ROWS)
    assert not trainer.planner.plan.level(STATES)  # on a CPU device and host have one memory
    if on_host is not None:
        placed_at(trainer, on_host)
    return trainer


def placed_at(trainer: Trainer, on_host: bool) -> None:
    plan = trainer.planner.plan.at(optimizer_states=on_host)
    trainer.planner.adopt(plan.to_record() | partition.MeshShape.of(trainer.mesh).to_record())
    trainer.engine.follow_plan()
    assert trainer.planner.plan.level(STATES) == on_host


def kinds_of(state) -> set:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state) if leaf.nbytes >= LARGE}


@pytest.mark.full
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_an_adapters_states_may_be_on_the_host(small, tmp_path, name):
    """The run is that of states on the device which are updated tensor by tensor, in every bit."""
    moved, kept = (adapted(tmp_path / str(on_host), on_host, name=name) for on_host in (True, False))
    kept.engine.program = dataclasses.replace(kept.engine.program, by_tensor=True)
    (state, losses), (want, want_losses) = stepped(moved), stepped(kept)
    assert losses == want_losses and losses[0] != losses[1]
    same(state, want)
    assert kinds_of(state) == {"pinned_host"} and kinds_of(want) == {"device"}


@pytest.mark.full
def test_a_run_goes_on_wherever_its_checkpoint_had_the_states(small, tmp_path):
    save = CheckpointConfig(every_steps=2, every_minutes=None, keep=3)
    want = adapted(tmp_path / "run", True, checkpoint=save).train()
    folder = tmp_path / "run" / "checkpoints"
    resumed = adapted(tmp_path / "run", checkpoint=save)
    shutil.rmtree(folder / "step_00000004")
    got = resumed.train()
    assert resumed.planner.plan.level(STATES) and [line["step"] for line in resumed.history] == [3, 4]
    same(nnx.state(got), nnx.state(want))


def lora_8b(**changes):
    """(costs, config) of an 8B in NF4 with an adapter, which takes 6.4 GB beside what a micro-batch needs."""
    data, source = DataConfig(train="rows", length=2048), ModelConfig(path="a shape", load_in="nf4")
    settings = dict(model=source, data=data, adapter=AdapterConfig(), steps=9, rows_per_step=8)
    config = TrainConfig(**(settings | changes))
    shape = config_from_hf(PUBLISHED["meta-llama/Llama-3.1-8B"])
    return costs_of(shape, config), config


def without(parts):
    return parts.limited({STATES: (0, 0)})


def lora_8b_with_its_embedding(**changes):
    """lora_8b, whose token embedding stays on the device."""
    parts, config = lora_8b(**changes)
    return parts.limited({"embeddings": (0, 0)}), config


@pytest.mark.full
def test_the_plan_has_the_states_on_the_host_if_that_is_faster():
    parts, config = lora_8b_with_its_embedding()
    device = find_device("H200")
    short, kept = (choice.choose(one, StepSpec.of(config), device, 6.83e9) for one in (parts, without(parts)))
    assert short.plan.level(STATES) and short.peak_bytes <= 6.83e9 and short.plan.micro_batches < 8
    assert short.step_seconds < kept.step_seconds / 1.05
    moved = kept.parts["optimizer states"] - short.parts["optimizer states"]
    assert parts.movables[STATES].bytes == 8 * parts.update.trained == moved
    assert short.host_bytes >= parts.movables[STATES].bytes and forecast(parts, short.plan, device) == short
    record = json.loads(json.dumps(short.plan.to_record()))
    assert record["optimizer_states"] == "host" and "optimizer_states" not in kept.plan.to_record()
    assert StepPlan.from_record(record, parts.shape.num_layers, parts.layers.all_residuals) == short.plan
    lines = plan_text.plan_lines(short, parts, device, 6.83e9)
    assert any(line.startswith("  optimizer states on the host: 0.34 GB, 0.03 s a step") for line in lines)
    ample, tight = (choice.choose(parts, StepSpec.of(config), device, budget) for budget in (None, 10.7e9))
    assert not ample.plan.level(STATES) and not tight.plan.level(STATES)  # not for less than 1 %


@pytest.mark.full
def test_the_states_are_on_the_host_if_nothing_else_fits():
    parts, config = lora_8b_with_its_embedding()
    device = find_device("H200")
    with pytest.raises(choice.PlanError):
        choice.choose(without(parts), StepSpec.of(config), device, 6.48e9)
    found = choice.choose(parts, StepSpec.of(config), device, 6.48e9)
    assert found.plan.level(STATES)
    for rank, moment in ((16, "the backward of a layer"), (32, "the update")):  # which has all states on the device
        parts, config = lora_8b_with_its_embedding(adapter=AdapterConfig(r=rank))
        smallest = choice.smallest_plan(parts, StepSpec.of(config), device)
        there = smallest.parts[moment] - parts.movables[STATES].bytes
        kept = smallest.parts.get("kept residuals", 0.0)  # the low-rank inputs of down_proj, which nothing recomputes
        assert smallest.peak_bytes == pytest.approx(sum(parts.fixed.values()) + there + kept) and kept < 3e6
        assert there == 0 if moment == "the update" else 0 < there < 0.06e9
        assert smallest.plan.chunk_tokens > 2**24 // parts.shape.vocab_size  # the fastest of the smallest


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [dict(max_grad_norm=None), dict(optim=OptimConfig("adafactor")), dict(mesh=MeshConfig(data=2))],
    ids=["no clipping", "no bound", "two devices"],
)
def test_states_that_stay_on_the_device(changes):
    assert not lora_8b(**changes)[0].movables[STATES].able


@pytest.mark.full
def test_a_host_with_little_memory_gets_no_states():
    parts, device = lora_8b_with_its_embedding()[0], find_device("H200")
    for other in (dataclasses.replace(device, host_memory_bytes=5e9), dataclasses.replace(device, link=0.0)):
        assert len(host_room.places(parts, other)) == 1
    assert len(host_room.places(parts, device)) == 2


def moved_in(parts, device) -> list[set]:
    return [set(placed.moved.levels) for placed in host_room.places(parts, device)]


@pytest.mark.full
def test_states_are_not_moved_alone_where_the_embedding_frees_more():
    """Its rows cost no time: 0.78 GB against 0.34 GB with rank 16, but 1.34 GB with rank 64."""
    device = find_device("H200")
    for rank, alone in ((16, False), (64, True)):
        found = moved_in(lora_8b(adapter=AdapterConfig(r=rank))[0], device)
        assert found == [set(), {"embeddings"}, *([{STATES}] if alone else []), {"embeddings", STATES}]
    host = dataclasses.replace(device, host_memory_bytes=5e9)
    assert moved_in(lora_8b()[0], host) == [set()]


def test_weights_that_are_placed_leave_the_states_where_they_are(small, tmp_path, monkeypatch):
    """Memory ran out in the first step: the next plan has them in the same place."""
    for on_host in (True, False):
        planner = adapted(tmp_path / str(on_host), on_host).planner
        monkeypatch.setattr(planner, "device", dataclasses.replace(find_device("H200"), name="cpu"))
        resident = planner._cost.limited({"streamed": (0, 0)})
        assert len(host_room.places(resident, planner.device)) == 2
        found = planner.forecast, False
        monkeypatch.setattr(planner, "_next", lambda found=found: found)
        planner.replan("it was too large", None, lambda line: None, placed=True)
        assert moved_in(planner._cost, planner.device) == [{STATES} if on_host else set()]
