"""Weights and optimizer states over the mesh's axis `fsdp`: what each device holds, and where it comes from."""

from __future__ import annotations

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import shapes_of
from flax import nnx
from random_weights import write_checkpoint
from tiny import CONFIGS
from tiny_models import tiny_model

from jaxtune.models.adapters.merge import merge_adapter
from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.files import shards
from jaxtune.models.files.quant import dequantize, quantize
from jaxtune.models.generation.generate import generate
from jaxtune.models.hf import Pretrained
from jaxtune.models.lora import get_peft_model, matrices
from jaxtune.models.placement import collectives, gathers, partition
from jaxtune.pallas import dispatch, gpu_kernel
from jaxtune.pallas.formats import FP8, MXFP4, NF4
from jaxtune.pallas.formats.fp8 import MATRIX, TILE
from jaxtune.train.config import ConfigError, MemoryConfig, MeshConfig, OptimConfig
from jaxtune.train.optimizer.adam8 import scale_by_adam_8bit
from jaxtune.train.planning.cost import step_cost
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, make_config

WIDE = dict(hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=4, head_dim=64)


def share(array: jax.Array) -> float:
    """Of an array, what its first device holds."""
    return math.prod(array.addressable_shards[0].data.shape) / max(array.size, 1)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_each_device_holds_its_part_and_the_planner_knows(tmp_path, optimizer):
    config = make_config(tmp_path, mesh=MeshConfig(data=2, fsdp=2), optim=OptimConfig(optimizer), steps=2)
    trainer = Trainer(tiny_model(**WIDE), None, config, dataset(documents(40)))
    state, sums, _ = trainer.model.first_state(trainer.engine)
    for tensor, gradient in zip(*map(jax.tree.leaves, (state.trainable, sums.gradients)), strict=True):
        assert share(tensor) == (1 / 2 if tensor.ndim == 2 else 1)
        assert share(gradient) == 1 / 4  # each data group's own sum of a divided tensor, else each device's own
    large = [share(leaf) for leaf in jax.tree.leaves(state.opt_state) if leaf.size >= 1024]
    assert large and set(large) == {1 / 2}
    cost = trainer.planner.cost
    fixed = cost.fixed
    held = {"trainable parameters (fp32)": state.trainable, "optimizer states": state.opt_state}
    for part, tree in held.items():
        found = sum(leaf.nbytes * share(leaf) for leaf in jax.tree.leaves(tree))
        assert fixed[part] == pytest.approx(found, rel=0.02)
    # What is gathered is in the compiler's figure for the programs, which is added to what lies beside them.
    assert "gathered weights" not in fixed and trainer.planner.forecast.parts["gathered weights"] > 0
    at_loss, forward, backward = cost.placed({}).gathered_bytes
    layer, head = cost.divided.layer_bytes, cost.divided.head_bytes
    assert layer > head > 0 and (at_loss, forward) == (layer + head, 2 * layer) and backward > forward
    assert cost.placed({"whole": 3}).gathered_bytes[:2] == (3 * layer + head, 3 * layer)
    assert step_cost(trainer.model.prepared, StepSpec.of(make_config(tmp_path))).gathered_bytes == (0.0, 0.0, 0.0)


@pytest.mark.full
@pytest.mark.parametrize("load_in", ["nf4", "fp8"])
def test_quantised_weights_are_cut_at_blocks(load_in):
    """Whatever becomes of a tensor, what is declared of it stays; adapters and norms are whole."""
    mesh = partition.make_mesh(1, 2)
    model = get_peft_model(quantize(tiny_model(**WIDE), load_in), r=4, modules_to_save=["lm_head"])
    for each in (model, merge_adapter(model), dequantize(model)):
        for name, matrix in matrices(each):
            places = jax.tree.leaves(partition.shardings(matrix.weight, mesh))
            for index, place in enumerate(places):  # codes and scales; the rest is small
                assert place.is_fully_replicated == (index >= 2), name
        for variable in (each.embedding.weight, each.head.weight):
            assert not partition.shardings(variable, mesh).get_value().is_fully_replicated
    small = jax.tree.leaves(partition.shardings(nnx.state(model, nnx.Param), mesh))
    assert sum(not place.is_fully_replicated for place in small) == 1  # the head
    # Parts that blocks do not allow are not made.
    assert quantize(tiny_model(), "nf4").layers[0].mlp.up_proj.weight.get_value().shard_axes(0, 2) is None


