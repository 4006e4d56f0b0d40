"""The stack: whatever becomes of the residuals, the numbers stay the same."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import adapted_model, tiny_model

from benchmarks.serial import serial_transfers
from jaxtune.models.config import PARALLEL, PRE_AND_POST_NORM, LayerSpec, RopeConfig
from jaxtune.models.layers.attention import Attention
from jaxtune.models.linear import Frozen
from jaxtune.models.placement import transfers as schedule
from jaxtune.models.stack.residual_plan import KEEP, RECOMPUTE, LayerPlan, ResidualPlan, residuals_of
from jaxtune.models.stack.stack import run_stack
from jaxtune.pallas.attention import attention
from jaxtune.pallas.quant_matmul import reference

LAYERS = 2
SPECS = (LayerSpec(window=4), LayerSpec(rotary=1))
SEGMENTS = np.array([[1] * 5 + [2] * 7, [0] + [3] * 8 + [0] * 3], np.int32)

OFFLOAD = LayerPlan("offload")
MIX = LayerPlan(query="recompute", lse="offload", mid="recompute", gate="offload", up="recompute")
PLANS = {
    "keep": ResidualPlan.uniform(KEEP, LAYERS),
    "recompute": ResidualPlan.uniform(RECOMPUTE, LAYERS),
    "offload": ResidualPlan.uniform(OFFLOAD, LAYERS),
    "a mix in a layer": ResidualPlan.uniform(MIX, LAYERS),
    "a layer each": ResidualPlan((LayerPlan("recompute", layer_input="offload"), LayerPlan(attention_out="recompute"))),
}


def make_model(**settings):
    rotary = (RopeConfig(), RopeConfig(theta=100.0))
    model = tiny_model(layers=SPECS, rotary=rotary, qk_norm="head", stages=PRE_AND_POST_NORM, attention_soft_cap=3.0)
    return adapted_model(model, r=2, **settings)


def loss_and_gradients(model, plan=None, dropout_key=None, run=run_stack):
    """(a sum over the stack's output, its gradients to the trainables and to x), jitted."""
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    x = jax.random.normal(jax.random.key(5), (*SEGMENTS.shape, model.config.hidden_size))
    probe = jax.random.normal(jax.random.key(6), x.shape)

    @jax.jit
    def compute(trainable, frozen, x):
        def total(trainable, x):
            model = nnx.merge(graph, trainable, frozen)
            layout = model.layout(SEGMENTS.shape, jnp.asarray(SEGMENTS))
            return (run(model.layers, model.config.layers, x, layout, plan, dropout_key)[0] * probe).sum()

        return jax.value_and_grad(total, (0, 1))(trainable, x)

    return compute(trainable, frozen, x)


def run_plainly(layers, specs, x, layout, plan, dropout_key):
    """The same layers under JAX's own differentiation: no segments, no plan, no hand-written backward."""
    assert plan is None and dropout_key is None
    for block, spec in zip(layers, specs, strict=True):
        config = block.mixer.config
        rotary = None if spec.rotary is None else layout.rotary[spec.rotary]
        query, key, value = block.mixer.project(block.normed("mixer", x), rotary)
        out = attention(
            query,
            key,
            value,
            layout,
            scale=config.attention_scale,
            window=spec.window,
            soft_cap=config.attention_soft_cap,
        )
        mid = block.added("mixer", x, block.mixer.output(out))
        x = block.added("mlp", mid, block.mlp.down(*block.mlp.gate_up(block.normed("mlp", mid))))
    return x, {}


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


TARGETS = ["q_proj", "o_proj", "up_proj"]


@pytest.fixture(scope="module")
def kept(with_costly_passes):
    """(model, its results with everything kept), with dropout."""
    model = make_model(lora_dropout=0.3, use_dora=True, target_modules=TARGETS)
    with with_costly_passes():
        return model, loss_and_gradients(model, PLANS["keep"], jax.random.key(9))


@pytest.mark.full
@pytest.mark.parametrize("plan", [name for name in PLANS if name != "keep"])
@pytest.mark.usefixtures("compiled_in_full")
def test_plans_give_the_same_bits_and_masks(kept, plan):
    model, want = kept
    assert_same(loss_and_gradients(model, PLANS[plan], jax.random.key(9)), want)


@pytest.mark.full
@pytest.mark.usefixtures("compiled_in_full")
def test_serial_transfers_give_the_same_bits(kept):
    """What overlapped ones are measured against."""
    model, want = kept
    with serial_transfers():
        assert_same(loss_and_gradients(model, PLANS["offload"], jax.random.key(9)), want)


@functools.cache
def operations(**settings) -> float:
    """Of a step's layers, as XLA counts them."""
    model = adapted_model(tiny_model(layers=(LayerSpec(),) * LAYERS, **settings), r=2, target_modules=TARGETS)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    x = jax.ShapeDtypeStruct((2, 128, model.config.hidden_size), jnp.float32)

    def total(trainable, frozen, x):
        model = nnx.merge(graph, trainable, frozen)
        return run_stack(model.layers, model.config.layers, x, model.layout(x.shape[:2]), PLANS["keep"])[0].sum()

    return jax.jit(jax.grad(total)).lower(trainable, frozen, x).compile().cost_analysis()["flops"]


@pytest.mark.full
@pytest.mark.parametrize(
    "norms, most",
    [(dict(stages=PRE_AND_POST_NORM), 1.03), (dict(qk_norm="head"), 1.02), (dict(qk_norm="projection"), 1.02)],
    ids=str,
)
def test_a_norm_of_products_multiplies_nothing_again(norms, most):
    """Its derivative reads the products, which are kept. Of the operations without these norms, XLA counts 1.022, 1.013
    and 1.012 with them; with the products made again it counted 1.046, 1.028 and 1.027."""
    assert operations() < operations(**norms) < most * operations()


@pytest.mark.parametrize("plan", ["keep", "recompute", "offload"])
def test_products_are_the_same_instructions_under_every_plan(plan):
    """XLA chooses a product's algorithm by its text: an attribute that only some plans set would make them differ."""
    graph, trainable, frozen = nnx.split(make_model(target_modules=TARGETS), nnx.Param, ...)

    def total(trainable):
        model = nnx.merge(graph, trainable, frozen)
        x, layout = jnp.ones((*SEGMENTS.shape, model.config.hidden_size)), model.layout(SEGMENTS.shape)
        return run_stack(model.layers, model.config.layers, x, layout, PLANS[plan])[0].sum()

    text = jax.jit(jax.grad(total)).lower(trainable).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) > 20
    assert [line for line in products if 'latency_metadata = "1000"' not in line] == []


