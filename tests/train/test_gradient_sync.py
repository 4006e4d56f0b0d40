"""Gradients that devices send each other in 16, 8 or 4 bits: the numbers, the bytes, training, and what stays exact."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec
from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import get_peft_model
from jaxtune.models.placement import low_format, partition
from jaxtune.train.config import CheckpointConfig, ConfigError, MeshConfig
from jaxtune.train.folder import record
from jaxtune.train.planning.exchange import SYNC_ERRORS
from jaxtune.train.program import gradient_sync
from jaxtune.train.program.gradient_sync import GradientSync
from jaxtune.train.program.step import StepProgram, Sums, TrainState
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import LENGTH, dataset, documents, lora_model, make_config

ROWS = dataset(documents(15, seed=6), LENGTH, packing=False).batches(16, shuffle=False).batch_at(0)
FORMATS = ("bf16", "int8", "int4")
BF16, INT8, INT4 = (GradientSync(format, True) for format in FORMATS)
STOCHASTIC = GradientSync("int4", False)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


# ---- the formats


BLOCKS = np.asarray(normal(0, 3, 256)) * np.array([[1e-3], [1.0], [1e20]], np.float32)


def test_a_block_is_integers_with_a_scale():
    """By numpy, from the definition."""
    blocks = BLOCKS.reshape(3, 4, 64)
    scales = np.abs(blocks).max(-1) / np.float32(127)
    want = np.rint(blocks * (1 / scales)[..., None]) * scales[..., None]
    encoded = jax.jit(low_format.encode, static_argnums=1)(BLOCKS, "int8")
    np.testing.assert_allclose(low_format.decode(encoded, "int8"), want.reshape(3, 256), rtol=1e-6)
    size = sum(part.nbytes for part in encoded.values())
    assert size == BLOCKS.size * low_format.bytes_per_number("int8")


def test_a_block_of_int4_is_squares_with_a_scale():
    """By numpy, from the definition: of 15 multiples of a scale the nearest; a scale is a part of the row's largest."""
    x = BLOCKS.astype(np.float64)
    x[1, :16] *= 1e-12  # below the smallest scale
    blocks = x.reshape(3, 16, 16)
    largest = np.abs(x).max(-1)[:, None]
    exponents = np.clip(np.floor(-8 * np.log2(np.abs(blocks).max(-1) / largest)), 0, 255)
    scales = (largest * 2 ** (-exponents / 8))[..., None]
    levels = np.array([k * abs(k) / 49 for k in range(-7, 8)])
    want = levels[np.abs((blocks / scales)[..., None] - levels).argmin(-1)] * scales
    encoded = jax.jit(low_format.encode, static_argnums=1)(x.astype(np.float32), "int4")
    np.testing.assert_allclose(low_format.decode(encoded, "int4"), want.reshape(3, 256), rtol=2e-6)
    assert not want[1, 0].any() and (np.abs(blocks) <= scales).all()
    size = sum(part.nbytes for name, part in encoded.items() if name != "largest")
    assert size == x.size * low_format.bytes_per_number("int4")


def test_numbers_that_are_usually_small_keep_more_digits():
    usual = jnp.zeros(32).at[:16].set(1e-3).at[3].set(4e-3).at[5].set(0.0)
    weights = low_format.weights_in_blocks(usual)
    want = np.array([0.5, 0.5, 0.5, 1, 0.5, 1 / 8, *[0.5] * 10, *[1] * 16])
    np.testing.assert_allclose(weights, want, rtol=1e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_extreme_blocks(format):
    x = np.zeros((5, 128), np.float32)
    x[1, 3], x[2, 5], x[3, :2], x[4, 7] = np.inf, np.nan, (np.inf, -np.inf), 1e-42
    for seed in (None, jnp.array([1, 2], jnp.uint32)):
        got = np.asarray(low_format.decode(low_format.encode(jnp.asarray(x), format, seed), format))
        assert (got[0] == 0).all() and np.isfinite(got[4]).all()
        for row in (1, 2, 3):
            assert not np.isfinite(got[row][x[row] != 0]).any()


# ---- a step on simulated devices


def one_layer() -> Decoder:
    return tiny_model(layers=(LayerSpec(),))


def adapted() -> Decoder:
    return get_peft_model(one_layer(), r=8)


class Made(NamedTuple):
    """A step's jitted functions, with the state, the sums and the frozen weights with which it starts."""

    program: StepProgram
    accumulate: Any
    update: Any
    total: Any
    state: TrainState
    sums: Sums
    frozen: Any


def made(mesh: tuple[int, int], sync: GradientSync | None, model: Decoder | None = None, **options) -> Made:
    graph, trainable, frozen = nnx.split(one_layer() if model is None else model, nnx.Param, ...)
    options = dict(optimizer=optax.sgd(0.05), schedule=lambda step: 0.05, max_grad_norm=None) | options
    program = StepProgram(graph, mesh=partition.make_mesh(*mesh), gradient_sync=sync, **options)
    whole = NamedSharding(program.mesh, partition.WHOLE)
    state = program.init(trainable, seed=0)
    where, places = program.shardings(state, whole), program.sums_shardings(trainable, whole)
    state, frozen = jax.device_put((state, frozen), (where, partition.shardings(frozen, program.mesh)))
    accumulate = jax.jit(program.accumulate, donate_argnums=0, out_shardings=places)
    update = jax.jit(program.update, donate_argnums=(0, 1), out_shardings=(where, places, whole))
    return Made(program, accumulate, update, jax.jit(program.total), state, program.zero_sums(trainable, whole), frozen)


def on(step: Made, batch=ROWS):
    return jax.device_put(batch, NamedSharding(step.program.mesh, partition.ROWS))


def flat(tree) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(tree)])


