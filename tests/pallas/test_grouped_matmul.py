"""The grouped product against a loop over experts in float64: values, and gradients of rows, weights and adapters.

The same body runs over the Mosaic kernel in Pallas' GPU interpreter."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxtune.pallas import dispatch, gpu_kernel, targets
from jaxtune.pallas.formats import MXFP4, NF4
from jaxtune.pallas.grouped_matmul import (
    TILE_ROWS,
    GroupedLora,
    api,
    first_use,
    grouped_bias,
    grouped_matmul,
    mosaic,
    mosaic_contract,
    mosaic_sums,
    reference,
)
from jaxtune.pallas.grouped_matmul.layout import groups_of

IN, OUT, RANK, SCALE = 128, 192, 8, 0.5
SIZES = {
    "uneven": [130, 0, 1, 60],
    "first and last empty": [0, 128, 0],
    "one row": [0, 1],
    "all in one": [0, 300, 0],
    "nothing": [0, 0],
}


def operands(sizes, transposed, seed=0):
    """(x, weight, a, b, dout) in float64 with bfloat16's values, and the mask of rows that hold something."""
    groups = groups_of(jnp.asarray(sizes, jnp.int32), max(1, sum(sizes)))
    draw = np.random.default_rng(seed)

    def array(*shape, size=1.0):
        return np.asarray(jnp.asarray(size * draw.standard_normal(shape), jnp.bfloat16), np.float64)

    experts = len(sizes)
    starts = np.asarray(groups.starts())
    held = np.zeros(groups.rows, bool)
    for start, size in zip(starts, sizes, strict=True):
        held[start : start + size] = True
    x, dout = array(groups.rows, IN) * held[:, None], array(groups.rows, OUT) * held[:, None]
    weight = array(experts, IN, OUT, size=IN**-0.5) if transposed else array(experts, OUT, IN, size=IN**-0.5)
    return groups, held, (x, weight, array(experts, RANK, IN, size=IN**-0.5), array(experts, OUT, RANK), dout)


def exact(sizes, groups, transposed, x, weight, a, b, dout):
    """out, dx, dweight, da, db by a loop over experts in float64."""
    out, dx = np.zeros((groups.rows, OUT)), np.zeros((groups.rows, IN))
    dweight, da, db = (np.zeros(array.shape) for array in (weight, a, b))
    for e, (start, size) in enumerate(zip(np.asarray(groups.starts()), sizes, strict=True)):
        rows = slice(start, start + size)
        w = weight[e].T if transposed else weight[e]
        full = w + SCALE * b[e] @ a[e]
        out[rows], dx[rows] = x[rows] @ full.T, dout[rows] @ full
        product = dout[rows].T @ x[rows]
        dweight[e] = product.T if transposed else product
        da[e], db[e] = SCALE * b[e].T @ product, SCALE * product @ a[e].T
    return out, dx, dweight, da, db


def outputs(implementation, groups, transposed, arrays, dtype):
    x, weight, a, b, dout = (jnp.asarray(array, dtype) for array in arrays)

    def run(x, weight, a, b):
        lora = GroupedLora(a, b, SCALE)
        return grouped_matmul(x, weight, groups, lora, transposed=transposed, implementation=implementation)

    out, pullback = jax.vjp(run, x, weight, a, b)
    return [np.asarray(array, np.float64) for array in (out, *pullback(dout))]


def distance(got, want):
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.gpu
def test_reference(case, transposed):
    sizes = SIZES[case]
    groups, _, arrays = operands(sizes, transposed)
    want = exact(sizes, groups, transposed, *arrays)
    for got, expected in zip(outputs("reference", groups, transposed, arrays, jnp.float32), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5 * max(1.0, np.abs(expected).max()))


