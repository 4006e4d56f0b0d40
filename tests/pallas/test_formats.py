"""NF4 and FP4 against bytes that bitsandbytes made (tests/parity/regenerate_nf4.py), and against their definition."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from nf4_cases import cases

from jaxtune.pallas.formats import FP4, NF4, dense
from jaxtune.pallas.formats.blockwise8 import dynamic_map
from jaxtune.pallas.formats.division import _rounded_quotient
from jaxtune.pallas.quant_matmul import LoraWeights, quant_matmul

GOLDEN = np.load(Path(__file__).resolve().parent.parent / "goldens" / "nf4.npz")
CASES = cases()


def golden(name: str, kind: str) -> dict[str, np.ndarray]:
    prefix = f"{name}/{kind}/"
    return {key.removeprefix(prefix): GOLDEN[key] for key in GOLDEN.files if key.startswith(prefix)}


def by_definition(codes: np.ndarray, absmax: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """float32, one element after the other."""
    size = int(np.prod(shape))
    nibbles = np.stack([codes >> 4, codes & 15], axis=1).reshape(-1)[:size]
    values = [NF4.table[nibble] * absmax[index // 64] for index, nibble in enumerate(nibbles)]
    return np.array(values, np.float32).reshape(shape)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.gpu
def test_bytes_are_bitsandbytes(name):
    array, want = CASES[name], golden(name, "plain")
    for given in (array, jnp.asarray(array)):
        got = NF4.encode(given, double_quant=False)
        np.testing.assert_array_equal(got.codes, want["codes"])
        assert np.asarray(got.absmax).tobytes() == want["absmax"].tobytes()
    assert (got.shape, got.dtype, got.size, got.ndim) == (array.shape, np.float32, array.size, array.ndim)
    decoded = got.decode()
    np.testing.assert_array_equal(decoded, by_definition(want["codes"], want["absmax"], array.shape))
    # At most half the widest gap of the table, 0.152 of the block's largest magnitude, from the original.
    limit = 0.152 * np.repeat(want["absmax"], 64)[: array.size].reshape(array.shape)
    assert (np.abs(np.asarray(decoded) - array) <= limit).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.gpu
def test_double_quantisation(name):
    array, want = CASES[name], golden(name, "double")
    got = NF4.encode(array)
    np.testing.assert_array_equal(got.codes, want["codes"])
    np.testing.assert_allclose(got.offset, want["offset"], rtol=3e-7)
    np.testing.assert_allclose(got.nested_absmax, want["nested_absmax"], rtol=1e-5, atol=1e-7 * float(want["offset"]))
    assert got.absmax.dtype == jnp.uint8 and got.absmax.shape == want["absmax"].shape
    # On the middle between two codes, either is right: what they stand for is then as near.
    absmax = golden(name, "plain")["absmax"]
    theirs = NF4(
        want["codes"],
        want["absmax"],
        want["nested_absmax"],
        dynamic_map(signed=True),
        want["offset"],
        array.shape,
        "float32",
    )
    ours = np.abs(np.asarray(got.block_absmax()) - absmax)
    error = np.abs(np.asarray(theirs.block_absmax()) - absmax)
    np.testing.assert_allclose(ours, error, atol=3e-7 * absmax.max() + 1e-37)
    nested = float(np.max(want["nested_absmax"]))
    different = np.asarray(got.absmax) != want["absmax"]
    assert nested == 0 or different.sum() <= max(1, 3 * different.size / 2048)
    # Their state, decoded here: exactly what they decode it to.
    if "decoded" in want:
        np.testing.assert_array_equal(theirs.decode(), want["decoded"])


def test_the_dynamic_map_is_bitsandbytes():
    ours = dynamic_map(signed=True)
    assert ours.dtype == np.float32 and ours.tobytes() == GOLDEN["dynamic_map"].tobytes()


@pytest.mark.gpu
def test_division_is_exact_whatever_the_device_rounds_to():
    """A GPU's quotient is up to two units off, and the bytes must not be."""
    draw = np.random.default_rng(0)
    near_one = (np.float32(1) + np.arange(-40, 41) * np.float32(2**-23)).astype(np.float32)
    y = np.concatenate([near_one, 2 * near_one, np.exp(8 * draw.standard_normal(4000)).astype(np.float32)])
    for x in (np.ones_like(y), (y * draw.uniform(-1, 1, y.size)).astype(np.float32), np.roll(y, 7), np.zeros_like(y)):
        want = (x.astype(np.float64) / y).astype(np.float32)  # float64 has bits enough for one rounding
        for off in range(-3, 4):
            approximate = (want.view(np.int32) + off).view(np.float32) if x.any() else want
            got = jax.jit(_rounded_quotient)(x, y, approximate)
            np.testing.assert_array_equal(got, want, err_msg=str(off))


def test_error_on_normal_numbers_is_the_published_one():
    """bitsandbytes' own tests hold NF4 in blocks of 64 to a mean error of 0.0728 on N(0, 1)."""
    array = jax.random.normal(jax.random.key(0), (1024, 1024))
    for double in (False, True):
        error = jnp.abs(NF4.encode(array, double).decode() - array).mean()
        assert 0.0715 < error < 0.0735


def test_memory():
    packed = jax.eval_shape(NF4.encode, jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16))
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(packed))
    assert abs(stored / 2**20 - 8.26) < 0.02 * 8.26
    small = NF4.encode(np.ones((64, 64), np.float32))
    assert small.nbytes == sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(small))
    encode = jax.jit(NF4.encode).lower(jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)).compile()
    assert encode.memory_analysis().temp_size_in_bytes < 3 * 4 * 1024**2  # a few times the tensor


