"""Quantised types of GGUF files: what gguf's reader reads of them, how far it is off, and which tensor has which."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from llama_cpp_models import made
from tiny_models import adapted_model

gguf = pytest.importorskip("gguf")

from jaxtune.export import api, gguf_types  # noqa: E402
from jaxtune.export.gguf_blocks import BLOCK_TYPES  # noqa: E402
from jaxtune.export.gguf_tensors import Tensor  # noqa: E402
from jaxtune.models.files.quant import quantize  # noqa: E402
from tests.export.test_gguf import dequantised, encoded, expected_tensors, our_name  # noqa: E402

STEPS = {"Q4_K": 15, "Q5_K": 31, "Q6_K": 63}  # between the smallest and the largest code


def read(array: np.ndarray, kind: str) -> np.ndarray:
    """What gguf's reader reads of an array that was encoded."""
    coded = encoded(jnp.asarray(array), kind).reshape(len(array), -1)
    return gguf.quants.dequantize(coded, gguf.GGMLQuantizationType[kind])


def rounded(array: np.ndarray, kind: str) -> np.ndarray:
    """The plain way: codes over the range of each part with the scales as they are, which a file cannot hold."""
    parts = array.reshape(len(array), -1, 16 if kind == "Q6_K" else 32)
    if kind == "Q6_K":
        scale = np.abs(parts).max(-1, keepdims=True) / 31
        return (np.round(parts / scale) * scale).reshape(array.shape)
    least = np.minimum(parts.min(-1, keepdims=True), 0)
    scale = (parts.max(-1, keepdims=True) - least) / STEPS[kind]
    return (np.round((parts - least) / scale) * scale + least).reshape(array.shape)


def drawn(name: str) -> np.ndarray:
    draw = np.random.default_rng(0)
    normal = draw.standard_normal((64, 512))
    return {
        "normal": normal * 0.02,
        "long tails": draw.standard_t(3, (64, 512)),
        "parts of other sizes": normal * 10.0 ** draw.integers(-2, 2, (64, 16)).repeat(32, 1),
        "positive": np.abs(normal),
    }[name].astype(np.float32)


@pytest.mark.full
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_no_block_is_further_off_than_rounding_explains(kind):
    """An export would end with an error. Rounding the scale and the least value of Q5_1 to f16 adds up."""
    made, draw = BLOCK_TYPES[kind], np.random.default_rng(0)
    normal, edges = draw.standard_normal((6_400_000,)), draw.choice([-1.0, 1.0], 640_000)
    for values in (normal, edges * (1 + 2.0**-11 * draw.random(640_000))):
        blocks = values.reshape(-1, made.numbers)
        given = jnp.asarray(blocks, jnp.float32)
        error = jnp.abs(made.decode(made.encode(given)) - given)
        assert not (error > made.allowed(given, jnp)).any()


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", ["normal", "long tails", "parts of other sizes", "positive"])
def test_errors_are_below_those_of_plain_rounding(name, kind):
    """Although scales have six or eight bits. The errors of llama.cpp itself: tests/llama_cpp."""
    array = drawn(name)
    error, plain = (float(np.square(found - array).mean()) for found in (read(array, kind), rounded(array, kind)))
    assert error < plain


@pytest.mark.parametrize("kind", STEPS)
def test_odd_blocks(kind):
    """Zeros and equal numbers come back; so do numbers below f16's, and codes and scales at their ends."""
    array = np.zeros((10, 256), np.float32)
    array[1], array[2], array[3] = 3.0, -3.0, 5 + 0.01 * np.random.default_rng(1).standard_normal(256)
    array[4] = 1e-6 * np.random.default_rng(2).standard_normal(256)
    array[5, 7], array[6, 7] = 1.0, -1.0
    array[7, ::2], array[8] = 2e4, -np.arange(256)
    array[9, :32], array[9, 32:] = np.arange(32), 1e-3
    found = read(array, kind)
    assert not found[0].any()
    np.testing.assert_allclose(found[1:3], array[1:3], rtol=1e-3)
    np.testing.assert_allclose(found[3], array[3], atol=0.05)
    assert np.square(found[4] - array[4]).mean() < 0.02 * np.square(array[4]).mean()
    largest = np.abs(array[5:8]).max(-1, keepdims=True)
    np.testing.assert_allclose(found[5:8] / largest, array[5:8] / largest, atol=1e-3)
    ranges = np.ptp(array[8:], -1, keepdims=True)
    assert (np.abs(found[8:] - array[8:]) <= 1.01 * ranges / STEPS[kind]).all()


def stored(architecture: str, names: list[str], outtype: str, columns: int = 256, **fields: int) -> list[str]:
    """The types of the tensors `names` in a file whose layers all have values."""
    fields = {"block_count": 16, "attention.head_count": 8, "attention.head_count_kv": 2, **fields}
    part = "attn_qkv" if any("attn_qkv" in name for name in names) else "attn_v"
    every = dict.fromkeys([*names, *(f"blk.{layer}.{part}.weight" for layer in range(fields["block_count"]))])
    tensors = [Tensor(name, (4, columns), lambda value: value, False) for name in every]
    keys = {f"{architecture}.{key}": value for key, value in fields.items()}
    found = gguf_types.stored_types(tensors, outtype, architecture, keys)
    return [found[name] for name in names]


