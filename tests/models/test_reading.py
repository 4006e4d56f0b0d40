"""A loaded model lies in one piece: the memory of tensors that are quantised, decoded or cast on a device is made
before any tensor is read, and they are written into it; those that the host casts and places come before them."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import CancelledError

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import shapes_of
from hypothesis import given
from hypothesis import strategies as st
from random_weights import rewrite, write_checkpoint
from test_mxfp4 import EXPERTS, checkpoint
from tiny import CONFIGS

from jaxtune.models.files import reading
from jaxtune.models.files.quant import encode
from jaxtune.models.hf import Pretrained
from jaxtune.models.lora import matrices
from jaxtune.models.placement import partition
from jaxtune.pallas.formats import Stored

MOE = CONFIGS["qwen3_moe"]
DTYPES = {name: np.dtype(name) for name in ("float32", "float16", "bfloat16")}


@pytest.fixture
def made(monkeypatch) -> list:
    """What reading._zeros makes, as the places of its arrays, until the test ends."""
    zeros, all_of_it = reading._zeros, []

    def noted(shapes, where):
        result = zeros(shapes, where)
        all_of_it.append(places(result))
        return result

    monkeypatch.setattr(reading, "_zeros", noted)
    return all_of_it


def places(tensor) -> list[int]:
    """Where the arrays of a tensor, or their parts on all devices, lie."""
    return [part.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tensor) for part in leaf.addressable_shards]


def weights(model) -> list:
    """The model's tensors, quantised weights whole."""
    return jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, Stored))


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("load_in", [None, "nf4", "fp8", "int8"])
def test_what_is_computed_lies_where_its_zeros_were(tmp_path, made, load_in, stored):
    write_checkpoint(tmp_path, MOE, shapes_of(MOE), DTYPES[stored])
    model = Pretrained(tmp_path, "bfloat16", load_in).load()
    found = [places(weight) for weight in weights(model) if isinstance(weight, Stored)]
    assert sorted(found) == sorted(made)
    assert bool(made) == (load_in is not None)  # the host casts


@pytest.mark.full
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_numbers_are_those_of_the_file_cast_and_quantised(tmp_path, stored):
    write_checkpoint(tmp_path, MOE, shapes_of(MOE), DTYPES[stored])
    plain = dict(matrices(Pretrained(tmp_path, "float32").load()))
    for load_in in ("nf4", "fp8"):
        model = Pretrained(tmp_path, "bfloat16", load_in).load()
        for name, matrix in matrices(model):
            cast = jnp.asarray(np.asarray(plain[name].stored_weight).astype(DTYPES["bfloat16"]))
            want = encode(cast, load_in) if matrix.quantizable else cast
            jax.tree.map(np.testing.assert_array_equal, matrix.stored_weight, want)


def test_the_compiled_program_writes_over_the_zeros():
    shapes = jax.eval_shape(lambda: encode(jnp.zeros((96, 64), jnp.bfloat16), "nf4"))
    compiled = reading._moved_into.lower(shapes, shapes).compile().memory_analysis()
    assert compiled is not None
    assert compiled.alias_size_in_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("load_in", [None, "nf4"])
def test_what_is_decoded_lies_where_its_zeros_were(tmp_path, made, load_in):
    checkpoint(tmp_path, EXPERTS)
    model = Pretrained(tmp_path, "bfloat16", load_in).load()
    computed = [matrix.stored_weight for _, matrix in matrices(model) if matrix.quantizable]
    assert sorted(places(weight) for weight in computed) == sorted(made)


def test_on_a_mesh_each_device_writes_its_part_over_its_zeros(tmp_path, made):
    write_checkpoint(tmp_path, MOE, shapes_of(MOE))
    model = Pretrained(tmp_path, "bfloat16", "nf4").load(mesh=partition.make_mesh(1, 2))
    whole = [weight for weight in weights(model) if not isinstance(weight, Stored) and weight.is_fully_replicated]
    written = [places(weight) for weight in weights(model) if not any(weight is other for other in whole)]
    assert whole and sorted(written) == sorted(made)  # the host casts what each device has whole
    assert all(len(place) % 2 == 0 for place in made)
    alone = Pretrained(tmp_path, "bfloat16", "nf4").load()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(model), jax.tree.leaves(alone))


def test_what_is_placed_as_it_is_stored_comes_before_anything_is_freed(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, MOE, shapes_of(MOE), DTYPES["bfloat16"])
    order, put, zeros = [], partition.put, reading._zeros

    def noted(tensor, where):
        order.append("placed" if isinstance(tensor, np.ndarray) else "quantised")
        return put(tensor, where)

    monkeypatch.setattr(reading, "_zeros", lambda *given: (order.append("made"), zeros(*given))[1])
    monkeypatch.setattr(reading.partition, "put", noted)
    model = Pretrained(tmp_path, "bfloat16", "nf4").load()
    count = sum(isinstance(weight, Stored) for weight in weights(model))
    others = len(weights(model)) - count
    assert order == ["made"] * count + ["placed"] * others + ["quantised"] * count


def test_a_load_that_is_cancelled_frees_the_zeros(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, MOE, shapes_of(MOE))
    cancelled, moved, done = threading.Event(), reading._moved_into, []

    def first(*given):
        cancelled.set()
        done.append(given)
        return moved(*given)

    monkeypatch.setattr(reading, "IN_FLIGHT_BYTES", 1)
    monkeypatch.setattr(reading, "_moved_into", first)
    gc.collect()
    before = len(jax.live_arrays())
    with pytest.raises(CancelledError):
        Pretrained(tmp_path, "bfloat16", "nf4").load(cancelled)
    assert 0 < len(done) < 3  # the next tensor may have begun
    done.clear()
    gc.collect()
    assert len(jax.live_arrays()) <= before


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight", "model.norm.weight"])
def test_numbers_that_are_not_finite_are_named(tmp_path, name):
    write_checkpoint(tmp_path, MOE, shapes_of(MOE))
    rewrite(tmp_path, lambda content: content[name].__setitem__(-1, np.inf))
    for load_in in (None, "nf4", "fp8"):
        with pytest.raises(ValueError, match=rf"not finite in bfloat16: {name} \(in model.safetensors\)"):
            Pretrained(tmp_path, "bfloat16", load_in).load()


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=9))
def test_the_host_finds_what_is_not_finite(dtype, numbers):
    """As a device does, also of what a cast makes infinite."""
    tensor = np.array(numbers, np.float32)
    for target in (None, dtype):
        with np.errstate(over="ignore"):
            want = bool(np.isfinite(tensor if target is None else tensor.astype(DTYPES[dtype])).all())
        assert reading.are_finite(tensor, target) == [want]
    with np.errstate(over="ignore", invalid="ignore"):
        cast = tensor.astype(DTYPES[dtype])
    assert reading.are_finite(cast) == [bool(np.isfinite(cast).all())] == reading.are_finite(jnp.asarray(cast))
    assert reading.are_finite(cast) == [bool(reading._all_finite(jnp.asarray(cast), None))]
