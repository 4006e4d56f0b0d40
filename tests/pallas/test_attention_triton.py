"""When the Triton attention kernels serve a call. What they do is tested where triton is: tests/parity, tests/gpu."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import compat, dispatch, targets
from jaxtune.pallas.attention import api, attention_forward, packed_layout, triton


@pytest.fixture
def with_jax_triton(monkeypatch):
    monkeypatch.setattr(compat, "_has_jax_triton", lambda: True)


def chosen(capability, dim=128, dtype=jnp.bfloat16, packed=False, **features):
    query = jax.ShapeDtypeStruct((1, 128, 4, dim), dtype)
    layout = packed_layout((1, 128), jnp.ones((1, 128), jnp.int32)) if packed else packed_layout((1, 128))
    with targets.compile_for(capability):
        return dispatch.choose("attention", api.implementations(query, layout, kv_heads=2, **features), None)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (12, 0)])
def test_before_hopper_and_on_consumer_cards_triton_serves_what_cudnn_cannot(with_jax_triton, capability):
    assert chosen(capability) == "cudnn"
    assert chosen(capability, packed=True) == "triton"
    assert chosen(capability, soft_cap=30.0) == "triton"
    assert chosen(capability, dim=64, sinks=jnp.zeros(4)) == "triton"
    for dim in (72, 80, 96, 192, 256, 264, 512):
        assert chosen(capability, packed=True, dim=dim) == "triton"
    for dim in (32, 100, 520):
        assert chosen(capability, packed=True, dim=dim) == "reference"
    assert chosen(capability, dim=96) == "cudnn"
    # cuDNN has heads of up to 128 there, from 9.0 on up to 256.
    assert chosen(capability, dim=256) == ("cudnn" if capability >= (9, 0) else "triton")
    assert chosen(capability, dim=264) == chosen(capability, dim=512) == "reference"


def test_on_hopper_mosaic_goes_first(with_jax_triton):
    assert chosen((9, 0), packed=True) == "mosaic"
    assert dispatch.record["attention"][1] == {}


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "reason"),
    [
        ((7, 5), jnp.float16, 64, "needs compute capability 8.0, this GPU has 7.5"),
        ((8, 6), jnp.float32, 64, "dtype float32"),
        ((8, 6), jnp.bfloat16, 100, "head dim 100; multiples of 8 from 64 to 512"),
        ((8, 6), jnp.bfloat16, 56, "head dim 56; multiples of 8 from 64 to 512"),
        ((8, 6), jnp.bfloat16, 512, "head dim 512 on whole rows, of which XLA makes the gradients faster"),
    ],
)
def test_refusals_say_why(with_jax_triton, capability, dtype, dim, reason):
    query = jnp.zeros((1, 128, 2, dim), dtype)
    layout = packed_layout((1, 128))
    with targets.compile_for(capability), pytest.raises(ValueError, match=reason):
        attention_forward(query, query, query, layout, scale=1.0, implementation="triton")


def test_a_machine_without_jax_triton_hears_where_it_comes_from(monkeypatch):
    monkeypatch.setattr(compat, "_has_jax_triton", lambda: False)
    with targets.compile_for((8, 6)):
        assert (
            compat.triton_refusal()
            == "jax-triton is not installed: pip install '.[cuda13]' in a clone of jaxtune (or cuda12)"
        )
    assert compat.triton_refusal() == "no NVIDIA GPU"


def test_a_head_dim_has_the_tiles_of_the_next_power_of_two():
    widths = {64: 64, 72: 128, 96: 128, 128: 128, 136: 256, 192: 256, 256: 256, 264: 512, 512: 512}
    assert {dim: triton.width(dim) for dim in widths} == widths
    with targets.compile_for((8, 6)):
        assert all(triton.tiles(dim) == triton.TILES[99][width] for dim, width in widths.items())


def test_an_unknown_gpu_gets_the_tiles_that_fit_everywhere():
    smallest = triton.TILES[min(triton.TILES)]
    for capability, tiles in (((8, 0), triton.TILES[163]), ((9, 0), triton.TILES[227]), ((13, 1), smallest)):
        with targets.compile_for(capability):
            assert triton.tiles(128) == tiles[128]


def test_a_scale_that_is_not_positive_is_refused():
    """The running maximum is taken of unscaled scores."""
    query = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"scale > 0, not -1\.0"):
        triton._call(
            None,
            triton.tiles(64).forward,
            64,
            2,
            (query,),
            (),
            query,
            scale=-1.0,
            runs=False,
            window=None,
            soft_cap=None,
        )