def with_random_gradients(step: Made, seed: int = 0) -> Sums:
    """Sums of a thousand targets on each device, with gradients of their own."""
    leaves, structure = jax.tree.flatten(step.sums.gradients)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    sums = dataclasses.replace(step.sums, gradients=jax.tree.unflatten(structure, drawn))
    sums = dataclasses.replace(sums, count=jnp.full_like(sums.count, 1000.0))
    copied = jax.tree.map(jnp.copy, sums)  # an update donates them
    return jax.device_put(copied, jax.tree.map(lambda a: a.sharding, step.sums))


@pytest.mark.full
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_stochastic_sums_are_right_on_average(format):
    """A thousand draws of one step's sum, on four devices."""
    step, exact = (made((4, 1), sync, micro_batches=2) for sync in (GradientSync(format, False), None))
    sums, draws = with_random_gradients(step), 1000

    def one(number):
        return step.program.total(sums, dataclasses.replace(step.state, step=number))[0].gradients

    def mean():
        def add(total, number):
            return jax.tree.map(jnp.add, total, one(number)), None

        zeros = jax.tree.map(lambda g: jnp.zeros(g.shape), step.state.trainable)
        return jax.tree.map(lambda t: t / draws, jax.lax.scan(add, zeros, jnp.arange(draws))[0])

    want, got, single = flat(exact.total(sums, exact.state)[0].gradients), flat(jax.jit(mean)()), flat(jax.jit(one)(7))
    assert np.linalg.norm(got - want) <= 0.01 * np.linalg.norm(want)
    assert np.linalg.norm(single - want) > 5 * np.linalg.norm(got - want)  # a single draw is rounded


def test_the_sum_of_parts_is_right_on_average():
    """The sum over fsdp, whose seed is a checksum of the gradient: each draw has another number in it."""
    mesh, draws = partition.make_mesh(1, 4), 400
    x = normal(3, 4, draws, 8, 129).at[:, :, :, 1:].set(normal(4, 4, 1, 8, 128))

    def local(x):
        return jax.vmap(lambda one: low_format.sum_shard(one, partition.TENSORS, 0, 4, "int4"))(x[0])[None]

    run = jax.shard_map(local, mesh=mesh, in_specs=partition.ROWS, out_specs=partition.ROWS, check_vma=False)
    got = np.asarray(jax.jit(run)(x), np.float64)  # [4, draws, 2, 129]
    got, want = got[..., 1:].mean(1), np.asarray(x.sum(0))[0, :, 1:].reshape(4, 2, 128)
    assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want)


# ---- bytes


def wide() -> Decoder:
    """Large enough that padding to whole blocks does not count."""
    shape = dict(hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=64)
    return tiny_model(layers=(LayerSpec(),), **shape)


