"""When the Triton kernels over four-bit weights serve a call; what they do is tested in tests/parity and tests/gpu."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import compat, targets
from jaxtune.pallas.formats import NF4
from jaxtune.pallas.quant_matmul import triton


def weight(*shape):
    return jax.eval_shape(lambda: NF4.encode(jnp.zeros(shape)))


@pytest.mark.parametrize(
    ("tokens", "inner", "dtype", "reason"),
    [
        (1, 64, jnp.bfloat16, None),
        (16, 64, jnp.float16, None),
        (17, 64, jnp.float16, "17 tokens; up to 16"),
        (4, 96, jnp.float16, "96 columns, not a multiple of 64: a block would lie in two rows"),
        (4, 64, jnp.float32, "dtype float32"),
    ],
)
def test_products_of_a_few_tokens(monkeypatch, tokens, inner, dtype, reason):
    monkeypatch.setattr(compat, "_has_jax_triton", lambda: True)
    with targets.compile_for((8, 9)):
        assert triton.small_refusal(weight(8, inner), dtype, tokens) == reason


def test_decoding(monkeypatch):
    monkeypatch.setattr(compat, "_has_jax_triton", lambda: True)
    with targets.compile_for((8, 9)):
        assert triton.refusal(weight(5, 7), jnp.float32) is None
        assert triton.refusal(weight(5, 7), jnp.int8) == "dtype int8"
    assert triton.refusal(weight(5, 7), jnp.bfloat16) == "no NVIDIA GPU"
    assert triton.small_refusal(weight(8, 64), jnp.bfloat16, 1) == "no NVIDIA GPU"


def test_a_kernel_in_a_graph_is_mapped_one_by_one(monkeypatch):
    """As XLA maps what it decodes, so that jax.vmap works on any GPU."""
    monkeypatch.setattr(compat, "_assembly", lambda *_: compat._Assembly("kernel", "", 0, 1))
    x = jax.ShapeDtypeStruct((5, 8, 64), jnp.bfloat16)

    def call(x):
        return compat.triton_graph_call(None, (x,), (jax.ShapeDtypeStruct((8, 16), x.dtype),), (1,), warps=1, stages=1)

    with targets.compile_for((9, 0)):
        mapped = jax.make_jaxpr(jax.vmap(call))(x)
    assert [out.shape for out in mapped.out_avals] == [(5, 8, 16)]
    assert [equation.primitive.name for equation in mapped.eqns if equation.primitive.name == "scan"] == ["scan"]