def test_equals_plain_differentiation():
    model = make_model(use_dora=True, target_modules=TARGETS)
    loss, (trainable, x) = loss_and_gradients(model)
    want_loss, (want_trainable, want_x) = loss_and_gradients(model, run=run_plainly)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    names = set()
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path((trainable, x)), jax.tree.leaves((want_trainable, want_x)), strict=True
    ):
        scale = np.abs(b).max()
        assert scale > 0, path
        np.testing.assert_allclose(a, b, atol=2e-6 * scale, rtol=0, err_msg=jax.tree_util.keystr(path))
        names.add(jax.tree_util.keystr(path))
    assert len(names) == 1 + 3 * 3 * LAYERS  # x; a, b and magnitude of three linears: nothing frozen among them


def test_a_gradient_of_frozen_tensors_is_refused():
    """It was zero, in silence. Those outside the stack have one."""
    model, tokens = make_model(target_modules=TARGETS), jnp.ones((1, 4), jnp.int32)

    def total(model):
        return model(tokens).sum()

    of_frozen = nnx.DiffState(0, Frozen)
    with pytest.raises(TypeError, match=r"gradient is asked for of layers.0..*weight.* frozen tensors, which get none"):
        nnx.grad(total, argnums=of_frozen)(model)
    with pytest.raises(TypeError, match="frozen tensors, which get none"):
        nnx.grad(nnx.jit(total), argnums=of_frozen)(model)
    gradient = nnx.grad(total, argnums=nnx.DiffState(0, nnx.PathContains("head")))(model)
    assert [float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient)] == [True]


@pytest.mark.full
@pytest.mark.parametrize("tile", [1, 4, 12])
def test_a_tiled_mlp_gives_the_same(tile):
    """One tile: the same bits. More: the same but for the order of the sums of the weights' gradients."""
    model = make_model(use_dora=True, target_modules=TARGETS)
    want_loss, (want, want_x) = loss_and_gradients(model, PLANS["recompute"])
    plan = ResidualPlan((RECOMPUTE, LayerPlan(layer_input="offload", gate="recompute", up="recompute")), tile)
    loss, (trainable, x) = loss_and_gradients(model, plan)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path((trainable, x)), jax.tree.leaves((want, want_x)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max(), rtol=0, err_msg=jax.tree_util.keystr(path))