COLLECTIVE = re.compile(
    r" = (\(.*?\)|\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
WIDTHS = {"f32": 4, "bf16": 2, "s8": 1, "u8": 1, "u16": 2}


def exchanged(compiled: str) -> dict[tuple[str, str], int]:
    """{(collective, dtype): bytes that a device gets from it}, in a compiled program."""
    found: dict[tuple[str, str], int] = {}
    for shapes, name in COLLECTIVE.findall(compiled):
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            size = math.prod(map(int, filter(None, sizes.split(",")))) * WIDTHS.get(dtype, 4)
            found[name, dtype] = found.get((name, dtype), 0) + size
    return found


@functools.cache
def exchanges(mesh: tuple[int, int], sync: GradientSync, lora: bool = False) -> tuple[dict, dict]:
    """What the programs of accumulate (if weights are divided, or there are two devices) and update exchange."""
    step = made(mesh, sync, get_peft_model(wide(), r=16) if lora else wide())
    of_update = exchanged(step.update.lower(step.state, step.sums).compile().as_text())
    if mesh[0] > 2 and mesh[1] == 1:
        return {}, of_update
    arguments = step.sums, step.state, step.frozen, on(step), jnp.int32(0)
    return exchanged(step.accumulate.lower(*arguments).compile().as_text()), of_update


def sent(found: dict[tuple[str, str], int], *names: str) -> int:
    return sum(size for (name, _), size in found.items() if name in names)


@pytest.mark.full
@pytest.mark.parametrize(("devices", "lora"), [(2, False), (4, False), (8, False), (2, True)])
def test_both_legs_are_in_the_format(devices, lora):
    legs = ("all-to-all", "all-gather")
    found = {sync.format: exchanges((devices, 1), sync, lora) for sync in (BF16, INT8, INT4)}
    for format, most in (("int8", 0.55), ("int4", 0.30)):
        for leg in legs:
            assert sent(found[format][1], leg) <= most * sent(found["bf16"][1], leg) > 0
        codes = "s8" if format == "int8" else "u8"
        assert {dtype for name, dtype in found[format][1] if name in legs} == {codes, "f32"}  # and the scales
        assert sent(found[format][1], "all-reduce") < 100  # the loss and the count
    for of_accumulate, of_update in found.values():
        assert not of_accumulate  # a step of one micro-batch too leaves it to the update, which does it once
        assert {name for name, _ in of_update} == {*legs, "all-reduce"}


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "sync", "most"), [((1, 2), INT8, 0.55), ((1, 4), INT4, 0.30), ((2, 4), INT8, 0.55)])
def test_divided_gradients_are_scattered_in_the_format(mesh, sync, most):
    (backward, update), (wide_backward, wide_update) = exchanges(mesh, sync), exchanges(mesh, BF16)
    assert sent(backward, "all-to-all") <= most * sent(wide_backward, "all-to-all") > 0
    assert sent(backward, "reduce-scatter") == 0
    assert sent(update, "all-to-all") <= most * sent(wide_update, "all-to-all") > 0


# ---- training


@functools.cache
def after_300_steps(sync: GradientSync | None, optimizer: str) -> tuple[np.ndarray, np.ndarray]:
    """(first weights, weights after 300 steps on four devices)."""
    step = made((4, 1), sync, optimizer=optax.adam(1e-3) if optimizer == "adam" else optax.sgd(0.3))
    first, batch, state, sums = flat(step.state.trainable), on(step), step.state, step.sums
    for _ in range(300):
        sums = step.accumulate(sums, state, step.frozen, batch, jnp.int32(0))
        state, sums, _ = step.update(state, sums)
    return first, flat(state.trainable)


def away(sync: GradientSync, optimizer: str) -> float:
    """How far the weights are from those of a float32 sync, as a part of the distance that these moved."""
    first, want = after_300_steps(None, optimizer)
    _, got = after_300_steps(sync, optimizer)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want - first))


@pytest.mark.full
@pytest.mark.parametrize(
    ("format", "optimizer", "most"), [("int8", "adam", 0.01), ("int4", "adam", 0.05), ("int4", "sgd", 0.05)]
)
def test_with_error_feedback_weights_stay_near_those_of_a_float32_sync(format, optimizer, most):
    near, without = (away(GradientSync(format, feedback), optimizer) for feedback in (True, False))
    assert near < most < without and (format == "int8" or 2 * near < without)


def test_one_update_of_all_micro_batches():
    """The norm is that of the sums after they were exchanged, and clipping follows it."""
    step, clipped = (made((4, 1), INT4, micro_batches=2, max_grad_norm=norm) for norm in (None, 1e-3))
    sums, first = with_random_gradients(step), flat(step.state.trainable)
    mean = flat(step.total(sums, step.state)[0].gradients) / 4000
    exact = flat(jax.tree.map(lambda g: np.asarray(g).sum(0), sums.gradients)) / 4000
    assert np.linalg.norm(mean - exact) > 0.05 * np.linalg.norm(exact)
    again = jax.tree.map(jnp.copy, sums)
    state, zeros, metrics = step.update(step.state, sums)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(mean), rtol=1e-5)
    np.testing.assert_allclose(flat(state.trainable) - first, -0.05 * mean, rtol=1e-3, atol=1e-6)
    assert not flat(zeros).any()
    state, _, metrics = clipped.update(clipped.state, again)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(mean), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(flat(state.trainable) - first), 0.05e-3, rtol=0.02)