@pytest.mark.full
@pytest.mark.parametrize(("case", "transposed"), [("uneven", False), ("uneven", True)])
@pytest.mark.gpu
def test_mosaic_in_the_interpreter(case, transposed):
    sizes = SIZES[case]
    groups, held, arrays = operands(sizes, transposed)
    want = exact(sizes, groups, transposed, *arrays)
    xla = outputs("reference", groups, transposed, arrays, jnp.bfloat16)
    with gpu_kernel.interpreted():
        got = outputs(None, groups, transposed, arrays, jnp.bfloat16)
    assert dispatch.record["grouped_matmul"][0] == "mosaic"
    for mine, theirs, expected in zip(got, xla, want, strict=True):
        assert distance(mine, expected) <= 2 * distance(theirs, expected)
    for rows in got[:2]:
        assert not rows[~held].any(), "rows that hold nothing must be zero"


@pytest.mark.parametrize("blocks", [mosaic.Blocks(64, 2, 1), mosaic.Blocks(64, 3, 2, lead=2), mosaic.Blocks(128, 2)])
@pytest.mark.gpu
def test_mosaic_order_and_size_of_the_items_change_nothing(blocks):
    """Narrow tiles, more of them than programs, bands that do not divide them; one warpgroup before the other; columns
    that tiles do not divide."""
    groups, _, (x, weight, *_) = operands(SIZES["uneven"], False)
    x, weight = jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    with gpu_kernel.interpreted():
        got = mosaic.product(x, weight, groups, 2, blocks=blocks)
        want = mosaic.product(x, weight, groups, 2)
    np.testing.assert_array_equal(got, want)


@pytest.mark.full
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.gpu
def test_mosaic_brings_the_rows_of_tokens_itself(case):
    """With an adapter's columns, which are rows; the same bits as over rows that were copied before."""
    groups, held, (x, weight, a, *_) = operands(SIZES[case], True)
    x, a = jnp.asarray(x, jnp.bfloat16)[:100], jnp.asarray(a, jnp.bfloat16)
    tokens = np.where(held, np.random.default_rng(1).integers(0, 100, groups.rows), 100)
    tokens = jnp.asarray(tokens, jnp.int32)
    rows = reference.rows_of(x, tokens)
    weight = jnp.asarray(weight, jnp.bfloat16)
    side = jnp.ones((len(SIZES[case]), RANK, weight.shape[2]), jnp.bfloat16)
    with gpu_kernel.interpreted():
        thin = mosaic.thin(rows, a, groups, 2)
        np.testing.assert_array_equal(mosaic.thin(x, a, groups, 2, tokens), thin)
        want = mosaic.product(rows, weight, groups, 1, (thin, side))
        np.testing.assert_array_equal(mosaic.product(x, weight, groups, 1, (thin, side), tokens), want)


@pytest.mark.parametrize("shape", [(16, 128), (8, 192), (8, 24)])  # of runs of 1,024 and of 512, and of no run
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.gpu
def test_sums_of_tiles_are_the_references(case, shape):
    sizes = SIZES[case]
    groups = groups_of(jnp.asarray(sizes, jnp.int32), max(1, sum(sizes)))
    values = jax.random.normal(jax.random.key(0), (groups.tiles, *shape))
    with gpu_kernel.interpreted():
        got = mosaic_sums.per_expert(values, groups)
    np.testing.assert_allclose(got, reference.per_expert(values, groups), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(16, 128), (8, 24)])  # of the kernel and of plain JAX
@pytest.mark.gpu
def test_sums_of_runs_leave_out_what_is_in_none(shape):
    """In the order of the parts: the numbers are whole, and of any other order they would be the same."""
    values = jnp.round(8 * jax.random.normal(jax.random.key(0), (7, *shape)))
    bounds = [0, 2, 2, 5, 6]  # the second has none, and the last part is in none
    with gpu_kernel.interpreted():
        got = mosaic_sums.of_runs(values, jnp.asarray(bounds, jnp.int32))
    want = [values[one:other].sum(0) for one, other in itertools.pairwise(bounds)]
    np.testing.assert_array_equal(got, jnp.stack(want))


