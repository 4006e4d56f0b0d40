"""Kernels and programs with sums in one order, compiled for an H200."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import one_order
from jaxtune.pallas.attention import attention_forward, packed_layout
from jaxtune.pallas.decode.attention import chunk_attention, decode_attention
from jaxtune.pallas.decode.few_rows import experts_down, experts_gated
from jaxtune.pallas.gated import RowGate, activated, gated_rows
from jaxtune.pallas.grouped_matmul import GroupedLora
from jaxtune.pallas.normed_heads import normed, normed_heads, rotated
from tests.gpu.aot.target import H200
from tests.gpu.aot.test_sampling import lowered
from tests.gpu.aot.triton_compiler import compile_call, recorded_calls


def _of_experts(x, gate_up, down, *rest):
    """A decoding step's experts."""
    *sides, weights = rest
    loras = [GroupedLora(*pair, 1.5) for pair in itertools.batched(sides, 2)]
    choice = jnp.zeros(weights.shape, jnp.int32)
    gated = experts_gated(x, gate_up, choice, weights.astype(jnp.float32), "silu", loras[0], implementation="triton")
    return experts_down(gated, down, choice, loras[1], implementation="triton")


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
    "norms of heads": lambda rows: (
        lambda x, a, w: normed_heads(x, w, tuple([a.astype(jnp.float32)] * 2)),
        [(1, rows, 32, 128), (1, rows, 64), (128,)],
    ),
    "inner rows of experts": lambda rows: (
        lambda x, w: gated_rows(x, w.astype(jnp.float32), RowGate("silu")),
        [(8 * rows, 1536), (8 * rows,)],
    ),
    "experts": lambda rows: (
        _of_experts,
        [(min(rows, 128), 2048), (128, 1536, 2048), (128, 2048, 768), (128, 16, 2048), (128, 1536, 16)]
        + [(128, 16, 768), (128, 2048, 16), (min(rows, 128), 8)],
    ),
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
    "attention of documents, heads of 64": lambda rows: (
        lambda q, k, s: attention_forward(
            q, k, k, packed_layout((1, 128 * rows), s[None].astype(jnp.int32), max_documents=9), scale=0.1
        ),
        [(1, 128 * rows, 15, 64), (1, 128 * rows, 5, 64), (128 * rows,)],
    ),
    "attention of steps, heads of 64": lambda rows: (
        lambda q, k, n: decode_attention(q, k, k, n.astype(jnp.int32), scale=0.1),
        [(rows, 15, 64), (rows, 5, 512, 64), (rows,)],
    ),
    "attention of chunks, heads of 64": lambda rows: (
        lambda q, k, c, n: chunk_attention(q, k, k, c, c, n.astype(jnp.int32), scale=0.1),
        [(2, rows, 15, 64), (2, rows, 5, 64), (2, 5, 4096, 64), (2,)],
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
    if kind == "experts" and rows == 1:
        pytest.skip("a row alone is multiplied as many are")
    with H200.lowering(), one_order.exact(), recorded_calls() as calls:
        jax.eval_shape(function, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    assert calls
    for call in calls:
        built = compile_call(call, (9, 0), tmp_path)
        assert built.shared_bytes <= 227 * 1024
        assert not built.spilled_bytes, built.name


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(72, 24, 64), (32, 8, 128)])
def test_a_warp_has_whole_rows_of_scores_in_training_as_in_decoding(heads, kv_heads, dim, tmp_path):
    """Of a row that several warps share, a thread of one has fewer numbers, and they are added in another order."""
    kinds = {
        "training": (
            lambda q, k, s: attention_forward(
                q, k, k, packed_layout((1, 1024), s[None].astype(jnp.int32), max_documents=9), scale=dim**-0.5
            )[0],
            [(1, 1024, heads, dim), (1, 1024, kv_heads, dim), (1024,)],
        ),
        "decoding": (
            lambda q, k, n: decode_attention(q, k, k, n.astype(jnp.int32), scale=dim**-0.5),
            [(64, heads, dim), (64, kv_heads, 512, dim), (64,)],
        ),
    }
    counts = {}
    for name, (function, shapes) in kinds.items():
        with H200.lowering(), one_order.exact(), recorded_calls() as calls:
            jax.eval_shape(function, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
        [call] = calls
        ptx = compile_call(call, (9, 0), tmp_path).ptx
        counts[name] = [len(re.findall(word, ptx)) for word in (r"ex2\.approx", r"fma\.rn\.f32", r"max\.f32")]
    assert counts["training"] == counts["decoding"] and counts["decoding"][0] > 64


@pytest.mark.full
@pytest.mark.parametrize(("load_in", "decodes"), [(None, 0), ("nf4", 0), ("nf4", 2)])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "smollm2-360m"])
def test_no_program_has_products_of_another_order(name, load_in, decodes):
    """Neither the vendor's nor XLA's own; over converted weights no step decodes."""
    _, programs = lowered(name, 2, True, load_in, decodes, exact=True)
    assert {*programs} == {"decode", "insert", "extend", "prefill", "pack"}
    experts = name.startswith("qwen3")
    for program_name, program in programs.items():
        text = program.compile().as_text()
        called = {*re.findall(r'custom_call_target="([^"]+)"', text)}
        is_step, codes = program_name == "decode", load_in and not decodes
        # Mosaic's kernels decode weights, and multiply many rows by experts in the order of few_rows' kernel.
        by_mosaic = codes or (experts and not is_step)
        top_k = called & {"__gpu$TopK"} if experts else ()
        assert called <= {"__gpu$xla.gpu.ptx", "triton_kernel_call", *top_k, *(["mosaic_gpu_v2"] if by_mosaic else [])}
        assert not re.search(r" dot\(|__triton_gemm", text), program_name
        if is_step:
            assert text.count('name = "as_trained_kernel"') == 2
            assert text.count('name = "expert_kernel"') == (4 if experts and not codes else 0)