def test_parts_of_formats():
    weight = jax.random.normal(jax.random.key(0), (256, 256))
    experts = MXFP4.encode(jnp.stack([weight, 2 * weight]))
    found = [NF4.encode(weight), NF4.encode(weight, double_quant=False), FP8.encode(weight)]
    found += [FP8.encode(weight, TILE), experts]
    for stored in found:
        axes = stored.shard_axes(0, 2)
        assert axes is not None
        leaves, structure = jax.tree.flatten(stored)
        halves = [
            [leaf if axis is None else jnp.split(leaf, 2, axis)[half] for leaf, axis in zip(leaves, axes, strict=True)]
            for half in (0, 1)
        ]
        again = [
            one if axis is None else jnp.concatenate([one, other], axis)
            for one, other, axis in zip(*halves, axes, strict=True)
        ]
        np.testing.assert_array_equal(jax.tree.unflatten(structure, again).decode(), stored.decode())
    assert FP8.encode(weight, TILE).shard_axes(0, 4) is None  # two blocks
    assert FP8.encode(weight, MATRIX).shard_axes(0, 2) is None


def test_experts_are_divided_by_expert():
    moe = MoEConfig(4, 2, 8, transposed=True)
    model = tiny_model(moe=moe)
    mesh = partition.make_mesh(1, 4)
    for _, matrix in matrices(model):
        place = partition.shardings(matrix.weight, mesh).get_value()
        assert place.shard_shape(matrix.weight.shape)[0] == matrix.weight.shape[0] // 4
    router = partition.shardings(model.layers[0].mlp.router.weight, mesh).get_value()
    assert router.is_fully_replicated


@pytest.mark.parametrize("load_in", [None, "fp8"])
def test_a_checkpoint_is_loaded_in_parts(load_in, tmp_path):
    config = CONFIGS["llama"]
    write_checkpoint(tmp_path, config, shapes_of(config))
    mesh = partition.make_mesh(1, 2)
    want, got = (Pretrained(tmp_path, "float32", load_in).load(mesh=over) for over in (None, mesh))
    assert (got.base_digest, got.base_fingerprint) == (want.base_digest, want.base_fingerprint)
    state = nnx.state(got)
    wanted = jax.tree.leaves(partition.shardings(state, mesh))
    for array, place, other in zip(*map(jax.tree.leaves, (state, wanted, nnx.state(want))), strict=True):
        assert array.sharding == place
        np.testing.assert_array_equal(np.asarray(array), np.asarray(other))
    assert any(share(array) < 1 for array in jax.tree.leaves(state))
    assert generate(got, [[1, 2]], 2) == generate(want, [[1, 2]], 2)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5_moe"])