def test_errors_are_what_the_sums_lack():
    """What two steps of the same gradients applied, and what is left, is what they should have applied."""
    step = made((2, 1), INT4, micro_batches=2)
    sums, lost = with_random_gradients(step), 0.0
    exact = flat(jax.tree.map(lambda g: np.asarray(g).sum(0), sums.gradients)) / 2000
    state = step.state
    for _ in range(2):
        total, errors = step.total(sums, state)
        lost = lost + exact - flat(total.gradients) / 2000
        state = dataclasses.replace(state, sync_errors=errors)
    [kept], [summed] = state.sync_errors["sent"], state.sync_errors["summed"]
    left = np.asarray(kept, np.float64).sum(0) + np.asarray(summed, np.float64).reshape(-1)
    np.testing.assert_allclose(np.linalg.norm(left), np.linalg.norm(lost), rtol=0.02)
    [usual] = np.asarray(state.sync_errors["usual"], np.float64)
    np.testing.assert_array_equal(usual[0], usual[1])
    assert 0.8 < np.linalg.norm(usual[0]) / np.linalg.norm(exact * math.sqrt(1 - 0.99**2)) < 1.2  # of two steps


@pytest.mark.full
def test_a_checkpoint_of_int4_with_equal_steps(tmp_path, monkeypatch, capsys):
    """An older version's, without usual sizes: the run continues, and says that its errors start from zero."""
    save = CheckpointConfig(every_steps=1, every_minutes=None, keep=6)
    mesh = mesh_config(gradient_sync="int4")

    def train(steps):
        config = make_config(tmp_path, steps=steps, rows_per_step=8, mesh=mesh, checkpoint=save)
        return Trainer(lora_model(), None, config, dataset(documents(24))).train()

    def older(self, trainable, shape):
        return {name: sizes for name, sizes in error_sizes(self, trainable, shape).items() if name != "usual"}

    error_sizes = GradientSync.error_sizes
    with monkeypatch.context() as patch:
        patch.setattr(GradientSync, "error_sizes", older)
        patch.setattr(GradientSync, "__str__", lambda self: "sent in int4 with error feedback")
        patch.setattr(record, "VERSION", 0)
        train(2)
    capsys.readouterr()
    train(3)
    said = capsys.readouterr().out
    assert "mesh.gradient_sync: the errors in the checkpoint are of another format; error feedback starts from" in said
    assert "not bit for bit the same run: numerics.gradients: saved 'fp32, sent in int4 with error feedback'" in said
    train(4)
    assert "mesh.gradient_sync" not in capsys.readouterr().out


# ---- what is not finite


@pytest.mark.parametrize("sync", [INT8, INT4, BF16, STOCHASTIC], ids=str)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_reaches_all_devices(sync, value):
    """An overflow in one number of one device: the update is skipped, the loss scale is halved, errors stay."""
    step = program_for_overflows(sync)
    state, sums, _ = step.update(jax.tree.map(jnp.copy, step.state), with_random_gradients(step))
    kept, scale = jax.tree.map(np.asarray, (state.trainable, state.sync_errors)), float(state.loss_scale)
    assert sync is STOCHASTIC or flat(kept[1]).any()
    sums = with_random_gradients(step, 1)
    leaves, structure = jax.tree.flatten(sums.gradients)
    where = leaves[3].sharding
    leaves[3] = jax.device_put(leaves[3].at[(2, *[0] * (leaves[3].ndim - 1))].set(value), where)
    sums = dataclasses.replace(sums, gradients=jax.tree.unflatten(structure, leaves))
    state, _, metrics = step.update(state, sums)
    assert not metrics["finite"] and int(state.skipped) == 1 and float(state.loss_scale) == scale / 2
    for ours, before in zip(*map(jax.tree.leaves, ((state.trainable, state.sync_errors), kept)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), before)
        if ours.is_fully_replicated:
            for part in ours.addressable_shards:
                np.testing.assert_array_equal(np.asarray(part.data), before)


@functools.cache
def program_for_overflows(sync: GradientSync) -> Made:
    return made((4, 1), sync, scale_loss=True, max_grad_norm=1.0)


