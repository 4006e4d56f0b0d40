"""Routing against a loop over tokens and experts: every size that a group can have, forward and gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import dispatch, gpu_kernel, targets
from jaxtune.pallas.grouped_matmul import GroupedLora, grouped_bias, grouped_matmul
from jaxtune.pallas.routing import (
    api,
    choose_experts,
    expert_weights,
    first_use,
    matmul_of_tokens,
    matmul_to_tokens,
    permute,
    reference,
    route,
    router_sums,
    row_weights,
    token_bias,
    unpermute,
)

TILE = 8
HIDDEN = 5
_draw = np.random.default_rng(0)

# name -> (choice int32[T, k], number of experts)
CASES = {
    "random": (np.stack([_draw.permutation(6)[:3] for _ in range(70)]), 6),
    "one token": (np.array([[3, 0]]), 5),
    "all in one expert": (np.full((37, 1), 2), 4),
    "whole tiles": (np.repeat(np.arange(4), 2 * TILE)[:, None], 4),
    "one over a tile": (np.array([[0]] * (TILE + 1) + [[2]] * (2 * TILE - 1)), 3),
    "one expert": (np.zeros((9, 1), int), 1),
    "many experts": (np.stack([_draw.permutation(256)[:8] for _ in range(40)]), 256),
    "more pairs than a block counts": (np.stack([_draw.permutation(3)[:2] for _ in range(400)]), 3),
    "padding": (np.where(_draw.random((50, 1)) < 0.4, 6, np.stack([_draw.permutation(6)[:2] for _ in range(50)])), 6),
    "nothing but padding": (np.full((11, 2), 4), 4),
}
CASES = {name: (choice.astype(np.int32), experts) for name, (choice, experts) in CASES.items()}
cases = pytest.mark.parametrize("case", CASES)
# Compiled as a whole: operation by operation, that takes several times as long as the tests themselves.
compiled_route = jax.jit(route, static_argnums=(1, 2))


@pytest.fixture
def rng():
    """A test's own numbers: the same whichever tests ran before it."""
    return np.random.default_rng(1)


