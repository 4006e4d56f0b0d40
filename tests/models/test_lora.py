"""Adapters: what gets one, what stays frozen, what is shared, and every refusal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import adapted_model, golden_model, tiny_model

from jaxtune.models.adapters.adapter_files import load_adapter, save_adapter
from jaxtune.models.adapters.merge import merge_adapter
from jaxtune.models.config import LayerSpec
from jaxtune.models.files.quant import prepare_qat, quantize
from jaxtune.models.linear import Frozen, first_rows, row_norm
from jaxtune.models.lora import freeze, get_peft_model, linears, without_adapter
from jaxtune.train.engine.trained_model import trainable_names

TOKENS = jnp.asarray([[3, 7, 11, 2, 40]])
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def base():
    return tiny_model()


def adapted(model) -> list[str]:
    return [name for name, linear in linears(model) if linear.lora is not None]


def arrays(model) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model))
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


@pytest.mark.parametrize(
    ("targets", "want"),
    [
        ("all-linear", ALL),
        (["q_proj", "down_proj"], ["q_proj", "down_proj"]),
        (("mlp.up_proj",), ["up_proj"]),
        (r".*\.(k|v)_proj", ["k_proj", "v_proj"]),
    ],
)
def test_targets(base, targets, want):
    model = get_peft_model(base, r=2, target_modules=targets)
    every_layer = [f"model.layers.{i}." for i in range(2)]
    assert [name.rsplit(".", 1)[1] for name in adapted(model)] == want * 2
    assert all(name.startswith(tuple(every_layer)) for name in adapted(model))


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3, -1])
def test_each_adapter_begins_with_what_its_own_key_draws(seed):
    """The rows of all are drawn by one program."""
    sizes = [(0, 16, 192), (1, 8, 257), (4, 4, 64)]
    keys = jax.random.split(jax.random.key(seed), 5)
    for (number, rank, width), a in zip(sizes, first_rows(seed, sizes), strict=True):
        bound = width**-0.5
        want = jax.random.uniform(keys[number], (rank, width), jnp.float32, -bound, bound)
        np.testing.assert_array_equal(a, want)
    shapes = nnx.eval_shape(lambda model: get_peft_model(model, r=2), tiny_model())
    assert jax.tree.map(lambda leaf: leaf.shape, nnx.state(shapes)) == jax.tree.map(
        lambda leaf: leaf.shape, nnx.state(get_peft_model(tiny_model(), r=2))
    )


def test_one_layer_by_its_whole_name_and_by_expression(base):
    for targets in (["model.layers.1.self_attn.q_proj"], r"model\.layers\.1\.self_attn\.q_proj"):
        assert adapted(get_peft_model(base, r=2, target_modules=targets)) == ["model.layers.1.self_attn.q_proj"]
    # The expression must match the whole name, as in PEFT.
    with pytest.raises(ValueError, match=r"target_modules 'q_proj' matches no linear; .*last parts: down_proj"):
        get_peft_model(base, target_modules="q_proj")


def test_a_last_part_is_whole_words(base):
    with pytest.raises(
        ValueError, match=r"target_modules: 'proj' matches no linear of this model; there are: down_proj"
    ):
        get_peft_model(base, target_modules=["proj"])


def test_fused_names_are_the_family_s():
    model = get_peft_model(tiny_model(fused_qkv=True, fused_gate_up=True), r=2)
    assert [name.rsplit(".", 1)[1] for name in adapted(model)] == [
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
    ] * 2


def test_what_trains_and_its_dtypes():
    model = get_peft_model(tiny_model("bfloat16"), r=2, target_modules=["q_proj"], use_dora=True)
    trainable = nnx.state(model, nnx.Param)
    assert trainable_names(trainable) == [
        f"layers.{i}.mixer.q_proj.lora.{part}" for i in range(2) for part in ("a", "b", "magnitude")
    ]
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(trainable)} == {"float32"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model, Frozen))} == {"bfloat16"}


def test_the_start_is_peft_s():
    """A uniform in +-1 / sqrt(in), B zero; another seed, another A; every linear its own."""
    model = get_peft_model(tiny_model(hidden_size=64), r=16, target_modules=["q_proj", "k_proj"])
    loras = [linear.lora for _, linear in linears(model) if linear.lora is not None]
    for lora in loras:
        a = np.asarray(lora.a[...])
        assert not np.asarray(lora.b[...]).any()
        assert np.abs(a).max() <= 1 / 8
        np.testing.assert_allclose(a.std(), 1 / 8 / np.sqrt(3), rtol=0.1)
    assert len({np.asarray(lora.a[...]).tobytes() for lora in loras}) == 4
    again, other = (get_peft_model(tiny_model(hidden_size=64), r=16, target_modules=["q_proj"], seed=s) for s in (0, 1))
    first = [next(l.lora.a[...] for _, l in linears(m) if l.lora is not None) for m in (again, other)]
    assert (np.asarray(first[0]) != np.asarray(first[1])).any()


@pytest.mark.parametrize("settings", [{}, dict(use_dora=True), dict(use_rslora=True)])
def test_at_its_start_the_model_is_the_base(base, settings):
    model = get_peft_model(base, r=2, **settings)
    want, got = np.asarray(base(TOKENS)), np.asarray(model(TOKENS))
    if settings.get("use_dora"):
        np.testing.assert_allclose(got, want, atol=1e-5)  # magnitude / norm is one up to a rounding
    else:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("settings", [dict(lora_alpha=6), dict(lora_alpha=6, use_rslora=True), dict(use_dora=True)])
def test_the_delta_is_what_the_formula_says(base, settings):
    model = adapted_model(base, r=4, target_modules=["o_proj"], **settings)
    linear = dict(linears(model))["model.layers.0.self_attn.o_proj"]
    lora, weight = linear.lora, np.asarray(linear.weight[...], np.float64)
    alpha = settings.get("lora_alpha", 16)
    scale = alpha / (2 if settings.get("use_rslora") else 4)
    assert lora.scale == scale
    total = weight + scale * np.asarray(lora.b[...], np.float64) @ np.asarray(lora.a[...], np.float64)
    norms = np.linalg.norm(total, axis=1)
    np.testing.assert_allclose(row_norm(linear.weight[...], lora.a[...], lora.b[...], lora.scale), norms, rtol=1e-6)
    if settings.get("use_dora"):
        total *= (np.asarray(lora.magnitude[...], np.float64) / norms)[:, None]
    x = np.random.default_rng(0).standard_normal((3, weight.shape[1]))
    np.testing.assert_allclose(linear(jnp.asarray(x, jnp.float32)), x @ total.T, rtol=1e-5, atol=1e-5)


def test_rank_and_alpha_patterns(base):
    model = get_peft_model(
        base, r=4, lora_alpha=8, rank_pattern={"q_proj": 2, r"layers\.1\.mlp\.up_proj": 3}, alpha_pattern={"mlp.*": 32}
    )
    got = {name: (linear.lora.rank, linear.lora.alpha) for name, linear in linears(model)}
    assert got["model.layers.0.self_attn.q_proj"] == got["model.layers.1.self_attn.q_proj"] == (2, 8)
    assert got["model.layers.0.mlp.up_proj"] == (4, 32)
    assert got["model.layers.1.mlp.up_proj"] == (3, 32)
    assert got["model.layers.0.self_attn.k_proj"] == (4, 8)


def test_the_first_matching_pattern_wins(base):
    """Whichever of two patterns is the longer one, the order in which they are given decides."""
    patterns = {r"layers\.1\.self_attn\.q_proj": 3, "q_proj": 2, ".*_proj": 5}
    for order in (list(patterns), list(patterns)[::-1]):
        chosen = {pattern: patterns[pattern] for pattern in order}
        model = get_peft_model(base, r=4, rank_pattern=chosen, alpha_pattern={key: 8 * r for key, r in chosen.items()})
        got = {name: (linear.lora.rank, linear.lora.alpha) for name, linear in linears(model)}
        first = order[0] == ".*_proj"
        assert got["model.layers.1.self_attn.q_proj"] == ((5, 40) if first else (3, 24))
        assert got["model.layers.0.self_attn.q_proj"] == ((5, 40) if first else (2, 16))
        assert got["model.layers.0.mlp.up_proj"] == (5, 40)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("names", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_modules_to_save_keep_a_tie(names, tied):
    base = tiny_model("bfloat16", tie_embeddings=tied)
    model = get_peft_model(base, r=2, target_modules=["q_proj"], modules_to_save=names)
    whole = [name for name in trainable_names(nnx.state(model, nnx.Param)) if "lora" not in name]
    want = {"embed_tokens": "embedding.weight", "lm_head": "head.weight"}
    assert whole == (["embedding.weight"] if tied else [want[name] for name in names])
    assert (model.head is None) == tied
    for name in whole:
        variable = model.embedding.weight if name.startswith("embedding") else model.head.weight
        assert variable[...].dtype == jnp.float32  # masters
    # What trains is what makes the logits, where it should be.
    assert isinstance(model.head_variable, nnx.Param) == (tied or "lm_head" in names)


def test_a_tied_tensor_gets_the_gradient_of_both_uses():
    base = tiny_model(tie_embeddings=True)
    model = get_peft_model(base, r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    gradient = np.asarray(nnx.grad(lambda m: m(TOKENS)[0, -1, 5])(model).embedding.weight[...])
    assert gradient[5].any()  # as the head
    assert all(gradient[int(token)].any() for token in TOKENS[0])  # as the embedding
    assert not gradient[1].any()


def test_the_argument_is_never_changed_and_arrays_are_shared():
    base = tiny_model()
    before, graph = arrays(base), nnx.graphdef(base)
    model = adapted_model(base, r=2, use_dora=True, modules_to_save=["embed_tokens", "lm_head"])
    assert nnx.graphdef(base) == graph
    after = arrays(base)
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)
    pairs = zip(linears(base), linears(model), strict=True)
    for (name, one), (_, other) in pairs:
        assert one.weight.get_value() is other.weight.get_value(), name
        assert isinstance(one.weight, nnx.Param) and isinstance(other.weight, Frozen)


def test_freeze_leaves_nothing_to_train(base):
    frozen = freeze(base)
    assert not jax.tree.leaves(nnx.state(frozen, nnx.Param))
    np.testing.assert_array_equal(frozen(TOKENS), base(TOKENS))
    assert jax.tree.leaves(nnx.state(base, nnx.Param))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(r=0), "r = 0: must be an integer of at least 1"),
        (dict(r=2.5), "r = 2.5: must be an integer of at least 1"),
        (dict(lora_alpha=float("nan")), "lora_alpha = nan: must be a finite number above 0"),
        (dict(lora_alpha=0), "lora_alpha = 0: must be a finite number above 0"),
        (dict(alpha_pattern={"k_proj": float("inf")}), "alpha_pattern: 'k_proj' = inf: must be a finite number"),
        (dict(lora_dropout=float("nan")), "lora_dropout = nan: must be at least 0"),
        (dict(lora_dropout=1.0), "lora_dropout = 1.0: must be at least 0 and below 1"),
        (dict(lora_dropout=-0.1), "lora_dropout = -0.1"),
        (
            dict(target_modules=["c_attn"]),
            "target_modules: 'c_attn' matches no linear of this model; there are: down_proj",
        ),
        (dict(target_modules=["q_proj", "qproj"]), "target_modules: 'qproj' matches no linear"),
        (
            dict(target_modules=["lm_head"]),
            r"'lm_head' matches no linear .*put it in modules_to_save to train it whole",
        ),
        (
            dict(target_modules=r".*\.c_attn"),
            r"matches no linear; it is a regular expression over names such as 'model",
        ),
        (dict(target_modules=[]), "target_modules is empty: name at least one of down_proj"),
        (dict(target_modules="(q_proj"), r"target_modules: '\(q_proj' is not a regular expression: missing \)"),
        (
            dict(modules_to_save=["norm"]),
            "modules_to_save: 'norm' cannot be trained whole; there are: embed_tokens, lm_head",
        ),
        (dict(rank_pattern={"c_attn": 4}), "rank_pattern: 'c_attn' matches no adapted linear"),
        (dict(alpha_pattern={"c_attn": 4}), "alpha_pattern: 'c_attn' matches no adapted linear"),
        (
            dict(target_modules=["q_proj"], rank_pattern={"k_proj": 4}),
            "rank_pattern: 'k_proj' matches no adapted linear",
        ),
        (dict(rank_pattern={"*": 4}), r"rank_pattern: '\*' is not a regular expression: nothing to repeat"),
        (dict(rank_pattern={"k_proj": 0}), "rank_pattern: 'k_proj' = 0: must be an integer of at least 1"),
    ],
)
def test_refusals(base, settings, message):
    with pytest.raises(ValueError, match=message):
        get_peft_model(base, **settings)


def test_adapters_upon_adapters_are_refused(base):
    with pytest.raises(ValueError, match="this model has adapters already; merge them first"):
        get_peft_model(get_peft_model(base, r=2), r=2)


# ---- the adapter off

OFF = {
    "lora": (dict(r=4), {}),
    "patterns, dropout": (dict(r=4, lora_dropout=0.5, use_rslora=True, target_modules=["q_proj", "down_proj"]), {}),
    "dora": (dict(r=4, use_dora=True), {}),
    "head and embedding": (dict(r=4, modules_to_save=["lm_head", "embed_tokens"]), {}),
    "tied head": (dict(r=4, modules_to_save=["lm_head"]), dict(tie_embeddings=True)),
}


FORMS = [("plain", case) for case in OFF] + [("nf4", "head and embedding"), ("qat", "lora"), ("file", "tied head")]


@pytest.mark.parametrize(("form", "case"), FORMS)
def test_without_adapter_is_the_base(form, case, tmp_path):
    settings, changes = OFF[case]
    base = tiny_model("bfloat16", hidden_size=32, layers=(LayerSpec(),), **changes)
    base = quantize(base) if form == "nf4" else base
    model = adapted_model(base, **settings)
    if form == "qat":
        model = prepare_qat(model, group_size=32)
    if form == "file":
        save_adapter(model, tmp_path / "adapter")
        model = load_adapter(base, tmp_path / "adapter")
    off = without_adapter(model)
    np.testing.assert_array_equal(off(TOKENS), base(TOKENS))
    assert not np.array_equal(model(TOKENS), base(TOKENS))  # and the model itself still has it
    assert not jax.tree.leaves(nnx.state(off, nnx.Param))
    held = {id(leaf) for leaf in jax.tree.leaves(nnx.state(model))}
    assert all(id(leaf) in held for leaf in jax.tree.leaves(nnx.state(off)))
    assert (off.source, off.base_fingerprint) == (base.source, base.base_fingerprint)


@pytest.mark.full
def test_without_adapter_of_experts():
    base = golden_model("qwen3_moe")
    settings = dict(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    model = adapted_model(base, **settings)
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(without_adapter(model)(tokens), base(tokens))
    assert not np.array_equal(model(tokens), base(tokens))


def test_without_adapter_needs_one():
    with pytest.raises(ValueError, match="without_adapter: this model has no adapter to leave out; load its base"):
        without_adapter(tiny_model())


@pytest.mark.full
def test_a_merged_model_has_no_second_head():
    model = adapted_model(tiny_model(), r=2, modules_to_save=["lm_head"])
    assert not [path for path, _ in nnx.to_flat_state(nnx.state(merge_adapter(model))) if "original" in path]