def test_types_by_tensor_and_layer():
    """As llama-quantize has them; `make llama-cpp` asks it."""
    both = functools.partial(stored, "llama", ["token_embd.weight", "output.weight"])
    assert both("q4_k_m") == ["Q4_K", "Q6_K"] and both("q6_k") == ["Q6_K"] * 2 and both("q4_0") == ["Q8_0"] * 2
    assert stored("llama", ["token_embd.weight"], "q4_k_m") == ["Q6_K"]  # it is the head too
    more = [0, 1, 4, 7, 10, 13, 14, 15]
    for part in ("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps"):
        found = stored("llama", [f"blk.{layer}.{part}.weight" for layer in range(16)], "q4_k_m")
        assert [layer for layer, kind in enumerate(found) if kind == "Q6_K"] == more
        assert set(found) == {"Q4_K", "Q6_K"}
    layer = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    layer = [f"blk.2.{part}.weight" for part in layer]
    assert stored("llama", layer, "q4_k_m") == ["Q4_K"] * 7 and stored("llama", layer, "q6_k") == ["Q6_K"] * 7
    assert stored("llama", layer, "q8_0", 96) == ["Q8_0"] * 7 and stored("llama", layer, "q8_0", 80) == ["F16"] * 7
    eight = ["Q4_K", "Q8_0", "Q8_0", "Q5_K", "Q4_K", "Q4_K", "Q4_K"]
    assert stored("llama", layer, "q4_k_m", expert_count=8) == eight
    assert stored("llama", layer, "q4_k_m", 96, expert_count=8) == [
        {"Q4_K": "Q5_0", "Q5_K": "Q5_1"}.get(kind, kind) for kind in eight
    ]
    assert stored("llama", layer, "q6_k", expert_count=8) == ["Q6_K", *["Q8_0"] * 2, *["Q6_K"] * 4]
    # Of the 70B models: layer 11 has no more bits of its own.
    large = {"names": ["blk.11.attn_v.weight", "blk.12.attn_v.weight"], "outtype": "q4_k_m", "block_count": 80}
    assert stored("llama", **large) == ["Q5_K", "Q6_K"] == stored("qwen2", **large)
    assert stored("llama", **large, **{"attention.head_count_kv": 8}) == ["Q4_K", "Q6_K"] == stored("qwen3", **large)
    assert stored("llama", layer[:1], "q6_k", 96) == ["Q8_0"] and stored("llama", layer[:1], "q6_k", 80) == ["F16"]


@pytest.mark.parametrize(
    ("name", "outtype", "changes"),
    [
        ("llama", "q4_k_m", dict(hidden_size=256, intermediate_size=256, vocab_size=128)),
        ("qwen3_moe", "q4_k_m", dict(hidden_size=256, moe_intermediate_size=96, vocab_size=128)),
        ("gemma2", "q6_k", dict(hidden_size=256, intermediate_size=256, vocab_size=128)),
    ],
)
def test_models_are_exported(name, outtype, changes, tmp_path, tokenizer):
    """Over a base in NF4 with an adapter; with experts whose rows are short; with a tied embedding."""
    model = made(name, **changes)
    if name == "llama":
        model = adapted_model(quantize(model), r=2)
    done = api.export_model(model, tmp_path / "out", "gguf", tokenizer=tokenizer, outtype=outtype)
    reader = gguf.GGUFReader(done.folder / f"model-{outtype}.gguf")
    assert reader.fields["general.file_type"].contents() == {"q4_k_m": 15, "q6_k": 18}[outtype]
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.attn_norm.weight"] == "F32"
    if name == "llama":
        assert types["blk.0.attn_q.weight"] == "Q4_K" and types["token_embd.weight"] in ("Q4_K", "Q6_K")
    if name == "qwen3_moe":
        assert types["blk.0.ffn_gate_inp.weight"] == "F32" and types["blk.0.ffn_down_exps.weight"] == "Q5_0"
        assert any("rows that are not whole blocks of q4_k_m" in note for note in done.notes)
    if name == "gemma2":
        short = {key for key, kind in types.items() if kind == "Q8_0"}
        assert short == {f"blk.{layer}.attn_output.weight" for layer in range(3)} and "output.weight" not in types
        assert set(types.values()) == {"F32", "Q6_K", "Q8_0"}
    whole = expected_tensors(name, api._whole(model).model) if name != "llama" else None
    exact = api.export_model(model, tmp_path / "exact", "gguf", tokenizer=tokenizer, outtype="f32")
    wanted = dequantised(gguf.GGUFReader(exact.folder / exact.files[0]))
    for key, value in dequantised(reader).items():
        if whole is not None and not key.startswith("rope_"):
            np.testing.assert_array_equal(wanted[key], whole[our_name(name, key)])
        spread = float(np.sqrt(np.square(wanted[key]).mean()))
        error = float(np.sqrt(np.square(value - wanted[key]).mean()))
        assert (
            error
            <= {"F32": 0, "Q8_0": 0.01, "Q6_K": 0.02, "Q5_0": 0.06, "Q5_1": 0.06, "Q4_K": 0.08}[types[key]] * spread
        ), key
