"""Kernels and programs with sums in one order, compiled for an H200."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import one_order
from jaxtune.pallas.attention import attention_forward, packed_layout
from jaxtune.pallas.decode.attention import chunk_attention, decode_attention
from jaxtune.pallas.gated import activated
from jaxtune.pallas.normed_heads import normed, rotated
from tests.gpu.aot.target import H200
from tests.gpu.aot.test_sampling import lowered
from tests.gpu.aot.triton_compiler import compile_call, recorded_calls

KINDS = {
    "products": lambda rows: (
        lambda x, w, u, b: one_order.adapted(x, w, (u, b)),
        [(rows, 4096), (4096, 4096), (rows, 16), (4096, 16)],
    ),
    "wide products": lambda rows: (
        lambda x, w, u, b: one_order.adapted(x, w, (u, b)),
        [(rows, 4096), (14336, 4096), (rows, 100), (14336, 100)],
    ),
    "low-rank inputs": lambda rows: (one_order.adapted, [(rows, 4096), (48, 4096)]),
    "odd columns": lambda rows: (one_order.adapted, [(rows, 200), (40, 200)]),
    "logits": lambda rows: (one_order.product, [(rows, 4096), (128256, 4096)]),
    "activations": lambda rows: (lambda x, y: activated(x, y, "silu"), [(rows, 14336)] * 2),
    "norms": lambda rows: (lambda x, w: normed(x, w, 1e-5, 0.0, False), [(rows, 4096), (4096,)]),
    "rotations": lambda rows: (
        lambda x, a: rotated(False, x, *[a.astype(jnp.float32)] * 2),
        [(1, rows, 32, 128), (1, rows, 64)],
    ),
    "log-probabilities": lambda rows: (
        lambda x: one_order.log_probabilities(
            x.astype(jnp.float32), jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows), 128256
        ),
        [(rows, 128256)],
    ),
    "attention of documents": lambda rows: (
        lambda q, k, s: attention_forward(
            q, k, k, packed_layout((1, 128 * rows), s[None].astype(jnp.int32), max_documents=9), scale=0.1
        ),
        [(1, 128 * rows, 32, 128), (1, 128 * rows, 8, 128), (128 * rows,)],
    ),
    "attention of steps": lambda rows: (
        lambda q, k, n: decode_attention(q, k, k, n.astype(jnp.int32), scale=0.1),
        [(rows, 32, 128), (rows, 8, 512, 128), (rows,)],
    ),
    "attention of chunks": lambda rows: (
        lambda q, k, c, n: chunk_attention(q, k, k, c, c, n.astype(jnp.int32), scale=0.1),
        [(2, rows, 32, 128), (2, rows, 8, 128), (2, 8, 4096, 128), (2,)],
    ),
}


@pytest.mark.parametrize("rows", [1, 64, 2048])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compile_without_spills(kind, rows, tmp_path):
    function, shapes = KINDS[kind](rows)
    with H200.lowering(), one_order.exact(), recorded_calls() as calls:
        jax.eval_shape(function, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    assert calls
    for call in calls:
        built = compile_call(call, (9, 0), tmp_path)
        assert built.shared_bytes <= 227 * 1024
        assert not built.spilled_bytes, built.name


@pytest.mark.full
@pytest.mark.parametrize("load_in", [None, "nf4"])
def test_no_program_has_products_of_another_order(load_in):
    """Neither the vendor's nor XLA's own."""
    _, programs = lowered("llama-3.1-8b", 2, True, load_in, exact=True)
    assert {*programs} == {"decode", "insert", "extend", "prefill", "pack"}
    for name, program in programs.items():
        text = program.compile().as_text()
        called = {*re.findall(r'custom_call_target="([^"]+)"', text)}
        assert called <= {"__gpu$xla.gpu.ptx", "triton_kernel_call", *(["mosaic_gpu_v2"] if load_in else [])}, name
        assert not re.search(r" dot\(|__triton_gemm", text), name
        if name == "decode":
            assert text.count('name = "as_trained_kernel"') == 2