def test_each_part_of_a_checkpoint_is_read_by_itself_and_once(family, tmp_path, monkeypatch):
    """On two groups of two devices, which hold the same: no read is of more than a part, but for digests: samples, and
    all bytes once."""
    config = CONFIGS[family]
    write_checkpoint(tmp_path, config, shapes_of(config))
    pretrained, read, reads = Pretrained(tmp_path, "float32"), shards.read_bytes, collections.defaultdict(list)

    def counted(entry, start=0, stop=None):
        reads[entry.name, entry.size_bytes].append((start, entry.size_bytes if stop is None else stop))
        return read(entry, start, stop)

    monkeypatch.setattr(shards, "read_bytes", counted)
    model = pretrained.load(mesh=partition.make_mesh(2, 2))
    parts = 0
    for (name, size), ranges in reads.items():
        large = [(start, stop) for start, stop in ranges if stop - start > 4096]  # bytes of a sample
        if size <= 8192 or "norm" in name or "gate.weight" in name:
            continue
        assert sorted(large) == [(0, size // 2), (0, size), (size // 2, size)]
        parts += len(large) - 1
    assert parts
    want = jax.tree.leaves(nnx.state(Pretrained(tmp_path, "float32").load()))
    for ours, theirs in zip(jax.tree.leaves(nnx.state(model)), want, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("tokens", [4, 64])  # of a table of 64 rows: looked up where they lie, or in the whole table
def test_rows_of_a_divided_table_and_their_gradients(tokens):
    mesh = partition.make_mesh(1, 4)
    table = nnx.State({"w": nnx.Param(jax.random.normal(jax.random.key(0), (64, 8)), axes=("vocab", "hidden"))})
    index = jax.random.randint(jax.random.key(1), (4, tokens), 0, 64)
    cotangent = jax.random.normal(jax.random.key(2), (4, tokens, 8))

    def taken(table, index, cotangent):
        """(rows, the gradient of their product with the cotangent)"""

        def product(table):
            rows = gathers.rows_of(table["w"], index, lambda table, index: table[index])
            return (rows * cotangent).sum(), rows

        gradient, rows = jax.grad(product, has_aux=True)(table)
        return rows, gradient

    want = taken(table, index, cotangent)
    parts = partition.divide(table, mesh)
    rows, whole = partition.ROWS, partition.specs(parts)
    run = jax.jit(partition.divided(taken, mesh, (whole, rows, rows), (rows, whole)))
    got = run(parts, index, cotangent)
    whole_table = "f32[64,8] = all_gather" in str(jax.make_jaxpr(run)(parts, index, cotangent))
    assert whole_table == (tokens == 64)
    np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(want[0]))
    ours, theirs = (jax.tree.leaves(partition.undivided(one)) for one in (got[1], want[1]))
    np.testing.assert_allclose(np.asarray(ours[0]), np.asarray(theirs[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_8_bit_moments_are_those_of_one_device():
    """Bit for bit by the kernel, of which each device runs the blocks of its rows."""
    adam = scale_by_adam_8bit(0.9, 0.95, 1e-8)
    tensors = {"w": nnx.Param(jnp.zeros((64, 256)), axes=("out", "in")), "norm": nnx.Param(jnp.zeros((256,)))}
    gradients = jax.tree.map(lambda a: jax.random.normal(jax.random.key(a.ndim), a.shape), nnx.State(tensors))
    state, mesh = adam.init(gradients), partition.make_mesh(1, 2)
    update = jax.jit(adam.update)
    with gpu_kernel.interpreted():
        want = update(gradients, state)
        with jax.set_mesh(mesh):
            places = partition.shardings(gradients, mesh), partition.states_shardings(state, gradients, mesh)
            given = jax.device_put((gradients, state), places)
            assert share(given[1].m["w"].get_value()) == 1 / 2
            divided = partition.which_are_divided(gradients, mesh)
            assert sorted(divided) == [False, True]
            run = functools.partial(adam.update, divided=divided)
            got = jax.jit(run, out_shardings=places)(*given)
            # What is whole is updated whole, on each: parts of it would have to be exchanged.
            everywhere = jax.sharding.NamedSharding(mesh, partition.WHOLE)
            whole = jax.jit(adam.update, out_shardings=everywhere)
            text = whole.lower(*jax.device_put((gradients, state), everywhere)).compile().as_text()
            assert "all-gather" not in text and "all-reduce" not in text
        assert dispatch.record["adamw_8bit"][0] == "mosaic"
    for ours, theirs in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.full
@pytest.mark.parametrize("keeps_model", [False, True])
@pytest.mark.parametrize("resident", [1, 2])
def test_frozen_weights_that_lie_whole(resident, keeps_model, tmp_path):
    """The run with weights that are gathered in each step, bit for bit; devices hold what the planner counts, and a
    model that nobody else holds gives up its parts."""

    def trainer_of(plan):
        memory, mesh = MemoryConfig(plan=plan), MeshConfig(data=1, fsdp=2)
        config = make_config(tmp_path / plan, mesh=mesh, memory=memory, steps=5, optim=OptimConfig("adamw_8bit"))
        model = tiny_model(**WIDE, layers=(LayerSpec(),) * 2)
        adapted = get_peft_model(quantize(model, "nf4"), r=4, modules_to_save=["lm_head"])
        return Trainer(adapted, None, config, dataset(documents(40)), keeps_model=keeps_model)

    trainer = trainer_of(f"keep; resident={resident}")
    state, _, frozen = trainer.model.first_state(trainer.engine)
    for layer, tensors in frozen["layers"].items():
        large = [share(leaf) for leaf in jax.tree.leaves(tensors) if leaf.size > 1024]
        assert large and set(large) == {1 if layer < resident else 1 / 2}
    assert share(frozen["embedding"]["weight"].get_value()) == (1 if resident == 2 else 1 / 2)
    found = sum(leaf.nbytes * share(leaf) for leaf in jax.tree.leaves(frozen))
    if keeps_model:  # with what the caller holds: it lies on one device, as it was made
        found += sum(leaf.nbytes / 2 for leaf in jax.tree.leaves(frozen) if share(leaf) == 1 and leaf.size > 1024)
    assert trainer.planner.forecast.parts["frozen weights"] == pytest.approx(found, rel=0.06)
    held = jax.tree.leaves(trainer.model.frozen)
    assert all(ours is theirs for ours, theirs in zip(jax.tree.leaves(frozen), held, strict=True)) != keeps_model
    head = next(leaf for leaf in jax.tree.leaves(state.trainable["head"]))
    assert share(head) == 1 / 2  # what trains is divided as ever
    got, want = (trainer_of(plan).train() for plan in (f"keep; resident={resident}", "keep"))
    for ours, theirs in zip(*(jax.tree.leaves(nnx.state(model)) for model in (got, want)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "optimizer", "mesh"),
    [
        (lambda: get_peft_model(quantize(tiny_model(**WIDE), "nf4"), r=4), "adamw", (2, 2)),
        (lambda: tiny_model(**WIDE), "adamw_8bit", (2, 4)),
    ],
    ids=["adapters", "all, in 8 bits"],
)
def test_usual_optimizers_lead_where_they_lead_on_one_device(model, optimizer, mesh, tmp_path):
    """After five steps, to within a thousandth of the way: what rounds differently may change a direction's sign."""
    model = model()

    def trained(*mesh):
        config = make_config(
            tmp_path / str(mesh), mesh=MeshConfig(*mesh), steps=5, rows_per_step=8, optim=OptimConfig(optimizer)
        )
        result = Trainer(model, None, config, dataset(documents(60))).train()
        return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(result, nnx.Param))]

    begun = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    one, several = trained(1, 1), trained(*mesh)

    def distance(ours, theirs):
        return np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(ours, theirs, strict=True)))

    assert 0 < distance(one, several) < 1e-3 * distance(one, begun)


def test_devices_connect_at_the_start_and_it_is_said(tmp_path):
    """In each group that a step's collectives have; not by the first step, which would be said to be slow."""

    def engine(*mesh):
        config = make_config(tmp_path, mesh=MeshConfig(*mesh), steps=1)
        return Trainer(tiny_model(), None, config, dataset(documents(20))).engine

    said = []
    seconds = engine(2, 2).connect(said.append)["collectives_seconds"]
    assert said == [f"collectives of 4 devices set up in {seconds:.1f} s"]
    assert engine(1, 1).connect(said.append) == {} and len(said) == 1
    for mesh, groups in (((2, 2), 3), ((1, 2), 1)):
        text = collectives.first_exchange(partition.make_mesh(*mesh)).as_text()
        assert len(set(re.findall(r"replica_groups=\S+", text))) == groups


def test_what_a_mesh_cannot_be(tmp_path):
    assert partition.make_mesh(-1, 2).shape == {"data": 4, "fsdp": 2}
    assert partition.make_mesh(2, -1).shape == {"data": 2, "fsdp": 4}
    with pytest.raises(ValueError, match="mesh.data = -1: 8 devices are not a multiple of mesh.fsdp = 3"):
        partition.make_mesh(-1, 3)
    with pytest.raises(ValueError, match="mesh.data = 4 and mesh.fsdp = 4: there are 8 cpu devices"):
        partition.make_mesh(4, 4)
    with pytest.raises(ConfigError, match="mesh.fsdp = -1: mesh.data is -1 too"):
        MeshConfig(-1, -1)
    with pytest.raises(ConfigError, match="mesh.data x mesh.fsdp = 8: must divide the 4 rows"):
        make_config(tmp_path, mesh=MeshConfig(2, 4))
    with pytest.raises(ConfigError, match=r"optim.offload = True: mesh.fsdp = 2 divides the states"):
        make_config(tmp_path, mesh=MeshConfig(1, 2), optim=OptimConfig(offload=True))
