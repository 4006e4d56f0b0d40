"""FP8 against its definition, number by number in numpy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxtune.pallas import dispatch, gpu_kernel
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import MATRIX, ROW, TILE
from jaxtune.pallas.grouped_matmul import fp8_experts, grouped_matmul, reference
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.quant_matmul import LoraWeights, fp8_product, quant_matmul

SHAPES = [(1, 1), (3, 130), (257, 129), (128, 256), (2, 5, 140)]


def by_definition(array: np.ndarray, block) -> tuple[np.ndarray, np.ndarray]:
    """(codes, float32 scales), block after block."""
    *lead, out, in_ = array.shape
    rows, columns = (whole if size is None else size for whole, size in zip((out, in_), block, strict=True))
    codes = np.zeros(array.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((*lead, -(-out // rows), -(-in_ // columns)), np.float32)
    for place in np.ndindex(scales.shape):
        *at, r, c = place
        part = (*at, slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns))
        largest = np.abs(array[part].astype(np.float32)).max()
        scales[place] = largest / np.float32(448) if largest else 1
        scaled = array[part].astype(np.float32) / scales[place]
        codes[part] = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales


def drawn(shape, dtype="float32", seed=0) -> np.ndarray:
    array = np.random.default_rng(seed).normal(size=shape) * 10.0 ** np.random.default_rng(1).integers(-4, 3, shape)
    array[..., 0, :] = 0  # a row of zeros
    return array.astype(jnp.dtype(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [ROW, TILE, MATRIX])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_the_definitions(shape, block, dtype):
    array = drawn(shape, dtype)
    codes, scales = by_definition(array, block)
    got = FP8.encode(array, block)
    assert got.problem() is None and got.shape == shape and got.dtype == array.dtype
    np.testing.assert_array_equal(np.asarray(got.scales), scales)
    np.testing.assert_array_equal(np.asarray(got.codes).view(np.uint8), codes.view(np.uint8))
    wide = got.decode(jnp.float32)
    expected = [codes[p].astype(np.float32) * scales[_block_of(p, shape, block)] for p in np.ndindex(*shape)]
    np.testing.assert_array_equal(np.asarray(wide).ravel(), np.array(expected, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [ROW, TILE, MATRIX])
@pytest.mark.parametrize("largest", [1e-35, 5e-36, 1e-36, 1.2e-38, 1e-39, 1e-45])
def test_rows_of_tiny_numbers_are_numbers(largest, block):
    """Their scale would be below 2^-126, which a CPU takes for zero; numbers below it are zeros on every device."""
    row = np.float32(largest) * np.array([0.3, -1.0, 0.0, 0.5], np.float32).repeat(32)
    array = np.tile(row, (3, 1))
    seen = np.where(np.abs(array) < 2.0**-126, 0, array)
    stored = FP8.encode(array, block)
    codes, scale = fp8_product.rounded(jnp.asarray(seen), block == TILE)
    for found, scales in ((stored.codes, stored.scales), (codes, scale)):
        decoded = np.float32(found).astype(np.float64) * np.float64(scales).max()
        np.testing.assert_allclose(decoded, seen, rtol=2**-4, atol=2.0**-126 * 2**-10)
        assert np.asarray(scales).min() >= 2.0**-126
    np.testing.assert_array_equal(np.signbit(np.float32(FP8.encode(np.full((1, 2), -0.0, np.float32)).codes)), True)


def _block_of(place, shape, block):
    *at, r, c = place
    rows, columns = (whole if size is None else size for whole, size in zip(shape[-2:], block, strict=True))
    return (*at, r // rows, c // columns)


def test_cut_at_its_blocks_a_part_is_what_is_stored_of_it():
    for block, axis, size in ((ROW, 0, 3), (TILE, 0, 128), (TILE, 1, 128)):
        array = drawn((256, 384))
        whole = FP8.encode(array, block)
        assert whole.block_length(axis) in (1, size)
        part = FP8.encode(np.take(array, range(size), axis), block)
        index = (slice(None),) * axis + (slice(0, size),)
        np.testing.assert_array_equal(np.asarray(whole.codes)[index], np.asarray(part.codes))
    assert (
        FP8.encode(drawn((4, 8)), ROW).block_length(1) is None
        and FP8.encode(drawn((4, 8)), MATRIX).block_length(0) is None
    )
    assert FP8.encode(drawn((2, 4, 8)), MATRIX).block_length(0) == 1


def test_parts_that_do_not_fit_are_refused():
    good = FP8.encode(drawn((4, 8)))
    for changed, words in (
        ({"codes": good.codes.astype(jnp.float32)}, "codes are float32"),
        ({"scales": good.scales[:3]}, r"scales are float32\[3, 1\]"),
        ({"block": (64, 64)}, r"blocks of \(64, 64\) asks for \(1, 1\)"),
        ({"transposed": good.codes}, r"transposed codes are float8_e4m3fn\[4, 8\]; they must be .*\[8, 4\]"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(good, **changed).decode()
    with pytest.raises(ValueError, match="block = .64, 64.: must be one of"):
        FP8.encode(drawn((4, 8)), (64, 64))
    with pytest.raises(ValueError, match="must have an element"):
        FP8.encode(np.zeros((0, 4), np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [ROW, TILE])
def test_products_and_gradients_equal_those_over_decoded_weights(block):
    draw = np.random.default_rng(0)
    weight = FP8.encode(draw.normal(size=(130, 150)).astype(np.float32), block)
    x = jnp.asarray(draw.normal(size=(5, 150)), jnp.float32)
    a, b = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((4, 150), (130, 4)))

    def loss(x, a, b, weight):
        return (quant_matmul(x, [weight], [LoraWeights(a, b, None, 0.5)])[0] ** 2).sum()

    packed = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, a, b, weight)
    plain = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, a, b, weight.decode(jnp.float32))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-3), packed, plain)


@pytest.mark.gpu
def test_experts_in_fp8_multiply_as_their_decoded_weights():
    draw = np.random.default_rng(0)
    weight = FP8.encode(draw.normal(size=(3, 16, 32)).astype(np.float32))
    groups = groups_of(jnp.array([5, 0, 130]), 135)
    x = jnp.asarray(draw.normal(size=(groups.rows, 32)), jnp.float32)
    out, plain = (grouped_matmul(x, w, groups) for w in (weight, weight.decode(jnp.float32)))
    held = np.arange(groups.rows) < 5
    np.testing.assert_allclose(np.asarray(out)[held], np.asarray(plain)[held], rtol=1e-5, atol=1e-5)
    first = np.asarray(x[:5]) @ np.asarray(weight.decode(jnp.float32))[0].T
    np.testing.assert_allclose(np.asarray(out)[:5], first, rtol=1e-4, atol=1e-4)


# ---- products as they are stored


def _in_fp8(x: np.ndarray, size: int | None = None) -> np.ndarray:
    """Each row, or each `size` numbers of it, rounded to e4m3 by the largest magnitude, in float32."""
    if size is not None:
        parts = [_in_fp8(x[:, first : first + size]) for first in range(0, x.shape[1], size)]
        return np.concatenate(parts, axis=1)
    scale = np.abs(x).max(1, keepdims=True) * np.float32(1 / 448)
    scale[scale == 0] = 1
    return np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


@pytest.mark.gpu
@pytest.mark.parametrize("block", [ROW, MATRIX, TILE])
def test_both_products_are_those_of_rounded_operands(block):
    """x W^T of x's rounded rows; the gradients of weights that share x side by side, which take the scales of W's rows
    before they are rounded, times the codes. Of 128 x 128: each 128 along the sum apart, and no scale before."""
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(178, 150)) * np.logspace(-3, 1, 178)[:, None]
    first, second = (FP8.encode(part.astype(np.float32), block) for part in (rows[:130], rows[130:]))
    x, dy = (draw.normal(size=(16, n)).astype(np.float32) for n in (150, 178))
    x[3] = 0
    outs, pull = jax.vjp(lambda x: quant_matmul(x, [first, second], fp8=True), jnp.asarray(x))
    (dx,) = pull((jnp.asarray(dy[:, :130]), jnp.asarray(dy[:, 130:])))
    wide = np.concatenate([np.asarray(w.decode(jnp.float32)) for w in (first, second)])
    if block == TILE:
        expected = np.concatenate([_in_fp8(dy[:, :130], 128), _in_fp8(dy[:, 130:], 128)], axis=1) @ wide
    else:
        codes = np.concatenate([np.asarray(w.codes).astype(np.float32) for w in (first, second)])
        scales = [np.broadcast_to(np.asarray(w.scales), (w.shape[0], 1))[:, 0] for w in (first, second)]
        expected = _in_fp8(dy * np.concatenate(scales)) @ codes
    got = np.concatenate(outs, axis=1)
    # Tensor cores of Hopper add products of e4m3 up with 14 bits: of the sum of their magnitudes, 2^-13 may be lost.
    lost = 2**-13 if jax.default_backend() == "gpu" else 0
    for found, want, terms in (
        (got, _in_fp8(x, 128 if block == TILE else None) @ wide.T, np.abs(x) @ np.abs(wide).T),
        (dx, expected, np.abs(dy) @ np.abs(wide)),
    ):
        assert (np.abs(found - want) <= 1e-4 * np.abs(want) + 1e-5 + lost * terms).all()
    # The error that the rounding makes: 2^-4 of a number at most, which averages out to under 4 % of the product.
    for found, exact in ((got, x @ wide.T), (dx, dy @ wide)):
        assert np.linalg.norm(found - exact) < 0.04 * np.linalg.norm(exact)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("block", [ROW, TILE])
@pytest.mark.parametrize(
    ("tokens", "sizes", "rank"),
    [(200, (256, 384), 40), (136, (384, 256), None), (128, (128, 256), 16), (128, (128, 128), 100)],
)
def test_the_kernel_multiplies_as_its_reference(tokens, sizes, rank, block):
    """Both directions, with adapters of ranks that fill no step, and one beyond what the kernel takes; the last tile of
    rows overlaps the one before."""
    out, width = sizes
    draw = np.random.default_rng(0)
    weight = FP8.encode((draw.normal(size=(out, width)) * np.logspace(-2, 1, out)[:, None]).astype(np.float32), block)
    if block == ROW:  # a row of zeros whose scale is zero, as some files have it
        weight = dataclasses.replace(weight, codes=weight.codes.at[5].set(0), scales=weight.scales.at[5].set(0))
    x, dy = (jnp.asarray(draw.normal(size=(tokens, n)), jnp.bfloat16) for n in (width, out))
    x = x.at[7].set(0)
    lora = None
    if rank is not None:
        a, b = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((rank, width), (out, rank)))
        lora = LoraWeights(a, b, None, 0.5)

    def both(implementation):
        def product(x, lora):
            return quant_matmul(x, [weight], [lora], fp8=True, implementation=implementation)[0]

        output, pull = jax.vjp(product, x, lora)
        return jax.tree.leaves((output, pull(dy)))

    with gpu_kernel.interpreted():
        got = jax.jit(lambda: both("mosaic"))()
    assert dispatch.record["fp8_matmul"] == ("mosaic", {})
    for one, other in zip(got, both("reference"), strict=True):
        one, other = (np.asarray(each, np.float32) for each in (one, other))
        assert np.linalg.norm(one - other) < 0.006 * np.linalg.norm(other)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("implementation", "outs", "block"),
    [
        ("mosaic", (256, 128, 128), ROW),
        ("mosaic", (256, 128), TILE),
        ("mosaic", (192, 64), ROW),
        ("reference", (256, 128, 128), ROW),
        ("reference", (150, 130), TILE),
    ],
)
def test_weights_that_have_their_codes_transposed_give_the_same_bits(implementation, outs, block):
    """In the kernel one after the other along the sum, where whole steps divide each, and joined elsewhere."""
    draw, (tokens, width) = np.random.default_rng(0), (136, 128)
    weights = [FP8.encode(draw.normal(size=(out, width)).astype(np.float32), block) for out in outs]
    pairs = [[jnp.asarray(draw.normal(size=s), jnp.bfloat16) for s in ((4, width), (out, 4))] for out in outs]
    loras = [LoraWeights(a, b) for a, b in pairs]
    x, *dys = (jnp.asarray(draw.normal(size=(tokens, n)), jnp.bfloat16) for n in (width, *outs))

    def step(x, weights, loras):
        def run(x, loras):
            return quant_matmul(x, weights, loras, fp8=True, implementation=implementation)

        outputs, pull = jax.vjp(run, x, loras)
        return outputs, pull(tuple(dys))

    run = jax.jit(step, compiler_options={"xla_allow_excess_precision": False})  # as the programs of a run
    with gpu_kernel.interpreted():
        without = run(x, weights, loras)
        kept = run(x, [weight.with_transposed() for weight in weights], loras)
    assert dispatch.record["fp8_matmul"][0] == implementation
    jax.tree.map(np.testing.assert_array_equal, without, kept)
    # The codes themselves are not read in the backward.
    wrong = [dataclasses.replace(one.with_transposed(), codes=jnp.zeros_like(one.codes)) for one in weights]
    with gpu_kernel.interpreted():
        np.testing.assert_array_equal(run(x, wrong, loras)[1][0], without[1][0])


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("block", [ROW, TILE])
def test_the_ranks_of_weights_that_share_x_may_add_up_beyond_what_the_kernel_takes(block):
    """As query, key and value of rank 64 do in the backward. Weights of zeros leave the adapters' products alone, in
    which a rank that nobody adds is missed."""
    draw, outs, (tokens, width, rank) = np.random.default_rng(0), (256, 128, 128), (128, 128, 64)
    weights = [FP8.encode(np.zeros((out, width), np.float32), block) for out in outs]
    x, *dys = (jnp.asarray(draw.normal(size=(tokens, n)), jnp.bfloat16) for n in (width, *outs))
    pairs = [[jnp.asarray(draw.normal(size=s), jnp.bfloat16) for s in ((rank, width), (out, rank))] for out in outs]

    def step(x, pairs):
        loras = [LoraWeights(a, b, None, 0.5) for a, b in pairs]
        outputs, pull = jax.vjp(lambda x: quant_matmul(x, weights, loras, fp8=True, implementation="mosaic"), x)
        return *outputs, *pull(tuple(dys))

    with gpu_kernel.interpreted():
        got = jax.jit(step)(x, pairs)
    assert dispatch.record["fp8_matmul"] == ("mosaic", {})
    wide = [[np.asarray(part, np.float64) for part in pair] for pair in pairs]
    want = [0.5 * np.asarray(x, np.float64) @ a.T @ b.T for a, b in wide]
    want.append(sum(0.5 * np.asarray(dy, np.float64) @ b @ a for dy, (a, b) in zip(dys, wide, strict=True)))
    for one, exact in zip(got, want, strict=True):
        assert np.linalg.norm(np.asarray(one, np.float64) - exact) < 0.006 * np.linalg.norm(exact)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("widths", "scaled", "blocks"),
    [((1024,), False, False), ((512, 1544), True, False), ((136, 40, 1024), False, True)],
)
def test_rows_side_by_side_are_rounded_as_defined(widths, scaled, blocks, monkeypatch):
    """On a GPU, where a kernel rounds, bit for bit as plain JAX, whose quotients may be another code than numpy's."""
    monkeypatch.setattr(fp8_product, "_LEAST_ROWS", 1)
    draw = np.random.default_rng(0)
    arrays = [jnp.asarray(draw.normal(size=(5, k)) * np.logspace(-3, 3, 5)[:, None], jnp.bfloat16) for k in widths]
    arrays = [array.at[2].set(0) for array in arrays]
    arrays[0] = arrays[0].at[3, 7].set(jnp.nan)
    factors = jnp.asarray(draw.uniform(0.1, 3, sum(widths)), jnp.float32) if scaled else None
    codes, scale = jax.jit(fp8_product.side_by_side, static_argnums=2)(arrays, factors, blocks)
    want = fp8_product.side_by_side(arrays, factors, blocks, "reference")
    finite = np.arange(5) != 3
    np.testing.assert_array_equal(np.asarray(scale)[finite], np.asarray(want[1])[finite])
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8)[finite], np.asarray(want[0]).view(np.uint8)[finite])
    for row in (codes[3], want[0][3]):
        assert np.isnan(np.asarray(row, np.float32)).any()
    wide = [np.pad(np.asarray(a, np.float32), ((0, 0), (0, -a.shape[1] % 128 if blocks else 0))) for a in arrays]
    wide = np.concatenate(wide, axis=1) * (1 if factors is None else np.asarray(factors))
    parts = wide.reshape(5, -1, 128) if blocks else wide[:, None]
    largest = np.abs(parts).max(-1)
    scales = np.where(largest == 0, 1, largest * np.float32(1 / 448))
    np.testing.assert_array_equal(np.asarray(scale)[finite], scales[finite])
    exact = (parts / scales[..., None]).reshape(wide.shape).astype(ml_dtypes.float8_e4m3fn)
    assert (np.asarray(codes).view(np.uint8) != exact.view(np.uint8))[finite].mean() < 0.002