def test_a_pytree_with_static_shape():
    packed = NF4.encode(np.ones((3, 5), np.float32))
    again = jax.tree.map(lambda leaf: leaf, packed)
    assert isinstance(again, NF4) and (again.shape, again.dtype_name) == ((3, 5), "float32")
    assert jax.jit(lambda weight: weight.decode(jnp.bfloat16))(packed).dtype == jnp.bfloat16
    assert NF4.encode(jnp.ones((2, 2), jnp.bfloat16)).decode().dtype == jnp.bfloat16
    array = jnp.ones(3)
    assert dense(array, jnp.bfloat16) is array and dense(packed).shape == (3, 5)


@pytest.mark.gpu
def test_fp4_is_decoded():
    """All 16 codes of an older checkpoint: sign, then 0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4 of the absmax."""
    codes = np.array([(2 * i) << 4 | (2 * i + 1) for i in range(8)], np.uint8)
    weight = FP4(codes, np.array([12.0], np.float32), None, None, None, (2, 8), "float32")
    rows = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3])
    np.testing.assert_allclose(weight.decode(), [rows, -rows], rtol=1e-7)


# ---- products


def product_parts(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [NF4.encode(jax.random.normal(key, (out, 64))) for key, out in zip(keys, (48, 16), strict=False)]
    x = jax.random.normal(keys[2], (2, 5, 64), dtype)
    lora = LoraWeights(jax.random.normal(keys[3], (3, 64)), jax.random.normal(keys[4], (48, 3)), None, 0.5)
    return x, weights, [lora, None], [None, jnp.arange(16.0)]


# On a GPU a Triton kernel multiplies float32, and adds up in an order of its own (tests/parity).
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.gpu)])
def test_products_equal_those_over_decoded_weights(dtype):
    """Both ways, bit for bit: nothing but the decoding differs. A group may mix arrays and four bits."""
    x, weights, loras, biases = product_parts(dtype)
    arrays = [weight.decode(dtype) for weight in weights]

    def run(weights):
        def loss(x, loras, biases):
            outputs = quant_matmul(x, weights, loras, biases)
            return sum(jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in outputs), outputs

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(x, loras, biases)

    want = run(arrays)
    for got in (run(weights), run([weights[0], arrays[1]])):
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_four_bit_weights_have_no_gradient():
    x, weights, loras, biases = product_parts()
    gradients = jax.grad(lambda w: quant_matmul(x, w, loras, biases)[0].sum(), allow_int=True)(weights)
    for leaf in jax.tree.leaves(gradients):
        assert leaf.dtype == jax.dtypes.float0 or not np.asarray(leaf).any()


def equations(jaxpr):
    for equation in jaxpr.eqns:
        inner = [
            p for p in equation.params.values() if isinstance(p, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr)
        ]
        if not inner:
            yield equation
        for sub in inner:
            yield from equations(getattr(sub, "jaxpr", sub))


def test_no_decoded_weight_is_kept_and_no_gradient_made():
    """Residuals are the four bits; of the size of the weight the backward makes decoded weights, and no product."""
    x, weights, loras, biases = product_parts()
    _, pullback = jax.vjp(lambda x, loras: quant_matmul(x, weights, loras, biases), x, loras)
    dense_sizes = {weight.size for weight in weights}
    assert not [r for r in jax.tree.leaves(pullback) if r.size in dense_sizes and jnp.issubdtype(r.dtype, jnp.floating)]
    outputs = quant_matmul(x, weights, loras, biases)
    shapes = {weight.shape for weight in weights}
    products = [
        equation
        for equation in equations(jax.make_jaxpr(pullback)(outputs).jaxpr)
        if equation.primitive.name == "dot_general" and equation.outvars[0].aval.shape in shapes
    ]
    assert not products


def test_a_chain_of_layers_decodes_one_weight_at_a_time():
    """Compiled, six layers need about one decoded weight of work: none waits from the forward to the backward."""
    size, count = 256, 6
    weights = [NF4.encode(jax.random.normal(key, (size, size))) for key in jax.random.split(jax.random.key(0), count)]

    def loss(x, weights):
        for weight in weights:
            x = jnp.tanh(quant_matmul(x, [weight])[0])
        return x.sum()

    work = jax.jit(jax.grad(loss)).lower(jnp.ones((4, size)), weights).compile().memory_analysis().temp_size_in_bytes
    assert work < 2 * 4 * size**2


@pytest.mark.parametrize("shape", [(512, 64), (512, 192), (1024, 96), (64, 3, 512)])
@pytest.mark.parametrize("double_quant", [True, False])
def test_cut_at_its_blocks_a_part_is_what_is_stored_of_it(shape, double_quant):
    """The arrays of a part are slices of the whole's, and decode to the part."""
    weight = NF4.encode(jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32), double_quant)
    unit = weight.block_length(0)
    row = int(np.prod(shape[1:]))
    assert unit is not None and unit < shape[0] and unit * row % (64 * 256 if double_quant else 64) == 0
    assert weight.block_length(1) is None
    size = unit * row
    part = NF4(
        weight.codes[: size // 2],
        weight.absmax[: size // 64],
        None if weight.nested_absmax is None else weight.nested_absmax[: size // 64 // 256],
        weight.nested_map,
        weight.offset,
        (unit, *shape[1:]),
        weight.dtype_name,
    )
    np.testing.assert_array_equal(part.decode(), weight.decode()[:unit])
