"""With `exact` a sampled token's log-probability has the bits that the training forward gives it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import draws, forget_programs
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import adapted_model, tiny_model

from jaxtune import Decoder, Sampler
from jaxtune.models.config import LayerSpec, MoEConfig, RopeConfig
from jaxtune.models.files.quant import quantize
from jaxtune.models.generation import exactness, plain_layer
from jaxtune.models.generation.differences import differences
from jaxtune.models.generation.exactness import refusal, require_exact
from jaxtune.models.generation.generate import training_logprobs
from jaxtune.models.layers.segment import INPUT, OUTPUT, Context
from jaxtune.pallas import compat, one_order, targets
from jaxtune.pallas.attention import packed_layout
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.gated import ACTIVATIONS, RowGate, activated, gated_rows
from jaxtune.pallas.normed_heads import normed
from jaxtune.pallas.normed_heads.reference import rotated
from jaxtune.pallas.routing import choose_experts, expert_weights

pytestmark = pytest.mark.usefixtures("compiled_in_full")
SHAPE = dict(hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16, attention_scale=0.25)
SHAPE |= dict(initializer_range=0.2, max_position_embeddings=640)
MOE = MoEConfig(num_experts=4, experts_per_token=2, expert_size=32, renormalize=True)
KINDS = {
    "dense": {},
    "normed_heads": dict(qk_norm="head"),
    "biases_and_a_soft_cap": dict(qkv_bias=True, attention_soft_cap=5.0, final_soft_cap=8.0),
    "windows_and_sinks": dict(layers=(LayerSpec(window=50), LayerSpec()), attention_sinks=True),
    "experts": dict(moe=MOE),
    "experts_of_all": dict(moe=dataclasses.replace(MOE, renormalize=False)),
    "experts_of_odd_sizes": dict(moe=MoEConfig(num_experts=7, experts_per_token=3, expert_size=21, renormalize=False)),
    "shared_expert": dict(moe=dataclasses.replace(MOE, shared_size=40), activation="gelu_tanh"),
    "clipped_experts": dict(
        moe=dataclasses.replace(MOE, swiglu_limit=2.0, interleaved=True, router_bias=True, expert_bias=True)
    ),
}


def model_of(kind: str, dtype: str, load_in: str | None) -> Decoder:
    model = tiny_model(dtype, **(SHAPE | KINDS[kind]))
    settings = dict(target_parameters=["experts.gate_up_proj", "experts.down_proj"]) if model.config.moe else {}
    return adapted_model(quantize(model, load_in) if load_in else model, r=4, lora_alpha=6, **settings)


EXPERTS = [kind for kind, changes in KINDS.items() if "moe" in changes]


@pytest.mark.full
@draws(8)
@given(st.data())
def test_experts_give_a_token_the_same_bits_beside_any_others(data):
    forget_programs()
    kind, dtype = data.draw(st.sampled_from(EXPERTS)), data.draw(st.sampled_from(["float32", "bfloat16"]))
    load_in = data.draw(st.sampled_from([None, "nf4"])) if kind == "experts" else None
    model = model_of(kind, dtype, load_in)
    layer, context = model.layers[0].parts["mlp"], Context(model.config.layers[0], packed_layout((1, 1)))
    graph, state = nnx.split(layer)

    @functools.partial(one_order.exactly_if, True)
    @jax.jit
    def fed_forward(state, x):
        moe = nnx.merge(graph, state)
        values = {INPUT: x, "choice": moe.choose(x)}
        for segment in moe.segments():
            if segment.name not in ("route", "balance"):
                results = segment.run(moe, context, *(values[name] for name in segment.reads))
                values |= dict(zip((residual.name for residual in segment.makes), results, strict=True))
        return values[OUTPUT]

    count = data.draw(st.integers(200, 300))
    x = jax.random.normal(jax.random.key(count), (1, count, SHAPE["hidden_size"]), dtype)
    whole = np.asarray(fed_forward(state, x), np.float32)
    for size in data.draw(st.lists(st.integers(1, count), min_size=3, max_size=3)):
        first = data.draw(st.integers(0, count - size))
        some = np.asarray(fed_forward(state, x[:, first : first + size]), np.float32)
        np.testing.assert_array_equal(some, whole[:, first : first + size])


@pytest.mark.full
@draws(6)
@given(st.data())
def test_sampler_and_training_forward_agree_in_every_bit(data):
    forget_programs()
    kind, dtype = data.draw(st.sampled_from([*KINDS])), data.draw(st.sampled_from(["bfloat16", "float32"]))
    load_in = data.draw(st.sampled_from([None, "nf4"])) if kind in ("dense", "normed_heads", "experts") else None
    lengths = data.draw(
        st.lists(st.one_of(st.integers(1, 300), st.sampled_from([63, 64, 65, 129])), min_size=1, max_size=8)
    )
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    prompts, new = [draw.integers(0, 48, length).tolist() for length in lengths], data.draw(st.integers(1, 24))
    settings = data.draw(
        st.sampled_from(
            [
                dict(temperature=1.0),
                dict(temperature=0.0),
                dict(temperature=1.0, top_k=5),
                dict(temperature=1.0, repetition_penalty=1.3),
            ]
        )
    )
    form = dict(slots=data.draw(st.sampled_from([1, 3, 4])), prefill_tokens=data.draw(st.sampled_from([2048, 100])))
    model = model_of(kind, dtype, load_in)
    with Sampler(model, length=400, exact=True, **form) as sampler:
        rows = sorted(sampler.run(prompts, new, eos_token_ids=(), **settings), key=lambda row: row.index)
    trained = training_logprobs(model, prompts, [row.ids for row in rows], new, exact=True)
    assert [np.float32(row.logprobs).tolist() for row in rows] == [np.float32(row).tolist() for row in trained]


@pytest.mark.parametrize(("kind", "dtype"), [("dense", "bfloat16"), ("dense", "float32"), ("experts", "bfloat16")])
def test_weights_that_are_converted_once_change_no_bit(kind, dtype, monkeypatch):
    """For a row alone, too; of experts the adapters are padded, as where Mosaic's kernels multiply by them, and no sort
    is made, as where few_rows' kernels do."""
    monkeypatch.setattr("jaxtune.models.generation.converted.pads_adapters", lambda *call: True)
    monkeypatch.setattr(plain_layer, "experts_have_kernels", lambda *call: True)
    model, prompts = model_of(kind, dtype, "nf4"), [[1, 2, 3], [7] * 70]
    with Sampler(model, 1, 128, exact=True, free_bytes=1e12) as sampler:
        assert sampler.plan.converted_layers == len(model.layers)
        weights = sampler._model.weights
        layers = weights.structure.model(weights.leaves).layers
        assert not any(isinstance(m.stored_weight, Stored) for layer in layers for *_, m in layer.matrices())
        rows = sorted(sampler.run(prompts, 8, temperature=1.0, eos_token_ids=()), key=lambda row: row.index)
    trained = training_logprobs(model, prompts, [row.ids for row in rows], 8, exact=True)
    assert [np.float32(row.logprobs).tolist() for row in rows] == [np.float32(row).tolist() for row in trained]


