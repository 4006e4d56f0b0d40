"""The Triton kernels of a decoding step pass Triton's compiler and assembler, and fit; products for Hopper alone."""

from __future__ import annotations

import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import dispatch, one_order, targets
from jaxtune.pallas.decode.few_rows import (
    added_norm,
    attended,
    chosen_token,
    experts_down,
    experts_gated,
    gated_product,
    placed,
    products,
)
from jaxtune.pallas.grouped_matmul import GroupedLora
from jaxtune.pallas.quant_matmul import LoraWeights
from tests.gpu.aot.triton_compiler import GPUS, SHARED_MEMORY_KB, compile_call, recorded_calls

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 4096, 14336, 32, 8, 128


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("rows", [1, 64, 128])
def test_products_fit_a_hopper_gpu(rows, tmp_path):
    assert_fit(calls_of(rows, None), tmp_path)


@pytest.mark.parametrize(
    ("rows", "rank", "gated"),
    [(2, 16, False), (64, 64, False), (128, 64, False), (2, 16, True), (64, 64, True), (128, 32, True)],
)
def test_products_with_adapters_fit_a_hopper_gpu(rows, rank, gated, tmp_path):
    calls = calls_of(rows, rank, gated=gated)
    assert [(settings["RANK"], settings["GATED"]) for *_, settings in calls] == [(rank, gated)] * 3
    assert_fit(calls, tmp_path)


@pytest.mark.parametrize(("rows", "rank"), [(1, 16), (64, 16), (64, 64), (128, 64)])
def test_wide_products_with_adapters_fit_a_hopper_gpu(rows, rank, tmp_path):
    """Of gate and up as one product, in one order."""
    weight = array(INNER, HIDDEN)
    lora = LoraWeights(jnp.zeros((rank, HIDDEN), jnp.bfloat16), jnp.zeros((INNER, rank), jnp.bfloat16))
    with targets.compile_for((9, 0)), one_order.exact(), recorded_calls() as calls:
        jax.eval_shape(lambda x, gate, up: products(x, [gate, up], [lora] * 2), array(rows, HIDDEN), weight, weight)
    assert [settings["ROWS"] for *_, settings in calls] == [128]
    assert_fit(calls, tmp_path)


def test_a_gated_product_of_most_rows_and_ranks_of_several_models_is_not_a_kernel(tmp_path):
    """It would spill registers."""
    calls = calls_of(128, 64, gated=True, count=2)
    assert [settings["ACTIVATION"] for *_, settings in calls] == [0, 0]
    assert_fit(calls, tmp_path)


def test_products_of_many_rows_with_several_weights_or_a_small_one_fit_a_hopper_gpu(tmp_path):
    weights = array(HIDDEN, HIDDEN), array(KV_HEADS * DIM, HIDDEN), array(KV_HEADS * DIM - 64, HIDDEN)
    with targets.compile_for((9, 0)), recorded_calls() as calls:
        jax.eval_shape(lambda x, query, key, _: products(x, [query, key, key]), array(256, HIDDEN), *weights)
        jax.eval_shape(lambda x, query, key, _: products(x, [query]), array(200, HIDDEN), *weights)
        jax.eval_shape(lambda x, query, _, uneven: products(x, [query, uneven]), array(256, HIDDEN), *weights)
        jax.eval_shape(lambda x, down: products(x, [down]), array(256, INNER), array(HIDDEN, INNER))
    sizes = [tuple(settings[name] for name in ("ROWS", "TOKENS", "SPLITS")) for *_, settings in calls]
    assert sizes == [(128, 128, 1), (128, 128, 2), (64, 256, 2)]
    assert_fit(calls, tmp_path)


@pytest.mark.parametrize(("rows", "rank"), [(64, 16), (128, None)])
def test_products_of_a_hidden_size_of_576_fit_a_hopper_gpu(rows, rank, tmp_path):
    """SmolLM2-135M: gate and up; query, key and value; down."""
    calls = calls_of(rows, rank, hidden=576, inner=1536, keys=192)
    sizes = [tuple(settings[name] for name in ("ROWS", "DEPTH", "SPLITS")) for *_, settings in calls]
    assert sizes == [(64, 64, 1), (64, 64, 3), (64, 128, 6)]
    assert_fit(calls, tmp_path)