@cases
@pytest.mark.gpu
def test_pairs_are_sorted_stably_into_whole_tiles(case):
    choice, experts = CASES[case]
    routing = compiled_route(choice, experts, TILE)
    slots, source, groups = np.asarray(routing.slots), np.asarray(routing.source), routing.groups
    flat = choice.reshape(-1)
    want_source, tile_expert = [], []
    for expert in range(experts):
        pairs = np.flatnonzero(flat == expert)
        tiles = -(-len(pairs) // TILE)
        want_source += [*pairs, *[flat.size] * (tiles * TILE - len(pairs))]
        tile_expert += [expert] * tiles
    assert int(groups.count) == len(tile_expert) <= groups.tiles
    np.testing.assert_array_equal(groups.sizes, [(flat == e).sum() for e in range(experts)])
    np.testing.assert_array_equal(groups.tile_expert, tile_expert + [experts] * (groups.tiles - len(tile_expert)))
    np.testing.assert_array_equal(source, want_source + [flat.size] * (groups.rows - len(want_source)))
    for pair, slot in enumerate(slots.reshape(-1)):
        assert source[slot] == pair if flat[pair] < experts else slot == groups.rows
    if (flat >= experts).any():  # what such a slot reads
        assert source[-1] == flat.size


@cases
@pytest.mark.gpu
def test_permute_weigh_and_back_against_a_loop(case, rng):
    choice, experts = CASES[case]
    tokens, k = choice.shape
    routing = compiled_route(choice, experts, TILE)
    x = rng.standard_normal((tokens, HIDDEN)).astype(np.float32)
    weights = rng.random((tokens, k)).astype(np.float32)
    factor = np.append(rng.standard_normal(experts), 0).astype(np.float32)  # what each expert multiplies by
    dout = rng.standard_normal((tokens, HIDDEN)).astype(np.float32)

    def mixture(x, weights):
        rows = permute(x, routing) * row_weights(weights, routing)[:, None]
        each = jnp.asarray(factor)[routing.groups.tile_expert]
        return unpermute(rows * jnp.repeat(each, TILE)[:, None], routing)

    def loop(x, weights):
        return sum(x * weights[:, j : j + 1] * factor[choice[:, j]][:, None] for j in range(k))

    @jax.jit
    def run(x, weights, dout):
        (got, pullback), (want, want_pullback) = (jax.vjp(f, x, weights) for f in (mixture, loop))
        return (got, want), list(zip(pullback(dout), want_pullback(dout), strict=True))

    (got, want), gradients = run(x, weights, dout)
    np.testing.assert_allclose(got, want, atol=1e-6)
    for mine, theirs in gradients:
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("case", ["random", "one token", "many experts", "nothing but padding"])
@pytest.mark.gpu
def test_mosaic_sorts_as_the_reference(case):
    choice, experts = CASES[case]
    with gpu_kernel.interpreted():
        got = jax.jit(lambda choice: route(choice, experts, TILE, implementation="mosaic"))(choice)
    assert dispatch.record["routing sort"][0] == "mosaic"
    want = compiled_route(choice, experts, TILE)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("case", ["all in one expert", "one token", "padding", "nothing but padding"])
@pytest.mark.gpu
def test_mosaic_moves_rows_as_the_reference(case, rng):
    """There and back, forward and gradient, against the loop over tokens, and bit for bit as the reference."""
    choice, experts = CASES[case]
    tokens, k = choice.shape
    routing = compiled_route(choice, experts, TILE)
    x, dout = (rng.standard_normal((tokens, 128)).astype(jnp.bfloat16) for _ in range(2))
    rows = np.append(x, np.zeros_like(x[:1]), 0)[np.asarray(routing.source) // k]
    scaled = rows * np.arange(1, 1 + len(rows)).astype(rows.dtype)[:, None]

    def run(implementation):
        @jax.jit
        def there_and_back(x, scaled, dout):
            there, back = jax.vjp(lambda x: permute(x, routing, implementation=implementation), x)
            out, pullback = jax.vjp(lambda rows: unpermute(rows, routing, implementation=implementation), scaled)
            return there, out, *pullback(dout), *back(scaled)

        return there_and_back(x, scaled, dout)

    want = run("reference")
    with gpu_kernel.interpreted():
        got = run("mosaic")
    assert dispatch.record["routing spread"][0] == "mosaic"
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    real = (choice < experts).sum(1, keepdims=True)
    x, slots = np.asarray(x, np.float32), np.asarray(routing.slots)
    for row, pair in enumerate(np.asarray(routing.source)):
        np.testing.assert_array_equal(np.asarray(got[0][row], np.float32), x[pair // k] if pair < choice.size else 0)
    factors = np.where(slots < routing.groups.rows, slots + 1, 0).sum(1, keepdims=True)
    np.testing.assert_allclose(np.asarray(got[1], np.float32), factors * x, rtol=0.02, atol=1e-6)
    assert not np.asarray(got[1], np.float32)[real[:, 0] == 0].any()


def test_first_use_finds_what_is_wrong(monkeypatch, tmp_path):
    """The cases on which kernels are compared at first use: one row of many that is wrong, one slot that is off."""
    monkeypatch.setattr(targets, "_device_capability", lambda platform: (9, 0))
    monkeypatch.setattr(dispatch, "first_uses", {})
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path))

    class Wrong:
        spread = staticmethod(lambda x, slots, source: reference.spread(x, slots, source).at[5].add(3))

    own = api._SORTS["reference"]
    off = own._replace(
        slots=lambda blocks, firsts: own.slots(blocks, firsts).at[0, :2].set(own.slots(blocks, firsts)[0, 1::-1])
    )
    assert first_use.refusal("right", reference) is None
    assert "differs from the reference" in first_use.refusal("wrong", Wrong)
    assert first_use.sort_refusal("right", own) is None
    assert "differs from the reference" in first_use.sort_refusal("wrong", off)


def test_mosaic_refuses_what_it_does_not_serve():
    routing = route(jnp.zeros((4, 1), jnp.int32), 2, TILE)
    with gpu_kernel.interpreted(), pytest.raises(ValueError, match="hidden size 5; multiples of 64"):
        permute(jnp.zeros((4, 5), jnp.bfloat16), routing, implementation="mosaic")
    with pytest.raises(ValueError, match="needs a Hopper GPU"):
        route(jnp.zeros((4, 1), jnp.int32), 2, TILE, implementation="mosaic")


@pytest.mark.gpu
def test_sums_are_in_float32_and_in_one_order():
    """1 + 2^-8 + 2^-8 is 1 where every sum is rounded to bfloat16, and 1 + 2^-7 where only the last is."""
    routing = route(jnp.array([[0, 1, 2]]), 3, TILE)
    rows = jnp.zeros((routing.groups.rows, 1), jnp.bfloat16)
    rows = rows.at[routing.slots[0]].set(jnp.array([[1.0], [2**-8], [2**-8]], jnp.bfloat16))
    assert float(unpermute(rows, routing)[0, 0]) == 1 + 2**-7


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.gpu
def test_weights_and_their_gradient(renormalize, rng):
    logits = rng.standard_normal((20, 7)).astype(np.float32)
    choice = choose_experts(jnp.asarray(logits), 3)
    np.testing.assert_array_equal(choice, np.argsort(-logits, axis=1, kind="stable")[:, :3])

    def plain(logits):
        weights = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), choice, axis=1)
        return weights / weights.sum(1, keepdims=True) if renormalize else weights

    dout = rng.standard_normal((20, 3)).astype(np.float32)
    got, pullback = jax.vjp(lambda logits: expert_weights(logits, choice, renormalize=renormalize), logits)
    want, want_pullback = jax.vjp(plain, logits)
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(pullback(dout)[0], want_pullback(dout)[0], atol=1e-6)


