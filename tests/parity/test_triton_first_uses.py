"""Checks of Triton kernels at their first use, which Triton's interpreter runs, within one_order.exact and outside."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas import dispatch, one_order, targets
from jaxtune.pallas.attention import attention_forward, packed_layout
from jaxtune.pallas.decode.few_rows import added_norm, experts_down, experts_gated, placed, products
from jaxtune.pallas.gated import RowGate
from jaxtune.pallas.gated import triton as gated_triton
from jaxtune.pallas.grouped_matmul import GroupedLora
from jaxtune.pallas.normed_heads import triton as heads_triton
from jaxtune.pallas.normed_stream import triton as stream_triton
from jaxtune.pallas.one_order import triton as one_order_triton
from jaxtune.pallas.quant_matmul import LoraWeights

DTYPE = jnp.dtype("float16")
CHECKED = dispatch._difference


def zeros(*shape: int, dtype=DTYPE) -> jax.Array:
    return jnp.zeros(shape, dtype)


@pytest.fixture
def checks(monkeypatch, tmp_path):
    """(op, whether its case ran in one order, the kernel's dtypes, why it is wrong or None) of each check."""
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(dispatch, "first_uses", {})
    monkeypatch.setattr(jax, "jit", lambda function, **_: function)  # the interpreter runs on arrays
    monkeypatch.setattr(targets, "_device_capability", lambda platform: (9, 0))
    monkeypatch.setattr(targets, "multiprocessors", lambda: 132)
    done = []

    def difference(compare):
        dtypes = []

        def noted():
            results, expected = compare()
            dtypes.extend(result.dtype for result in results)
            return results, expected

        reason = CHECKED(noted)
        done.append((one_order.is_exact(), dtypes, reason))
        return reason

    monkeypatch.setattr(dispatch, "_difference", difference)
    with interpreted((9, 0)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "_compiled_for", None)  # of the interpreter, for which nothing would be checked
        yield done
    assert targets.absent() is None


def lora_of(rank: int, rows: int, columns: int) -> LoraWeights:
    return LoraWeights(zeros(rank, columns), zeros(rows, rank), None, 0.5)


def attended():
    segments = jnp.ones((1, 128), jnp.int32)
    query, key = zeros(1, 128, 2, 64), zeros(1, 128, 1, 64)
    layout = packed_layout((1, 128), segments, 2)
    attention_forward(query, key, key, layout, scale=0.125, implementation="triton")


def of_experts():
    choice, lora = zeros(3, 2, dtype=jnp.int32), GroupedLora(zeros(4, 4, 64), zeros(4, 128, 4), 0.5)
    experts_gated(zeros(3, 128), zeros(4, 128, 128), choice, zeros(3, 2, dtype=jnp.float32), "silu")
    experts_down(zeros(6, 64), zeros(4, 128, 64), choice)
    experts_down(zeros(6, 64), zeros(4, 128, 64), choice, lora)


def normed(dtype):
    added_norm(zeros(3, 256), zeros(1, 3, 256, dtype=dtype), zeros(256), eps=1e-6)


def of_heads(dtype):
    cache, positions = zeros(3, 1, 64, 64), zeros(3, dtype=jnp.int32)
    placed(zeros(1, 3, 4 * 64, dtype=dtype), cache, cache, positions, norms=(zeros(64), zeros(64)))


CALLS = {
    "products": lambda: products(zeros(3, 512), [zeros(128, 512)]),
    "products, adapted": lambda: products(zeros(3, 512), [zeros(128, 512)], [lora_of(8, 128, 512)]),
    "experts": of_experts,
    "added_norm, float32": lambda: normed(jnp.float32),
    "added_norm, 16 bits": lambda: normed(DTYPE),
    "placed, float32": lambda: of_heads(jnp.float32),
    "placed, 16 bits": lambda: of_heads(DTYPE),
    "normed_heads": lambda: heads_triton._first_use(DTYPE, DTYPE, 64),
    "normed_stream": lambda: stream_triton._first_use(DTYPE, DTYPE, 192),
    "gated rows": lambda: gated_triton._first_use(DTYPE, RowGate("silu")),
    "attention": attended,
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_case_is_computed_as_its_call_is(name, exact, checks):
    """And is right: the reference adds up as usual in both."""
    with one_order.exact(exact):
        CALLS[name]()
    assert checks and all(check[0] == exact for check in checks)
    assert [reason for *_, reason in checks] == [None] * len(checks)
    assert all(call[2].endswith(", one order") == exact for call in dispatch.first_uses)


@pytest.mark.parametrize("exact", [False, True])
def test_the_kernel_of_experts_is_checked_with_the_dtype_of_its_sums(exact, checks):
    with one_order.exact(exact):
        of_experts()
    assert [dtypes for _, dtypes, _ in checks[1:]] == [[DTYPE if exact else jnp.float32]] * 2


def test_one_order_s_product_is_checked(checks):
    with one_order.exact():
        one_order_triton.product(zeros(3, 64), zeros(40, 64), None, DTYPE)
    assert [(ran_exact, reason) for ran_exact, _, reason in checks] == [(True, None)]


def test_sums_of_another_dtype_are_another_kernel(checks):
    for dtype in (jnp.float32, DTYPE):
        normed(dtype)
        of_heads(dtype)
    assert len(checks) == 4