def test_the_likeliest_tokens_have_the_bits_of_the_tokens():
    with Sampler(model_of("dense", "float32", None), 3, 128, exact=True) as sampler:
        settings = dict(temperature=0.7, top_k=3, top_logprobs=3, scaled_logprobs=True)
        numbers = [sampler.submit(list(range(1, count)), 20, seed=count, **settings) for count in (3, 9, 40)]
        pieces = []
        while sampler.pending:
            pieces += sampler.step()
        with pytest.raises(ValueError, match="Sampler: exact: score"):
            sampler.score([1, 2, 3])
        with pytest.raises(ValueError, match="Sampler: exact: adapters of several models"):
            sampler.load_adapter("other", "folder")
    assert {piece.request for piece in pieces} == set(numbers)
    for piece in pieces:
        for token, logprob, likeliest in zip(piece.ids, piece.logprobs, piece.top_logprobs, strict=True):
            assert dict(likeliest)[token] == logprob


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("exact", [True, False])
def test_no_operation_differs(kind, exact):
    """Of rows that are packed, prefilled and decoded; without `exact` some do, so that the comparison sees them."""
    model = model_of(kind, "float32", None)
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 48, length).tolist() for length in (90, 143, 71)]
    with one_order.exact() if exact else contextlib.nullcontext():
        found = list(differences(model, texts, [60, 101, 20], steps=2))
    assert {one.phase for one in found} == {"packed", "prompts", "packed prompts", "decoding"}
    operations = {one.operation for one in found if one.phase == "decoding"}
    assert operations >= {"attention", "key", "stream", "down", "next norm"}
    assert all(one.numbers for one in found)
    differing = [one for one in found if one.differing]
    assert not differing if exact else differing


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_operations_are_compared_with_the_samplers_weights(kind, monkeypatch):
    """Prompts and steps read its copies, padded adapters among them; no bit differs until one of its weights does."""
    monkeypatch.setattr("jaxtune.models.generation.converted.pads_adapters", lambda *call: True)
    model, texts = model_of(kind, "bfloat16", "nf4"), [[1, 2, 3, 4, 5], [7] * 40]
    with Sampler(model, 2, 128, exact=True, free_bytes=1e12) as sampler:
        sampled = sampler.model

    def differing() -> set[tuple[str, str]]:
        with one_order.exact():
            lines = list(differences(model, texts, [3, 30], sampled=sampled, steps=1))
        return {(line.phase, line.operation) for line in lines if line.differing}

    assert differing() == set()
    matrix = sampled.layers[1].mlp.experts.down_proj if kind == "experts" else sampled.layers[1].mlp.down_proj
    assert isinstance(matrix.weight[...], jax.Array) and not isinstance(matrix.stored_weight, Stored)
    matrix.weight.set_value(2 * matrix.weight[...])
    changed = differing()
    assert {("decoding", "down"), ("prompts", "layer_output"), ("packed prompts", "layer_output")} <= changed
    assert not [line for line in changed if line[0] == "packed"]