# ---- experts


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block", [ROW, MATRIX, TILE])
def test_experts_products_are_those_of_rounded_operands(block, transposed):
    """As of one weight: along the second axis rows are rounded as they are; along the first they take the scales of
    their expert's rows before that."""
    draw, sizes = np.random.default_rng(0), [5, 0, 130]
    groups = groups_of(jnp.array(sizes), sum(sizes))
    weight = FP8.encode((draw.normal(size=(3, 130, 150)) * np.logspace(-3, 1, 130)[:, None]).astype(np.float32), block)
    width, out = (130, 150) if transposed else (150, 130)
    x, dout = (draw.normal(size=(groups.rows, size)).astype(np.float32) for size in (width, out))
    got, pull = jax.vjp(lambda x: grouped_matmul(x, weight, groups, transposed=transposed, fp8=True), jnp.asarray(x))
    sides = [(x, got, transposed), (dout, pull(jnp.asarray(dout))[0], not transposed)]
    starts, wide = np.asarray(groups.starts()), np.asarray(weight.decode(jnp.float32))
    codes = np.asarray(weight.codes).astype(np.float32)
    for left, result, along_first in sides:
        for expert, size in enumerate(sizes):
            rows = left[starts[expert] :][:size]
            exact = rows @ (wide[expert] if along_first else wide[expert].T)
            if block == TILE:
                rows, side = _in_fp8(rows, 128), wide[expert]
            elif along_first:
                scales = np.broadcast_to(np.asarray(weight.scales)[expert, :, 0], (130,))
                rows, side = _in_fp8(rows * scales), codes[expert]
            else:
                rows, side = _in_fp8(rows), wide[expert]
            found = np.asarray(result)[starts[expert] :][:size]
            wanted = rows @ (side if along_first else side.T)
            # As a whole: a number between two codes may be rounded to the other one.
            assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)
            assert not size or np.linalg.norm(found - exact) < 0.04 * np.linalg.norm(exact)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "block", "contract", "rank"), [((576, 640), ROW, 1, 24), ((128, 256), TILE, 2, 0)])
