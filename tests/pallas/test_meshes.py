"""Public ops over a user's own mesh: axes that XLA divides over, axes that are Explicit (what jax.make_mesh makes), in
force by jax.set_mesh or only in the arrays' shardings. The results are those of one device."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtune.pallas import gpu_kernel, meshes
from jaxtune.pallas.attention import attention, packed_layout
from jaxtune.pallas.delta_rule import gated_delta_rule, short_convolution
from jaxtune.pallas.formats import NF4
from jaxtune.pallas.gated import RowGate, gated_backward, gated_rows_backward
from jaxtune.pallas.gated.mosaic import CHUNK
from jaxtune.pallas.grouped_matmul import grouped_matmul
from jaxtune.pallas.linear_cross_entropy import linear_cross_entropy
from jaxtune.pallas.normed_stream import normed_stream
from jaxtune.pallas.quant_matmul import LoraWeights, gated_matmul, normed_matmul, quant_matmul
from jaxtune.pallas.routing import choose_experts, expert_weights, permute, route, router_sums, row_weights, unpermute
from jaxtune.pallas.thin_pair import thin_pair


@pytest.fixture(autouse=True)
def without_races():
    """Nothing: the interpreter takes kernels that run on two devices at once for one device's, and calls their accesses
    of different buffers races."""


DEVICES, ROWS, LENGTH, HIDDEN, EXPERTS = 2, 4, 16, 64, 4


def draw(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)


def packed_attention(query, key, ids):
    return attention(query, key, key, packed_layout(ids.shape, ids), scale=0.2)


def linears(x, weight):
    lora = LoraWeights(draw(4, HIDDEN), draw(32, 4))
    return quant_matmul(x, [weight, NF4.encode(weight)], [lora, None])


def loss(x, head):
    targets = jnp.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 32
    return linear_cross_entropy(x, head, targets, jnp.ones((ROWS, LENGTH)))[0]


def experts(x, router):
    logits = x.reshape(-1, HIDDEN) @ router.T
    choice = choose_experts(logits, 2)
    routing = route(choice, EXPERTS, 8)
    rows = grouped_matmul(permute(x.reshape(-1, HIDDEN), routing), draw(EXPERTS, HIDDEN, HIDDEN), routing.groups)
    rows *= row_weights(expert_weights(logits, choice, renormalize=True), routing)[:, None]
    return unpermute(rows, routing), router_sums(logits, choice).z_loss()


def gate(x, up):
    return gated_backward(x, up, x, "silu")


def gated_linear(x, weight):
    return gated_matmul(x, x + 1, weight, LoraWeights(draw(4, HIDDEN), draw(32, 4)), activation="silu")


def normed_linear(x, norm, weight):
    return normed_matmul(x, norm, [weight], [LoraWeights(draw(4, HIDDEN), draw(32, 4))], [None])


def gate_rows(x, weights):
    return gated_rows_backward(jnp.concatenate([x, x + 1], 1), weights, x, RowGate("silu"))


def adapter(dout, inner, b):
    return thin_pair(dout, b, inner)


def delta_rule(x, ids):
    layout = packed_layout(ids.shape, ids)
    x = short_convolution(x, draw(HIDDEN, 4), layout).reshape(ROWS, LENGTH, 2, 32)
    rates = jax.nn.sigmoid(x[..., 0])
    return gated_delta_rule(x, x + 1, x, -rates, rates, layout)


IDS = jnp.asarray(np.repeat([[1, 2]], ROWS, 0).repeat(LENGTH // 2, 1), jnp.int32)
# Of an op: arrays that are divided over the mesh, and arrays that every device has.
OPS = {
    packed_attention: ([draw(ROWS, LENGTH, 4, 16), draw(ROWS, LENGTH, 2, 16), IDS], []),
    linears: ([draw(ROWS, LENGTH, HIDDEN)], [draw(32, HIDDEN)]),
    loss: ([draw(ROWS, LENGTH, HIDDEN)], [draw(32, HIDDEN)]),
    experts: ([draw(ROWS, LENGTH, HIDDEN)], [draw(EXPERTS, HIDDEN)]),
    delta_rule: ([draw(ROWS, LENGTH, HIDDEN), IDS], []),
    gate: ([draw(ROWS, LENGTH), draw(ROWS, LENGTH) + 1], []),
    gated_linear: ([draw(ROWS, LENGTH, HIDDEN)], [draw(32, HIDDEN)]),
    normed_linear: ([draw(ROWS, LENGTH, HIDDEN)], [draw(HIDDEN), draw(32, HIDDEN)]),
    gate_rows: ([draw(ROWS, LENGTH), draw(ROWS)], []),
    adapter: ([draw(ROWS, LENGTH), draw(ROWS, 4)], [draw(LENGTH, 4)]),
    normed_stream: ([draw(ROWS, LENGTH, HIDDEN)], [draw(HIDDEN)]),
}


def with_gradient(op):
    """The results of op, and the gradient of the sum of their squares by its first array."""

    def run(*arrays):
        def total(first):
            results = op(first, *arrays[1:])
            return sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(results)), results

        return jax.grad(total, has_aux=True)(arrays[0])

    return run


@pytest.fixture(scope="module")
def alone():
    """What one device gives."""
    return {op: jax.jit(with_gradient(op))(*divided, *whole) for op, (divided, whole) in OPS.items()}


# Every pair of an axis's name, its kind and how the mesh is in force.
WAYS = [
    ("data", AxisType.Auto, False),
    ("data", AxisType.Explicit, True),
    ("x", AxisType.Auto, True),
    ("x", AxisType.Explicit, False),
]


@pytest.mark.full
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize(
    ("name", "kind", "in_force"),
    WAYS,
    ids=["data-Auto-arrays", "data-Explicit-set_mesh", "x-Auto-set_mesh", "x-Explicit-arrays"],
)
def test_a_mesh_gives_what_one_device_gives(alone, op, name, kind, in_force):
    mesh = jax.make_mesh((DEVICES,), (name,), axis_types=(kind,), devices=jax.devices()[:DEVICES])
    divided, whole = OPS[op]
    arrays = [jax.device_put(array, NamedSharding(mesh, PartitionSpec(name))) for array in divided]
    arrays += [jax.device_put(array, NamedSharding(mesh, PartitionSpec())) for array in whole]
    with jax.set_mesh(mesh) if in_force else contextlib.nullcontext():
        compiled = jax.jit(with_gradient(op)).lower(*arrays).compile()
        results = compiled(*arrays)
    for got, want in zip(jax.tree.leaves(results), jax.tree.leaves(alone[op]), strict=True):
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    if kind is AxisType.Explicit:
        gradient, results = results
        assert gradient.sharding.spec[0] == name
        if op is gate or (op is packed_attention and name == "data"):  # rows are computed where they are
            assert "all-gather" not in compiled.as_text()


def test_a_result_of_an_explicit_mesh_is_divided_as_the_first_array_is():
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        x = jax.device_put(draw(ROWS, LENGTH, HIDDEN), NamedSharding(mesh, PartitionSpec("a", "b")))
        (out,) = jax.jit(lambda x: quant_matmul(x, [jnp.ones((HIDDEN + 1, HIDDEN))]))(x)
        assert out.sharding.spec == PartitionSpec("a", "b", None)


def test_what_has_no_array_of_an_explicit_mesh_is_whole():
    """Layouts of sizes alone, and numpy's arrays."""
    ids, weight = np.asarray(IDS), np.asarray(draw(32, HIDDEN))
    want = packed_layout(ids.shape), packed_layout(ids.shape, ids), NF4.encode(weight)
    with jax.set_mesh(jax.make_mesh((DEVICES,), ("data",), devices=jax.devices()[:DEVICES])):
        found = packed_layout(ids.shape), packed_layout(ids.shape, ids), NF4.encode(weight)
        traced = jax.jit(lambda: packed_layout(ids.shape))()
    for got, one in zip(jax.tree.leaves((*found, traced)), jax.tree.leaves((*want, want[0])), strict=True):
        np.testing.assert_array_equal(got, one)
        assert got.sharding.is_fully_replicated


