"""The one-pass kernel of 8-bit Adam: its table of cells exactly, its body run by Pallas' GPU interpreter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtune.pallas import dispatch, gpu_kernel, targets
from jaxtune.pallas.adam8 import api as kernel
from jaxtune.pallas.formats.blockwise8 import BLOCK, dynamic_map, nearest_codes, upper_bounds
from jaxtune.train.optimizer.adam8 import scale_by_adam_8bit
from tests.pallas.conftest import without_races  # noqa: F401 - a fixture


@pytest.mark.parametrize("signed", [True, False])
def test_a_cell_gives_the_nearest_code(signed):
    """Everywhere, on the bounds and beside them, at both ends and beyond."""
    draw = np.random.default_rng(0)
    bounds = upper_bounds(signed)
    x = np.concatenate(
        [
            draw.uniform(-1, 1, 50_000),
            10 ** draw.uniform(-12, 0, 50_000) * draw.choice([-1, 1], 50_000),
            *(side * each for each in (bounds, np.nextafter(bounds, np.float32(2))) for side in (-1, 1)),
            dynamic_map(signed),
            [0.0, -0.0, 1.0, -1.0, 1e-30],
        ]
    ).astype(np.float32)
    x = np.clip(x if signed else np.abs(x), -1, 1)
    got = kernel.nearest_codes_in_jnp(jnp.asarray(x), jnp.asarray(kernel.cells(signed)), signed)
    np.testing.assert_array_equal(got, nearest_codes(jnp.asarray(x), signed))


def test_lanes_of_a_warp_have_neighbours_and_a_warp_whole_blocks():
    """The strides by which a chunk is stored reach every element once; eight lanes hold a line of 128 bytes."""
    layout = kernel._layout().to_mgpu()
    registers = layout.registers_shape((8, BLOCK))
    strides = layout.tiling.tile_strides((BLOCK, 1))
    (warp,), (lane,), vector = layout.warp_dims, layout.lane_dims, layout.vector_dim
    counts = [*registers]
    counts[warp], counts[lane], counts[vector] = 4, 32, 4
    assert len(strides) == len(registers)
    places = np.indices(counts)
    flat = np.tensordot(strides, places, axes=1)
    assert sorted(flat.reshape(-1)) == list(range(8 * BLOCK))
    np.testing.assert_array_equal(flat // BLOCK % 4, places[warp])
    np.testing.assert_array_equal(flat % 128, 4 * places[lane] + places[vector])


def without_kernel():
    """The plain steps, on a Hopper GPU too."""
    return targets.compile_for((8, 0))


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(("dtype", "scale"), [(jnp.bfloat16, 1.0), (jnp.bfloat16, 0.037), (jnp.float32, 1e-7)])
@pytest.mark.gpu
@pytest.mark.usefixtures("without_races")
def test_steps_are_those_of_the_reference(dtype, scale, monkeypatch):
    """Two steps over a tensor with parts of a chunk and of a block, whole chunks with blocks of zeros, and one too
    small for 8 bits. Gradients come multiplied, and are scaled back."""
    monkeypatch.setattr(kernel, "_PROGRAMS", 2)
    shapes = {"matrix": (461, 130), "padded": (4096,), "short": (100,)}  # 29 chunks: three of a warpgroup, or two
    adam = scale_by_adam_8bit(0.9, 0.95, 1e-8)
    names = list(shapes)

    def gradients(step):
        keys = jax.random.split(jax.random.key(step), len(names))
        drawn = {n: (jax.random.normal(k, shapes[n]) / scale).astype(dtype) for n, k in zip(names, keys, strict=True)}
        return drawn | {"padded": drawn["padded"].at[512:1024].set(0)}

    state = adam.init(gradients(0))
    for step in range(2):
        with without_kernel():
            want, want_state = adam.update(gradients(step), state, scale=jnp.float32(scale))
        assert dispatch.record["adamw_8bit"][0] == "reference"
        with gpu_kernel.interpreted():
            got, got_state = adam.update(gradients(step), state, scale=jnp.float32(scale))
        assert dispatch.record["adamw_8bit"] == ("mosaic", {})
        wide = {n: g.astype(jnp.float32) * jnp.float32(scale) for n, g in gradients(step).items()}
        with without_kernel():
            scaled, scaled_state = adam.update(wide, state)
        assert bits((scaled, scaled_state)) == bits((want, want_state))
        for name in names:
            np.testing.assert_allclose(got[name], want[name], rtol=2e-6, atol=1e-7)
            np.testing.assert_allclose(got_state.m_absmax[name], want_state.m_absmax[name], rtol=1e-6)
            np.testing.assert_allclose(got_state.v_absmax[name], want_state.v_absmax[name], rtol=1e-6)
            # A value within rounding of a bound may take the code beside it.
            for mine, theirs in ((got_state.m, want_state.m), (got_state.v, want_state.v)):
                assert (np.asarray(mine[name]) != np.asarray(theirs[name])).mean() < 1e-3
        state = want_state


@pytest.mark.parametrize("interpreted", [True, False])
@pytest.mark.parametrize("shape", [(4096,), (81, 130), (100,)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.gpu
def test_where_the_step_is_not_finite_all_states_stay(bad, shape, interpreted):
    """Bit for bit; in the step after it all of them change, and those of the caller are not written to."""
    adam = scale_by_adam_8bit(0.9, 0.95, 1e-8)
    first, second, third = (jax.random.normal(jax.random.key(i), shape) for i in range(3))
    update = jax.jit(adam.update)
    with gpu_kernel.interpreted() if interpreted else without_kernel():
        _, state = update(first, adam.init(first))
        before = bits(state)
        _, kept = update(second.at[..., 7].set(bad), state, scale=jnp.float32(bad), finite=jnp.asarray(False))
        assert bits(kept) == bits(state) == before
        _, new = update(third, kept, finite=jnp.asarray(True))
        assert all(one != other for one, other in zip(bits(new), before, strict=True) if one)
        assert bits(kept) == bits(state) == before
    if shape != (100,):
        assert dispatch.record["adamw_8bit"][0] == ("mosaic" if interpreted else "reference")


@pytest.mark.parametrize(
    ("size", "dtype", "codes", "capability", "reason"),
    [
        (4096, jnp.bfloat16, jnp.uint8, (8, 0), "Hopper"),
        (4096, jnp.float16, jnp.uint8, (9, 0), "dtype float16"),
        (4096, jnp.float32, jnp.int8, (9, 0), "codes of int8"),
        (1024, jnp.float32, jnp.uint8, (9, 0), "1024 elements, fewer than 2048"),
        (4096, jnp.float32, jnp.uint8, (9, 0), None),
    ],
)
def test_refusals_say_why(size, dtype, codes, capability, reason):
    with targets.compile_for(capability):
        said = kernel.refusal(jnp.zeros(size, dtype), jnp.zeros((size // BLOCK, BLOCK), codes))
    assert said is None if reason is None else reason in said


def test_the_kernel_takes_no_gradient_that_it_refuses():
    codes, absmax = jnp.zeros((16, BLOCK), jnp.uint8), jnp.zeros(16)
    given = jnp.zeros(4096, jnp.float16), codes, absmax, codes, absmax, 0.1, 0.05, 1.0, True
    assert kernel.plain_update(*given, betas=(0.9, 0.95), eps=1e-8)[0].shape == (4096,)
    with pytest.raises(TypeError, match="adam_update: gradient .*float16"):
        kernel.adam_update(*given, betas=(0.9, 0.95), eps=1e-8)


@pytest.mark.full
def test_over_a_mesh_each_device_runs_the_kernel():
    """On whole moments where XLA would divide them, as in the update of a run; inside a shard_map on its own."""
    adam = scale_by_adam_8bit(0.9, 0.95, 1e-8)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    gradient = jax.random.normal(jax.random.key(0), (2 * 4096,))
    state = adam.init(gradient)
    half = PartitionSpec("data")
    divided = jax.tree.map(lambda a: half if a.ndim else PartitionSpec(), state)
    update = jax.jit(lambda gradient, state: adam.update(gradient, state))
    with gpu_kernel.interpreted():
        want = update(gradient, state)
        assert dispatch.record["adamw_8bit"] == ("mosaic", {})
        with jax.set_mesh(mesh):
            found = [
                update(*jax.device_put((gradient, state), NamedSharding(mesh, PartitionSpec()))),
                jax.jit(
                    jax.shard_map(adam.update, in_specs=(half, divided), out_specs=(half, divided), check_vma=False)
                )(gradient, state),
            ]
        assert dispatch.record["adamw_8bit"] == ("mosaic", {})
    for got in found:
        assert bits(got) == bits(want)


@pytest.mark.full
@pytest.mark.parametrize("rows", [16, 48])  # halves of 16 rows are too small for the kernel
def test_parts_of_a_tensor_give_what_the_whole_does(rows):
    mesh = jax.make_mesh((2,), ("tensors",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    gradient = jax.random.normal(jax.random.key(0), (rows, 128))
    m = jnp.zeros((rows // 2, BLOCK), jnp.uint8), jnp.zeros(rows // 2)
    update = functools.partial(kernel.adam_update, betas=(0.9, 0.95), eps=1e-8)
    numbers = 0.1, 0.05, 1.0, True
    with gpu_kernel.interpreted():
        want = jax.jit(update)(gradient, *m, *m, *numbers)
        with jax.set_mesh(mesh):
            given = jax.device_put((gradient, *m, *m), NamedSharding(mesh, PartitionSpec("tensors")))
            got = jax.jit(functools.partial(update, divided="tensors"))(*given, *numbers)
    for ours, whole in zip(got, want, strict=True):  # codes exactly; XLA rounds a product or two otherwise
        np.testing.assert_allclose(ours, whole, rtol=1e-6 if ours.dtype == jnp.float32 else 0)


@pytest.mark.full
@pytest.mark.gpu
def test_the_check_at_first_use_compares_the_kernel_with_xla():
    """As on a GPU, but interpreted: three or four chunks of each warpgroup and a part of one, made and skipped."""
    with gpu_kernel.interpreted():
        got, want = kernel._small_case(jnp.bfloat16)
    assert len(got) == len(want) == 5
    for one, other in zip(got, want, strict=True):
        assert np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(other)
