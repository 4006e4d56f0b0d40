"""The Triton kernels of `normed_heads` lower, pass the compiler and the assembler on every GPU, and leave XLA nothing
of the norm and the rotation."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh

from jaxtune.pallas import dispatch, targets
from jaxtune.pallas.normed_heads import normed_heads
from tests.gpu.aot.triton_compiler import GPUS, compile_call, recorded_calls, target

ROWS, LENGTH = 2, 512


def gradients(x, weight, cos, sin, dout):
    def run(x, weight):
        return normed_heads(x, weight, (cos, sin), implementation="triton")

    out, pull = jax.vjp(run, x, weight)
    return out, pull(dout)


def arguments(heads: int, dim: int, where=None):
    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    x = array(ROWS, LENGTH, heads, dim)
    table = [array(ROWS, LENGTH, dim // 2, dtype=jnp.float32)] * 2
    return x, array(dim), *table, x


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(("heads", "dim"), [(16, 128), (4, 128), (8, 256), (8, 64)])
def test_numbers_stay_in_registers(capability, heads, dim, tmp_path):
    """Nothing spills on Hopper, and a thread reads and writes 16 bytes at once where halves are long enough."""
    jax.clear_caches()
    with targets.compile_for(capability), recorded_calls() as calls:
        jax.eval_shape(gradients, *arguments(heads, dim))
    assert [kernel.__name__ for kernel, *_ in calls] == ["normed_heads_kernel", "normed_heads_gradient_kernel"]
    for call, arrays in zip(calls, (1, 2), strict=True):
        compiled = compile_call(call, capability, tmp_path)
        assert compiled.spilled_bytes == 0 or capability != (9, 0)
        vector = re.findall(r"(ld|st)\.global(?:\.[\w:]+)*\.v4\.b32", compiled.ptx)
        assert vector.count("ld") >= 2 * arrays and vector.count("st") >= 2


def test_the_norm_the_rotation_and_their_gradients_are_a_kernel_each():
    gpu = target((9, 0))
    given = arguments(16, 128, where=gpu.sharding())
    with gpu.lowering():
        text = jax.jit(gradients).lower(*given).compile().as_text()
    assert text is not None
    assert dispatch.record["normed_heads"] == ("triton", {})
    assert text.count('custom_call_target="triton_kernel_call"') == 2
    assert not re.search(rf"= \(?(bf16|f32)\[{ROWS},{LENGTH},16,\d+\]\S* fusion", text)


def test_every_array_is_divided_between_devices():
    """A kernel counts heads from the first that its device has; the weight's gradient is added up over devices."""
    jax.clear_caches()
    with targets.compile_for((9, 0)), recorded_calls() as calls, use_abstract_mesh(AbstractMesh((ROWS,), ("data",))):
        jax.eval_shape(gradients, *arguments(16, 128))
    for _, types, _ in calls:
        assert {array.shape[0] for array in types if len(array.shape) > 2} == {1}