@pytest.mark.parametrize("name", ["data", "x"])
def test_a_kernel_runs_on_each_device(name):
    """Interpreted, where XLA divides: rows over the axis `data`, everything whole along another; inside a shard_map it
    sees what that gives it."""
    mesh = jax.make_mesh((DEVICES,), (name,), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    gate, up, dgated = jax.random.normal(jax.random.key(0), (3, ROWS, CHUNK)).astype(jnp.bfloat16)
    weight, seen = NF4.encode(draw(32, HIDDEN)), []
    x = draw(ROWS, HIDDEN).astype(jnp.bfloat16)

    def run(*arrays):
        return gated_backward(*arrays, "silu", implementation="mosaic")

    def matmul(x, weight):
        return quant_matmul(x, [weight], implementation="mosaic")

    def local(*arrays):
        seen.append(arrays[0].shape)
        return run(*arrays)

    spec = PartitionSpec(name)
    with gpu_kernel.interpreted():
        want, product = jax.jit(run)(gate, up, dgated), jax.jit(matmul)(x, weight)
        with jax.set_mesh(mesh):
            arrays = jax.device_put((gate, up, dgated), NamedSharding(mesh, spec))
            lowered = jax.jit(run).lower(*arrays).as_text()
            by_rows = jax.shard_map(local, in_specs=spec, out_specs=spec, check_vma=False)
            found = jax.jit(run)(*arrays), jax.jit(by_rows)(*arrays)
            divided = jax.device_put(weight, NamedSharding(mesh, PartitionSpec()))
            over = jax.jit(matmul)(jax.device_put(x, NamedSharding(mesh, spec)), divided)
        explicit = jax.make_mesh((DEVICES,), (name,), devices=jax.devices()[:DEVICES])
        with jax.set_mesh(explicit):
            arrays = jax.device_put((gate, up, dgated), NamedSharding(explicit, spec))
            found = *found, jax.jit(run)(*arrays)
        assert found[2][0].sharding.spec[0] == name
    assert seen == [(ROWS // DEVICES, CHUNK)]
    assert (f"tensor<{ROWS // DEVICES}x{CHUNK}xbf16>" in lowered) == (name == "data")
    for got in found:
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(over[0], product[0])


def test_what_each_device_sees():
    mesh = jax.make_mesh((2, 2), ("data", "x"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    seen = []

    def sums(rows, head, count, more=None):
        seen.append((rows.shape, head.shape, count, None if more is None else more.shape))
        return rows * 2, head + rows.sum(0), None

    run = meshes.on_each_device(sums, rows=1, results=1)
    x, head = draw(ROWS, HIDDEN), draw(HIDDEN)
    want = run(x, head, 3, more=x)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x, head: run(x, head, 3, more=x))(x, head)
        odd = jax.jit(lambda x, head: run(x, head, 3))(x[:3], head)
    assert seen == [
        ((ROWS, HIDDEN), (HIDDEN,), 3, (ROWS, HIDDEN)),
        ((ROWS // 2, HIDDEN), (HIDDEN,), 3, (ROWS, HIDDEN)),
        ((3, HIDDEN), (HIDDEN,), 3, None),
    ]
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], x.sum(0) + 2 * head, rtol=1e-5)  # a sum over the rows' devices
    np.testing.assert_allclose(odd[1], x[:3].sum(0) + head, rtol=1e-5)
    assert got[2] is None