def test_padding_is_routed_nowhere_and_equals_take_the_first():
    logits = jnp.zeros((4, 6))  # all equal: the lower index first
    real = jnp.array([True, False, True, True])
    choice = choose_experts(logits, 2, real)
    np.testing.assert_array_equal(choice, [[0, 1], [6, 6], [0, 1], [0, 1]])
    assert not np.asarray(expert_weights(logits, choice, renormalize=True))[1].any()
    np.testing.assert_array_equal(route(choice, 6).groups.sizes, [3, 3, 0, 0, 0, 0])


def test_a_token_may_lose_a_part_of_its_experts(rng):
    """Pairs past an expert's capacity, say: the rest share the whole, and the token still counts."""
    logits = jnp.asarray(rng.standard_normal((3, 4)), jnp.float32)
    choice = choose_experts(logits, 3).at[1, 0].set(4).at[2].set(4)
    got, pullback = jax.vjp(lambda logits: expert_weights(logits, choice, renormalize=True), logits)
    rest = jax.nn.softmax(logits[1, choice[1, 1:]])
    np.testing.assert_allclose(got[1], [0, *rest], rtol=1e-6)
    np.testing.assert_allclose(got.sum(1), [1, 1, 0], rtol=1e-6)
    (gradient,) = pullback(jnp.ones_like(got).at[1, 1].set(2.0))
    slope = rest[0] * (1 - rest[0])
    np.testing.assert_allclose(gradient[1, choice[1, 1:]], [slope, -slope], rtol=1e-5)
    assert not np.asarray(gradient[2]).any()
    assert router_sums(logits, choice).tokens == 2


@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_and_z_loss_against_their_definition(masked, rng):
    logits = rng.standard_normal((30, 5)).astype(np.float64)
    mask = (rng.random(30) < 0.6) if masked else np.ones(30, bool)
    chosen = np.argsort(-logits, axis=1)[:, :2]
    probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    share = np.stack([(chosen[mask] == e).sum(1).mean() for e in range(5)])
    want = 5 * (share * probability[mask].mean(0)).sum()
    square = np.log(np.exp(logits).sum(1))[mask] ** 2
    choice = np.where(mask[:, None], chosen, 5).astype(np.int32)

    @jax.jit
    def losses(logits, choice):
        parts = [router_sums(logits[at], choice[at]) for at in (slice(11), slice(11, None))]
        both = (router_sums(logits, choice), parts[0] + parts[1])
        return [(sums.load_balancing_loss(), sums.z_loss()) for sums in both]

    for load_balancing, z in losses(logits.astype(np.float32), choice):
        np.testing.assert_allclose(load_balancing, want, rtol=1e-5)
        np.testing.assert_allclose(z, square.mean(), rtol=1e-5)


def test_losses_of_nothing_but_padding_are_zero():
    sums = router_sums(jnp.ones((3, 4)), jnp.full((3, 2), 4))
    assert float(sums.load_balancing_loss()) == float(sums.z_loss()) == float(sums.tokens) == 0


def of_tokens_and_back(choice, experts, arrays, joined: bool, implementation):
    """Outputs and gradients of a layer's two products; they move their rows themselves if `joined`."""
    routing = compiled_route(choice, experts)
    options = dict(implementation=implementation, transposed=True)

    def run(x, weights, loras):
        (gate_up, down), (a, b) = weights, [GroupedLora(*lora, 0.5) for lora in loras]
        if joined:
            rows = matmul_of_tokens(x, gate_up, routing, a, **options)
            return matmul_to_tokens(rows, down, routing, b, **options)
        rows = grouped_matmul(permute(x, routing), gate_up, routing.groups, a, **options)
        return unpermute(grouped_matmul(rows, down, routing.groups, b, **options), routing)

    out, pullback = jax.vjp(run, *arrays[:3])
    return out, pullback(arrays[3])


