"""The gated product of 129 to 256 rows: the Mosaic kernel's body under Pallas' GPU interpreter against plain JAX, and
which calls it is chosen for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import dispatch, gpu_kernel, persistent
from jaxtune.pallas.decode.few_rows import gated_mosaic, gated_product, reference
from jaxtune.pallas.decode.few_rows import triton as few_triton
from jaxtune.pallas.quant_matmul import LoraWeights


def normal(*shape, seed=0, scale=1.0, dtype=jnp.bfloat16):
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


@pytest.mark.parametrize(
    ("rows", "out", "size", "activation", "dtype"),
    [
        (136, 192, 192, "silu", jnp.bfloat16),  # the halves overlap
        (200, 240, 1088, "silu", jnp.float16),  # of two pairs of programs one has two tiles, more steps than stages
        (256, 112, 512, "gelu_tanh", jnp.bfloat16),
    ],
)
@pytest.mark.gpu
def test_the_kernel_is_the_reference(rows, out, size, activation, dtype, monkeypatch):
    monkeypatch.setattr(persistent, "cores", lambda: 4)
    x = normal(rows, size, dtype=dtype)
    gate, up = (normal(out, size, seed=seed, scale=size**-0.5, dtype=dtype) for seed in (1, 2))
    with gpu_kernel.interpreted():
        assert gated_mosaic.refusal(x, gate, activation) is None
        got = np.asarray(gated_mosaic.gated_product(x, gate, up, activation), np.float32)
    same = reference.gated_product(x, gate, up, activation)
    assert same.dtype == dtype and (got == np.asarray(same, np.float32)).mean() > 0.98
    x, gate, up = (array.astype(jnp.float32) for array in (x, gate, up))
    want = np.asarray(reference.gated_product(x, gate, up, activation))
    assert np.linalg.norm(got - want) <= (8e-3 if dtype == jnp.bfloat16 else 1e-3) * np.linalg.norm(want)


@pytest.mark.gpu
def test_a_row_that_is_not_finite_stays_alone():
    x, (gate, up) = normal(136, 128), (normal(64, 128, seed=seed) for seed in (1, 2))
    with gpu_kernel.interpreted():
        got = gated_mosaic.gated_product(x.at[20].set(jnp.nan), gate, up, "silu")
        other = gated_mosaic.gated_product(x, gate, up, "silu")
    alone = np.arange(136) == 20
    assert np.isnan(np.asarray(got, np.float32)).all(1).tolist() == alone.tolist()
    assert (np.asarray(got, np.float32)[~alone] == np.asarray(other, np.float32)[~alone]).all()


@pytest.fixture
def hopper(monkeypatch):
    """Kernels are chosen as on a GPU of Hopper's kind; those of Triton, which is not installed, are plain JAX."""
    for name in ("activated", "gated_product"):
        monkeypatch.setattr(few_triton, name, getattr(reference, name))
    monkeypatch.setattr("jaxtune.pallas.compat._has_jax_triton", lambda: True)
    with dispatch.compile_for((9, 0)):
        yield


@pytest.mark.parametrize(
    ("out", "columns"), [(14336, 112), (12288, 96), (3072, 64), (9728, 64), (11008, 64), (64, 64), (1000, None)]
)
def test_tiles_occupy_the_multiprocessors_evenly(out, columns, hopper):
    assert gated_mosaic.columns_of(out) == columns


def shapes(rows, out=1024, size=512, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, size), (out, size), (out, size))]


def chosen(given, activation="silu", loras=()):
    jax.eval_shape(lambda x, gate, up: gated_product(x, gate, up, activation, loras), *given)
    return dispatch.record["gated_product"][0]


def test_it_is_chosen_for_129_to_256_rows(hopper):
    assert [chosen(shapes(rows)) for rows in (128, 136, 256)] == ["triton", "mosaic", "mosaic"]
    for others in (shapes(130), shapes(264), shapes(256, out=1000), shapes(256, size=96)):
        assert chosen(others) == "reference"
    assert chosen(shapes(256, dtype=jnp.float32)) == "reference"
    assert chosen(shapes(256), activation="gelu") == "reference"
    lora = LoraWeights(jnp.zeros((8, 512), jnp.bfloat16), jnp.zeros((1024, 8), jnp.bfloat16), scale=1.0)
    assert chosen(shapes(256), loras=[lora, None]) == "reference"
    with dispatch.compile_for((8, 0)):
        assert chosen(shapes(256)) == "reference"