def test_a_parallel_layer_under_a_mixed_plan_and_in_tiles():
    """Both of its parts read the layer's input, through one norm."""
    traits = dict(stages=PARALLEL, centred_norm=True, residual_scale=0.3, interleaved_rotary=True)
    model = tiny_model(layers=SPECS[:1], **traits)
    want = loss_and_gradients(model, ResidualPlan((KEEP,)))
    assert_same(loss_and_gradients(model, ResidualPlan((MIX,))), want)
    got = loss_and_gradients(model, ResidualPlan((RECOMPUTE,), 4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_layers_that_keep_gate_or_up_are_not_tiled():
    model = make_model()
    plan = ResidualPlan.uniform(LayerPlan(gate="recompute"), LAYERS)
    tiled = ResidualPlan(plan.layers, 4)
    assert_same(loss_and_gradients(model, tiled), loss_and_gradients(model, plan))


def test_full_fine_tuning_equals_plain_differentiation():
    model = tiny_model(layers=SPECS[:1], qkv_bias=True, mlp_bias=True)
    want = loss_and_gradients(model, run=run_plainly)
    got = loss_and_gradients(model, ResidualPlan.uniform(RECOMPUTE, 1))
    assert len(jax.tree.leaves(got)) > 12
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * max(1.0, np.abs(b).max()), rtol=0)


def test_dropout_masks_differ_by_key(kept):
    model, first = kept
    assert first[0] != loss_and_gradients(model, PLANS["keep"], jax.random.key(1))[0]


def test_dropout_masks_differ_by_layer_and_segment(monkeypatch):
    model = make_model(lora_dropout=0.5)
    seen = []

    def spy(x, rate, key, part):
        seen.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        return x

    monkeypatch.setattr(reference, "dropout", spy)
    with jax.disable_jit():
        x = jnp.zeros((*SEGMENTS.shape, model.config.hidden_size))
        layout = model.layout(SEGMENTS.shape, jnp.asarray(SEGMENTS))
        run_stack(model.layers, SPECS, x, layout, dropout_key=jax.random.key(0))
    assert len(seen) == len(set(seen)) == 4 * LAYERS  # project, mix, expand, contract


@pytest.mark.full
def test_equal_layers_are_traced_once(monkeypatch):
    """32 layers of two kinds: two traces of a layer's forward and two of its backward."""
    counts = {"project": 0}
    project = Attention.project

    def counted(self, *arguments, **options):
        counts["project"] += 1
        return project(self, *arguments, **options)

    monkeypatch.setattr(Attention, "project", counted)
    kinds = (LayerSpec(), LayerSpec(window=3))
    model = adapted_model(tiny_model(hidden_size=24, head_dim=4, layers=kinds * 16), r=3)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    tokens = jnp.zeros((1, 7), jnp.int32)

    def loss(trainable, frozen):
        return nnx.merge(graph, trainable, frozen).hidden_states(tokens).sum()

    jax.jit(loss).trace(trainable, frozen)
    assert counts["project"] == 2
    counts["project"] = 0
    jax.jit(jax.grad(loss)).trace(trainable, frozen)
    # Forward again, because it hands out residuals now; and once in the backward, under jax.vjp.
    assert counts["project"] == 2 + 2


def test_offloaded_residuals_are_on_the_host_and_come_back():
    """In the program: a copy to the host for each offloaded residual of each layer but the last, and one back.

    The backward begins with the last layer, whose residuals would come back at once.
    """
    model = make_model()
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

    def loss(trainable, plan):
        return nnx.merge(graph, trainable, frozen).hidden_states(jnp.asarray(SEGMENTS), plan=plan).sum()

    def copies(plan):
        text = str(jax.make_jaxpr(lambda t: jax.grad(loss)(t, plan))(trainable))
        return text.count("Space.Host"), text.count("Space.Device")

    assert copies(PLANS["recompute"]) == (0, 0)
    assert copies(ResidualPlan.uniform(LayerPlan(gate="offload", up="offload"), LAYERS)) == (2, 2)
    last = ResidualPlan((KEEP,) * (LAYERS - 1) + (OFFLOAD,))
    assert copies(last) == (0, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerPlan(gate="drop"), "residual gate: placement 'drop' is not one of keep, offload, recompute"),
        (
            lambda: run_plan(gat="offload"),
            "no layer has a residual 'gat' \\(nearest: gate\\); there are: layer_input, query",
        ),
        (lambda: run_plan(typo="keep"), "no layer has a residual 'typo'"),
        (lambda: run_plan(layer_input="recompute"), "residual layer_input: it can be kept or offloaded"),
        (lambda: run_plan("recompute", layer_input="recompute"), "residual layer_input: it can be kept or offloaded"),
    ],
)
def test_layer_plan_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_residuals_may_be_given_by_an_iterator():
    residuals = residuals_of(make_model().layers)
    plan = LayerPlan("offload", gate="keep")
    assert plan.resolved(iter(residuals)) == plan.resolved(residuals)


