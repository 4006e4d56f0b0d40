"""One step divided over a mesh: what every device adds up is what one device would, before anything is clipped.

A clipped norm and Adam's direction hide a gradient that is everywhere twice what it should be; so here are the
gradients themselves, tensor by tensor, and weights after SGD.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import prepare_qat, quantize
from jaxtune.models.lora import get_peft_model
from jaxtune.models.placement import partition
from jaxtune.models.reward import reward_model
from jaxtune.models.stack.residual_plan import KEEP, RECOMPUTE, ResidualPlan
from jaxtune.train import trainer as trainer_module
from jaxtune.train.config import CheckpointConfig, ConfigError, MeshConfig
from jaxtune.train.data.packing.pairs import PackedPairs
from jaxtune.train.engine.trained_model import trainable_names
from jaxtune.train.objectives.kto import KTO
from jaxtune.train.objectives.loss import declared_losses
from jaxtune.train.objectives.preference import DPO, ORPO
from jaxtune.train.objectives.reward import Reward
from jaxtune.train.program.step import StepProgram
from jaxtune.train.trainer import Trainer
from tests.train.test_preference import pairs
from tests.train.tiny_runs import LENGTH, dataset, documents, lora_model, make_config

MOE = MoEConfig(4, 2, 8, router_bias=True, expert_bias=True, transposed=True, interleaved=True, swiglu_limit=0.5)
MICRO_BATCHES, STEPS = 2, 5
ROWS = dataset(documents(15, seed=6), LENGTH, packing=False).batches(16, shuffle=False).batch_at(0)
PACKED = dataset(documents(60, seed=6), LENGTH).batches(16, shuffle=False).batch_at(0)


def one_layer(**changes) -> Decoder:
    return tiny_model(**(dict(layers=(LayerSpec(window=5),)) | changes))


def moved(model: Decoder) -> Decoder:
    """The model with adapters that do something."""
    for path, leaf in nnx.iter_graph(model):
        if isinstance(leaf, nnx.Param) and path[-1] == "b":
            leaf.set_value(0.05 * jax.random.normal(jax.random.key(len(path)), leaf.shape))
    return model


def wide_enough_for_blocks() -> Decoder:
    """Of which each device's part has whole blocks, those of doubly quantised scales too."""
    shape = dict(hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=64)
    return tiny_model(**shape, initializer_range=0.05)


def experts_whole(**changes) -> Decoder:
    model = one_layer(moe=MOE, attention_sinks=True, **changes)
    for layer in model.layers:  # routers that prefer some experts
        for leaf, scale in ((layer.mlp.router.weight, 2.0), (layer.mlp.router.bias, 0.1)):
            leaf.set_value(scale * jax.random.normal(jax.random.key(1), leaf.shape))
    return model


LOSSES = declared_losses(experts_whole())
MODELS = {
    "adapters with dropout and DoRA, the head whole": (
        lambda: moved(get_peft_model(one_layer(), r=4, lora_dropout=0.3, use_dora=True, modules_to_save=["lm_head"])),
        dict(dropout=True),
    ),
    "noise on the embeddings of packed rows": (
        lambda: moved(get_peft_model(one_layer(), r=4)),
        dict(batch=PACKED, noise_alpha=40.0),
    ),
    "NF4, recomputed": (
        lambda: moved(get_peft_model(quantize(one_layer(), "nf4"), r=4)),
        dict(plan=ResidualPlan.uniform(RECOMPUTE, 1)),
    ),
    "experts whole, with routers' losses": (
        experts_whole,
        dict(aux_losses=LOSSES.weighted(dict(router_aux_loss=0.3, router_z_loss=0.2))),
    ),
}


MODELS["a step's only micro-batch, its loss scaled"] = (
    lambda: moved(get_peft_model(one_layer(), r=4)),
    dict(micro_batches=1, scale_loss=True),
)
# Of two layers, so that one gathers what the other needs.
DIVIDED = {
    "adapters with dropout and DoRA, tied tensors whole": (
        lambda: moved(
            get_peft_model(
                tiny_model(tie_embeddings=True), r=4, lora_dropout=0.3, use_dora=True, modules_to_save=["lm_head"]
            )
        ),
        dict(dropout=True),
    ),
    "all trained, packed rows and a window": (
        lambda: tiny_model(layers=(LayerSpec(window=5), LayerSpec())),
        dict(batch=PACKED, micro_batches=1, plan=ResidualPlan((KEEP, KEEP), whole_weights=2)),
    ),
    "all trained, recomputed": (tiny_model, dict(plan=ResidualPlan.uniform(RECOMPUTE, 2))),
    "NF4, recomputed": (
        lambda: moved(get_peft_model(quantize(wide_enough_for_blocks(), "nf4"), r=4)),
        dict(plan=ResidualPlan.uniform(RECOMPUTE, 2)),
    ),
    "QAT": (
        lambda: prepare_qat(moved(get_peft_model(tiny_model(hidden_size=32, head_dim=16), r=4)), "int4", 32),
        dict(micro_batches=1),
    ),
    "experts, with routers' losses": (
        lambda: experts_whole(layers=(LayerSpec(),) * 2),
        dict(aux_losses=LOSSES.weighted(dict(router_aux_loss=0.3, router_z_loss=0.2))),
    ),
}