def test_the_kernels_multiply_experts_as_their_reference(shape, block, contract, rank):
    """Rows of tokens, which take their expert's factors, with an adapter; and rows in order, in blocks. A tile that is
    half empty, one that is not and one that holds nothing; widths that whole steps, and pieces of a row, do not divide.
    """
    draw, sizes, count = np.random.default_rng(0), [6, 66], 90
    groups = groups_of(jnp.array(sizes), 140)
    held = np.concatenate([np.arange(128) < size for size in (*sizes, 0)])
    tokens = jnp.asarray(np.where(held, draw.integers(0, count, groups.rows), count), jnp.int32)
    values = draw.normal(size=(2, *shape)) * np.logspace(-2, 1, shape[0])[:, None]
    weight = FP8.encode(values.astype(np.float32), block)
    x = jnp.asarray(draw.normal(size=(count, shape[contract - 1])), jnp.bfloat16)
    extra = exact = None
    if rank:
        u = jnp.asarray(draw.normal(size=(groups.rows, rank)) * held[:, None], jnp.bfloat16)
        side = jnp.asarray(draw.normal(size=(2, rank, shape[1])), jnp.bfloat16)
        extra = jnp.pad(u, ((0, 0), (0, 64 - rank))), side  # as the kernel of thin products gives it
        exact = u.astype(jnp.float32), side.astype(jnp.float32)
    if contract == 2:
        x, tokens = reference.rows_of(x, tokens), None
    with gpu_kernel.interpreted():
        run = jax.jit(fp8_experts._by_kernel, static_argnums=(3, 6))
        got = np.asarray(run(x, weight, groups, contract, extra, tokens, "mosaic"), np.float32)
    want = fp8_experts._by_reference(x.astype(jnp.float32), weight, groups, contract, exact, tokens)
    assert not got[~held].any(), "rows that hold nothing must be zero"
    assert np.linalg.norm(got - want) < 0.003 * np.linalg.norm(want)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "reference"])
