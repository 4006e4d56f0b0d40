"""The Mosaic kernels for weights in four bits: their bodies run by Pallas' GPU interpreter, and who calls them when.

Table look-ups and warp-level products (lanes.py) are written out there; everything else is the code that a GPU runs.
"""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import dispatch, gpu_kernel, lanes, targets, tuning
from jaxtune.pallas.formats import FP4, FP8, MXFP4, NF4
from jaxtune.pallas.formats.int8 import Int8
from jaxtune.pallas.formats.mxfp4 import TABLE
from jaxtune.pallas.formats.nvfp4 import NVFP4
from jaxtune.pallas.quant_matmul import LoraWeights, api, line_matmul, mosaic, quant_matmul, row_matmul
from jaxtune.pallas.quant_matmul.shapes import WEIGHTS


def normal(seed, *shape, dtype=jnp.float32):
    """Drawn by numpy: JAX would compile a program for each shape."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype))


def packed(rows, columns, double_quant=True, seed=0):
    array = normal(seed, rows, columns) * np.geomspace(1e-3, 10, rows, dtype=np.float32)[:, None]
    return NF4.encode(array.astype(jnp.bfloat16), double_quant)


def as_fp4(weight):
    return FP4(
        weight.codes, weight.absmax, weight.nested_absmax, weight.nested_map, weight.offset, weight.shape, "bfloat16"
    )


def distance(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize(
    ("shape", "double_quant", "dtype"),
    [
        ((16, 64), True, jnp.bfloat16),  # one line
        ((80, 1024), True, jnp.bfloat16),  # programs of eight lines over several nested blocks
        ((12, 512), False, jnp.float16),  # of two, absmax as they are
    ],
)
@pytest.mark.gpu
def test_dequantising_is_decoding(shape, double_quant, dtype):
    weight = packed(*shape, double_quant)
    for each in (weight, as_fp4(weight)):
        with gpu_kernel.interpreted():
            got = mosaic.dequantize(each, dtype)
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(each.decode(dtype)))


@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(16, 64), (80, 1024), (12, 512)])
@pytest.mark.gpu
def test_dequantising_nvfp4_is_decoding(shape, dtype, divides):
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    scales = draw.integers(0, 127, (*shape[:-1], shape[-1] // 16), np.uint8).view(jnp.float8_e4m3fn)
    whole = np.full((1, 1), 1537.0 if divides else 1 / 1537.0, np.float32)
    weight = NVFP4(jnp.asarray(codes), jnp.asarray(scales), jnp.asarray(whole), divides=divides)
    assert mosaic.Chunks.decodes(weight) and mosaic.small_refusal(weight, dtype, 1) == "a weight in NVFP4"
    with gpu_kernel.interpreted():
        got = mosaic.dequantize(weight, dtype)
        array, _ = api.decoded(weight, jnp.ones(3, dtype))
    assert dispatch.record["quant_matmul"][0] == "mosaic"
    want = np.asarray(weight.decode(dtype))
    assert np.asarray(got).tobytes() == want.tobytes() == np.asarray(array).tobytes()
    each = NVFP4(weight.codes[None], weight.scales[None], jnp.ones((1, shape[0], 1)))
    assert mosaic.Chunks.decodes(each) == (shape[0] == 1)  # a scale for each row: decoded without a kernel


@pytest.mark.parametrize("shape", [(16, 64), (3, 80, 1024), (12, 512)])
@pytest.mark.gpu
def test_dequantising_mxfp4_is_decoding(shape):
    draw = np.random.default_rng(0)
    smallest = 2 if jax.default_backend() == "gpu" else 1  # XLA's decoding makes 0 there of what is below 2^-126
    codes, scales = (
        draw.integers(0, 256, (*shape[:-1], shape[-1] // 2)),
        draw.integers(smallest, 255, (*shape[:-1], shape[-1] // 32)),
    )
    weight = MXFP4(jnp.asarray(codes, jnp.uint8), jnp.asarray(scales, jnp.uint8))
    with gpu_kernel.interpreted():
        got = mosaic.dequantize(weight, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(weight.decode(jnp.bfloat16), np.float32))
    assert np.isfinite(np.asarray(got, np.float32)).mean() > 0.99
    with gpu_kernel.interpreted():  # chosen where it can serve
        array, _ = api.decoded(weight, jnp.ones(3, jnp.bfloat16))
        assert dispatch.record["quant_matmul"][0] == "mosaic" and array.dtype == jnp.bfloat16
        array, _ = api.decoded(weight, jnp.ones(3, jnp.float32))
    refused = dispatch.record["quant_matmul"]
    assert refused[0] == "reference" and refused[1]["mosaic"] == "dtype float32" and array.dtype == jnp.float32


@pytest.mark.parametrize(
    ("rows", "columns", "tokens", "double_quant"),
    [
        (48, 2048, 2, True),  # whole lines; several tiles a program
        (16, 1536, 1, True),  # one token, but no whole slices for row_matmul
        (16, 3072, 4, False),  # the warpgroups share the columns unevenly
        (48, 1536, 3, True),  # half lines: an odd number of chunks
        (16, 1024, 7, True),
        (32, 1024, 16, False),
    ],
)
@pytest.mark.gpu
def test_small_product(rows, columns, tokens, double_quant, monkeypatch):
    plan = mosaic._plan
    monkeypatch.setattr(mosaic, "_plan", lambda *shape: dataclasses.replace(plan(*shape), programs=2))
    weight = packed(rows, columns, double_quant)
    x = normal(101, tokens, columns, dtype=jnp.bfloat16)
    want = np.asarray(x, np.float64) @ np.asarray(weight.decode(jnp.float32), np.float64).T
    with gpu_kernel.interpreted():
        got = mosaic.small_matmul(x, weight)
    assert got.shape == (tokens, rows) and got.dtype == jnp.bfloat16
    assert distance(got, want) <= 2 * distance(x @ weight.decode(jnp.bfloat16).T, want)


def test_kernels_are_traced_alike_under_jax_enable_x64(monkeypatch):
    weight, x = packed(16, 1024, True), normal(101, 7, 1024, dtype=jnp.bfloat16)

    def traced(wide):
        monkeypatch.setattr(gpu_kernel, "_traced_once", {})
        with targets.compile_for((9, 0)), jax.enable_x64(wide):
            return str(jax.make_jaxpr(lambda x, weight: mosaic.small_matmul(x, weight))(x, weight))

    assert "f32" in traced(wide=True) and traced(wide=True) == traced(wide=False)


@pytest.mark.full
@pytest.mark.parametrize(
    ("rows", "columns", "double_quant", "dtype"),
    [
        (96, 1024, True, jnp.bfloat16),  # a slice a row, 16 pairs a chunk
        (80, 2048, False, jnp.float16),
        (50, 3072, True, jnp.bfloat16),  # a pair a chunk; slices that do not fill a warpgroup
        (16, 14_336, True, jnp.bfloat16),
    ],
)
@pytest.mark.parametrize("programs", [2, 132])
@pytest.mark.gpu
def test_product_of_one_token_by_rows(rows, columns, double_quant, dtype, programs, monkeypatch):
    monkeypatch.setattr(row_matmul, "PROGRAMS", programs)
    weight = packed(rows, columns, double_quant)
    x = normal(101, 1, columns, dtype=dtype)
    with gpu_kernel.interpreted():
        for each in (weight, as_fp4(weight)):
            assert mosaic.row_refusal(each, dtype) is None
            want = np.asarray(x, np.float64) @ np.asarray(each.decode(jnp.float32), np.float64).T
            got = mosaic.small_matmul(x, each)
            assert got.shape == (1, rows) and got.dtype == dtype
            assert distance(got, want) <= 2 * distance(x @ each.decode(dtype).T, want)


def test_rows_are_cut_into_whole_chunks():
    for rows, columns in WEIGHTS:
        plan = row_matmul.plan(rows, columns)
        assert plan is not None and rows % (2 * plan.pairs) == 0 and 2 <= plan.stages <= 4
        assert plan.chunks_per_program * row_matmul.PROGRAMS * 2 * plan.pairs >= rows
    assert row_matmul.plan(4096, 4096) == row_matmul.Plan(slices=4, pairs=4, stages=2, chunks_per_program=4)
    assert row_matmul.plan(4096, 1536) is row_matmul.plan(4095, 1024) is row_matmul.plan(4096, 29 * 1024) is None
    weight = jax.eval_shape(NF4.encode, jax.ShapeDtypeStruct((4096, 1536), jnp.bfloat16))
    with targets.compile_for((9, 0)):
        assert "columns in multiples of 1,024" in (mosaic.row_refusal(weight, jnp.bfloat16) or "")


@pytest.mark.parametrize(
    ("rows", "columns", "tokens", "double_quant", "tile"),
    [
        (48, 2048, 1, True, line_matmul.Tile(2, 2, 2)),  # the last tile overlaps the one before
        (32, 3072, 12, False, line_matmul.Tile(1, 2, 3, 2)),  # parts of the columns, two widths of tokens
        (48, 5120, 9, True, line_matmul.Tile(1, 2, 2, 2, 2)),  # two lines a copy
        (32, 5120, 4, True, line_matmul.Tile(2, 3, 1)),  # more than a span a warpgroup, lines shared out unevenly
    ],
)
@pytest.mark.gpu
def test_small_product_by_lines(rows, columns, tokens, double_quant, tile):
    weight = packed(rows, columns, double_quant)
    x = normal(101, tokens, columns, dtype=jnp.bfloat16)
    want = np.asarray(x, np.float64) @ np.asarray(weight.decode(jnp.float32), np.float64).T
    with gpu_kernel.interpreted():
        got = mosaic.small_matmul(x, weight, tile)
    assert got.shape == (tokens, rows) and got.dtype == jnp.bfloat16
    assert distance(got, want) <= 2 * distance(x @ weight.decode(jnp.bfloat16).T, want)


def test_what_was_measured_decides(monkeypatch):
    """A tile in the tuner's table is taken, for its shape and tokens; without one everything stays as it was."""
    weight, dtype = packed(256, 1024), jnp.dtype(jnp.bfloat16)
    line = line_matmul.Tile(1, 2, 2)
    with gpu_kernel.interpreted():
        assert mosaic.line_tile(weight, dtype, 2) is None
        with tuning.forced("small_matmul", dataclasses.asdict(line)):
            assert mosaic.line_tile(weight, dtype, 2) == line
            assert mosaic.line_tile(packed(16, 1536), dtype, 2) is None  # refused: columns
        with tuning.forced("small_matmul", {}):  # measured, and slower than what is chosen without a table
            assert mosaic.line_tile(weight, dtype, 2) is None
    assert mosaic.small_bucket(weight, 3) == "256 x 1024, tokens=4"


