"""Lion, Muon and schedules against their formulas, over drawn shapes and lengths."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.pallas.formats.blockwise8 import decode
from jaxtune.train.config import ConfigError, OptimConfig, ScheduleConfig
from jaxtune.train.config.sections import ENDLESS, OPTIMIZERS, SCHEDULES
from jaxtune.train.optimizer.muon import orthogonal
from jaxtune.train.optimizer.optim import decayed_tensors, embedding_tensors, make_optimizer, update_bound
from jaxtune.train.optimizer.schedule import learning_rate_schedule, new_rates

RATE = 0.01


def updates_of(name: str, gradients: list[dict], weights: dict, **options):
    """(weights after an update for each of the gradients, the last states)"""
    optimizer = make_optimizer(OptimConfig(name=name, **options), optax.constant_schedule(RATE))
    state, step = optimizer.init(weights), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = step(gradient, state, weights)
        weights = jax.tree.map(jnp.add, weights, updates)
    return weights, state


@given(rows=st.integers(1, 70), columns=st.integers(1, 70), seed=st.integers(0, 99), decay=st.sampled_from([0.0, 0.3]))
@settings(max_examples=6, deadline=None)
def test_lion_is_the_formula(rows, columns, seed, decay):
    draw = np.random.default_rng(seed)
    weight = draw.standard_normal((rows, columns))
    gradients = draw.standard_normal((3, rows, columns))
    got, _ = updates_of(
        "lion",
        [{"matrix": jnp.asarray(g, jnp.float32)} for g in gradients],
        {"matrix": jnp.asarray(weight, jnp.float32)},
        beta1=0.8,
        beta2=0.95,
        weight_decay=decay,
    )
    momentum = np.zeros_like(weight)
    for g in gradients.astype(np.float32).astype(float):
        weight = weight - RATE * (np.sign(0.8 * momentum + 0.2 * g) + decay * weight)
        momentum = 0.95 * momentum + 0.05 * g
    np.testing.assert_allclose(got["matrix"], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 65), (17, 300), (10, 10)])
def test_lion_in_8_bits_goes_by_its_coded_momentum(shape):
    """The direction of each step follows from the momentum that the codes mean; a skipped step leaves them."""
    optimizer = make_optimizer(OptimConfig(name="lion_8bit", beta2=0.9), optax.constant_schedule(1.0))
    draw, weights = np.random.default_rng(0), jnp.zeros(shape)
    state, size = optimizer.init(weights), math.prod(shape)
    for _ in range(4):
        gradient = jnp.asarray(draw.standard_normal(shape), jnp.float32)
        coded = state[0].m.dtype == jnp.uint8
        assert coded == (size >= 4096)
        old = decode(state[0].m, state[0].m_absmax, True).reshape(-1)[:size].reshape(shape) if coded else state[0].m
        updates, new = optimizer.update(gradient, state, weights, scale=0.5)
        np.testing.assert_array_equal(-updates, np.sign(0.9 * old + np.float32(0.1) * (0.5 * gradient)))
        after = decode(new[0].m, new[0].m_absmax, True).reshape(-1)[:size].reshape(shape) if coded else new[0].m
        want = 0.9 * old + 0.1 * 0.5 * gradient
        bound = 0.02 * float(jnp.abs(want).max()) if coded else 1e-6
        assert float(jnp.abs(after - want).max()) <= bound
        _, skipped = optimizer.update(jnp.full(shape, jnp.nan), state, weights, finite=False)
        assert all((a == b).all() for a, b in zip(jax.tree.leaves(skipped), jax.tree.leaves(state), strict=True))
        state = new
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state[0])) <= (4 * size if size < 4096 else size * 1.02 + 300)


@pytest.mark.full
@given(st.lists(st.integers(1, 3), max_size=1), st.integers(1, 60), st.integers(1, 60), st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_orthogonal_has_singular_values_near_one(batch, rows, columns, seed):
    x = np.random.default_rng(seed).standard_normal((*batch, rows, columns)) * 10.0 ** (seed % 7 - 3)
    values = np.linalg.svd(np.asarray(orthogonal(jnp.asarray(x, jnp.float32))), compute_uv=False)
    assert values.max() < 1.25
    condition = np.linalg.svd(x, compute_uv=False)
    fine = condition > 0.05 * np.sqrt((condition**2).sum(-1, keepdims=True))
    assert (values[fine] > 0.6).all()


def test_muon_updates_matrices_and_leaves_the_rest_to_adam():
    """Also where tensors are updated one by one, as in full fine-tuning."""
    draw = np.random.default_rng(1)
    shapes = {
        "embedding": {"weight": (40, 8)},
        "head": {"weight": (40, 8)},
        "layer": {"up": (8, 24), "experts": (3, 8, 5), "norm": (8,), "bias": (3, 8), "kernel": (6, 3, 2, 2, 2)},
    }
    is_shape = dict(is_leaf=lambda x: isinstance(x, tuple))
    weights = jax.tree.map(lambda s: jnp.asarray(draw.standard_normal(s), jnp.float32), shapes, **is_shape)
    gradients = [
        jax.tree.map(lambda s: jnp.asarray(draw.standard_normal(s), jnp.float32), shapes, **is_shape) for _ in range(3)
    ]
    options = dict(beta2=0.99, eps=1e-6, weight_decay=0.1)
    got, state = updates_of("muon", gradients, weights, **options)
    adam, _ = updates_of("adamw", gradients, weights, **options)
    for path in (("embedding", "weight"), ("head", "weight"), ("layer", "norm"), ("layer", "bias")):
        one, other = (tree[path[0]][path[1]] for tree in (got, adam))
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6, err_msg=str(path))
    for name in ("up", "experts", "kernel"):  # the last of a convolution: the matrix of its product
        want, momentum = np.asarray(weights["layer"][name], np.float64), 0.0
        for gradient in gradients:
            g = np.asarray(gradient["layer"][name], np.float64)
            momentum = 0.95 * momentum + 0.05 * g
            matrices = (0.95 * momentum + 0.05 * g).reshape((6, 24) if name == "kernel" else g.shape)
            direction = np.asarray(orthogonal(jnp.asarray(matrices, jnp.float32))).reshape(g.shape)
            want = want - RATE * (0.2 * math.sqrt(max(matrices.shape[-2:])) * direction + 0.1 * want)
        np.testing.assert_allclose(got["layer"][name], want, rtol=1e-4, atol=2e-4)
    assert state[0].v["layer"]["up"].size == 0

    optimizer = make_optimizer(OptimConfig(name="muon", **options), optax.constant_schedule(RATE))
    whole, _ = optimizer.update(gradients[0], optimizer.init(weights), weights)
    first = optimizer.init(weights)
    by_name = zip(decayed_tensors(weights), embedding_tensors(weights), strict=True)
    for index, (decays, embeds) in enumerate(by_name):
        pick = jax.tree.structure(weights)
        own = jax.tree.map(
            lambda tree, index=index, pick=pick: (
                [jax.tree.leaves(tree)[index]] if jax.tree.structure(tree) == pick else tree
            ),
            first,
            is_leaf=lambda tree, pick=pick: jax.tree.structure(tree) == pick,
        )
        alone, _ = optimizer.update(
            [jax.tree.leaves(gradients[0])[index]],
            own,
            [jax.tree.leaves(weights)[index]],
            decayed=[decays],
            embeddings=[embeds],
        )
        np.testing.assert_array_equal(alone[0], jax.tree.leaves(whole)[index])


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if update_bound(OptimConfig(name=name), 2.0)])
def test_no_update_is_beyond_the_bound(name):
    config = OptimConfig(name=name, eps=1e-3, beta1=0.5, beta2=0.99, weight_decay=0.25)
    optimizer, bound = make_optimizer(config, optax.constant_schedule(1.0)), update_bound(config, 2.0)
    weights = {"a": jnp.full((64, 64), 3.0)}
    state = optimizer.init(weights)
    for size in (0.0, 1e-6, 2.0, 2.0, 0.0):
        updates, state = optimizer.update({"a": jnp.zeros((64, 64)).at[0, 0].set(size)}, state, weights)
        assert float(jnp.abs(updates["a"]).max()) <= bound.direction + bound.decay * 3.0


def drawn_schedule(draw, name):
    total = draw(st.integers(2, 60))
    keys = {"warmup_steps": draw(st.integers(0, total)), "zero_start": draw(st.booleans())}
    if name not in ("constant", "inverse_sqrt"):
        keys["min_ratio"] = draw(st.sampled_from([0.0, 0.1, 0.5]))
    if name == "warmup_stable_decay":
        keys["decay_steps"] = draw(st.integers(1, total))
        keys |= {key: draw(st.sampled_from(["linear", "cosine", "1-sqrt"])) for key in ("decay", "warmup")}
    return ScheduleConfig(name=name, **keys), total


@pytest.mark.parametrize("name", SCHEDULES)
@given(st.data())
@settings(max_examples=20, deadline=None)
def test_a_longer_run_names_its_new_rates_only_if_they_are_new(name, data):
    config, total = drawn_schedule(data.draw, name)
    changes = {"warmup_steps": 0, "warmup_ratio": 0.25} if data.draw(st.booleans()) else {}
    if name not in ENDLESS and data.draw(st.booleans()):
        changes["min_ratio"] = 1.0
    if name == "warmup_stable_decay":
        changes["stable_steps"] = data.draw(st.none() | st.integers(0, 9))
        if data.draw(st.booleans()):
            changes |= {"decay_steps": None, "decay_ratio": 0.25}
    config = dataclasses.replace(config, **changes)
    longer = total + data.draw(st.integers(100, 200))
    of_steps = [learning_rate_schedule(config, 2.0, steps) for steps in (total, longer)]
    rates = [np.asarray(jax.vmap(schedule)(jnp.arange(longer))) for schedule in of_steps]
    told = new_rates(config, of_steps[1], 1, 0, longer)
    assert bool(told) == (not np.allclose(*rates))
    assert new_rates(config, None, 1, 0, longer) == []


@pytest.mark.parametrize("name", SCHEDULES)
@given(st.data())
@settings(max_examples=5, deadline=None)
def test_a_schedule_never_leaves_its_range_and_reaches_its_ends(name, data):
    config, total = drawn_schedule(data.draw, name)
    rates = np.asarray(jax.vmap(learning_rate_schedule(config, 2.0, total))(jnp.arange(total + 1)))
    assert np.isfinite(rates).all() and rates.max() <= 2.0 + 1e-5 and rates.min() >= -1e-6
    warmup = config.warmup_steps
    if warmup:
        lowest = 2.0 * config.min_ratio if name == "warmup_stable_decay" else 0.0
        shapeless = config.warmup == "linear"
        if config.zero_start:
            assert rates[0] == pytest.approx(lowest, abs=1e-5)
        elif shapeless:
            assert rates[0] == pytest.approx(lowest + (2.0 - lowest) / warmup, rel=1e-4)
        assert (np.diff(rates[: warmup + (not config.zero_start) - 1]) >= -1e-5).all()
    if name in ("linear", "cosine", "cosine_with_restarts", "polynomial") and warmup < total:
        assert rates[total] == pytest.approx(2.0 * config.min_ratio, abs=1e-4)
    if name != "warmup_stable_decay" and warmup < total:
        assert rates[warmup] == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(power=2.0), "schedule.power = 2.0: needs schedule.name = polynomial"),
        (dict(name="cosine", decay_steps=3), "schedule.decay_steps = 3: needs schedule.name = warmup_stable_decay"),
        (dict(name="warmup_stable_decay"), "schedule.decay_steps = None: set it or schedule.decay_ratio, one of them"),
        (dict(name="warmup_stable_decay", decay_steps=1, decay_ratio=0.1), "one of them"),
        (dict(name="inverse_sqrt", timescale=0), "schedule.timescale = 0: must be greater than 0"),
        (dict(name="polynomial", power=0.0), "schedule.power = 0.0: must be greater than 0"),
    ],
)
def test_bad_schedules(values, message):
    with pytest.raises(ConfigError, match=message):
        ScheduleConfig(**values)


def test_momentum_by_the_optimizer():
    assert [OptimConfig(name=name).momentum for name in ("sgd", "muon", "adamw")] == [0.9, 0.95, 0.9]
    assert dataclasses.replace(OptimConfig(name="muon", momentum=0.5)).momentum == 0.5
