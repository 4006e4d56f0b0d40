"""More positions than a checkpoint was made for: what is read of the changed config, saved, recorded and said."""

import json

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIGS

import jaxtune
from jaxtune.models.adapters import trained_over
from jaxtune.models.files.positions import stretched
from jaxtune.models.hf import model_from_config, save_pretrained
from jaxtune.models.registry import config_from_hf
from jaxtune.models.rope import rotary_frequencies

SCALED = sorted(
    name for name, hf in CONFIGS.items() if config_from_hf(hf).rotary[0].kind not in ("proportional", "longrope")
)
SCALINGS = st.sampled_from(
    [
        {"rope_type": "linear"},
        {"rope_type": "yarn"},
        {"type": "yarn", "original_max_position_embeddings": 48},
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ]
)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(SCALED), SCALINGS, st.floats(1.5, 9.0), st.none() | st.integers(900, 5000))
def test_the_scaling_is_that_of_full_attention_and_the_rest_stays(name, scaling, factor, positions):
    before = config_from_hf(CONFIGS[name])
    after = config_from_hf(stretched(CONFIGS[name], scaling | {"factor": factor}, positions))
    original = scaling.get("original_max_position_embeddings", before.max_position_embeddings)
    rope = after.rotary[0]
    assert (rope.kind, rope.factor) == (scaling.get("rope_type", "yarn"), factor)
    assert rope.theta == before.rotary[0].theta
    assert rope.llama_4_scaling_beta == before.rotary[0].llama_4_scaling_beta
    assert rope.partial_rotary_factor == before.rotary[0].partial_rotary_factor
    assert rope.kind == "linear" or rope.original_max_position_embeddings == original
    assert after.max_position_embeddings == (positions or max(int(factor * original), before.max_position_embeddings))
    if isinstance(CONFIGS[name].get("rope_parameters"), dict) and "full_attention" in CONFIGS[name]["rope_parameters"]:
        assert after.rotary[1:] == before.rotary[1:]


@pytest.mark.parametrize("key", ("rope_parameters", "rope_scaling"))
def test_queries_that_grow_with_their_position_do_so_under_another_base(key):
    hf = {name: value for name, value in CONFIGS["ministral3"].items() if name != "rope_parameters"}
    hf |= {key: CONFIGS["ministral3"]["rope_parameters"]}
    [before], [after] = (
        config_from_hf(hf).rotary,
        config_from_hf(stretched(hf, {"type": "linear", "factor": 2.0}, None)).rotary,
    )
    growth = before.llama_4_scaling_beta, before.original_max_position_embeddings
    assert (after.kind, after.llama_4_scaling_beta, after.original_max_position_embeddings) == ("linear", *growth)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CONFIGS)), st.integers(1, 5000))
def test_positions_alone_leave_every_angle(name, more):
    before = config_from_hf(CONFIGS[name])
    positions = before.context_length + more
    after = config_from_hf(stretched(CONFIGS[name], None, positions))
    assert after.context_length == positions
    for old, new in zip(before.rotary, after.rotary, strict=True):
        was = rotary_frequencies(old, old.head_dim or before.head_dim, before.max_position_embeddings)
        now = rotary_frequencies(new, new.head_dim or after.head_dim, after.max_position_embeddings)
        assert was.scale == now.scale and (was.short == now.short).all()
        assert was.long is None or (was.long == now.long).all()


@pytest.mark.parametrize(
    ("name", "scaling", "positions", "message"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, None, "rope_type = 'dynamic' is not supported; it can be"),
        ("llama", {"factor": 2.0}, None, "rope_type = None is not supported"),
        ("llama", {"rope_type": "linear"}, None, "'linear' needs 'factor'"),
        ("llama", {"rope_type": "yarn", "factor": -2.0}, None, "model.rope_scaling.factor"),
        ("llama", None, 3, "the model has .* already"),
        ("gemma4", {"rope_type": "yarn", "factor": 2.0}, None, "proportional, which cannot be replaced"),
    ],
)
def test_what_cannot_be_is_said(name, scaling, positions, message):
    with pytest.raises(ValueError, match=message):
        stretched(CONFIGS[name], scaling, positions)


@pytest.mark.full
def test_a_model_and_an_adapter_keep_their_positions(tmp_path):
    base = CONFIGS["llama"]
    save_pretrained(model_from_config(base, jax.random.key(0)), tmp_path / "base")
    scaling = {"rope_type": "yarn", "factor": 4.0}
    model, _ = jaxtune.from_pretrained(tmp_path / "base", "float32", rope_scaling=scaling)
    wanted = config_from_hf(stretched(base, scaling, None))
    assert model.config == wanted and wanted.context_length == 4 * base["max_position_embeddings"]
    adapted = jaxtune.get_peft_model(model, r=2)
    jaxtune.save_adapter(adapted, tmp_path / "adapter")
    again, _ = jaxtune.from_pretrained(tmp_path / "adapter")
    assert again.config == wanted
    assert trained_over.read(tmp_path / "adapter").positions == {"rope_scaling": scaling}
    save_pretrained(jaxtune.merge_adapter(again), tmp_path / "merged")
    assert json.loads((tmp_path / "merged/config.json").read_text())["max_position_embeddings"] == wanted.context_length
    assert jaxtune.from_pretrained(tmp_path / "merged")[0].config == wanted
    # A base with its own positions is another model.
    with pytest.raises(ValueError):
        jaxtune.load_adapter(jaxtune.from_pretrained(tmp_path / "base", "float32")[0], tmp_path / "adapter")
