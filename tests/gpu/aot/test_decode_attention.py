"""The decode kernels lower, pass the assembler and fit: Mosaic's for an H200, Triton's on every GPU."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import dispatch, targets
from jaxtune.pallas.decode.attention import as_trained, decode_attention, inserted, written
from tests.gpu.aot.target import H200
from tests.gpu.aot.triton_compiler import GPUS, SHARED_MEMORY_KB, compile_call, recorded_calls, target

ROWS, CAPACITY, KV_HEADS = 64, 1280, 8


def arguments(dim, group, where=None, cache_dtype=jnp.bfloat16, capacity=CAPACITY):
    cache = jax.ShapeDtypeStruct((ROWS, KV_HEADS, capacity, dim), cache_dtype, sharding=where)
    query = jax.ShapeDtypeStruct((ROWS, KV_HEADS * group, dim), jnp.bfloat16, sharding=where)
    return query, cache, cache, jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=where)


@pytest.mark.parametrize(
    ("dim", "group", "features"),
    [
        (64, 8, {}),
        (96, 1, {}),
        (128, 4, {}),
        (128, 12, {"window": 100, "soft_cap": 30.0}),
        (256, 2, {"soft_cap": 30.0}),
    ],
)
def test_mosaic_kernels_compile_for_an_h200(dim, group, features, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    with H200.lowering():
        lowered = jax.jit(lambda *a: decode_attention(*a, scale=0.1, **features)).lower(
            *arguments(dim, group, H200.sharding())
        )
        assert dispatch.record["decode_attention"] == ("mosaic", {})
        text = lowered.compile().as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 2  # the splits, and the splits combined
    spilled = re.findall(r"(\d+) bytes spill stores", "".join(capfd.readouterr()))
    assert spilled == ["0", "0"]


@pytest.mark.parametrize("rows", [1, 64])
def test_a_step_copies_no_cache(rows):
    """A token is written into the donated caches where they are."""
    where = H200.sharding()

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def steps(query, keys, values, new, lengths):
        def one(_, carry):
            query, keys, values, lengths = carry
            keys, values = (written(cache, new, lengths) for cache in (keys, values))
            lengths = lengths + 1
            return decode_attention(query, keys, values, lengths, scale=0.1), keys, values, lengths

        return jax.lax.fori_loop(0, 8, one, (query, keys, values, lengths))

    cache = array(rows, KV_HEADS, CAPACITY, 128)
    with H200.lowering():
        given = array(rows, 32, 128), cache, cache, array(rows, KV_HEADS, 128), array(rows, dtype=jnp.int32)
        compiled = jax.jit(steps, donate_argnums=(1, 2)).lower(*given).compile()
    cache_bytes = rows * KV_HEADS * CAPACITY * 128 * 2
    assert compiled.memory_analysis().temp_size_in_bytes < max(cache_bytes, 8 << 20)
    assert not re.search(rf"bf16\[{rows},{KV_HEADS},{CAPACITY},128\]\S* copy\(", compiled.as_text())


@pytest.mark.parametrize(
    ("capability", "dim", "cache_dtype"),
    [
        *((capability, dim, jnp.bfloat16) for capability in SHARED_MEMORY_KB for dim in (64, 128, 256, 512)),
        ((8, 6), 96, jnp.bfloat16),
        ((8, 9), 128, jnp.float8_e4m3fn),
        ((9, 0), 128, jnp.float8_e4m3fn),
    ],
)
def test_triton_kernels_fit(capability, dim, cache_dtype, tmp_path):
    with targets.compile_for(capability), recorded_calls() as calls:
        for capacity in (CAPACITY, 768):
            jax.eval_shape(
                lambda *a: decode_attention(*a, scale=0.1, implementation="triton"),
                *arguments(dim, 4, cache_dtype=cache_dtype, capacity=capacity),
            )
    names = [kernel.__name__ for kernel, *_ in calls]
    assert names == ["decode_split_kernel", "decode_combine_kernel", "decode_whole_kernel"]
    for call in calls:
        compiled = compile_call(call, capability, tmp_path)
        assert compiled.shared_bytes <= SHARED_MEMORY_KB[capability] * 1024, compiled.name
        assert compiled.spilled_bytes == 0, compiled.name
    assert "mma" in compile_call(calls[0], capability, tmp_path).ptx


@pytest.mark.parametrize("capability", GPUS)
def test_triton_kernels_lower_through_jax_triton(capability):
    gpu = target(capability)
    with gpu.lowering():
        lowered = jax.jit(lambda *a: decode_attention(*a, scale=0.1, implementation="triton")).lower(
            *arguments(64, 4, gpu.sharding())
        )
        text = lowered.compile().as_text()
    assert text.count('custom_call_target="triton_kernel_call"') == 2


def test_rows_are_inserted_where_the_cache_is():
    where = H200.sharding()

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    with H200.lowering():
        numbers = array(16, dtype=jnp.int32)
        given = array(ROWS, KV_HEADS, CAPACITY, 128), array(16, KV_HEADS, 256, 128), numbers, numbers
        compiled = jax.jit(inserted, donate_argnums=0).lower(*given).compile()
    text = compiled.as_text()
    assert 'name = "insert_kernel"' in text and "copy(" not in text and "scatter" not in text
    assert compiled.memory_analysis().alias_size_in_bytes == ROWS * KV_HEADS * CAPACITY * 128 * 2


@pytest.mark.parametrize(("dim", "group"), [(64, 8), (96, 1), (128, 4), (256, 2)])
def test_the_kernel_in_the_order_of_training_compiles_for_an_h200(dim, group):
    where = H200.sharding()
    with H200.lowering():
        run = jax.jit(lambda query, *others: as_trained.attended(query[:, None], *others, scale=0.1))
        lowered = run.lower(*arguments(dim, group, where))
        assert lowered.compile().as_text().count("__gpu$xla.gpu.ptx") == 1
