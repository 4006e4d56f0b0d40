"""Every family against stored results of transformers, on a tiny random checkpoint with all of its features on."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from pathlib import Path

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import shapes_of
from flax import nnx
from random_weights import write_checkpoint
from tiny import CONFIGS, golden_tokens

from jaxtune.models import initial
from jaxtune.models.components import stored_as
from jaxtune.models.decoder import Decoder, abstract_decoder
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.lora import get_peft_model
from jaxtune.models.registry import FAMILIES, config_from_hf, family, text_config
from jaxtune.pallas.formats import FORMATS

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
# scope: the tests of a family follow one another, so that one worker loads and compiles it.
families = pytest.mark.parametrize("name", CONFIGS, scope="module")


def parameter_count(hf: dict) -> int:
    # A layer's scalar is a buffer in transformers, which counts parameters.
    return sum(math.prod(shape) for name, shape in shapes_of(hf).items() if not name.endswith("layer_scalar"))


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """name -> the tiny model in fp32, loaded from a folder; made once."""
    models = {}

    def get(name):
        if name not in models:
            folder = tmp_path_factory.mktemp(name)
            write_checkpoint(folder, CONFIGS[name], shapes_of(CONFIGS[name]))
            models[name] = checks.load(folder)
        return models[name]

    return get


@families
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_shapes_is_that_of_tracing(name, dtype):
    """Without an adapter, and with one."""
    config = config_from_hf(text_config(CONFIGS[name]))
    settings = dict(r=2, target_parameters=["experts.down_proj"] if config.moe else None, use_rslora=True)
    adapted = functools.partial(get_peft_model, **settings)
    traced, made = nnx.eval_shape(lambda: Decoder(config, jax.random.key(0), dtype)), abstract_decoder(config, dtype)
    with initial.as_shapes():
        made_with_adapter = adapted(made)
        untraced, its_state = nnx.split(Decoder(config, initial.NO_KEY, dtype))  # for which `made` may have been traced
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), its_state)
    made_anew = nnx.merge(untraced, shapes)
    pairs = ((traced, made), (traced, made_anew), (nnx.eval_shape(adapted, traced), made_with_adapter))
    for one, other in pairs:
        (graph, state), (its_graph, its_state) = nnx.split(one), nnx.split(other)
        assert graph == its_graph
        assert jax.tree.leaves_with_path(state) == jax.tree.leaves_with_path(its_state)


@families
def test_a_model_of_shapes_is_stored_as_tracing_says(name):
    """In each format, beside a module in another dtype, or with the same refusal."""
    model = abstract_decoder(config_from_hf(text_config(CONFIGS[name])), "bfloat16")

    def split(word, traces):
        stored = functools.partial(stored_as, words={"norms": "fp32"}, default_format=word)
        try:
            with initial.as_shapes(not traces):
                return nnx.split(nnx.eval_shape(stored, model) if traces else stored(model))
        except ValueError as error:
            return str(error)

    for word in FORMATS:
        expected, found = split(word, True), split(word, False)
        assert isinstance(expected, str) == isinstance(found, str)
        if isinstance(expected, str):
            assert found == expected
        else:
            assert found[0] == expected[0]
            assert jax.tree.leaves_with_path(found[1]) == jax.tree.leaves_with_path(expected[1])


@families
@pytest.mark.gpu
def test_logits_and_greedy_equal_transformers(name, model_of):
    golden, model, tokens = np.load(GOLDENS / f"{name}.npz"), model_of(name), golden_tokens()
    np.testing.assert_allclose(model(jnp.asarray(tokens)), golden["logits"], atol=1e-4, rtol=0)
    ids = checks.greedy(model, tokens[:, : checks.PROMPT_TOKENS], checks.NEW_TOKENS)
    np.testing.assert_array_equal(ids, golden["greedy"])


@families
@pytest.mark.gpu
def test_loss_and_gradients_equal_transformers(name, model_of):
    golden, model, tokens = np.load(GOLDENS / f"{name}.npz"), model_of(name), golden_tokens()
    np.testing.assert_allclose(checks.mean_loss(model, jnp.asarray(tokens)), golden["loss"], atol=1e-5)
    gradients = checks.gradients(model, tokens)
    assert sorted(gradients) == list(golden["gradient_names"])
    norms = [np.linalg.norm(gradients[key]) for key in sorted(gradients)]
    # Without rotary positions the key bias moves every score of a query alike: its gradient is 0 but for rounding.
    np.testing.assert_allclose(norms, golden["gradient_norms"], rtol=2e-4, atol=2e-6)
    stored = [key.removeprefix("gradient:") for key in golden.files if key.startswith("gradient:")]
    assert len(stored) >= 3
    for key in stored:
        np.testing.assert_allclose(gradients[key], golden["gradient:" + key], atol=1e-5, rtol=1e-3, err_msg=key)


def packed_and_alone():
    """Three documents, alone in a row each, and then together in three rows, in three orders, with padding between and
    after them: (tokens int32[6, T], segment ids, [(packed row, document, its first token, its tokens)])."""
    lengths, gap = (9, 5, 20), 3
    rng = np.random.default_rng(3)
    documents = [rng.integers(3, 128, n, np.int32) for n in lengths]
    tokens, ids = np.zeros((2, 6, sum(lengths) + 2 * gap), np.int32)
    for row, document in enumerate(documents):
        tokens[row, : len(document)], ids[row, : len(document)] = document, 1
    places = []
    for row, order in enumerate(((0, 1, 2), (2, 0, 1), (1, 2, 0))):
        at = 0
        for number, document in enumerate(order):
            inside = slice(at, at + lengths[document])
            tokens[3 + row, inside], ids[3 + row, inside] = documents[document], number + 1
            places.append((row, document, at, lengths[document]))
            at += lengths[document] + (gap if number == 0 else 0)
    return tokens, ids, places


@families
@pytest.mark.gpu
def test_packed_equals_unpacked(name, model_of, compiled_in_full):
    """Each document gives the logits that it gives alone, wherever it lies. Both have one shape, for one program.

    What float32 rounds is a share of the largest logit: sums of as large terms lead to all of them."""
    model, (tokens, ids, places) = model_of(name), packed_and_alone()
    want, got = (model(jnp.asarray(tokens[half]), jnp.asarray(ids[half])) for half in (slice(3), slice(3, 6)))
    allowed = 2e-6 * float(jnp.abs(want).max())
    for row, document, start, n in places:
        np.testing.assert_allclose(got[row, start : start + n], want[document, :n], atol=allowed, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"], scope="module")
def test_gradients_of_packed_rows_are_those_of_their_documents(name, model_of):
    """Of gated delta nets, whose state would carry gradients over a border. Each document lies in three packed rows."""
    model, (tokens, ids, _) = model_of(name), packed_and_alone()
    follows = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
    alone = np.arange(6)[:, None] < 3

    def total(model, counted):  # one program, of all six rows
        logits = jax.nn.log_softmax(model(jnp.asarray(tokens), jnp.asarray(ids))[:, :-1])
        return -(jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0] * counted).sum()

    gradient = nnx.jit(nnx.grad(total))
    want, got = (gradient(model, jnp.asarray(follows & half, jnp.float32)) for half in (alone, ~alone))
    for (path, a), (_, b) in zip(nnx.to_flat_state(want), nnx.to_flat_state(got), strict=True):
        a, b = 3 * a.get_value(), b.get_value()
        np.testing.assert_allclose(b, a, atol=1e-5 * float(abs(a).max()) + 1e-7, rtol=1e-4, err_msg=str(path))


@families
def test_save_then_load_is_equal(name, model_of, tmp_path):
    model, tokens = model_of(name), jnp.asarray(golden_tokens())
    save_pretrained(model, tmp_path / "out", max_shard_bytes=100_000)
    again, tokenizer = from_pretrained(tmp_path / "out", dtype="float32")
    assert tokenizer is None
    assert again.config == model.config
    assert again.base_fingerprint == model.base_fingerprint
    np.testing.assert_array_equal(again(tokens), model(tokens))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == CONFIGS[name]


@families
def test_own_config_reads_back(name):
    """to_hf says everything that from_hf needs, also when the model was not loaded."""
    config = config_from_hf(CONFIGS[name])
    assert config_from_hf(family(config.family).to_hf(config)) == config


def test_changed_config_is_written_anew(tmp_path, model_of):
    model = nnx.merge(*nnx.split(model_of("llama")))
    model.config = dataclasses.replace(model.config, max_position_embeddings=4096)
    save_pretrained(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 4096
    assert config["eos_token_id"] == 2  # token ids are the source's


def test_every_family_is_tested():
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES)


_PUBLISHED = {
    "Llama-3.2-1B": (
        1_235_814_400,
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    # As the hub has it: what equals the class's default is left out.
    "gemma-3-1b": (
        999_885_952,
        {
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32768,
            "sliding_window": 512,
        },
    ),
    "phi-4": (
        14_659_507_200,
        {
            "model_type": "phi3",
            "vocab_size": 100352,
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "hidden_act": "silu",
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 16384,
            "rope_theta": 250000,
        },
    ),
}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_published_parameter_count(name):
    count, hf = _PUBLISHED[name]
    assert parameter_count(hf) == count


@pytest.mark.full
def test_published_parameter_counts_of_real_configs(test_data):
    readme = (test_data / "README.md").read_text()
    checked = []
    for file in sorted((test_data / "configs").glob("*.json")):
        hf = json.loads(file.read_text())
        if hf["model_type"] not in FAMILIES:
            continue
        published = re.search(rf"configs/{re.escape(file.name)}` \| HF config[^|,]*, ([\d,]+) parameters", readme)
        assert published, file.name
        config = config_from_hf(hf)
        assert parameter_count(hf) == int(published[1].replace(",", "")), file.name
        assert config_from_hf(family(config.family).to_hf(config)) == config, file.name
        checked.append(file.name)
    assert len(checked) >= 14


_REFUSED = {
    "model_type": ({"model_type": "mamba"}, "model_type 'mamba' is not supported.*llama.*gpt_oss"),
    "no model_type": ({"model_type": None}, "model_type None is not supported"),
    "activation": ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported: silu"),
    "rope_type": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
    "rope_factor": ({"rope_scaling": {"rope_type": "linear"}}, "rope_type 'linear' needs 'factor'"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "quant_method = 'gptq'; of quantised checkpoints"),
    "experts": ({"num_local_experts": 8}, "num_local_experts = 8 is not supported"),
    "missing key": ({"hidden_size": None}, "lacks 'hidden_size'"),
    "heads": ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_refusals_name_key_and_value(case):
    change, message = _REFUSED[case]
    with pytest.raises(ValueError, match=message):
        config_from_hf({**CONFIGS["llama"], **change})


def test_refused_layer_types():
    with pytest.raises(ValueError, match="layer_types 'chunked_attention' is not supported"):
        config_from_hf({**CONFIGS["qwen3"], "layer_types": ["chunked_attention"] * 3})
    with pytest.raises(ValueError, match="layer_types has 1 entries, num_hidden_layers is 3"):
        config_from_hf({**CONFIGS["qwen3"], "layer_types": ["full_attention"]})
    with pytest.raises(ValueError, match="use_bidirectional_attention = True is not supported"):
        config_from_hf({**CONFIGS["gemma2"], "use_bidirectional_attention": True})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(use_bidirectional_attention="all"),
            "use_bidirectional_attention = 'all' is not supported: only",
        ),
        (dict(num_kv_shared_layers=2), "num_kv_shared_layers = 2: layer 1 shares the keys and values of a full_att"),
        (dict(hidden_size_per_layer_input=-8), "hidden_size_per_layer_input = -8"),
        (dict(enable_moe_block=True), "num_experts is missing, and enable_moe_block = True needs it"),
        (dict(rope_parameters={"rope_type": "default"}), "rope_parameters lacks 'full_attention'"),
        (dict(per_layer_config={"x": {}}), "per_layer_config has 'x', which is not the index of a layer"),
        (dict(per_layer_config={"1": {"sliding_window": 3}}), "per_layer_config.1.sliding_window = 3 is not supported"),
        (dict(per_layer_config={"1": {"head_dim": 64}}), "gives the full_attention layers different shapes"),
        (dict(per_layer_config={"0": {"head_dim": 64}}), "is not of global layers alone"),
        (dict(per_layer_config={"9": {"head_dim": 64}}), "is not of global layers alone"),
        (
            dict(attention_k_eq_v=False, per_layer_config={str(at): {"num_key_value_heads": 1} for at in (1, 2)}),
            "gives global layers 1 key and value heads in place of 2: only supported with attention_k_eq_v",
        ),
    ],
)
def test_refused_of_gemma4(changes, message):
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        config_from_hf({**CONFIGS["gemma4"], **changes})


def test_spellings_of_gemma4():
    """What transformers 5.23 writes means what earlier files say, and the last layer is global whatever they say."""
    hf = CONFIGS["gemma4"]
    want = config_from_hf(hf)
    new = {key: value for key, value in hf.items() if "global" not in key}
    new["per_layer_config"] = {index: {"head_dim": 64, "num_key_value_heads": 1} for index in ("01", "2")}
    assert config_from_hf(new) == want
    assert config_from_hf({**hf, "layer_types": [*hf["layer_types"][:2], "sliding_attention"]}) == want
    assert config_from_hf({**hf, "use_bidirectional_attention": "vision"}) == want
    usual = {key: value for key, value in hf.items() if key not in ("layer_types", "rope_parameters")}
    config = config_from_hf({**usual, "num_hidden_layers": 12})
    assert [index for index, layer in enumerate(config.layers) if layer.window is None] == [5, 11]
    assert [(rope.theta, rope.kind, rope.head_dim) for rope in config.rotary] == [
        (1e6, "proportional", 64),
        (1e4, "default", 32),
    ]
    usual = {key: value for key, value in hf.items() if key != "hidden_size_per_layer_input"}
    found = config_from_hf(usual)  # what transformers' class has
    assert (found.per_layer_size, found.per_layer_vocab_size) == (256, 262_144)
    with pytest.raises(ValueError, match="hidden_size_per_layer_input = 256 is not supported.*'gemma4_unified_text'"):
        config_from_hf({**CONFIGS["gemma4_unified"], "hidden_size_per_layer_input": 256})


@pytest.mark.full
def test_keys_and_values_that_a_checkpoint_has_for_nothing(model_of, tmp_path):
    """Published E2B and E4B have them in layers that share those of earlier layers, and transformers ignores them."""
    hf, shapes = CONFIGS["gemma4_shared"], shapes_of(CONFIGS["gemma4_shared"])
    more = {f"model.layers.3.self_attn.{name}.weight": (64, 64) for name in ("k_proj", "v_proj")}
    write_checkpoint(tmp_path, hf, shapes | more | {"model.layers.3.self_attn.k_norm.weight": (64,)})
    loaded, model = checks.load(tmp_path), model_of("gemma4_shared")
    for (path, a), (_, b) in zip(*(nnx.to_flat_state(nnx.state(m)) for m in (loaded, model)), strict=True):
        np.testing.assert_array_equal(a.get_value(), b.get_value(), err_msg=str(path))
    write_checkpoint(tmp_path / "other", hf, shapes | {"model.layers.2.self_attn.out_proj.weight": (8, 8)})
    with pytest.raises(ValueError, match="unexpected: model.layers.2.self_attn.out_proj.weight"):
        checks.load(tmp_path / "other")


def test_attention_without_its_gate_is_refused():
    with pytest.raises(ValueError, match="attn_output_gate = False is not supported: q_proj has a gate"):
        config_from_hf({**CONFIGS["qwen3_5"], "attn_output_gate": False})
    assert config_from_hf({**CONFIGS["qwen3_5"], "attn_output_gate": True}) == config_from_hf(CONFIGS["qwen3_5"])


def test_refused_longrope_factors():
    scaling = {**CONFIGS["phi3"]["rope_scaling"], "long_factor": [1.0, 2.0]}
    with pytest.raises(ValueError, match="long_factor must be 6 numbers, not 2"):
        config_from_hf({**CONFIGS["phi3"], "rope_scaling": scaling})


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "smollm3"])
def test_old_and_new_spelling_mean_the_same(name):
    """rope_theta and rope_scaling of transformers 4 against rope_parameters of transformers 5."""
    old = CONFIGS[name]
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling", "rope_local_base_freq")}
    scaling = dict(old.get("rope_scaling") or {"rope_type": "default"})
    rope = {
        "rope_theta": old["rope_theta"],
        "rope_type": scaling.pop("type", None) or scaling.pop("rope_type"),
        **scaling,
    }
    if name == "phi3":
        rope["partial_rotary_factor"] = new.pop("partial_rotary_factor")
    if name == "gemma3":
        local = {"rope_theta": old["rope_local_base_freq"], "rope_type": "default"}
        rope = {"full_attention": rope, "sliding_attention": local}
        every = new.pop("sliding_window_pattern")
        kinds = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(4)]
        new["layer_types"] = kinds
    assert config_from_hf(new | {"rope_parameters": rope}) == config_from_hf(old)


def test_parameters_for_types_of_layers_that_a_model_lacks_are_refused():
    parameters = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}
    with pytest.raises(ValueError, match="rope_parameters has an object for 'full_attention'; a model with one rotary"):
        config_from_hf({**CONFIGS["qwen2"], "rope_parameters": parameters, "rope_scaling": None})


def test_gemma_3_s_parameters_for_no_type_of_layer_mean_nothing():
    """As in transformers' class, which reads them within an object for a type of layer alone."""
    given = {key: value for key, value in CONFIGS["gemma3"].items() if key != "rope_scaling"}
    plain = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    assert config_from_hf({**given, "rope_parameters": plain}) == config_from_hf(given)