def test_products_do_not_depend_on_the_number_of_rows():
    x, weight = (jax.random.normal(jax.random.key(n), (size, 200)) for n, size in enumerate((67, 33)))
    product = jax.jit(one_order.product)
    whole = product(x, weight)
    np.testing.assert_allclose(whole, np.float64(x) @ np.float64(weight).T, rtol=0, atol=1e-4)
    for first, last in ((0, 1), (5, 8), (40, 67), (66, 67)):
        np.testing.assert_array_equal(product(x[first:last], weight), whole[first:last])
    np.testing.assert_array_equal(one_order.total(x), jnp.stack([one_order.total(row) for row in x]))


@pytest.mark.parametrize("argument", [0, 1])
def test_gradients_are_those_of_the_product(argument):
    operands = [jax.random.normal(jax.random.key(n), (size, 24)) for n, size in enumerate((5, 7))]
    got = jax.grad(lambda *a: jnp.sin(one_order.product(*a)).sum(), argument)(*operands)
    want = jax.grad(lambda x, weight: jnp.sin(x @ weight.T).sum(), argument)(*operands)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    got = jax.grad(lambda x: jnp.sin(one_order.total(x)).sum())(operands[argument])
    want = jax.grad(lambda x: jnp.sin(x.sum(-1)).sum())(operands[argument])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def _log_probabilities(x):
    return one_order.log_probabilities(x, jnp.argmin(x, -1)[:, None], jnp.full(len(x), 0.7, jnp.float32), x.shape[1])


def _expert_weights(x, renormalize):
    return expert_weights(x, choose_experts(x, min(3, x.shape[1])), renormalize=renormalize)


FUNCTIONS = {  # of float32[rows, columns], a row's results of the row alone
    "exp": one_order.exp,
    "log": lambda x: one_order.log(jnp.abs(x) + 1e-20),
    "tanh": one_order.tanh,
    "sigmoid": one_order.sigmoid,
    "softmax": one_order.softmax,
    "log_probabilities": _log_probabilities,
    "expert_weights": functools.partial(_expert_weights, renormalize=True),
    "expert_weights_of_all": functools.partial(_expert_weights, renormalize=False),
    **{name: functools.partial(lambda name, x: activated(x, x[:, ::-1], name), name) for name in ACTIVATIONS},
    "gated_rows": lambda x: gated_rows(jnp.concatenate([x, x], 1), x[:, 0], RowGate("silu")),
    "clipped_rows": lambda x: gated_rows(jnp.concatenate([x, x], 1), x[:, 0], RowGate("silu", 7.0, 1.702, True)),
    "rotated": lambda x: rotated(False, x[:, None, None].repeat(2, -1), x[:, None], x[:, None, ::-1]),
    "norm": lambda x: normed(x, x[0] * 0 + 1.5, 1e-6, 0.0, False),
}


