"""bf16 weights with stochastic rounding: every bit of it, its statistics, and training that tracks float32."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec
from jaxtune.pallas.rounding import random_bits, stochastic_round
from jaxtune.train.config import AdapterConfig, CheckpointConfig, ConfigError, OptimConfig
from jaxtune.train.optimizer.optim import weight_storage
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, make_config

SEED = jnp.array([0x12345678, 0x9ABCDEF0], jnp.uint32)


def neighbours(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(nearer to zero, farther) bf16 neighbours of float32 values, as float32."""
    bits = x.view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32), (bits + np.uint32(0x10000)).view(np.float32)


def mixed(x):
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def test_bits_are_their_definition():
    """By numpy, from the element's place: the same on every device, and in any later version."""
    shape, stream = (3, 5, 7), 11
    place = np.arange(np.prod(shape), dtype=np.uint32)
    with np.errstate(over="ignore"):
        hashed = mixed(place ^ np.uint32(SEED[0])) + np.uint32(stream * 0x9E3779B9 % 2**32)
        wanted = mixed(hashed ^ np.uint32(SEED[1])) >> np.uint32(16)
    np.testing.assert_array_equal(random_bits(shape, SEED, stream).reshape(-1), wanted)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    below, above = neighbours(x)
    up = (x.view(np.uint32) & 0xFFFF).reshape(-1) + wanted >= 0x10000
    rounded = np.asarray(stochastic_round(jnp.asarray(x), SEED, stream), np.float32).reshape(-1)
    np.testing.assert_array_equal(rounded, np.where(up, above.reshape(-1), below.reshape(-1)))


def test_what_bfloat16_holds_stays_and_what_is_not_finite_is_cast():
    every = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    values = every.view(np.float32)
    rounded = np.asarray(jax.lax.bitcast_convert_type(stochastic_round(jnp.asarray(values), SEED, 0), jnp.uint16))
    finite = np.isfinite(values)
    np.testing.assert_array_equal(rounded[finite], (every[finite] >> 16).astype(np.uint16))
    odd = jnp.array([np.inf, -np.inf, np.nan, -np.nan])
    np.testing.assert_array_equal(np.asarray(stochastic_round(odd, SEED, 0), np.float32), np.asarray(odd))
    payload = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(np.asarray(stochastic_round(jnp.asarray(payload), SEED, 0), np.float32)).all()


@pytest.mark.parametrize("share", [1 / 65536, 0.1, 0.5, 0.9, 65535 / 65536])
@pytest.mark.parametrize("start", [1.0, -3.25, 1e-39])
def test_rounding_is_unbiased(start, share):
    count = 1 << 20
    base = np.float32(start).view(np.uint32) & np.uint32(0xFFFF0000)
    x = np.full(count, base + np.uint32(round(share * 65536)), np.uint32).view(np.float32)
    below, above = neighbours(x)
    rounded = np.asarray(stochastic_round(jnp.asarray(x), SEED, 3)).astype(np.float32)
    up = rounded.view(np.uint32) == above.view(np.uint32)
    assert (up | (rounded.view(np.uint32) == below.view(np.uint32))).all()
    exact = round(share * 65536) / 65536
    assert abs(up.mean() - exact) < 5 * np.sqrt(exact * (1 - exact) / count)


def test_bits_of_places_steps_and_tensors_are_independent():
    count = 1 << 18
    other = jax.random.key_data(jax.random.fold_in(jax.random.key(0), 1))
    draws = [
        np.asarray(random_bits((count,), seed, stream)).astype(np.int64)
        for seed, stream in [(SEED, 0), (SEED, 1), (SEED + jnp.uint32(1), 0), (other, 0)]
    ]
    bound = 5 / np.sqrt(count)
    for draw in draws:
        assert draw.min() >= 0 and draw.max() < 1 << 16
        assert abs(np.bincount(draw >> 8, minlength=256) - count / 256).max() < 6 * np.sqrt(count / 256)
        for lag in (1, 2, 64, 4096):  # rows and neighbours
            assert abs(np.corrcoef(draw[:-lag], draw[lag:])[0, 1]) < bound
    for one in range(len(draws)):
        for two in range(one):
            assert abs(np.corrcoef(draws[one], draws[two])[0, 1]) < bound
            for bit in (15, 8, 0):
                assert abs(((draws[one] >> bit & 1) == (draws[two] >> bit & 1)).mean() - 0.5) < bound