def run_plan(*rest, **placements):
    plan = ResidualPlan.uniform(LayerPlan(*rest, **placements), LAYERS)
    return make_model().hidden_states(jnp.zeros((1, 4), jnp.int32), plan=plan)


@pytest.mark.parametrize("plan", ["keep", "recompute"])
@pytest.mark.parametrize("target", ["all-linear", r".*layers\.1\..*"])  # the second leaves a layer without adapters
def test_gradients_are_added_to_sums(plan, target):
    rotary = (RopeConfig(), RopeConfig(theta=100.0))
    model = adapted_model(tiny_model(layers=SPECS, rotary=rotary), r=2, target_modules=target)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    begun = jax.tree.map(lambda a: jnp.full(a.shape, 0.25, jnp.float32), trainable["layers"])

    @jax.jit
    def gradients(trainable, begun):
        def loss(trainable, begun):
            model = nnx.merge(graph, trainable, frozen)
            return model.run(jnp.asarray(SEGMENTS), plan=PLANS[plan], gradient_sums=begun)[0].sum()

        return jax.grad(loss, (0, 1))(trainable, begun)

    want, _ = gradients(trainable, None)
    rest, got = gradients(trainable, begun)
    assert_same(got, jax.tree.map(lambda a: a + 0.25, want["layers"]))
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(rest))


def test_tiles_that_cannot_be():
    model, tokens = make_model(), jnp.zeros((1, 12), jnp.int32)
    with pytest.raises(ValueError, match="tile_tokens = 5 does not divide 12 tokens"):
        model.hidden_states(tokens, plan=ResidualPlan((RECOMPUTE,) * LAYERS, 5))
    with pytest.raises(ValueError, match="a tiled MLP has no dropout"):
        model.hidden_states(tokens, plan=ResidualPlan((RECOMPUTE,) * LAYERS, 4), dropout_key=jax.random.key(0))


@pytest.mark.full
def test_two_models_and_changing_lengths_in_one_process():
    """No stale buffer: each call gives what it gives without offload, whatever ran before it."""
    offload = ResidualPlan.uniform(OFFLOAD, LAYERS)
    models = [make_model(), adapted_model(tiny_model(layers=SPECS, rotary=(RopeConfig(), RopeConfig())), r=3)]

    def gradients(model, length, plan):
        graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
        tokens = jnp.asarray(np.random.default_rng(length).integers(0, 48, (2, length)), jnp.int32)

        @jax.jit
        def compute(trainable, frozen):
            loss = lambda t: nnx.merge(graph, t, frozen).hidden_states(tokens, plan=plan).sum()  # noqa: E731
            return jax.value_and_grad(loss)(trainable)

        return compute(trainable, frozen)

    got = [gradients(model, length, offload) for length in (8, 32, 6) for model in models]
    want = [gradients(model, length, PLANS["keep"]) for length in (8, 32, 6) for model in models]
    for one, other in zip(got, want, strict=True):
        assert_same(one, other)


def test_a_plan_of_another_depth():
    with pytest.raises(ValueError, match="the residual plan has 3 layers, the model 2"):
        make_model().hidden_states(jnp.zeros((1, 4), jnp.int32), plan=ResidualPlan.uniform(KEEP, 3))


@pytest.mark.parametrize("shape", [(3, 5, 4), (1, 12, 4), (12, 4), (12, 1), (1, 1, 4)])
def test_pieces_make_the_whole(monkeypatch, shape):
    monkeypatch.setattr(schedule, "PIECE_BYTES", 32)
    array = jnp.arange(np.prod(shape)).reshape(shape)
    (pieces,) = schedule.cut([array], [1.0])
    assert len(pieces.arrays) > 1 or max(shape[:2]) == 1
    np.testing.assert_array_equal(schedule.join(pieces), array)


def test_a_layer_more_needs_an_entry_more_in_the_config():
    model, tokens = make_model(), jnp.ones((1, 4), jnp.int32)
    model.layers = nnx.List([*model.layers, nnx.clone(model.layers[-1])])
    with pytest.raises(
        ValueError, match=r"has 3 layers, and its config 2: .* dataclasses.replace\(model.config, layers="
    ):
        model(tokens)
    model.config = dataclasses.replace(model.config, layers=(*model.config.layers, model.config.layers[-1]))
    whole, first = model(tokens), make_model()
    assert whole.shape == first(tokens).shape and not np.allclose(whole, first(tokens))
    del model.layers[-1]
    with pytest.raises(ValueError, match="has 2 layers, and its config 3"):
        model.hidden_states(tokens)