@draws(2)
@given(st.data())
def test_functions_give_a_row_the_same_bits_beside_any_others(data):
    """Of any number of columns: XLA takes another exponential for columns that are no multiple of a vector's."""
    forget_programs()
    columns, count = data.draw(st.sampled_from([3, 5, 7, 13, 31])), data.draw(st.integers(99, 300))
    first = data.draw(st.integers(1, count - 1))
    x = 6 * jax.random.normal(jax.random.key(count), (count, columns))
    differing = []
    for name, function in FUNCTIONS.items():
        with one_order.exact():
            run = jax.jit(function)
            whole, some, alone = run(x), run(x[first:]), run(x[:1])
        pairs = [*zip(*map(jax.tree.leaves, (some, whole)), strict=True)]
        same = [np.array_equal(got, expected[first:]) for got, expected in pairs]
        pairs = [*zip(*map(jax.tree.leaves, (alone, whole)), strict=True)]
        if not all(same + [np.array_equal(got, expected[:1]) for got, expected in pairs]):
            differing.append(name)
    assert not differing


def test_functions_are_as_close_as_float32_allows():
    for computed, usual, least, most, absolute in (
        (one_order.functions.exp, np.exp, -87.3, 88.7, 0.0),
        (one_order.functions.log, np.log, 1e-30, 1e30, 0.0),
        (one_order.functions.log, np.log, 0.5, 3.0, 2e-7),
        (one_order.functions.tanh, np.tanh, -10.0, 10.0, 0.0),
        (one_order.functions.sigmoid, lambda x: 1 / (1 + np.exp(-x)), -80.0, 80.0, 0.0),
        (one_order.functions.erfc, np.vectorize(math.erfc), -6.0, 9.0, 5e-7),
    ):
        x = np.linspace(least, most, 20_001, dtype=np.float32)
        np.testing.assert_allclose(computed(x), usual(np.float64(x)), rtol=3e-7, atol=absolute)


def test_functions_have_their_derivatives():
    x = jnp.linspace(-6, 6, 101)
    for computed, usual in (
        (one_order.functions.exp, jnp.exp),
        (lambda x: one_order.functions.log(jnp.abs(x) + 1), lambda x: jnp.log(jnp.abs(x) + 1)),
        (one_order.functions.tanh, jnp.tanh),
        (one_order.functions.sigmoid, jax.nn.sigmoid),
        (one_order.functions.silu, jax.nn.silu),
        (one_order.functions.gelu, functools.partial(jax.nn.gelu, approximate=False)),
        (one_order.functions.gelu_tanh, jax.nn.gelu),
    ):
        got, expected = (jax.vmap(jax.value_and_grad(function))(x) for function in (computed, usual))
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=5e-6)
    assert one_order.functions.silu(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_functions_at_their_ends():
    ends = jnp.asarray([-np.inf, -100.0, np.inf, np.nan])
    np.testing.assert_array_equal(one_order.functions.exp(ends), [0.0, 0.0, np.inf, np.nan])
    np.testing.assert_array_equal(one_order.functions.sigmoid(ends), [0.0, 0.0, 1.0, np.nan])
    np.testing.assert_array_equal(one_order.functions.tanh(ends), [-1.0, -1.0, 1.0, np.nan])
    assert jnp.isfinite(jax.vmap(jax.grad(one_order.functions.silu))(jnp.asarray([-1e30, -100.0, 100.0]))).all()


WIDE = dict(hidden_size=128, num_heads=2, num_kv_heads=1, head_dim=128)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(layers=(LayerSpec(), LayerSpec(window=50))), "layers.1: attention with a window of 50"),
        (dict(moe=dataclasses.replace(MOE, router_bias=True)), "layers.0: a router's bias, not measured, on a GPU"),
        (dict(moe=dataclasses.replace(MOE, renormalize=False)), "layers.0: experts whose weights do not sum to one"),
        (dict(moe=dataclasses.replace(MOE, shared_size=32)), "layers.0: a shared expert, not measured"),
        (dict(moe=dataclasses.replace(MOE, swiglu_limit=7.0)), "layers.0: limits of experts' gates, not measured"),
        (dict(moe=MOE, qk_norm="head"), None),
        (dict(moe=dataclasses.replace(MOE, num_experts=20, experts_per_token=17)), "layers.0: more than 16 experts a"),
        (dict(activation="gelu"), "layers.0: the activation gelu, not measured, on a GPU"),
        (dict(head_dim=64), None),
        (dict(head_dim=96), "layers.0: heads of 96 numbers, not measured"),
        (dict(attention_sinks=True), "layers.0: sinks, not measured"),
        (dict(final_soft_cap=3.0), "layers.0: soft caps, not measured"),
        (dict(qkv_bias=True), "layers.0: biases, not measured"),
        (dict(qk_norm="projection"), "layers.0: attention or a feed-forward that decoding computes operation"),
        ({}, None),
    ],
)
def test_what_has_no_kernels_is_refused_on_a_gpu(changes, reason, monkeypatch):
    monkeypatch.setattr(compat, "_has_jax_triton", lambda: True)
    model = tiny_model("bfloat16", **(WIDE | changes))
    with targets.compile_for((9, 0)):
        found = refusal(model)
        assert found is None if reason is None else found is not None and found.startswith(reason)
        assert refusal(tiny_model("float32", **WIDE)) == "this GPU: products in float32; measured in bfloat16 alone"
    with targets.compile_for((8, 0)):
        assert refusal(model) == "this GPU: measured on Hopper alone (compute capability 9.0)"


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("rank", [64, 65, 128, 129])
def test_ranks_that_were_not_measured_are_refused_on_a_gpu(rank, kind, monkeypatch):
    monkeypatch.setattr(compat, "_has_jax_triton", lambda: True)
    settings = dict(target_parameters=["experts.gate_up_proj", "experts.down_proj"]) if kind == "experts" else {}
    model = adapted_model(tiny_model("bfloat16", **(WIDE | KINDS[kind])), r=rank, lora_alpha=8, **settings)
    with targets.compile_for((9, 0)):
        reason = refusal(model)
    if kind == "experts" and rank > 64:
        assert reason == "layers.0: adapters of experts of ranks above 64, not measured, on a GPU"
    else:
        assert reason is None if rank <= 128 else reason is not None and "an adapter of rank 129; up to 128" in reason


