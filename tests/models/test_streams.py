"""Frozen weights that stream from the host give the bits of those that stay, whatever else is planned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIGS, golden_tokens

from jaxtune.models.adapters.merge import merge_adapter, merged_weights
from jaxtune.models.files.quant import compute_in_fp8, quantize
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.hf import model_from_config, save_weights
from jaxtune.models.lora import freeze, get_peft_model, matrices
from jaxtune.models.placement.host_pieces import pieces_of
from jaxtune.models.placement.streams import Arrivals, declared, is_on_host, streamed_layers
from jaxtune.models.stack.residual_plan import KEEP, RECOMPUTE, LayerPlan, ResidualPlan
from jaxtune.pallas.formats import FORMATS
from jaxtune.train.planning.movables.streamed import Streamed

PLANS = {"keep": KEEP, "recompute": RECOMPUTE, "offload": LayerPlan("offload")}
WHERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def make_model(family: str, form: str | None, targets: str | list[str] = "all-linear"):
    model = model_from_config(CONFIGS[family], jax.random.key(0), "bfloat16" if form else "float32")
    form = None if form == "bf16" else form
    if form == "mxfp4":
        model = freeze(model)
        for _, matrix in matrices(model):
            if matrix.weight.get_value().ndim == 3:
                matrix.weight = matrix.weight.replace(FORMATS["mxfp4"].encode(matrix.stored_weight))
    elif form == "fp8 products":
        model = compute_in_fp8(quantize(model, "fp8"))
    elif form is not None:
        model = quantize(model, form)
    return get_peft_model(model, r=2, target_modules=targets)


def loss_and_gradients(model, plan: LayerPlan, level: int):
    """(loss, gradients), jitted, with `level` layers' frozen weights on the host."""
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    frozen = Streamed.moved(model, frozen, level, WHERE)
    tokens = jnp.asarray(golden_tokens())
    segments = jnp.asarray([[1] * 9 + [2] * 15, [1] * 20 + [0] * 4])
    residuals = ResidualPlan.uniform(plan, len(model.layers))

    @jax.jit
    def compute(trainable, frozen):
        def total(trainable):
            hidden = nnx.merge(graph, trainable, frozen).hidden_states(tokens, segments, plan=residuals)
            return (hidden.astype(jnp.float32) * jnp.cos(jnp.arange(hidden.size).reshape(hidden.shape))).sum()

        return jax.value_and_grad(total)(trainable)

    return compute(trainable, frozen)


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


CASES = [
    ("qwen3_5", "nf4", "recompute", 2),
    ("gpt_oss", "mxfp4", "offload", 1),
    ("qwen3", "fp8 products", "recompute", 3),
    ("llama", "bf16", "recompute", 2),
    ("qwen3_moe", "bf16", "keep", 2),
    ("mixtral", "nf4", "recompute", 2),
]
OTHERS = [(family, form, plan, 2) for family in CONFIGS for form in (None, "nf4") for plan in ("keep", "offload")]


@pytest.mark.parametrize(
    ("family", "form", "plan", "level"),
    [*CASES, *(pytest.param(*other, marks=pytest.mark.full) for other in OTHERS)],
    ids=str,
)
@pytest.mark.usefixtures("compiled_in_full")  # with few optimisations, products differ by where an operand was made
def test_a_step_has_the_same_bits(family, form, plan, level):
    model = make_model(family, form)
    level = min(level, len(model.layers))
    assert_same(loss_and_gradients(model, PLANS[plan], level), loss_and_gradients(model, PLANS[plan], 0))


def test_a_pass_without_gradients_has_the_same_bits():
    model = make_model("gemma3", None)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    tokens, run = jnp.asarray(golden_tokens()), jax.jit(lambda model, tokens: model(tokens))
    want = run(model, tokens)
    for level in range(1, len(model.layers) + 1):
        streamed = nnx.merge(graph, trainable, Streamed.moved(model, frozen, level, WHERE))
        np.testing.assert_array_equal(run(streamed, tokens), want)