def test_a_window_as_long_as_the_context_stays_where_yarn_extends_it():
    given = {**CONFIGS["qwen2"], "use_sliding_window": True, "max_window_layers": 0, "max_position_embeddings": 64}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for scaling, window, length in ((None, None, 64), (yarn, 64, 256)):
        config = config_from_hf({**given, "sliding_window": 64, "rope_scaling": scaling})
        assert [layer.window for layer in config.layers] == [window] * len(config.layers)
        assert config.context_length == length
    of_context = config_from_hf({**given, "sliding_window": 256, "rope_scaling": yarn})
    assert {layer.window for layer in of_context.layers} == {None}


@pytest.mark.parametrize("name", ["olmo3", "ministral3", "gpt_oss"])
def test_a_model_of_families_with_yarn_whose_layers_have_no_window_is_read_back_as_it_is(name):
    """transformers' classes need a window, which must then be no shorter than what yarn makes of the context."""
    config = config_from_hf(CONFIGS[name])
    assert any(rope.kind == "yarn" for rope in config.rotary)
    layers = tuple(dataclasses.replace(layer, window=None) for layer in config.layers)
    config = dataclasses.replace(config, layers=layers)
    assert config_from_hf(family(config.family).to_hf(config)) == config


def test_a_scale_of_queries_that_is_no_whole_number_is_written_as_it_was():
    for scalar in (224.5, 256, 144):
        config = config_from_hf({**CONFIGS["gemma2"], "query_pre_attn_scalar": scalar})
        written = family(config.family).to_hf(config)
        assert written["query_pre_attn_scalar"] == scalar and type(written["query_pre_attn_scalar"]) is type(scalar)
        assert config_from_hf(written) == config


