"""Every format and every grid of QAT, over three dtypes and standard deviations from 1 to 1e-4: the relative error is
that of wide numbers, because scales are computed and kept in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp_models import made

import jaxtune
from jaxtune.models.files.quant import convert_qat, prepare_qat, quantize
from jaxtune.models.lora import linears, matrices
from jaxtune.models.observed_inputs import observed_scales
from jaxtune.models.qat.fake_quant import ROUNDINGS, FakeQuant
from jaxtune.pallas.format_names import QAT_GROUPS
from jaxtune.pallas.formats import FORMATS, dense
from jaxtune.pallas.formats.nvfp4 import NVFP4

DTYPES = ["float32", "bfloat16", "float16"]
DRAWN = np.random.default_rng(0).standard_normal((24, 256)).astype(np.float32)
DEVIATIONS = [1.0, 0.02, 0.004, 1e-3, 1e-4]
# Grids whose own scales have 16 bits or fewer, as their files have them: how much larger their error may be.
SHORT_SCALES = {"q8_0": 2.5, "int8": 1.3}


def error(found, numbers) -> float:
    found, numbers = np.asarray(found, np.float64), np.asarray(numbers, np.float64)
    return float(np.linalg.norm(found - numbers) / np.linalg.norm(numbers))


def rounded_inputs(name: str, x: jax.Array) -> jax.Array:
    rounding = ROUNDINGS[name]
    assert rounding.activations is not None
    if rounding.observed is None:
        return rounding.activations(x)
    return rounding.activations(x, rounding.observed(jnp.abs(x.astype(jnp.float32)).max()))


WAYS = {f"format {name}": lambda x, name=name: FORMATS[name].encode(x).decode("float32") for name in FORMATS}
WAYS |= {
    f"weights {name}": lambda x, name=name: FakeQuant(name, QAT_GROUPS[name][0], x.dtype.name).round(x)
    for name in ROUNDINGS
}
WAYS |= {f"inputs {name}": functools.partial(rounded_inputs, name) for name in ROUNDINGS if ROUNDINGS[name].activations}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_small_numbers_are_rounded_as_well_as_large_ones(way, dtype):
    of_wide = error(WAYS[way](jnp.asarray(DRAWN)), DRAWN)
    most = 1.06 * of_wide * SHORT_SCALES.get(way.partition(" ")[2], 1.0)
    for deviation in DEVIATIONS:
        numbers = jnp.asarray(DRAWN * np.float32(deviation), dtype)
        assert error(WAYS[way](numbers), numbers) < most, deviation


@given(st.integers(0, 2**31), st.floats(-27, 30), st.sampled_from(DTYPES), st.integers(1, 4))
def test_nvfp4_has_one_error_at_every_size_and_dtype(seed, exponent, dtype, blocks):
    """Also of one row, and far below the numbers of float16; a block much smaller than the largest is not lost."""
    wide = np.random.default_rng(seed).standard_normal((3, 16 * blocks)).astype(np.float32)
    lowest, highest = (-4, 4) if dtype == "float16" else (-27, 30)
    numbers = jnp.asarray(wide * np.float32(10.0 ** np.clip(exponent, lowest, highest)), dtype)
    weight = NVFP4.encode(numbers)
    largest = np.abs(np.asarray(numbers, np.float64)).max()
    np.testing.assert_allclose(np.float64(weight.tensor_scale) * largest, 448 * 6, rtol=1e-6)
    assert error(weight.decode("float32"), numbers) < 0.16
    small = jnp.asarray(np.concatenate([wide[:, :16], wide[:, :16] * np.float32(2e-6)], axis=1))
    found = np.asarray(NVFP4.encode(small).decode("float32"))[:, 16:]
    assert found.any() or np.abs(wide[:, :16]).max() / np.abs(wide).max() < 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(dtype):
    weight = NVFP4.encode(jnp.zeros((4, 32), dtype))
    assert not np.asarray(weight.decode("float32")).any() and float(weight.tensor_scale.item()) == 1.0


def small_model(dtype: str, deviation: float):
    """A tiny model whose matrices have this standard deviation."""
    model = made("qwen2", dtype, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=1)
    for index, (_, matrix) in enumerate(linears(model)):
        drawn = np.random.default_rng(index).standard_normal(matrix.weight.shape).astype(np.float32)
        matrix.weight[...] = jnp.asarray(drawn * np.float32(deviation), dtype)
    return model


@pytest.mark.parametrize("word", ["nvfp4", "fp8", "int8", "nf4"])
def test_small_float16_weights_are_loaded_and_exported_in_a_format(tmp_path, word):
    model = small_model("float16", 1e-3)
    wanted = {name: np.asarray(matrix.weight[...]) for name, matrix in linears(model)}
    jaxtune.save_pretrained(model, tmp_path / "plain")
    jaxtune.export_model(model, tmp_path / "out", to="bnb-4bit" if word == "nf4" else word)
    most = 1.1 * error(WAYS[f"format {word}"](jnp.asarray(DRAWN)), DRAWN)
    ways = {
        "quantize": quantize(model, word),
        "load_in": jaxtune.from_pretrained(tmp_path / "plain", dtype="float16", load_in=word)[0],
        "export": jaxtune.from_pretrained(tmp_path / "out", dtype="float16")[0],
    }
    for way, other in ways.items():
        for name, matrix in matrices(other):
            if matrix.stored_weight is not None and name in wanted:
                assert error(dense(matrix.stored_weight, "float32"), wanted[name]) < most, (way, name)


@pytest.mark.parametrize("deviation", [0.02, 1e-3, 1e-4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("word", ["nvfp4", "nvfp4-nvfp4"])
def test_what_qat_rounded_to_nvfp4_is_exported_exactly(tmp_path, word, dtype, deviation):
    model = small_model(dtype, deviation)
    scales = None
    if word == "nvfp4-nvfp4":
        scales = observed_scales(model, word, np.arange(24, dtype=np.int32).reshape(2, 12))
    trained = convert_qat(prepare_qat(model, word, input_scales=scales))
    jaxtune.export_model(trained, tmp_path / "out", to=word)
    loaded, _ = jaxtune.from_pretrained(tmp_path / "out", dtype=dtype)
    for (name, ours), (_, theirs) in zip(linears(trained), linears(loaded), strict=True):
        found = np.asarray(dense(theirs.stored_weight, dtype))
        np.testing.assert_array_equal(found, ours.weight[...], err_msg=name)