@pytest.mark.parametrize(("transposed", "block"), [(False, ROW), (True, TILE)])
def test_experts_that_have_their_codes_transposed_give_the_same_bits(transposed, block, implementation):
    """In the direction that sums along their first axis: the backward, or the forward if they are transposed."""
    draw, sizes = np.random.default_rng(0), [6, 66]
    groups = groups_of(jnp.array(sizes), 140)
    held = jnp.asarray(np.concatenate([np.arange(128) < size for size in (*sizes, 0)]))[:, None]
    weight = FP8.encode(draw.normal(size=(2, 512, 640)).astype(np.float32), block)
    width, out = (512, 640) if transposed else (640, 512)
    x, dout = (jnp.where(held, jnp.asarray(draw.normal(size=(groups.rows, n)), jnp.bfloat16), 0) for n in (width, out))

    def both(weight):
        def run(x):
            return grouped_matmul(x, weight, groups, transposed=transposed, fp8=True, implementation=implementation)

        output, pull = jax.vjp(run, x)
        return output, *pull(dout)

    with gpu_kernel.interpreted():
        without, kept = (jax.jit(both)(one) for one in (weight, weight.with_transposed()))
    assert dispatch.record["fp8_matmul of experts"][0] == implementation
    jax.tree.map(np.testing.assert_array_equal, without, kept)
    if implementation == "mosaic":
        wrong = dataclasses.replace(weight.with_transposed(), codes=jnp.zeros_like(weight.codes))
        with gpu_kernel.interpreted():
            np.testing.assert_array_equal(jax.jit(both)(wrong)[0 if transposed else 1], without[0 if transposed else 1])