# The kernels are interpreted: random choices without padding are the reference's alone.
@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        *[(case, "reference") for case in ("random", "padding", "one token")],
        *[(case, "mosaic") for case in ("padding", "one token")],
    ],
)
@pytest.mark.gpu
def test_products_that_move_their_rows_give_the_same_bits(case, implementation):
    choice, experts = CASES[case]
    draw = np.random.default_rng(4)

    def array(*shape):
        return jnp.asarray(draw.standard_normal(shape), jnp.bfloat16)

    x, dout = array(len(choice), 64), array(len(choice), 64)
    weights = array(experts, 64, 128), array(experts, 128, 64)
    loras = (array(experts, 8, 64), array(experts, 128, 8)), (array(experts, 8, 128), array(experts, 64, 8))
    arrays = x, weights, loras, dout
    if implementation == "reference":
        arrays = jax.tree.map(lambda array: array.astype(jnp.float32), arrays)
    with gpu_kernel.interpreted():
        mine, theirs = (of_tokens_and_back(choice, experts, arrays, joined, implementation) for joined in (True, False))
    for got, want in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert np.isfinite(np.asarray(want, np.float32)).all()
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.full
@pytest.mark.parametrize(
    ("implementation", "rank", "transposed"),
    [("reference", 8, True), ("mosaic", 8, True), ("mosaic", 8, False), ("mosaic", 64, True), ("mosaic", None, True)],
)
@pytest.mark.gpu
def test_biases_of_rows_and_their_gradients(implementation, rank, transposed):
    """In the product of an adapter whose rank is padded they are added before it is rounded, else to what it rounds;
    an error is at most as large as of the pass that adds them. All gradients are those with this pass."""
    choice, experts = CASES["padding"]
    routing, draw = compiled_route(choice, experts), np.random.default_rng(6)
    dtype = jnp.float32 if implementation == "reference" else jnp.bfloat16

    def array(*shape):
        return jnp.asarray(draw.standard_normal(shape), dtype)

    x, bias, dout = array(len(choice), 64), 8 * array(experts, 128), array(routing.groups.rows, 128)
    held = np.asarray(routing.source) < choice.size
    dout = jnp.where(held[:, None], dout, 0)
    weight = array(experts, 64, 128) if transposed else array(experts, 128, 64)
    sides = () if rank is None else (array(experts, rank, 64), array(experts, 128, rank))
    options = dict(transposed=transposed, implementation=implementation)

    def run(x, weight, bias, sides, joined):
        lora = GroupedLora(*sides, 0.5) if sides else None
        if joined:
            return matmul_of_tokens(x, weight, routing, lora, bias, **options)
        return grouped_bias(matmul_of_tokens(x, weight, routing, lora, **options), bias, routing.groups)

    with gpu_kernel.interpreted():
        (mine, pullback), (passed, want) = (
            jax.vjp(lambda *arrays, joined=joined: run(*arrays, joined), x, weight, bias, sides)
            for joined in (True, False)
        )
        for got, wanted in zip(jax.tree.leaves(pullback(dout)), jax.tree.leaves(want(dout)), strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))
    x, weight, bias, sides = jax.tree.map(lambda a: np.asarray(a, np.float64), (x, weight, bias, sides))
    rows, expert = np.asarray(routing.source)[held], choice.reshape(-1)[np.asarray(routing.source)[held]]
    matrices = weight.swapaxes(1, 2) if transposed else weight
    exact = np.einsum("ri,roi->ro", x[rows // choice.shape[1]], matrices[expert]) + bias[expert]
    if sides:
        exact += 0.5 * np.einsum("ri,rki,rok->ro", x[rows // choice.shape[1]], sides[0][expert], sides[1][expert])
    errors = [np.linalg.norm(np.asarray(out, np.float64)[held] - exact) for out in (mine, passed)]
    assert errors[0] <= errors[1] <= 0.01 * np.linalg.norm(exact)
    folded = implementation == "mosaic" and rank == 8
    assert (errors[0] < errors[1]) == folded, "what is rounded once is nearer"


@pytest.mark.parametrize("case", ["random", "padding"])
@pytest.mark.gpu
def test_biases_of_each_tokens_experts_and_their_gradients(case):
    choice, experts = CASES[case]
    tokens, k = choice.shape
    draw = np.random.default_rng(5)
    out, weights, bias, dout = (draw.standard_normal(s) for s in ((tokens, 5), (tokens, k), (experts, 5), (tokens, 5)))
    weights = np.where(choice < experts, weights, 0)
    arrays = [jnp.asarray(array, jnp.float32) for array in (out, weights, bias)]
    got, pullback = jax.vjp(lambda *a: token_bias(*a, jnp.asarray(choice)), *arrays)
    each = np.append(bias, np.zeros((1, 5)), 0)[np.minimum(choice, experts)]  # [T, k, 5]
    np.testing.assert_allclose(got, out + (weights[..., None] * each).sum(1), atol=1e-5)
    dbias = np.zeros((experts + 1, 5))
    np.add.at(dbias, np.minimum(choice, experts), weights[..., None] * dout[:, None])
    want = dout, np.einsum("tn,tkn->tk", dout, each), dbias[:experts]
    for mine, theirs in zip(pullback(jnp.asarray(dout, jnp.float32)), want, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