def test_what_is_not_finite_reaches_the_parts():
    x = normal(0, 4, 8, 128).at[1, 5, 3].set(jnp.inf)
    mesh = partition.make_mesh(1, 4)

    def local(x):
        return low_format.sum_shard(x[0], partition.TENSORS, 0, 4, "int4")[None]

    run = jax.shard_map(local, mesh=mesh, in_specs=partition.ROWS, out_specs=partition.ROWS, check_vma=False)
    assert not np.isfinite(np.asarray(jax.jit(run)(x))[2, 1, 3])  # row 5 is the second one of the third device


# ---- runs


def mesh_config(**changes) -> MeshConfig:
    return MeshConfig(**(dict(data=2, gradient_sync="int8") | changes))


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "mesh"),
    [(lora_model, mesh_config()), (one_layer, mesh_config(data=1, fsdp=2, gradient_rounding="stochastic"))],
    ids=["adapters", "all"],
)
def test_a_resumed_run_is_the_same_run(make, mesh, tmp_path, capsys):
    save = CheckpointConfig(every_steps=1, every_minutes=None, keep=6)
    model = make()

    def train(mesh, done):
        """Trained tensors, after the checkpoints of steps after `done` were removed."""
        for step in range(done + 1, 7):
            shutil.rmtree(tmp_path / "checkpoints" / f"step_{step:08d}", ignore_errors=True)
        config = make_config(tmp_path, steps=6, rows_per_step=8, micro_batches=2, mesh=mesh, checkpoint=save)
        trainer = Trainer(model, None, config, dataset(documents(24)))
        return flat(nnx.state(trainer.train(), nnx.Param)), trainer

    want, trainer = train(mesh, 0)
    assert "gradients fp32, sent in int8 with" in trainer.notes()[0]
    np.testing.assert_array_equal(train(mesh, 3)[0], want)
    if mesh.gradient_rounding == "stochastic":
        return
    state = trainer.model.state_shapes(trainer.engine)
    kept = sum(leaf.size * 2 // 2 for leaf in jax.tree.leaves(state.sync_errors))  # bytes on one of two devices
    assert trainer.planner.cost.fixed[SYNC_ERRORS] == kept > 0
    reset = "the errors in the checkpoint are of another mesh; error feedback starts from zero"
    for other, said in (
        (dataclasses.replace(mesh, data=4), reset),
        (MeshConfig(data=2), "the errors of error feedback in the checkpoint are not used"),
    ):
        capsys.readouterr()
        got, _ = train(other, 3)
        assert f"mesh.gradient_sync: {said}" in capsys.readouterr().out
        np.testing.assert_allclose(got, want, atol=0.05 * np.abs(want).max())
    train(MeshConfig(data=2), 0)
    capsys.readouterr()
    train(mesh, 5)
    assert "mesh.gradient_sync: the checkpoint has no errors" in capsys.readouterr().out


@pytest.mark.parametrize("sync", [INT8, INT4], ids=str)
def test_the_planner_counts_the_errors(sync):
    """What the update takes beside them is counted for GPUs (tests/gpu/aot/test_gradient_sync.py). On a CPU, whose
    compiler keeps more, it takes no more than was once counted for all devices: of a model whose sums are larger than
    anything else of the update."""
    step = made((4, 1), sync, wide())
    kept, taken = sync.bytes_on_device(step.state.trainable, partition.MeshShape.of(step.program.mesh))
    assert kept == sum(leaf.nbytes for leaf in jax.tree.leaves(step.state.sync_errors)) / 4
    assert taken > kept  # both the old and the new ones are there
    numbers = sync.error_sizes(step.state.trainable, partition.MeshShape.of(step.program.mesh))["sent"]
    analysis = step.update.lower(step.state, step.sums).compile().memory_analysis()
    once = {"int8": 12.0, "int4": 30.0}[sync.format] * sum(numbers) + 4.0 * max(numbers)
    assert analysis.temp_size_in_bytes <= 1.1 * once


def test_config_errors():
    with pytest.raises(ConfigError, match=r"mesh.gradient_sync = 'int8': nothing is sent on a mesh of one device"):
        MeshConfig(gradient_sync="int8")
    with pytest.raises(ConfigError, match=r"mesh.gradient_rounding = 'stochastic': mesh.gradient_sync = fp32 rounds"):
        MeshConfig(data=2, gradient_rounding="stochastic")
    assert gradient_sync.gradient_sync_of(MeshConfig(data=2)) is None
    assert gradient_sync.gradient_sync_of(mesh_config()) == INT8