def calls_of(
    rows: int,
    rank: int | None,
    hidden: int = HIDDEN,
    inner: int = INNER,
    keys: int = KV_HEADS * DIM,
    gated: bool = False,
    count: int = 3,
):
    """The calls of kernels for the products of a layer, of Llama-3.1-8B's sizes if none are named, with adapters of
    that rank or without; gated: of which each row takes columns of its own."""

    def lora(weight):
        if rank is None:
            return None
        sides = jnp.zeros((rank, weight.shape[1]), weight.dtype), jnp.zeros((weight.shape[0], rank))
        return LoraWeights(*sides, gate=jnp.zeros((rows, 1, rank)) if gated else None)

    def run(x, wide, query, key, gate, down):
        attention, gated = [lora(query), lora(key), lora(key)], gated_product(x, gate, gate, "silu", [lora(gate)] * 2)
        return products(x, [query, key, key], attention), gated, products(wide, [down], [lora(down)])

    with targets.compile_for((9, 0)), recorded_calls() as calls:
        weights = array(hidden, hidden), array(keys, hidden), array(inner, hidden), array(hidden, inner)
        jax.eval_shape(run, array(rows, hidden), array(rows, inner), *weights)
    assert len(calls) == count
    return calls


def assert_fit(calls, tmp_path, shared_kb: float = SHARED_MEMORY_KB[9, 0]):
    for call in calls:
        compiled = compile_call(call, (9, 0), tmp_path)
        assert compiled.shared_bytes <= shared_kb * 1024
        assert compiled.spilled_bytes == 0
        assert "wgmma" in compiled.ptx


# Tokens, experts of each, all experts, hidden, inner; and how many tokens are multiplied at once.
EXPERTS = {
    "Qwen3-30B-A3B": (64, 8, 128, 2048, 768, 32),
    "Qwen3-30B-A3B, most rows": (128, 8, 128, 2048, 768, 32),
    "Qwen3-Next": (64, 10, 512, 2048, 512, 32),
    "like gpt-oss-20b": (2, 4, 32, 2880, 2880, 16),
    "like gpt-oss-20b, most rows": (128, 4, 32, 2880, 2880, 64),
    "Mixtral-8x7B": (128, 2, 8, 4096, 14336, 64),
}


@pytest.mark.parametrize(("rank", "own_ranks"), [(None, None), (16, None), (64, None), (64, 16)])
@pytest.mark.parametrize("case", EXPERTS)
def test_products_with_experts_fit_a_hopper_gpu(case, rank, own_ranks, tmp_path):
    """In half of a multiprocessor's shared memory, so that two programs share it; with adapters and without."""
    count, k, experts, hidden, inner, at_once = EXPERTS[case]

    def lora(matrices):
        if rank is None:
            return None
        _, rows, columns = matrices.shape
        a = jnp.zeros((experts, rank, columns), matrices.dtype)
        return GroupedLora(a, jnp.zeros((experts, rows, rank)), 2.0, own_ranks)

    def run(x, gate_up, down, choice, weights):
        return experts_down(experts_gated(x, gate_up, choice, weights, "silu", lora(gate_up)), down, choice, lora(down))

    with targets.compile_for((9, 0)), recorded_calls() as calls:
        matrices = array(experts, 2 * inner, hidden), array(experts, hidden, inner)
        ints, floats = array(count, k, dtype=jnp.int32), array(count, k, dtype=jnp.float32)
        jax.eval_shape(run, array(count, hidden), *matrices, ints, floats)
    assert [kernel.__name__ for kernel, *_ in calls] == ["expert_kernel"] * 2
    assert {settings["SLOTS"] for *_, settings in calls} == {at_once}
    assert_fit(calls, tmp_path, SHARED_MEMORY_KB[9, 0] / 2)


