"""Public ops over a user's own mesh: axes that XLA divides over, axes that are Explicit (what jax.make_mesh makes), in
force by jax.set_mesh or only in the arrays' shardings. The results are those of one device."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtune.pallas import meshes
from jaxtune.pallas.attention import attention, packed_layout
from jaxtune.pallas.formats import NF4
from jaxtune.pallas.gated import gated_backward
from jaxtune.pallas.grouped_matmul import grouped_matmul
from jaxtune.pallas.linear_cross_entropy import linear_cross_entropy
from jaxtune.pallas.quant_matmul import LoraWeights, quant_matmul
from jaxtune.pallas.routing import choose_experts, expert_weights, permute, route, router_sums, row_weights, unpermute

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


IDS = jnp.asarray(np.repeat([[1, 2]], ROWS, 0).repeat(LENGTH // 2, 1), jnp.int32)
# Of an op: arrays that are divided over the mesh, and arrays that every device has.
OPS = {
    packed_attention: ([draw(ROWS, LENGTH, 4, 16), draw(ROWS, LENGTH, 2, 16), IDS], []),
    linears: ([draw(ROWS, LENGTH, HIDDEN)], [draw(32, HIDDEN)]),
    loss: ([draw(ROWS, LENGTH, HIDDEN)], [draw(32, HIDDEN)]),
    experts: ([draw(ROWS, LENGTH, HIDDEN)], [draw(EXPERTS, HIDDEN)]),
    gate: ([draw(ROWS, LENGTH), draw(ROWS, LENGTH) + 1], []),
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


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("in_force", [True, False], ids=["set_mesh", "by the arrays"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["data", "x"])
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


def test_a_kernel_that_nothing_divides_refuses_a_mesh_but_not_a_device_of_it():
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    assert meshes.refusal() is None
    with jax.set_mesh(mesh):
        assert "a mesh of several devices" in (meshes.refusal() or "")
        seen = []
        jax.jit(
            jax.shard_map(
                lambda x: seen.append(meshes.refusal()) or x, in_specs=PartitionSpec(), out_specs=PartitionSpec()
            )
        )(jnp.ones(2))
    assert seen == [None]