def preferences(**labels):
    """Sixteen rows of packed pairs, the last ones empty."""
    rows = PackedPairs(pairs(20), 24, **labels)
    batch = rows.empty(16)
    for row in range(min(len(rows), 16)):
        rows.fill(batch, row, row)
    return batch


PREFERENCES = {
    "DPO over NF4, with dropout": (
        lambda: moved(get_peft_model(quantize(wide_enough_for_blocks(), "nf4"), r=4, lora_dropout=0.3)),
        dict(objective=DPO(0.3), batch=preferences(), dropout=True),
    ),
    "ORPO of experts, with routers' losses": (
        lambda: experts_whole(layers=(LayerSpec(),) * 2),
        dict(objective=ORPO(0.4), batch=preferences(), aux_losses=LOSSES.weighted(dict(router_aux_loss=0.3))),
    ),
    "KTO": (
        lambda: moved(get_peft_model(one_layer(), r=4)),
        dict(objective=KTO(0.3), batch=preferences(labels=np.arange(20) % 2.0)),
    ),
    "a reward model": (
        lambda: moved(get_peft_model(reward_model(one_layer()), r=4)),
        dict(objective=Reward(0.1), batch=preferences(labels=np.arange(20) / 20.0)),
    ),
}
MODELS |= DIVIDED | PREFERENCES


class Done(NamedTuple):
    """Gradient sums of step 1 before clipping, weights after STEPS of SGD, metrics of the steps, what evaluation gives;
    tensors by name."""

    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    metrics: list[dict]
    evaluated: list[float]


def program_of(model: Decoder, mesh: tuple[int, ...] | None, **options):
    """(StepProgram, trainable, frozen); mesh: devices along each axis."""
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    mesh = None if mesh is None else partition.make_mesh(*mesh)
    options = dict(optimizer=optax.sgd(0.05), max_grad_norm=None, micro_batches=MICRO_BATCHES) | options
    return StepProgram(graph, schedule=lambda step: 0.05, mesh=mesh, **options), trainable, frozen


@functools.cache
def run(name: str, mesh: tuple[int, ...]) -> Done:
    make, options = MODELS[name]
    batch = options.get("batch", ROWS)
    options = {key: value for key, value in options.items() if key != "batch"}
    program, trainable, frozen = program_of(make(), mesh, **options)
    place = functools.partial(NamedSharding, program.mesh)
    state, whole = program.init(trainable, seed=0), place(partition.WHOLE)
    where = program.shardings(state, whole)
    state, frozen = jax.device_put((state, frozen), (where, partition.shardings(frozen, program.mesh)))
    sums = program.zero_sums(trainable, whole)
    count = program.micro_batches
    size = len(batch.tokens) // count
    parts = [jax.tree.map(lambda a, i=i: a[i * size : (i + 1) * size], batch) for i in range(count)]
    parts = jax.device_put(parts, place(partition.ROWS))
    names = trainable_names(trainable)

    def named(tree):
        return dict(zip(names, map(np.asarray, jax.tree.leaves(tree)), strict=True))

    metrics, gradients = [], {}
    with jax.set_mesh(program.mesh):
        places = program.sums_shardings(trainable, whole)
        accumulate = jax.jit(program.accumulate, donate_argnums=0, out_shardings=places)
        update = jax.jit(program.update, donate_argnums=(0, 1), out_shardings=(where, places, whole))
        evaluated = [float(x) for x in jax.tree.leaves(jax.jit(program.evaluate)(state.trainable, frozen, parts[0]))]
        for _ in range(STEPS):
            for index, batch in enumerate(parts):
                sums = accumulate(sums, state, frozen, batch, jnp.int32(index))
            if not gradients:
                gradients = named(jax.jit(program.total)(sums, state)[0].gradients)
            state, sums, found = update(state, sums)
            metrics.append(jax.tree.map(np.asarray, found))
    return Done(gradients, named(state.trainable), metrics, evaluated)