@pytest.mark.parametrize("capability", GPUS)
def test_other_kernels_fit(capability, tmp_path):
    def run(x, parts, weight, keys, positions, table, norms):
        return added_norm(x, parts[..., :HIDDEN], weight, eps=1e-5), placed(parts, keys, keys, positions, table, norms)

    rows = 64
    parts = array(4, rows, (HEADS + 2 * KV_HEADS) * DIM, dtype=jnp.float32)
    table = (array(rows, DIM // 2, dtype=jnp.float32),) * 2
    keys, positions = array(rows, KV_HEADS, 768, DIM), array(rows, dtype=jnp.int32)
    with targets.compile_for(capability), recorded_calls() as calls:
        jax.eval_shape(run, array(rows, HIDDEN), parts, array(HIDDEN), keys, positions, table, (array(DIM),) * 2)
    assert [kernel.__name__ for kernel, *_ in calls] == ["added_norm_kernel", "placed_kernel"]
    for call in calls:
        compiled = compile_call(call, capability, tmp_path)
        assert compiled.spilled_bytes == 0


@pytest.mark.parametrize("capability", GPUS)
def test_the_activation_of_many_rows_fits(capability, tmp_path):
    weight = array(INNER, HIDDEN)
    with targets.compile_for(capability), recorded_calls() as calls:
        jax.eval_shape(lambda x, gate: gated_product(x, gate, gate, "silu"), array(257, HIDDEN), weight)
    [call] = calls
    assert call[0].__name__ == "activated_kernel"
    assert compile_call(call, capability, tmp_path).spilled_bytes == 0


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(("dim", "group"), [(64, 8), (128, 4), (256, 2), (512, 4)])
def test_attention_of_a_new_token_fits(capability, dim, group, tmp_path):
    rows = 64
    parts = array(2, rows, (group + 2) * KV_HEADS * dim, dtype=jnp.float32)
    table = (array(rows, dim // 2, dtype=jnp.float32),) * 2
    keys, positions = array(rows, KV_HEADS, 768, dim), array(rows, dtype=jnp.int32)
    with targets.compile_for(capability), recorded_calls() as calls:
        for norms in (None, (array(dim),) * 2):
            run = functools.partial(attended, scale=0.1, implementation="triton")
            jax.eval_shape(run, parts, keys, keys, positions, table, norms)
    assert [kernel.__name__ for kernel, *_ in calls] == ["attended_kernel"] * 2
    for call in calls:
        compiled = compile_call(call, capability, tmp_path)
        assert compiled.spilled_bytes == 0
        assert compiled.shared_bytes <= SHARED_MEMORY_KB[capability] * 1024


@pytest.mark.parametrize("capability", GPUS[-3:])
@pytest.mark.parametrize(("dim", "rows", "capacity"), [(64, 64, 768), (128, 1, 768), (128, 64, 768), (128, 64, 3072)])
def test_attention_over_a_cache_in_fp8_fits(dim, rows, capacity, capability, tmp_path):
    """Products are in float16, to which one instruction converts codes; in Gluon long caches of many rows take one
    kernel, which moves no code between lanes."""
    parts, positions = array(2, rows, 6 * KV_HEADS * dim, dtype=jnp.float32), array(rows, dtype=jnp.int32)
    keys, table = array(rows, KV_HEADS, capacity, dim, dtype=jnp.float8_e4m3fn), (array(rows, dim // 2),) * 2
    with targets.compile_for(capability), recorded_calls() as calls:
        run = functools.partial(attended, scale=0.1, dtype=jnp.bfloat16, batch_invariant=False)
        out, *caches = jax.eval_shape(run, parts, keys, keys, positions, table)
    in_gluon = capability == (9, 0) and dim == 128 and rows == 64
    if capacity > 1024 and not in_gluon:
        assert dispatch.record["attended"][0] == "apart"
        return
    [call] = calls
    assert call[0].__name__ == ("many_kernel" if in_gluon else "attended_kernel") and out.dtype == jnp.bfloat16
    assert all(cache.dtype == keys.dtype for cache in caches)
    compiled = compile_call(call, capability, tmp_path)
    assert compiled.spilled_bytes == 0 and compiled.shared_bytes <= SHARED_MEMORY_KB[capability] * 1024
    assert "cvt.rn.f16x2.e4m3x2" in compiled.ptx and ".f32.f16.f16.f32" in compiled.ptx
    assert not in_gluon or 4 * (compiled.shared_bytes + 1024) <= (SHARED_MEMORY_KB[9, 0] + 1) * 1024


@pytest.mark.parametrize("capability", GPUS[-3:])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_token_is_placed_in_a_cache_in_fp8(capability, dim, tmp_path):
    keys, rows = array(5, KV_HEADS, 768, dim, dtype=jnp.float8_e4m3fn), array(5, dtype=jnp.int32)
    with targets.compile_for(capability), recorded_calls() as calls:
        run = functools.partial(placed, dtype=jnp.bfloat16)
        jax.eval_shape(run, array(2, 5, 6 * KV_HEADS * dim, dtype=jnp.float32), keys, keys, rows)
    [call] = calls
    assert compile_call(call, capability, tmp_path).spilled_bytes == 0


@pytest.mark.parametrize(
    ("rows", "invariant", "group", "kernel", "step", "shares"),
    [
        (1, False, 4, "attended_kernel", 128, 6),
        (1, True, 4, "attended_kernel", 32, 1),
        (4, False, 4, "attended_kernel", 128, 4),
        (16, False, 4, "attended_kernel", 128, 1),
        (17, False, 4, "many_kernel", 32, 1),
        (64, False, 8, "many_kernel", 32, 1),
        (64, False, 9, "attended_kernel", 32, 1),
        (256, False, 4, "many_kernel", 32, 1),
        (256, True, 4, "attended_kernel", 32, 1),
    ],
)
def test_kernels_of_the_attention_by_the_number_of_rows_fit_a_hopper_gpu(
    rows, invariant, group, kernel, step, shares, tmp_path
):
    """Four programs share a multiprocessor, where there are so many. shares: how many programs share a head, which is
    one where a row must have the same bits in any batch."""
    parts, keys = array(2, rows, (group + 2) * KV_HEADS * DIM, dtype=jnp.float32), array(rows, KV_HEADS, 768, DIM)
    with targets.compile_for((9, 0)), recorded_calls() as calls:
        run = functools.partial(attended, scale=0.1, batch_invariant=invariant)
        jax.eval_shape(run, parts, keys, keys, array(rows, dtype=jnp.int32))
    [call] = calls
    assert call[0].__name__ == kernel and call[2]["STEP"] == step and call[2].get("SHARES", 1) == shares
    compiled = compile_call(call, (9, 0), tmp_path)
    assert compiled.spilled_bytes == 0
    assert (1 if step == 128 else 4) * (compiled.shared_bytes + 1024) <= (SHARED_MEMORY_KB[9, 0] + 1) * 1024


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("everything", [False, True])
def test_the_attention_of_many_rows_fits_a_hopper_gpu(dtype, everything, tmp_path):
    """Everything: norms, rotation, sums of parts, a window, a soft cap and sinks."""
    keys, rows = array(64, KV_HEADS, 768, DIM, dtype=dtype), array(64, dtype=jnp.int32)
    parts = array(1, 64, 6 * KV_HEADS * DIM, dtype=dtype)
    given, options = (parts, keys, keys, rows), {}
    if everything:
        table = (array(64, DIM // 2, dtype=jnp.float32),) * 2
        given = array(4, *parts.shape[1:], dtype=jnp.float32), keys, keys, rows, table, (array(DIM, dtype=dtype),) * 2
        options = {"window": 100, "soft_cap": 5.0, "sinks": jnp.zeros(4 * KV_HEADS)}
    with targets.compile_for((9, 0)), recorded_calls() as calls:
        jax.eval_shape(functools.partial(attended, scale=0.1, batch_invariant=False, **options), *given)
    [call] = calls
    assert call[0].__name__ == "many_kernel" and bool(call[2]["WINDOW"]) is everything
    compiled = compile_call(call, (9, 0), tmp_path)
    assert compiled.spilled_bytes == 0
    assert 4 * (compiled.shared_bytes + 1024) <= (SHARED_MEMORY_KB[9, 0] + 1) * 1024


@pytest.mark.parametrize(
    ("rows", "capacity", "invariant", "kernel"),
    [
        (64, 2304, False, "many_kernel"),
        (64, 3072, False, "many_kernel"),
        (64, 3104, False, None),
        (64, 2304, True, None),
        (33, 1024, False, "many_kernel"),
        (33, 2304, False, None),
        (34, 2320, False, None),
    ],
)
def test_the_attention_of_many_rows_reads_long_caches(rows, capacity, invariant, kernel, tmp_path):
    """A cache that the kernel does not read is written and read apart."""
    keys, parts = array(rows, KV_HEADS, capacity, DIM), array(2, rows, 6 * KV_HEADS * DIM, dtype=jnp.float32)
    with targets.compile_for((9, 0)), recorded_calls() as calls:
        run = functools.partial(attended, scale=0.1, batch_invariant=invariant)
        jax.eval_shape(run, parts, keys, keys, array(rows, dtype=jnp.int32))
    assert dispatch.record["attended"][0] == ("triton" if kernel else "apart")
    if kernel:
        [call] = calls
        assert call[0].__name__ == kernel and compile_call(call, (9, 0), tmp_path).spilled_bytes == 0


def test_the_attention_of_many_rows_without_gluon_is_that_of_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxtune.pallas.decode.few_rows.attended_gluon", None)
    monkeypatch.delattr(importlib.import_module("jaxtune.pallas.decode.few_rows"), "attended_gluon", raising=False)
    keys, parts = array(64, KV_HEADS, 768, DIM), array(2, 64, 6 * KV_HEADS * DIM, dtype=jnp.float32)
    with targets.compile_for((9, 0)), recorded_calls() as calls:
        run = functools.partial(attended, scale=0.1, batch_invariant=False)
        jax.eval_shape(run, parts, keys, keys, array(64, dtype=jnp.int32))
    assert [kernel.__name__ for kernel, *_ in calls] == ["attended_kernel"]


@pytest.mark.parametrize(("dim", "group", "invariant"), [(64, 8, True), (128, 4, True), (128, 4, False)])
def test_the_attention_reads_keys_before_its_own_parts(dim, group, invariant, tmp_path):
    """The only number that is read before the first keys is the row's position."""
    parts = array(2, 64, (group + 2) * KV_HEADS * dim, dtype=jnp.float32)
    keys, positions = array(64, KV_HEADS, 768, dim), array(64, dtype=jnp.int32)
    with targets.compile_for((9, 0)), recorded_calls() as calls:
        run = functools.partial(attended, scale=0.1, batch_invariant=invariant, implementation="triton")
        jax.eval_shape(run, parts, keys, keys, positions)
    [call] = calls
    ptx = compile_call(call, (9, 0), tmp_path).ptx
    assert ptx.split("cp.async", maxsplit=1)[0].count("ld.global") == 1


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("vocab", [128_256, 262_144])
@pytest.mark.parametrize("masks", [True, False])
def test_choosing_a_token_fits(capability, vocab, masks, tmp_path):
    numbers = (array(64, dtype=jnp.float32),) * 3
    numbers += (array(64, vocab // 32, dtype=jnp.uint32),) * masks
    with targets.compile_for(capability), recorded_calls() as calls:
        run = functools.partial(chosen_token, implementation="triton")
        jax.eval_shape(lambda logits, *given: run(logits, vocab, *given), array(64, vocab, dtype=jnp.float32), *numbers)
    assert [kernel.__name__ for kernel, *_ in calls] == ["chunk_kernel", "token_kernel"]
    for call in calls:
        assert compile_call(call, capability, tmp_path).spilled_bytes == 0
