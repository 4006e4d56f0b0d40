"""The Triton kernels of the gated delta rule lower, pass the compiler and the assembler, and fit, on every GPU."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, use_abstract_mesh

from jaxtune.models.decoder import Decoder
from jaxtune.models.files.published import PUBLISHED
from jaxtune.models.registry import config_from_hf
from jaxtune.models.stack.residual_plan import RECOMPUTE, ResidualPlan
from jaxtune.pallas import dispatch, targets
from jaxtune.pallas.attention import packed_layout
from jaxtune.pallas.delta_rule import gated_delta_rule, short_convolution_parts
from jaxtune.pallas.delta_rule.triton import DIM
from tests.gpu.aot.triton_compiler import SHARED_MEMORY_KB, compile_call, recorded_calls, target

ROWS, LENGTH, KEY_HEADS, HEADS = 2, 512, 2, 4


def step(query, key, value, decay, beta, segment_ids):
    def total(*arrays):
        layout = packed_layout(segment_ids.shape, segment_ids)
        return gated_delta_rule(*arrays, layout, implementation="triton").astype(jnp.float32).sum()

    return jax.grad(total, argnums=(0, 1, 2, 3, 4))(query, key, value, decay, beta)


def arguments(where=None):
    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((ROWS, LENGTH, *shape), dtype, sharding=where)

    rates = array(HEADS, dtype=jnp.float32)
    return *(array(heads, DIM) for heads in (KEY_HEADS, KEY_HEADS, HEADS)), rates, rates, array(dtype=jnp.int32)


@pytest.mark.full
@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (8, 6)])
def test_kernels_fit(capability, tmp_path):
    jax.clear_caches()  # a trace for one GPU is no trace for another
    with targets.compile_for(capability), recorded_calls() as calls:
        jax.eval_shape(step, *arguments())
    assert [kernel.__name__ for kernel, *_ in calls] == [
        "numbers_kernel",
        "chunk_kernel",
        "forward_kernel",
        "reverse_kernel",
        "pairs_kernel",
        "dquery_kernel",
        "dkey_kernel",
        "rates_kernel",
    ]
    for call in calls:
        compiled = compile_call(call, capability, tmp_path)
        assert compiled.shared_bytes <= SHARED_MEMORY_KB[capability] * 1024, compiled.name
        products = compiled.name not in ("numbers_kernel", "rates_kernel")
        assert ("wgmma" in compiled.ptx) == (products and capability == (9, 0)), compiled.name
        if capability == (9, 0):
            assert compiled.spilled_bytes == 0, compiled.name


def convolution(x, weight, segment_ids, douts):
    def parts(x):
        layout = packed_layout(segment_ids.shape, segment_ids)
        return short_convolution_parts(x, weight, layout, (2048, 2048, 4096), implementation="triton")

    out, pull = jax.vjp(parts, x)
    return out, pull(douts)


def convolution_arguments(where=None):
    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    tokens = (ROWS, LENGTH)
    douts = tuple(array(*tokens, size) for size in (2048, 2048, 4096))
    return array(*tokens, 8192), array(8192, 4), array(*tokens, dtype=jnp.int32), douts


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (8, 6)])
def test_the_convolution_keeps_tokens_in_registers(capability, tmp_path):
    """Four channels a thread, loaded and stored at once, and nothing spills."""
    jax.clear_caches()
    with targets.compile_for(capability), recorded_calls() as calls:
        jax.eval_shape(convolution, *convolution_arguments())
    for call, least in zip(calls, (7, 11), strict=True):
        compiled = compile_call(call, capability, tmp_path)
        assert compiled.shared_bytes == 0 and compiled.spilled_bytes == 0
        vector = re.findall(r"(ld|st)\.global(?:\.[\w:]+)*\.v2\.b32", compiled.ptx)
        assert vector.count("ld") >= least and vector.count("st") >= 4, "4 channels of 16 bits are 8 bytes"


def test_the_convolution_and_its_gradient_are_a_kernel_each():
    """XLA joins no gradients and stores no sums in float32 before the gradient's."""
    gpu = target((9, 0))
    with gpu.lowering():
        text = jax.jit(convolution).lower(*convolution_arguments(where=gpu.sharding())).compile().as_text()
    assert dispatch.record["short_convolution"] == ("triton", {})
    assert text.count('custom_call_target="triton_kernel_call"') == 2
    assert not re.search(rf"= \(?(bf16|f32)\[{ROWS},{LENGTH},\d+\]\S* (fusion|concatenate)", text)


def test_every_array_is_divided_between_devices():
    """A kernel counts rows from the first that its device has."""
    jax.clear_caches()
    with targets.compile_for((9, 0)), recorded_calls() as calls, use_abstract_mesh(AbstractMesh((ROWS,), ("data",))):
        jax.eval_shape(step, *arguments())
    assert len(calls) == 8
    for kernel, types, _ in calls:
        assert {array.shape[0] for array in types} == {1}, kernel.__name__


def test_a_layer_that_is_computed_again_makes_its_chunks_once_more():
    """The derivative is taken of what is made again for the layers after it, not of a third run."""
    shape = PUBLISHED["Qwen/Qwen3.5-9B"] | {
        "num_hidden_layers": 1,
        "layer_types": ["linear_attention"],
        "hidden_size": DIM,
        "intermediate_size": DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": HEADS,
        "vocab_size": DIM,
    }
    model = nnx.eval_shape(lambda: Decoder(config_from_hf(shape), jax.random.key(0), "bfloat16"))
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)

    def total(model, tokens):
        return model.hidden_states(tokens, plan=ResidualPlan.uniform(RECOMPUTE, 1)).astype(jnp.float32).sum()

    jax.clear_caches()
    with targets.compile_for((9, 0)), recorded_calls() as calls:
        nnx.eval_shape(nnx.grad(total), model, tokens)
    assert [kernel.__name__.removesuffix("_kernel") for kernel, *_ in calls] == [
        "convolution",
        "numbers",
        "chunk",
        "forward",
        "convolution",
        "numbers",
        "chunk",
        "forward",
        "reverse",
        "pairs",
        "dquery",
        "dkey",
        "rates",
        "convolution_gradient",
    ]


@pytest.mark.full
def test_a_step_lowers_through_jax_triton_and_compiles():
    gpu = target((9, 0))
    with gpu.lowering():
        text = jax.jit(step).lower(*arguments(where=gpu.sharding())).compile().as_text()
    assert dispatch.record["gated_delta_rule"] == ("triton", {})
    assert text.count('custom_call_target="triton_kernel_call"') == 8