def test_what_the_kernel_refuses_is_said():
    with gpu_kernel.interpreted():
        for words, (tokens, out, width), dtype in (
            ("size 130 is not a multiple of 64", (256, 130, 128), "bfloat16"),
            ("100 tokens, fewer than 128", (100, 128, 128), "bfloat16"),
            ("130 tokens, no multiple of 8", (130, 128, 128), "bfloat16"),
            ("dtype float32", (256, 128, 128), "float32"),
        ):
            weight = FP8.encode(np.ones((out, width), np.float32))
            with pytest.raises(ValueError, match=words):
                quant_matmul(jnp.ones((tokens, width), dtype), [weight], fp8=True, implementation="mosaic")


@pytest.mark.parametrize("block", [ROW, TILE])
def test_a_tokens_outliers_touch_no_other_token(block):
    """A massive activation, and channels 50 times larger, cost precision where they are and nowhere else."""
    draw = np.random.default_rng(0)
    weight = FP8.encode(draw.normal(size=(32, 256)).astype(np.float32), block)
    x = draw.normal(size=(8, 256)).astype(np.float32)
    plain = np.asarray(quant_matmul(jnp.asarray(x), [weight], fp8=True)[0])
    spiked = x.copy()
    spiked[2, 7] = 3000.0
    got = np.asarray(quant_matmul(jnp.asarray(spiked), [weight], fp8=True)[0])
    others = np.arange(8) != 2
    np.testing.assert_array_equal(got[others], plain[others])
    exact = spiked[2] @ np.asarray(weight.decode(jnp.float32)).T
    assert np.linalg.norm(got[2] - exact) < 0.04 * np.linalg.norm(exact)
    x[:, ::64] *= 50
    got, exact = quant_matmul(jnp.asarray(x), [weight], fp8=True)[0], x @ np.asarray(weight.decode(jnp.float32)).T
    assert np.linalg.norm(got - exact) < 0.04 * np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_doras_factors_and_a_bias_stand_outside(dtype):
    draw = np.random.default_rng(0)
    weight = FP8.encode(draw.normal(size=(16, 32)).astype(np.float32))
    x, bias, factors = (jnp.asarray(draw.normal(size=shape), dtype) for shape in ((4, 32), (16,), (16,)))
    a, b = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((3, 32), (16, 3)))
    plain = quant_matmul(x, [weight], [LoraWeights(a, b, None, 2.0)], fp8=True)[0]
    row_scale = factors.astype(jnp.float32)
    got = quant_matmul(x, [weight], [LoraWeights(a, b, row_scale, 2.0)], [bias], fp8=True)[0]
    np.testing.assert_array_equal(got, (plain * row_scale).astype(x.dtype) + bias)


def test_adapters_multiply_what_is_not_rounded():
    draw = np.random.default_rng(0)
    zero = FP8.encode(np.zeros((16, 32), np.float32))
    x = jnp.asarray(draw.normal(size=(4, 32)), jnp.float32)
    lora = LoraWeights(*(jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((3, 32), (16, 3))))
    got = quant_matmul(x, [zero], [lora], fp8=True)[0]
    np.testing.assert_array_equal(got, quant_matmul(x, [zero], [lora])[0])