@pytest.mark.parametrize("shape", WEIGHTS)
def test_every_shape_has_candidates_that_fit(shape):
    weight = jax.eval_shape(NF4.encode, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    with targets.compile_for((9, 0)):
        for tokens in (1, 4, 8, 16):
            found = line_matmul.tiles(*shape, tokens)
            assert 2 <= len(found) <= 9 and len(set(found)) == len(found)
            assert any(tile.splits == 1 for tile in found)
            assert all(mosaic.line_refusal(tile, weight, jnp.bfloat16, tokens) is None for tile in found)


def group(columns=1024):
    """Two weights in four bits and one array over one x, with adapters."""
    weights = [packed(32, columns), packed(16, columns, seed=1), normal(101, 8, columns, dtype=jnp.bfloat16)]
    loras = [
        LoraWeights(normal(102 + i, 4, columns), normal(104 + i, w.shape[0], 4), None, 0.5)
        for i, w in enumerate(weights[:2])
    ]
    return weights, [*loras, None]


@pytest.mark.parametrize("tokens", [3, 24])
@pytest.mark.gpu
def test_the_whole_op_over_the_kernels(tokens):
    """Forward and gradients of a group: few tokens through the small product, more through the decoded weight."""
    weights, loras = group()
    x = normal(109, tokens, 1024, dtype=jnp.bfloat16)

    def run(implementation):
        def outputs(x, loras):
            return quant_matmul(x, weights, loras, implementation=implementation)

        found, pullback = jax.vjp(outputs, x, loras)
        return found, pullback(tuple(jnp.cos(jnp.arange(y.size).reshape(y.shape)).astype(y.dtype) for y in found))

    with gpu_kernel.interpreted():
        got, got_gradients = run("mosaic")
    assert dispatch.record["quant_matmul"] == ("mosaic", {})
    want, want_gradients = run("reference")
    for one, other in zip(got, want, strict=True):
        if tokens == 24:
            np.testing.assert_array_equal(one, other)
        assert distance(one, np.asarray(other, np.float64)) < 4e-3
    for one, other in zip(jax.tree.leaves(got_gradients), jax.tree.leaves(want_gradients), strict=True):
        np.testing.assert_array_equal(one, other)


def test_who_serves_which_call(monkeypatch):
    """Where Triton is not there."""
    monkeypatch.setattr("jaxtune.pallas.compat._has_jax_triton", lambda: False)

    def chosen(dtype, weight, capability=(9, 0), **options):
        x = jnp.zeros((64, weight.shape[1]), dtype)
        with targets.compile_for(capability):
            jax.eval_shape(lambda x: quant_matmul(x, [weight], **options), x)
        return dispatch.record["quant_matmul"]

    weight = packed(32, 64)
    assert chosen(jnp.bfloat16, weight) == ("mosaic", {})
    assert chosen(jnp.bfloat16, jnp.zeros((32, 64))) == ("reference", {})
    for options, reason in (
        ((jnp.bfloat16, weight, (8, 0)), "Hopper"),
        ((jnp.float32, weight), "dtype float32"),
        ((jnp.bfloat16, packed(3, 65)), "195 elements, no multiple of 1024"),
    ):
        name, refused = chosen(*options)
        assert name == "reference" and reason in refused["mosaic"]
        with pytest.raises(ValueError, match=reason):
            chosen(*options, implementation="mosaic")
    with pytest.raises(ValueError, match="no quantised weight"):
        chosen(jnp.bfloat16, jnp.zeros((32, 64)), implementation="mosaic")


@pytest.mark.parametrize(
    ("shape", "tokens", "reason"),
    [
        ((32, 1024), 17, "no NVIDIA GPU|jax-triton|numbers or more"),
        ((40, 1024), 1, r"\(40, 1024\)"),
        ((32, 768), 1, r"\(32, 768\)"),
    ],
)
def test_refusals_of_the_small_product(shape, tokens, reason):
    with targets.compile_for((9, 0)), pytest.raises(AssertionError, match=reason):
        assert mosaic.small_refusal(packed(*shape), jnp.bfloat16, tokens) is None, mosaic.small_refusal(
            packed(*shape), jnp.bfloat16, tokens
        )


@pytest.mark.parametrize(
    ("formats", "name", "refused"), [((FP8, Int8), "reference", {}), ((FP8, NF4), "reference", {"mosaic", "triton"})]
)
def test_formats_without_a_kernel_are_decoded_by_xla_without_a_word(formats, name, refused, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_say_once", dispatch._say_once.__wrapped__)
    monkeypatch.setattr("jaxtune.pallas.compat._has_jax_triton", lambda: True)
    weights = [kind.encode(normal(0, 64, 64)) for kind in formats]
    with targets.compile_for((9, 0)):
        assert dispatch.choose("quant_matmul", api.implementations(weights, jnp.bfloat16), None) == name
    assert dispatch.record["quant_matmul"][1].keys() == set(refused)
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "quant_matmul runs on plain JAX"
    ] * bool(refused)


def test_modules_have_what_the_chain_calls():
    for kernels in api.IMPLEMENTATIONS.values():
        for name in ("refusal", "dequantize", "small_refusal", "small_matmul"):
            assert callable(getattr(kernels, name))


@pytest.mark.parametrize("table", [NF4.table, TABLE], ids=["nf4", "mxfp4"])
def test_byte_permutations_find_every_entry(monkeypatch, table):
    """What a lane emits, computed: the entries of a word's eight codes, from the lowest bits up, bit for bit."""

    def permute(low, high, selector):
        words = (np.asarray(word).astype(np.int64).astype(np.uint32) for word in (low, high, selector))
        low, high, selector = np.broadcast_arrays(*words)
        both = np.stack([low, high], -1).view(np.uint8)
        index = np.stack([(selector >> np.uint32(4 * byte)) & np.uint32(15) for byte in range(4)], -1)
        assert (index < 8).all(), "bit 3 of a selector would repeat a sign"
        return np.take_along_axis(both, index.astype(np.int64), -1).view(np.uint32)[..., 0]

    monkeypatch.setattr(lanes, "ir_permute", permute)
    monkeypatch.setattr(lanes, "ir_const", np.uint32)
    monkeypatch.setattr(lanes, "ir_shift_right", lambda value, amount: value >> np.uint32(amount))
    arithmetic = types.SimpleNamespace(andi=np.bitwise_and, xori=np.bitwise_xor, bitcast=lambda _, value: value)
    monkeypatch.setattr(lanes, "arith", arithmetic)
    monkeypatch.setattr(lanes, "ir", types.SimpleNamespace(F32Type=types.SimpleNamespace(get=lambda: None)))
    words = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint64).astype(np.uint32)
    for number, found in enumerate(lanes._entries(table.tobytes(), words)):
        want = table[(words >> np.uint32(4 * number)) & 15].view(np.uint32)
        np.testing.assert_array_equal(np.broadcast_to(found, words.shape), want)