MESHES = [
    *((name, (2, 1)) for name in MODELS if name not in DIVIDED),
    ("DPO over NF4, with dropout", (1, 2)),
    ("ORPO of experts, with routers' losses", (2, 2)),
    ("a reward model", (1, 2)),
    (next(iter(MODELS)), (4, 1)),
    ("a step's only micro-batch, its loss scaled", (8, 1)),
    ("QAT", (2, 1)),
    *((name, (1, 2)) for name in DIVIDED),
    *(("all trained, packed rows and a window", mesh) for mesh in ((1, 4), (2, 4))),
    *((name, (2, 2)) for name in ("all trained, recomputed", "experts, with routers' losses")),
]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(
            name, mesh, marks=() if name.startswith("all trained") and mesh in ((1, 2), (2, 2)) else pytest.mark.full
        )
        for name, mesh in MESHES
    ],
)
def test_gradients_and_weights_are_those_of_one_device(name, mesh):
    """Dropout's masks are the same too, or no gradient would be."""
    require_same(run(name, mesh), run(name, (1, 1)))


def require_same(got: Done, want: Done) -> None:
    assert sum(np.linalg.norm(array) > 1e-3 for array in want.gradients.values()) > 0.9 * len(want.gradients)
    for tensor in want.gradients:
        for ours, theirs in ((got.gradients, want.gradients), (got.weights, want.weights)):
            assert np.linalg.norm(ours[tensor] - theirs[tensor]) <= 1e-5 * np.linalg.norm(theirs[tensor]), tensor
    np.testing.assert_allclose(got.evaluated[:2], want.evaluated[:2], rtol=1e-6)  # loss and count
    np.testing.assert_allclose(got.evaluated, want.evaluated, rtol=1e-5)  # an objective's metrics, some a difference
    for step, (ours, theirs) in enumerate(zip(got.metrics, want.metrics, strict=True)):
        for key in theirs if step == 0 else ("loss", "count"):
            np.testing.assert_allclose(*(jax.tree.leaves(each[key]) for each in (ours, theirs)), rtol=1e-5, err_msg=key)


@pytest.mark.full
def test_an_axis_of_the_mesh_is_its_declaration(monkeypatch):
    """A third axis, along which tensors are whole: the step needs nothing else to divide its rows over it."""
    name = "all trained, packed rows and a window"
    want = run(name, (1, 1))
    added = (*partition.AXES, partition.Axis("islands"))
    monkeypatch.setattr(partition, "AXES", added)
    monkeypatch.setattr(partition, "ROWS", PartitionSpec(tuple(axis.name for axis in added)))
    assert partition.make_mesh(2, 2, -1).shape == {"data": 2, "fsdp": 2, "islands": 2}
    shape = partition.mesh_shape(2, 2, 2)
    assert (shape.size, shape.shard_count, shape.copies) == (8, 2, 4)
    assert partition.MeshShape.from_record({"mesh_data": 2, "mesh_fsdp": 2}) == (2, 2, 1)
    assert partition.MeshShape.from_record(shape.to_record()) == shape
    require_same(run.__wrapped__(name, (2, 2, 2)), want)


def test_the_config_has_a_key_for_each_axis():
    assert list(MeshConfig().axes) == [axis.name for axis in partition.AXES]


def test_devices_have_different_numbers_of_targets():
    """What the test above stands on."""
    for parts in (4, 8):
        assert len(set(ROWS.weights.reshape(parts, -1).sum(1).tolist())) > 2
    assert ROWS.weights[-1].sum() == 0


@pytest.mark.full
def test_a_mesh_of_one_device_is_the_plain_program():
    make, options = MODELS["experts whole, with routers' losses"]
    programs = []
    for mesh in (None, (1, 1)):
        program, trainable, frozen = program_of(make(), mesh, **options)
        state, sums = (jax.eval_shape(f, trainable) for f in (lambda t: program.init(t, 0), program.zero_sums))  # noqa: B023
        batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), ROWS)
        index = jax.ShapeDtypeStruct((), jnp.int32)
        lowered = jax.jit(program.accumulate).lower(sums, state, frozen, batch, index)
        programs.append((lowered.as_text(), jax.jit(program.update).lower(state, sums).as_text()))
    assert programs[0] == programs[1]