def test_the_same_bits_over_a_mesh():
    x = jax.random.normal(jax.random.key(1), (16, 24))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    divided = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    np.testing.assert_array_equal(
        np.asarray(jax.jit(stochastic_round, static_argnums=2)(divided, SEED, 5)).astype(np.float32),
        np.asarray(stochastic_round(x, SEED, 5)).astype(np.float32),
    )


def test_which_runs_keep_bf16_weights():
    assert weight_storage(None, "bf16", 1_235_814_400) == "fp32"
    assert weight_storage(None, "bf16", 8_030_261_248) == "bf16"
    assert weight_storage(None, "fp32", 8_030_261_248) == weight_storage(None, "fp16", 8_030_261_248) == "fp32"
    assert weight_storage("fp32", "bf16", 8_030_261_248) == "fp32" and weight_storage("bf16", "bf16", 9) == "bf16"


# ---- the Trainer

ROWS = dataset(documents(48))


def trainer_of(output, name="adamw", weights="bf16", rate=1e-2, **changes) -> Trainer:
    optim = OptimConfig(name=name, learning_rate=rate, weights=weights)
    model = tiny_model(hidden_size=64, intermediate_size=96, layers=(LayerSpec(),))
    return Trainer(model, None, make_config(output, optim=optim, **changes), ROWS)


def losses(trainer) -> np.ndarray:
    return np.asarray([line["loss"] for line in trainer.history])


@pytest.mark.full
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_training_tracks_float32(tmp_path, name):
    found = {}
    for weights in ("fp32", "bf16"):
        trainer = trainer_of(tmp_path / weights, name, weights, rate=3e-3, steps=40)
        trainer.train()
        found[weights] = losses(trainer)
    exact, rounded = found["fp32"], found["bf16"]
    assert exact[-5:].mean() < 0.7 * exact[0]
    assert 0 < abs(rounded - exact).max() < 0.05 * exact[0]
    assert abs(rounded[-5:].mean() - exact[-5:].mean()) < 0.02 * exact[0]


def up_proj(state) -> np.ndarray:
    return np.asarray(state["layers"][0]["mlp"]["up_proj"]["weight"].get_value(), np.float64).ravel()


@pytest.mark.full
def test_updates_too_small_for_bf16_are_kept_on_average(tmp_path):
    """At a rate at which rounding to nearest would leave most weights where they are."""
    moved, start = {}, np.zeros(0)
    for weights in ("fp32", "bf16"):
        trainer = trainer_of(tmp_path / weights, weights=weights, rate=5e-6, steps=30)
        start = up_proj(trainer.model.trainable)
        began = start if weights == "fp32" else start.astype(jnp.bfloat16).astype(np.float64)
        moved[weights] = up_proj(nnx.state(trainer.train(), nnx.Param)) - began
    exact, rounded = moved["fp32"], moved["bf16"]
    small = abs(exact) < abs(start) * 2.0**-10  # less than half a unit of the weight, after all steps together
    assert small.mean() > 0.5
    # Single ones move by a whole unit or not at all; regressed on what fp32 does, their slope is one.
    exact, rounded = exact[small], rounded[small]
    slope, noise = (rounded * exact).sum() / (exact**2).sum(), rounded.std() / np.sqrt((exact**2).sum())
    assert noise < 0.1 and abs(slope - 1) < 5 * noise


