"""Every key under the architecture's name in a GGUF file is read, changes no number, or is named in an error."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp_models import CHANGES, made

gguf = pytest.importorskip("gguf")

from jaxtune.export.architectures import architecture, hyperparameters  # noqa: E402
from jaxtune.models.files.gguf_config import config_of  # noqa: E402
from jaxtune.models.files.gguf_metadata import Metadata  # noqa: E402
from jaxtune.models.files.gguf_unread import _UNCHANGING  # noqa: E402
from jaxtune.models.hf import from_pretrained  # noqa: E402
from tests.models.test_gguf_in import numbers, written  # noqa: E402

KEYS = sorted(
    value.removeprefix("{arch}.")
    for section in vars(gguf.constants.Keys).values()
    if isinstance(section, type)
    for value in vars(section).values()
    if isinstance(value, str) and value.startswith("{arch}.") and "{" not in value.removeprefix("{arch}.")
) + ["rope.scale_linear", "a_key_of_tomorrow"]
# of tensors, which the config does not have, and numbers that follow from them
SHAPES = {"block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv"}
SHAPES |= {"attention.key_length", "context_length", "attention.key_length_swa", "attention.shared_kv_layers"}
SHAPES |= {"attention.sliding_window_pattern", "embedding_length_per_layer_input"}


@pytest.fixture(scope="module")
def told() -> dict[str, Metadata]:
    """What a file of each architecture says, without its numbers."""
    found = {}
    for name in CHANGES:
        config = made(name).config
        arch = architecture(config)
        if arch.name in found or any(rope.kind in ("llama3", "longrope", "proportional") for rope in config.rotary):
            continue
        keys, _ = hyperparameters(config, arch)
        fields = {f"{arch.name}.{key}": value for key, value in keys.items()} | {"general.architecture": arch.name}
        shapes = {"token_embd.weight": (config.vocab_size, config.hidden_size)}
        found[arch.name] = Metadata("a.gguf", fields, shapes, lambda name: np.zeros(1), config.tie_embeddings)
    assert len(found) > 10
    return found


def changed(data: Metadata, **fields) -> Metadata:
    merged = {**data.fields} | {f"{data.architecture}.{key.replace('__', '.')}": value for key, value in fields.items()}
    return dataclasses.replace(data, fields=merged, asked=set())


@given(st.data())
def test_a_key_is_read_or_changes_nothing_or_is_named(told, data):
    name, key = data.draw(st.sampled_from(sorted(told))), data.draw(st.sampled_from(KEYS))
    value = data.draw(st.sampled_from([0.37, 3.0, 0.0, 1.0, 2, 7, 1, 0, True, False, "yarn", "tomorrow"]))
    plain = config_of(changed(told[name]))
    try:
        found = config_of(changed(told[name], **{key: value}))
    except (ValueError, TypeError, ZeroDivisionError) as error:
        assert key in str(error) or key in SHAPES or isinstance(value, str) or value == 0, (name, key, value, error)
        return
    if found != plain or key in SHAPES or told[name].fields.get(f"{name}.{key}") == value:
        return
    assert (
        key in _UNCHANGING
        or value in (0, 1, "none", "linear")
        or (key, value) == ("rope.freq_base", 10000.0)
        or (key in ("attention.sliding_window", "rope.scaling.factor", "rope.scale_linear"))
    ), (name, key, value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope__scaling__yarn_ext_factor": 0.5}, r"llama\.rope\.scaling\.yarn_ext_factor = 0\.5 is not followed"),
        ({"rope__scaling__attn_factor": 1.2}, r"llama\.rope\.scaling\.attn_factor = 1\.2.*may be 1\.0.*safetensors"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__yarn_ext_factor": 0.0}, "ext_f"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 0.9}, "attn_fac"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scale_linear": 2.0}, "scale_linear"),
        ({"rope__scaling__type": "tomorrow"}, "rope.scaling.type = 'tomorrow' is not supported"),
        ({"rope__dimension_count": 8}, "llama.rope.dimension_count = 8"),
        ({"rope__dimension_sections": [8, 12, 12, 0]}, "dimension_sections"),
        ({"attention__value_length": 8}, "llama.attention.value_length = 8"),
        ({"attention__sliding_window": 2}, "llama.attention.sliding_window = 2"),
        ({"expert_group_count": 4}, "llama.expert_group_count = 4 .*may be 0 or 1"),
        ({"attention__causal": False}, "llama.attention.causal = False"),
    ],
)
def test_what_is_not_followed_is_named(fields, message, told):
    with pytest.raises(ValueError, match=message):
        config_of(changed(told["llama"], **fields))


@pytest.mark.parametrize(
    "says",
    [
        {"rope.scale_linear": 2.0},
        {"rope.scaling.factor": 2.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0, "rope.scale_linear": 2.0},
    ],
)
def test_a_line_is_read_from_each_of_its_keys(says, tmp_path):
    """As llama.cpp reads it: the type is linear by default, and older files have another key."""
    plain = made("llama", "bfloat16", num_hidden_layers=1, rope_scaling=None)
    wanted = made("llama", "bfloat16", num_hidden_layers=1, rope_scaling={"rope_type": "linear", "factor": 2.0})
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    fields = {f"llama.{key}": value for key, value in says.items()}
    found, _ = from_pretrained(written(plain, tmp_path / "model.gguf", **fields))
    assert found.config == wanted.config and numbers(found).keys() == numbers(wanted).keys()
    assert not np.array_equal(np.asarray(found(tokens), np.float32), np.asarray(plain(tokens), np.float32))


def test_a_factor_of_no_kind_does_nothing(told):
    says = {"rope__scaling__type": "none", "rope__scaling__factor": 4.0, "rope__scale_linear": 2.0}
    assert "rope_scaling" not in config_of(changed(told["llama"], **says))