@pytest.mark.parametrize("name", ["llama", "gemma3", "glm4", "qwen3_5"])
def test_a_share_of_rotated_dimensions_is_written_or_refused(name):
    """transformers ignores it in families whose class rotates whole heads, and a saved config.json would lack it."""
    given = {key: value for key, value in CONFIGS[name].items() if key != "rope_parameters"}
    whole = config_from_hf({**given, "partial_rotary_factor": 1.0})
    assert config_from_hf(family(whole.family).to_hf(whole)) == whole
    half = dataclasses.replace(
        whole, rotary=tuple(dataclasses.replace(one, theta=7.0, partial_rotary_factor=0.5) for one in whole.rotary)
    )
    if name in ("glm4", "qwen3_5"):
        assert config_from_hf(family(half.family).to_hf(half)) == half
        return
    refused = "partial_rotary_factor = 0.5 is not supported .*transformers rotates whole heads"
    for read in (
        lambda: config_from_hf({**given, "partial_rotary_factor": 0.5}),
        lambda: family(half.family).to_hf(half),
    ):
        with pytest.raises(ValueError, match=refused):
            read()


def test_model_from_config_starts_near_ln_v(tmp_path):
    """Initial weights from a config: every token about equally likely; the same key gives the same weights."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["qwen3"], "tie_word_embeddings": True}))
    tokens = jnp.asarray(golden_tokens())
    first, second = (model_from_config(tmp_path, jax.random.key(5), "float32") for _ in range(2))
    assert abs(float(checks.mean_loss(first, tokens)) - math.log(128)) < 0.3
    np.testing.assert_array_equal(first(tokens), second(tokens))
    other = model_from_config({**CONFIGS["qwen3"]}, jax.random.key(6))
    assert not np.array_equal(first.embedding.weight[...], other.embedding.weight[...])


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_random_weights_are_the_same_under_jax_enable_x64(name):
    def made():
        return model_from_config(CONFIGS[name], jax.random.key(5), "float32")

    want = nnx.to_flat_state(nnx.state(made()))
    with jax.enable_x64(True):
        got = nnx.to_flat_state(nnx.state(made()))
    for (path, one), (_, other) in zip(want, got, strict=True):
        assert other.dtype == jnp.float32, path
        np.testing.assert_array_equal(one.get_value(), other.get_value(), err_msg=str(path))
