"""Which kernels run which calls on which GPUs: by their own refusals, nothing compiled."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import compat, targets
from jaxtune.pallas.adam8 import api as adam8
from jaxtune.pallas.attention import api as attention
from jaxtune.pallas.attention.layout import packed_layout
from jaxtune.pallas.decode.attention import api as decode_attention
from jaxtune.pallas.decode.few_rows import experts_triton
from jaxtune.pallas.decode.few_rows import triton as few_rows
from jaxtune.pallas.delta_rule import api as delta_rule
from jaxtune.pallas.formats import FP8, MXFP4, NF4
from jaxtune.pallas.formats.fp8 import MATRIX, ROW, TILE
from jaxtune.pallas.gated import api as gated
from jaxtune.pallas.gated import thin
from jaxtune.pallas.grouped_matmul import api as grouped_matmul
from jaxtune.pallas.grouped_matmul import gated_thin
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.linear_cross_entropy import api as linear_cross_entropy
from jaxtune.pallas.normed_heads import api as normed_heads
from jaxtune.pallas.normed_stream import api as normed_stream
from jaxtune.pallas.one_order import triton as one_order
from jaxtune.pallas.quant_matmul import api as quant_matmul
from jaxtune.pallas.quant_matmul import (
    coded,
    fp8_few,
    fp8_gradients,
    fp8_mosaic,
    fp8_normed,
    fp8_rounding,
    fp8_triton,
    mosaic,
    triton,
)
from jaxtune.pallas.routing import api as routing
from jaxtune.pallas.thin_pair import api as thin_pair

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
type Refusals = Mapping[str, Callable[[], str | None]]

_BF16, _F16, _F32 = jnp.bfloat16, jnp.float16, jnp.float32


def _of(*shape: int, dtype: Any = _BF16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _stored(kind: Any, *shape: int, block: Any = None) -> Any:
    encode = kind.encode if block is None else functools.partial(kind.encode, block=block)
    return jax.eval_shape(encode, _of(*shape))


def _layout(rows: int, length: int, documents: int = 1) -> Any:
    if documents == 1:
        return jax.eval_shape(lambda: packed_layout((rows, length)))
    return jax.eval_shape(lambda ids: packed_layout((rows, length), ids, documents), _of(rows, length, dtype=jnp.int32))


def _attention(dim: int, dtype: Any = _BF16, documents: int = 1, length: int = 2048, **options: Any) -> Refusals:
    query = _of(2, length, 8, dim, dtype=dtype)
    return attention.implementations(query, _layout(2, length, documents), kv_heads=2, **options)


def _decoding(dim: int, capacity: int, dtype: Any = _BF16) -> Refusals:
    return decode_attention.implementations(_of(4, 8, dim), _of(4, 2, capacity, dim, dtype=dtype))


def _experts(rows: int, weight: Any = None, dtype: Any = _BF16) -> Refusals:
    groups = jax.eval_shape(lambda sizes: groups_of(sizes, rows), _of(32, dtype=jnp.int32))
    return grouped_matmul.implementations(dtype, 2880, 5760, groups, weight)


def _few(tokens: int, weight: Any, dtype: Any = _BF16) -> Refusals:
    kernels = {
        "mosaic few": lambda: mosaic.few_refusal(weight, dtype, tokens),
        "triton few": lambda: triton.few_refusal(weight, dtype, tokens),
        "mosaic small": lambda: mosaic.small_refusal(weight, dtype, tokens),
        "triton small": lambda: triton.small_refusal(weight, dtype, tokens),
        "coded": lambda: coded.refusal([weight], dtype, tokens),
        "fp8_few": lambda: fp8_few.refusal([weight], dtype, tokens),
    }
    return kernels


def _one(name: str, refusal: Callable, *arguments: Any) -> Refusals:
    return {name: functools.partial(refusal, *arguments)}


def _cases() -> dict[str, Callable[[], Refusals]]:
    cases: dict[str, Callable[[], Refusals]] = {}

    def add(name: str, made: Callable[..., Refusals], *arguments: Any, **options: Any) -> None:
        cases[name] = functools.partial(made, *arguments, **options)

    for dim in (64, 80, 96, 128, 192, 256, 512):
        add(f"attention, head dim {dim}", _attention, dim)
        add(f"attention, head dim {dim}, packed", _attention, dim, documents=8)
    for name, options in {
        "float16": dict(dtype=_F16),
        "float32": dict(dtype=_F32),
        "window": dict(window=512, documents=8),
        "soft cap": dict(soft_cap=50.0, documents=8),
        "sinks": dict(sinks=True, documents=8),
        "16,384 tokens": dict(length=16384),
        "many documents": dict(documents=300),
    }.items():
        add(f"attention, head dim 128, {name}", _attention, 128, **options)
    for dim in (64, 128, 256, 512):
        for capacity in (256, 4096):
            add(f"decode attention, head dim {dim}, {capacity} keys", _decoding, dim, capacity)
    add("decode attention, e4m3", _decoding, 128, 1024, jnp.float8_e4m3fn)
    matrices = {
        "bfloat16": _of(4096, 4096),
        "NF4": _stored(NF4, 4096, 4096),
        "NF4, 14336 x 4096": _stored(NF4, 14336, 4096),
        "MXFP4": _stored(MXFP4, 4096, 4096),
        "FP8 of rows": _stored(FP8, 4096, 4096, block=ROW),
        "FP8 of tiles": _stored(FP8, 4096, 4096, block=TILE),
        "FP8 of matrices": _stored(FP8, 4096, 4096, block=MATRIX),
    }
    for name, weight in matrices.items():
        for dtype in (_BF16, _F16, _F32):
            add(f"product, {name}, {jnp.dtype(dtype)}", quant_matmul.implementations, [weight], dtype)
        if name != "bfloat16":
            for tokens in (1, 8, 16, 64, 256):
                add(f"product of {tokens}, {name}", _few, tokens, weight)
    add(
        "product of 64, bfloat16",
        _one,
        "triton",
        few_rows.products_refusal,
        _of(64, 4096),
        [matrices["bfloat16"]],
        [None],
    )
    add("added norm of few rows", _one, "triton", few_rows.added_norm_refusal, _of(1, 8, 4096))
    for dtype in (_BF16, jnp.float8_e4m3fn):
        add(
            f"placed keys, {jnp.dtype(dtype)}",
            _one,
            "triton",
            few_rows.placed_refusal,
            _of(8, 2, 512, 128, dtype=dtype),
        )
    add(
        "gated experts of few rows",
        _one,
        "triton",
        experts_triton.gated_refusal,
        _of(8, 2048),
        _of(32, 1536, 2048),
        8,
        "silu",
        None,
    )
    for blocks in (False, True):
        name = "tiles" if blocks else "rows"
        add(f"FP8 product, {name}, mosaic", _one, "mosaic", fp8_mosaic.refusal, 16384, 4096, 4096, 16, _BF16, blocks)
        add(f"FP8 product, {name}, triton", _one, "triton", fp8_triton.refusal, 4096, 4096, 16, _BF16, blocks)
        add(f"FP8 rounding, {name}", _one, "triton", fp8_rounding.refusal, [4096], _BF16, blocks)
        add(f"FP8 normed, {name}", _one, "triton", fp8_normed.refusal, _of(16384, 4096), 16, blocks)
    add("FP8 gradients", _one, "triton", fp8_gradients.refusal, [4096], [16], _BF16)
    experts = _stored(NF4, 32, 5760, 2880)
    for rows in (512, 16384):
        add(f"experts, {rows} rows", _experts, rows)
        add(f"experts, {rows} rows, NF4", _experts, rows, experts)
    add("experts, float32", _experts, 16384, None, _F32)
    gate = gated.RowGate("silu")
    add("experts' gated thin", _one, "triton", gated_thin.refusal, _of(16384, 1536), 16, gate)
    add("routing sort", routing.sort_implementations, 32)
    add("routing spread", routing.implementations, _BF16, 2880, 4)
    add("gated", gated.implementations, _BF16, 16384 * 14336, "silu")
    add("gated rows", gated.row_implementations, _of(16384, 1536), gate)
    add("gated thin", thin.implementations, _of(16384, 14336), 16, "silu")
    add("thin pair", thin_pair.implementations, _of(16384, 4096), _of(4096, 16, dtype=_F32))
    add("loss", linear_cross_entropy.implementations)
    tables = [_of(8, 2048, 64, dtype=_F32)] * 2
    add("normed heads", normed_heads.implementations, _of(8, 2048, 32, 128), _of(128), tables)
    add("normed stream", normed_stream.implementations, _of(16384, 4096), _of(4096))
    add("delta rule", delta_rule.implementations, _of(2, 2048, 16, 128), _of(2, 2048, 32, 128))
    add("adamw_8bit", _one, "mosaic", adam8.refusal, _of(1 << 20, dtype=_F32), _of(1 << 20, dtype=jnp.uint8))
    add("sums in one order", _one, "triton", one_order.refusal, _BF16)
    return cases


CASES = _cases()


def record(case: str) -> dict[str, str]:
    """{the implementations that do not refuse, in the order in which they are tried: capabilities}"""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for capability in CAPABILITIES:
        with pytest.MonkeyPatch.context() as patch, targets.compile_for(capability):
            patch.setattr(compat, "_has_jax_triton", lambda: True)
            runs = [name for name, refusal in CASES[case]().items() if refusal() is None]
        found[", ".join(runs) or "none"].append("{}.{}".format(*capability))
    return {runs: " ".join(capabilities) for runs, capabilities in found.items()}