@pytest.mark.parametrize(("family", "form"), [("qwen3", None), ("gpt_oss", "mxfp4")])
def test_it_is_merged_as_one_that_stays_without_a_copy_on_the_host(family, form, tmp_path):
    model = make_model(family, form, targets=["q_proj"])
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    trainable = jax.tree.map(lambda array: array + 0.01, trainable)
    model = nnx.merge(graph, trainable, frozen)
    streamed = nnx.merge(graph, trainable, Streamed.moved(model, frozen, len(model.layers), WHERE))
    pinned = [array for array in jax.tree.leaves(nnx.state(streamed)) if is_on_host(array)]
    assert len(pinned) >= 6 * len(model.layers)  # of attention and feed-forward
    merged, want = merge_adapter(streamed), merge_adapter(model)
    assert not any(map(is_on_host, jax.tree.leaves(nnx.state(merged))))
    assert_same(jax.tree.leaves(nnx.state(merged)), jax.tree.leaves(nnx.state(want)))
    files = []
    for name, weights in (("streamed", merged_weights(streamed)), ("stays", merged_weights(model))):
        save_weights(weights, tmp_path / name)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    for array in pinned:
        pieces = pieces_of(array, 100)
        assert b"".join(make().tobytes() for _, make in pieces) == np.asarray(jax.device_put(array, WHERE)).tobytes()
        assert array._npy_value is None


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3", None),
        ("gpt_oss", "mxfp4"),
        *(pytest.param(family, "nf4", marks=pytest.mark.full) for family in CONFIGS),
    ],
)
def test_it_answers_as_one_that_stays(family, form):
    """Prompts that are packed or alone, at any level."""
    model = make_model(family, form, targets=["q_proj"])
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

    @given(st.integers(1, len(model.layers)), st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(0, 99))
    @settings(deadline=None, max_examples=3)
    def check(level, lengths, seed):
        streamed = nnx.merge(graph, trainable, Streamed.moved(model, frozen, level, WHERE))
        assert any(map(is_on_host, jax.tree.leaves(nnx.state(streamed))))
        drawn = np.random.default_rng(seed)
        prompts = [drawn.integers(1, 100, length).tolist() for length in lengths]
        with Sampler(streamed, 2, 64) as one, Sampler(model, 2, 64) as other:
            assert [*one.run(prompts, 5)] == [*other.run(prompts, 5)]

    check()


@given(st.integers(1, 100), st.data())
def test_layers_are_spread_evenly(layers, data):
    level = data.draw(st.integers(0, layers))
    chosen = streamed_layers(level, layers)
    assert len(chosen) == level and (not level or chosen[-1] == layers - 1)
    gaps = np.diff([-1, *chosen])
    assert not level or gaps.max() - gaps.min() <= 1


@given(st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=9), st.booleans())
@settings(deadline=None)
def test_each_weight_arrives_once_in_its_place_and_at_most_those_of_two_layers_are_there(sizes, arrived):
    """Sizes are of each layer's arrays on the host; every layer has one on the device, too."""
    where, host = WHERE, WHERE.with_memory_kind("pinned_host")
    number = iter(range(100))

    def variable(size, hosted):
        array = jax.device_put(np.full((size, 1), next(number), np.float32), host if hosted else where)
        return declared(nnx.Variable(array), array, hosted)

    variables = [[variable(size, True) for size in layer] + [variable(1, False)] for layer in sizes]
    weights = [[leaf.get_value() for leaf in layer] for layer in variables]
    first = [jax.device_put(leaf, where) for leaf in weights[0][:-1]] if arrived else None
    arrivals, there = Arrivals(variables, first), 0
    for layer, expected in enumerate(weights):
        taken = arrivals.take(layer)
        np.testing.assert_array_equal([a[0, 0] for a in taken], [a[0, 0] for a in expected[:-1]])
        assert all(a.sharding.memory_kind == where.memory_kind for a in taken)
        beside = arrivals.beside(layer)
        later = {index for index, other in enumerate(weights) for a in other for b in beside if a is b}
        assert len(later) <= 1 and all(index > layer for index in later)
        arrivals.arrive(layer, [jax.device_put(a, where) for a in beside])
        there += len(taken)
    assert there == sum(map(len, sizes))


def test_copies_are_spread_over_the_layers_between():
    array = jax.device_put(np.zeros((4, 2)), WHERE.with_memory_kind("pinned_host"))
    weights = [[declared(nnx.Variable(array), array, True) for _ in range(6 * (layer in (3, 7)))] for layer in range(8)]
    arrivals = Arrivals(weights)
    assert [len(arrivals.beside(layer)) for layer in range(8)] == [2, 2, 2, 2, 1, 2, 1, 0]