def test_a_router_in_a_dtype_of_its_own_is_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr(compat, "_has_jax_triton", lambda: True)
    model = tiny_model("bfloat16", **(WIDE | dict(moe=MOE)))
    model.layers[1].mlp.router.compute = "float32"
    monkeypatch.setattr(exactness, "_not_measured", lambda layer: None)
    with targets.compile_for((9, 0)):
        assert refusal(model) == "layers.1: a router in a dtype of its own, on a GPU"
    assert refusal(model) is None


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: tiny_model(centred_norm=True), "LayerNorm"),
        (lambda: adapted_model(tiny_model(), r=2, use_dora=True), "layers.0.mixer.q_proj: DoRA"),
        (lambda: adapted_model(tiny_model(), r=2, lora_dropout=0.1), "dropout of 0.1"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(model, reason):
    with pytest.raises(ValueError, match=f"Sampler: exact: .*{reason}"):
        Sampler(model(), 1, 64, exact=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        (dict(norm_offset=1.0), "a RMSNorm that trains"),
        (dict(float32_norm=True), "a RMSNorm that trains"),
        (dict(attention_sinks=True), "a Attention that trains"),
        (dict(moe=dataclasses.replace(MOE, router_bias=True)), "a Router that trains"),
    ],
)
def test_masters_that_a_forward_reads_unrounded_are_refused(changes, reason):
    """A sampler of all trained weights has them rounded."""
    model = tiny_model("bfloat16", **(SHAPE | changes))
    require_exact(adapted_model(model, r=4, lora_alpha=8), "objective", trains=True)
    require_exact(tiny_model("float32", **(SHAPE | changes)), "objective", trains=True)
    with contextlib.nullcontext() if reason is None else pytest.raises(ValueError, match=reason):
        require_exact(model, "objective", trains=True)


def test_factors_that_change_with_the_length_are_refused():
    factors = (1.0,) * (SHAPE["head_dim"] // 2)
    rope = RopeConfig(kind="longrope", short_factor=factors, long_factor=factors)
    assert refusal(tiny_model(**(SHAPE | dict(rotary=(rope,))))) == "longrope, whose factors change with a row's length"