@pytest.mark.full
def test_devices_exchange_nothing_until_the_update():
    """But what routers' losses are products of; a step's only micro-batch exchanges its gradients itself."""
    found = {}
    for name in ("NF4, recomputed", "experts whole, with routers' losses"):
        make, options = MODELS[name]
        program, trainable, frozen = program_of(make(), (2, 1), **options)
        place = functools.partial(NamedSharding, program.mesh)

        def placed(tree, spec, place=place):
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place(spec)), tree)

        state = placed(jax.eval_shape(lambda t: program.init(t, 0), trainable), partition.WHOLE)  # noqa: B023
        sums = program.zero_sums(trainable, place(partition.WHOLE))
        frozen, batch = placed(frozen, partition.WHOLE), placed(ROWS, partition.ROWS)
        index = placed(jax.ShapeDtypeStruct((), jnp.int32), partition.WHOLE)
        found[name] = jax.jit(program.accumulate).lower(sums, state, frozen, batch, index).compile().as_text()
    collectives = ("all-reduce(", "all-gather(", "all-to-all(", "collective-permute(", "reduce-scatter(")
    assert not any(each in found["NF4, recomputed"] for each in collectives)
    assert not any(each in found["experts whole, with routers' losses"] for each in collectives[1:])


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "meshes"),
    [
        (lambda: get_peft_model(one_layer(), r=4, lora_dropout=0.2), [(1, 1), (2, 1)]),
        (lambda: one_layer(hidden_size=64), [(1, 1), (1, 2), (2, 4), (1, 1)]),
    ],
    ids=["adapters", "all"],
)
def test_a_run_goes_on_on_other_meshes(model, meshes, tmp_path, capsys):
    """From mesh to mesh, a step on each: nearly as it was on the first; on the same mesh again, bit for bit."""
    steps = 1 + len(meshes)
    save = CheckpointConfig(every_steps=1, every_minutes=None, keep=steps)
    model = model()

    def train(mesh, done):
        """(tensors, losses) of the steps after `done`, whose checkpoints go first."""
        for step in range(done + 1, steps + 1):
            shutil.rmtree(tmp_path / "checkpoints" / f"step_{step:08d}", ignore_errors=True)
        config = make_config(tmp_path, steps=steps, rows_per_step=8, mesh=MeshConfig(*mesh), checkpoint=save)
        trainer = Trainer(model, None, config, dataset(documents(24)))
        trained = jax.tree.map(np.asarray, jax.tree.leaves(nnx.state(trainer.train(), nnx.Param)))
        return trained, [line["loss"] for line in trainer.history]

    want, losses = train(meshes[0], 0)
    for done, (last, mesh) in enumerate(itertools.pairwise(meshes), 1):
        capsys.readouterr()
        got, loss = train(mesh, done)
        said = capsys.readouterr().out
        for axis, before, now in zip(("data", "fsdp"), last, mesh, strict=True):
            assert (f"numerics.mesh_{axis}: saved {before}, now {now}" in said) == (before != now)
        np.testing.assert_allclose(loss, losses[done:], rtol=1e-6)
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
        if mesh != (1, 1):
            again, _ = train(mesh, steps - 1)
            for ours, theirs in zip(again, got, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_a_checkpoints_plan_is_of_its_mesh(tmp_path):
    """Eight micro-batches of a row each, that one device had room for, are nothing that four devices can share."""

    def trainer(*mesh):
        config = make_config(tmp_path, rows_per_step=8, mesh=MeshConfig(*mesh))
        return Trainer(lora_model(), None, config, dataset(documents(40)))

    alone = trainer(1, 1)
    saved = alone.record()["numerics"] | {"micro_batches": 8}
    for mesh, adopted in (((1, 1), 8), ((4, 1), 1), ((1, 2), 1)):
        planner = trainer(*mesh).planner
        planner.adopt(saved)
        assert planner.plan.micro_batches == adopted, mesh


def test_all_devices_by_minus_one(tmp_path, monkeypatch):
    def trainer(**changes):
        config = make_config(tmp_path, mesh=MeshConfig(data=-1), steps=1, **changes)
        return Trainer(lora_model(), None, config, dataset(documents(40)))

    assert trainer(rows_per_step=8).program.devices == jax.device_count() == 8
    monkeypatch.setattr(trainer_module, "device_peak_flops", lambda kind, dtype: 1e12)
    assert trainer(rows_per_step=8)._watched().peak_flops == 8e12  # what MFU is a share of
    assert trainer(rows_per_step=8).config.mesh.data == -1  # as it was written
    with pytest.raises(ConfigError, match="mesh.data = 8: must divide the 4 rows of a micro-batch"):
        trainer(rows_per_step=4)
    with pytest.raises(ConfigError, match="mesh.data = 0: must be greater than 0, or -1 for all devices"):
        MeshConfig(data=0)