@pytest.mark.parametrize(
    ("columns", "rank"), [(128, 16), (256, 3), (192, 8), (64, 72)]
)  # of each width of items; a rank that fills no tile, and one of two parts
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.gpu
def test_rows_are_contracted_as_by_the_reference(case, columns, rank):
    sizes = SIZES[case]
    groups = groups_of(jnp.asarray(sizes, jnp.int32), max(1, sum(sizes)))
    keys = jax.random.split(jax.random.key(0))
    wide = jax.random.normal(keys[0], (groups.rows, columns)).astype(jnp.bfloat16)
    thin = jax.random.normal(keys[1], (groups.rows, -(-rank // 64) * 64)).astype(jnp.bfloat16)
    with gpu_kernel.interpreted():
        got = mosaic_contract.contract_rows(thin, wide, groups, rank)
    exact = (thin[:, :rank].astype(jnp.float32), wide.astype(jnp.float32))
    np.testing.assert_allclose(got, reference.contract_rows(*exact, groups, jnp.float32), rtol=1e-5, atol=1e-5)


def contracted(sizes, groups, left, right):
    """left^T right over the rows of each expert, by a loop in float64."""
    ends = zip(np.asarray(groups.starts()), sizes, strict=True)
    return np.stack([left[start : start + size].T @ right[start : start + size] for start, size in ends])


# (p, q, dtype) of a gradient [E, p, q]: one warpgroup that multiplies, and two; items of 64, 128, 192 and 256 columns;
# tiles that do not divide either side.
GRADIENTS = [
    (64, 64, jnp.bfloat16),
    (64, 256, jnp.float32),
    (128, 128, jnp.float32),
    (192, 320, jnp.bfloat16),
    (128, 448, jnp.bfloat16),
    (320, 256, jnp.float32),
]


@pytest.mark.parametrize(("p", "q", "dtype"), GRADIENTS)
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.gpu
def test_the_gradient_of_a_weight(case, p, q, dtype):
    """Experts without rows get zeros; rows that hold nothing are not zero on one of the sides."""
    sizes = SIZES[case]
    groups, held, _ = operands(sizes, False)
    draw = np.random.default_rng(0)
    left, right = (jnp.asarray(draw.standard_normal((groups.rows, size)), jnp.bfloat16) for size in (p, q))
    right = right * held[:, None].astype(jnp.bfloat16)
    with gpu_kernel.interpreted():
        got = mosaic_contract.weight_gradient(left, right, groups, dtype)
    assert got.dtype == dtype
    want = contracted(sizes, groups, np.asarray(left, np.float64), np.asarray(right, np.float64))
    rounding = 2.0**-8 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=rounding, atol=1e-4)
    assert not np.asarray(got, np.float64)[np.asarray(sizes) == 0].any()


@pytest.mark.full
@pytest.mark.parametrize("weight_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.gpu
def test_whose_kernel_computes_a_weights_gradient(monkeypatch, transposed, weight_dtype):
    """That for Hopper beside its products, in the weight's dtype; XLA beside others; none if it does not train."""
    calls = []
    kernel = mosaic_contract.weight_gradient
    # On a GPU the check at the first use calls the kernel too.
    assert jax.default_backend() != "gpu" or mosaic_contract.weight_refusal(jnp.bfloat16, weight_dtype) is None
    monkeypatch.setattr(mosaic_contract, "weight_gradient", lambda *given: calls.append(given[3]) or kernel(*given))
    sizes = SIZES["uneven"]
    groups, _, arrays = operands(sizes, transposed)
    want = exact(sizes, groups, transposed, *arrays)[2]
    x, weight, _, _, dout = (jnp.asarray(array, jnp.bfloat16) for array in arrays)

    def gradient(implementation, **options):
        def run(weight):
            return grouped_matmul(x, weight, groups, transposed=transposed, implementation=implementation, **options)

        (got,) = jax.vjp(run, weight.astype(weight_dtype))[1](dout)
        assert got.dtype == weight_dtype
        return np.asarray(got, np.float64)

    xla = gradient("reference")
    assert not calls
    with gpu_kernel.interpreted():
        mine = gradient("mosaic")
        assert calls == [weight_dtype]
        assert distance(mine, want) <= 1.01 * distance(xla, want) + 1e-6
        assert not gradient("mosaic", weight_trains=False).any()
        assert calls == [weight_dtype]


@pytest.mark.full
def test_first_use_finds_a_wrong_gradient_of_a_weight(monkeypatch, tmp_path):
    """It compares each dtype on its own: the kernel passes, and one that loses an expert's last rows does not."""
    monkeypatch.setattr(targets, "_device_capability", lambda platform: (9, 0))
    monkeypatch.setattr(dispatch, "first_uses", {})
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path))
    with gpu_kernel.interpreted():
        assert mosaic_contract.weight_refusal(jnp.bfloat16, jnp.bfloat16) is None
    kernel = mosaic_contract.weight_gradient

    def wrong(left, right, groups, dtype):
        return reference.contract_rows(left.at[256:384].set(0), right, groups, dtype)

    monkeypatch.setattr(mosaic_contract, "weight_gradient", wrong)
    assert "differs from the reference" in mosaic_contract.weight_refusal(jnp.bfloat16, jnp.float32)
    monkeypatch.setattr(mosaic_contract, "weight_gradient", kernel)
    assert mosaic_contract.weight_refusal(jnp.bfloat16, jnp.bfloat16) is None
    assert "float8_e4m3fn" in mosaic_contract.weight_refusal(jnp.bfloat16, jnp.float8_e4m3fn)


@pytest.mark.parametrize("kind", [None, "nf4", "mxfp4"])
def test_a_derivative_that_follows_changes_nothing(kind):
    groups, _, (x, weight, a, b, dout) = operands(SIZES["uneven"], False)
    stored = jnp.asarray(weight, jnp.float32) if kind is None else packed(kind, weight)
    x, a, b, dout = (jnp.asarray(array, jnp.float32) for array in (x, a, b, dout))

    def results(follows):
        def run(x, a, b):
            return grouped_matmul(x, stored, groups, GroupedLora(a, b, SCALE), derivative_follows=follows)

        out, pullback = jax.vjp(run, x, a, b)
        return out, *pullback(dout)

    for mine, theirs in zip(results(True), results(False), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_wide_weights_of_a_trainable_base():
    """Past the width of thin products the gradient of the weight is added up tile by tile."""
    sizes = [200, 0, 140]
    groups = groups_of(jnp.asarray(sizes, jnp.int32), sum(sizes))
    draw = np.random.default_rng(1)
    x, dout = draw.standard_normal((groups.rows, 300)), draw.standard_normal((groups.rows, 260))
    held = np.zeros((groups.rows, 1))
    for start, size in zip(np.asarray(groups.starts()), sizes, strict=True):
        held[start : start + size] = 1
    x, dout = (np.float32(array * held) for array in (x, dout))
    _, pullback = jax.vjp(lambda w: grouped_matmul(jnp.asarray(x), w, groups), jnp.zeros((3, 260, 300)))
    (got,) = pullback(jnp.asarray(dout))
    for e, start in enumerate(np.asarray(groups.starts())):
        rows = slice(start, start + sizes[e])
        np.testing.assert_allclose(got[e], dout[rows].T @ x[rows], atol=1e-3)


def packed(kind, weight):
    """weight [E, ., .] in four bits; in MXFP4 other numbers of its shape, with scales of which no two are equal;
    swapped: in MXFP4 whose blocks are along the last axis but one, as of gpt-oss's files."""
    if kind == "nf4":
        return NF4.encode(jnp.asarray(weight, jnp.float32))
    if kind == "swapped":
        return dataclasses.replace(packed("mxfp4", weight.swapaxes(1, 2)), swapped=True)
    draw = np.random.default_rng(3)
    rows = weight.shape[:-1]
    codes = draw.integers(0, 256, (*rows, weight.shape[-1] // 2)).astype(np.uint8)
    scales = draw.integers(118, 124, (*rows, weight.shape[-1] // 32)).astype(np.uint8)
    return MXFP4(jnp.asarray(codes), jnp.asarray(scales))


@pytest.mark.parametrize("kind", ["nf4", "mxfp4", "swapped"])
def test_weights_in_four_bits_are_their_decoded_values(kind):
    transposed = kind == "swapped"
    groups, _, (x, weight, a, b, dout) = operands(SIZES["uneven"], transposed)
    stored = packed(kind, weight)
    lora = GroupedLora(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), SCALE)
    x = jnp.asarray(x, jnp.float32)

    def run(weight):
        out, pullback = jax.vjp(lambda x: grouped_matmul(x, weight, groups, lora, transposed=transposed), x)
        return out, *pullback(jnp.asarray(dout, jnp.float32))

    for mine, theirs in zip(run(stored), run(stored.decode(jnp.float32)), strict=True):
        if transposed:  # the products' sums may have another order
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
        else:
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "transposed"), [("nf4", True), ("mxfp4", False), ("swapped", True)])
@pytest.mark.gpu
def test_products_over_four_bits_in_the_interpreter(kind, transposed):
    """Forward and dx, with an adapter: both directions of both formats; an error as of a bf16 product."""
    sizes = SIZES["uneven"]
    groups, held, (x, weight, a, b, dout) = operands(sizes, transposed)
    stored = packed(kind, weight)
    arrays = (x, np.asarray(stored.decode(jnp.float32), np.float64), a, b, dout)
    want = exact(sizes, groups, transposed, *arrays)
    xla = outputs("reference", groups, transposed, arrays, jnp.bfloat16)
    x, _, a, b, dout = (jnp.asarray(array, jnp.bfloat16) for array in arrays)

    def run(x):
        options = dict(transposed=transposed, implementation="mosaic_ahead")
        return grouped_matmul(x, stored, groups, GroupedLora(a, b, SCALE), **options)

    with gpu_kernel.interpreted():
        out, pullback = jax.vjp(run, x)
        got = [np.asarray(array, np.float64) for array in (out, *pullback(dout))]
    for mine, theirs, expected in zip(got, xla[:2], want[:2], strict=True):
        assert distance(mine, expected) <= 2 * distance(theirs, expected)
        assert not mine[~held].any(), "rows that hold nothing must be zero"


@pytest.mark.parametrize("case", ["one row", "all in one", "nothing"])
@pytest.mark.gpu
def test_groups_of_any_size_over_four_bits(case):
    sizes = SIZES[case]
    groups, _, (x, weight, *_) = operands(sizes, False)
    stored = packed("nf4", weight[:, :64])
    x = jnp.asarray(x, jnp.bfloat16)
    with gpu_kernel.interpreted():
        got = mosaic.product(x, stored, groups, 2)
    want = np.zeros(got.shape)
    values = np.asarray(stored.decode(jnp.float32), np.float64)
    for e, (start, size) in enumerate(zip(np.asarray(groups.starts()), sizes, strict=True)):
        want[start : start + size] = np.asarray(x, np.float64)[start : start + size] @ values[e].T
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= 0.006 * np.linalg.norm(want)


@pytest.mark.gpu
def test_bias_and_its_gradients():
    sizes = SIZES["uneven"]
    groups, held, _ = operands(sizes, False)
    draw = np.random.default_rng(2)
    rows, drows = (jnp.asarray(draw.standard_normal((groups.rows, 5)) * held[:, None], jnp.float32) for _ in range(2))
    bias = jnp.asarray(draw.random((4, 5)), jnp.float32)
    expert = np.minimum(np.repeat(np.asarray(groups.tile_expert), TILE_ROWS), 3)
    got, pullback = jax.vjp(lambda *args: grouped_bias(*args, groups), rows, bias)
    want, want_pullback = jax.vjp(lambda r, b: r + b[expert], rows, bias)
    np.testing.assert_allclose(np.asarray(got)[held], np.asarray(want)[held], atol=1e-6)
    for mine, theirs in zip(pullback(drows), want_pullback(drows), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "dtype", "columns", "reason"),
    [
        ((8, 0), jnp.bfloat16, OUT, "Hopper"),
        ((9, 0), jnp.float32, OUT, "float32"),
        ((9, 0), jnp.bfloat16, 100, "size 100 is not a multiple of 64"),
    ],
)
def test_refusals_say_why(capability, dtype, columns, reason):
    groups = groups_of(jnp.array([4, 4], jnp.int32), 8)
    x, weight = jnp.zeros((groups.rows, IN), dtype), jnp.zeros((2, columns, IN), dtype)
    with targets.compile_for(capability), pytest.raises(ValueError, match=reason):
        grouped_matmul(x, weight, groups, implementation="mosaic")


def test_what_is_chosen_is_what_was_measured_to_be_faster():
    groups = groups_of(jnp.array([512, 512], jnp.int32), 1024)
    weight = NF4.encode(jnp.ones((2, OUT, IN)))
    with gpu_kernel.interpreted():
        table = api.implementations(jnp.bfloat16, IN, OUT, groups, weight)
        assert dispatch.choose("grouped_matmul", table, None) == "mosaic_ahead"
        weight = MXFP4(jnp.zeros((2, OUT, IN // 2), jnp.uint8), jnp.zeros((2, OUT, IN // 32), jnp.uint8))
        table = api.implementations(jnp.bfloat16, IN, OUT, groups, weight)
        assert dispatch.choose("grouped_matmul", table, None) == "mosaic_ahead"
        for devices, want in ((1, "mosaic_ahead"), (2, "mosaic")):  # whose programs wait for each other, beside NCCL's
            mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])

            def chosen(x, name, seen, weight=weight):
                table = api.implementations(jnp.bfloat16, IN, OUT, groups, weight, name)
                seen.append(dispatch.choose("grouped_matmul", table, name))
                return x

            seen: list[str] = []
            for name in (None, "mosaic_ahead"):  # as the trainer: each device has its own rows
                one = jax.shard_map(
                    functools.partial(chosen, name=name, seen=seen),
                    mesh=mesh,
                    in_specs=PartitionSpec(),
                    out_specs=PartitionSpec(),
                )
                jax.eval_shape(one, jnp.ones(2))
            assert seen == [want, "mosaic_ahead"]
        uneven = NF4.encode(jnp.ones((2, 65, 64)))
        assert "4160 numbers an expert" in api.implementations(jnp.bfloat16, 64, 64, groups, uneven)["mosaic_ahead"]()
    x = jnp.zeros((groups.rows, IN), jnp.bfloat16)
    with gpu_kernel.interpreted(), pytest.raises(ValueError, match="no weight in four bits"):
        grouped_matmul(x, jnp.zeros((2, OUT, IN), jnp.bfloat16), groups, implementation="mosaic_ahead")


@pytest.mark.full
@pytest.mark.parametrize(("pairs", "want"), [(192, "mosaic"), (448, "mosaic_ahead")])
def test_experts_of_few_rows_are_decoded_first(pairs, want):
    """The buffer has half a tile more for an expert: 256 of 320 rows, and 512."""
    groups = groups_of(jnp.full(64, pairs, jnp.int32), 64 * pairs)
    weight = NF4.encode(jnp.ones((64, 64, 64)))
    with gpu_kernel.interpreted():
        table = api.implementations(jnp.bfloat16, 64, 64, groups, weight)
        assert dispatch.choose("grouped_matmul", table, None) == want
        assert dispatch.choose("grouped_matmul", table, "mosaic_ahead") == "mosaic_ahead"


@pytest.mark.full
def test_first_use_finds_what_is_wrong(monkeypatch, tmp_path):
    """The case on which a kernel is compared at first use: the kernel passes, and one that loses an expert does not."""
    monkeypatch.setattr(targets, "_device_capability", lambda platform: (9, 0))
    monkeypatch.setattr(dispatch, "first_uses", {})
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path))
    stored = NF4.encode(jnp.ones((1, 64, 64)))
    right = reference.product

    def product(x, weight, *rest):
        return right(x, weight.decode(x.dtype), *rest)

    def wrong(x, weight, groups, *rest):
        return product(x, weight, groups, *rest).at[:128].multiply(0.9)

    assert first_use.refusal("right", product, stored) is None
    assert "differs from the reference" in first_use.refusal("wrong", wrong, stored)

    def shifted(x, weight, groups, contract, extra, tokens=None):
        """Brings the rows of other tokens."""
        rows = x if tokens is None else reference.rows_of(x, tokens - 1)
        return right(rows, weight, groups, contract, extra)

    with gpu_kernel.interpreted():
        assert first_use.refusal("gathering", mosaic.product, None, gathering=True) is None
    assert first_use.refusal("shifted", shifted, None) is None
    assert "differs from the reference" in first_use.refusal("shifted", shifted, None, gathering=True)