@pytest.mark.full
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_a_run_goes_on_bit_for_bit(tmp_path, name):
    save = CheckpointConfig(every_steps=2, every_minutes=None)
    straight = trainer_of(tmp_path / "run", name, checkpoint=save)
    want = straight.train()
    folder = tmp_path / "run" / "checkpoints"
    record = json.loads((folder / "step_00000002" / "meta.json").read_text())
    assert record["meta"]["storage"] == {"weights": "bf16", "optimizer": "8 bits" if "8bit" in name else "fp32"}
    dtypes = {key: entry["dtype"] for key, entry in record["arrays"].items()}
    kept = {key: dtype for key, dtype in dtypes.items() if "trainable" in key}
    assert len(kept) == 12 and {d for k, d in kept.items() if "norm" in k} == {"float32"}
    assert {dtype for key, dtype in kept.items() if "norm" not in key} == {"bfloat16"}
    assert "bfloat16" not in {dtype for key, dtype in dtypes.items() if "trainable" not in key}
    shutil.rmtree(folder / "step_00000004")
    resumed = trainer_of(tmp_path / "run", name, checkpoint=save)
    got = resumed.train()
    assert [line["step"] for line in resumed.history] == [3, 4]
    jax.tree.map(np.testing.assert_array_equal, nnx.state(got), nnx.state(want))


@pytest.mark.full
def test_the_seed_decides(tmp_path):
    first, again, other = (
        nnx.state(trainer_of(tmp_path / str(i), steps=1, seed=seed).train()) for i, seed in enumerate((0, 0, 1))
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    weights = (np.asarray(tree["head"]["weight"].get_value()) for tree in (first, other))
    assert not np.array_equal(*weights)


def test_gradients_are_bf16_only_where_nothing_adds_up(tmp_path):
    for parts, dtype in ((1, jnp.bfloat16), (2, jnp.float32)):
        trainer = trainer_of(tmp_path, micro_batches=parts)
        state, sums, _ = trainer.model.first_shapes(trainer.engine)
        assert {leaf.dtype for leaf in jax.tree.leaves(sums.gradients) if leaf.ndim > 1} == {jnp.dtype(dtype)}
        assert {leaf.dtype for leaf in jax.tree.leaves(sums.gradients) if leaf.ndim == 1} == {jnp.dtype("float32")}
        assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state)} == {jnp.dtype("float32"), jnp.dtype("int32")}
        words = "bf16" if parts == 1 else "fp32"
        assert trainer.notes()[0] == (
            "compute fp32; trainable weights bf16, matrices rounded stochastically and the rest in fp32; gradients "
            f"{words}; optimizer state fp32"
        )
    assert trainer_of(tmp_path, weights="fp32").notes()[0] == (
        "compute fp32; trainable weights fp32; gradients fp32; optimizer state fp32"
    )


@pytest.mark.full
def test_a_run_does_not_go_on_in_another_storage(tmp_path):
    save = CheckpointConfig(every_steps=2, every_minutes=None)
    trainer_of(tmp_path, steps=2, checkpoint=save).train()
    with pytest.raises(ValueError, match=r"storage\.weights"):
        trainer_of(tmp_path, weights="fp32", steps=2, checkpoint=save).train()


def test_adapters_stay_in_float32(tmp_path):
    with pytest.raises(ConfigError, match=r"optim.weights = 'bf16': adapters are kept in fp32"):
        make_config(tmp_path, optim=OptimConfig(weights="bf16"), adapter=AdapterConfig())


def test_gradients_of_an_embedding_in_bf16_add_up_in_float32():
    """One token 600 times: bf16 sums of ones stop at 256."""
    model = tiny_model("bfloat16", hidden_size=8, layers=())
    gradient = nnx.grad(lambda m: m.embed(jnp.zeros((1, 600), jnp.int32)).astype(jnp.float32).sum())(model)
    row = np.asarray(gradient["embedding"]["weight"].get_value(), np.float32)[0]
    np.testing.assert_array_equal(row, jnp.bfloat16(600))
