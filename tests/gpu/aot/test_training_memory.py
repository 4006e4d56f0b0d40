"""What full fine-tuning over bf16 weights, and QAT, take on an H200: of an 8B shape with a few layers."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxtune.models.files.quant import prepare_qat
from jaxtune.models.stack.residual_plan import KEEP, ResidualPlan
from jaxtune.train.config import OptimConfig
from jaxtune.train.data.batches import Batch
from jaxtune.train.engine.xla_options import compiler_options
from jaxtune.train.optimizer import optimizer_offload
from jaxtune.train.optimizer.optim import make_optimizer, update_bound
from jaxtune.train.program.step import StepProgram
from tests.gpu.aot.target import H200
from tests.gpu.aot.test_compile_h200 import HIDDEN, INNER, LENGTH, ROWS, VOCAB, make_full_model, make_model


def size(tree) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


@functools.cache
def where():
    return H200.sharding()  # once: each call makes another device


def placed(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where()), tree)


def on_host(opt_state):
    host = H200.on_host(where())
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=host) if optimizer_offload.is_hosted(a) else a,
        opt_state,
    )


def compiled(lowered):
    return lowered.compile(compiler_options=compiler_options("gpu", deterministic=False)).memory_analysis()


def program_of(model, layers: int, weights="fp32", name="adamw_8bit", offload=False):
    """(program, abstract state, sums, frozen) of a step of one micro-batch."""
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    schedule = optax.constant_schedule(1e-5)
    optim = OptimConfig(name=name, offload=offload)
    program = StepProgram(
        graph,
        make_optimizer(optim, schedule),
        schedule,
        plan=ResidualPlan.uniform(KEEP, layers),
        max_documents=1,
        weights=weights,
        bound=update_bound(optim, 1.0) if weights == "bf16" else None,
        by_tensor=weights == "bf16",
        offload=offload,
    )
    state = placed(jax.eval_shape(lambda t: program.init(t, 0), trainable))
    if offload:
        state = dataclasses.replace(state, opt_state=on_host(state.opt_state))
    return program, state, placed(jax.eval_shape(program.zero_sums, state.trainable)), placed(frozen)


@functools.cache
def update_of(layers: int, name: str = "adamw_8bit", offload: bool = False):
    program, state, sums, _ = program_of(make_full_model(layers), layers, "bf16", name, offload)
    with H200.lowering():
        lowered = jax.jit(program.update, donate_argnums=(0, 1)).lower(state, sums)
    return compiled(lowered), size(state), size(sums), size(state.trainable)


@pytest.mark.full
def test_bf16_state_is_six_bytes_a_parameter():
    _, state, sums, weights = update_of(2)
    parameters = sum(a.size for a in jax.tree.leaves(nnx.state(make_full_model(2), nnx.Param)))
    assert weights == pytest.approx(2 * parameters, rel=1e-3) and sums == pytest.approx(weights, rel=1e-3)
    assert state == pytest.approx((2 + 2 + 8 / 256) * parameters, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_an_update_without_a_bound_keeps_neither_of_what_it_makes_twice(weights, micro_batches):
    """Without clipping; with gradients in bfloat16, and sums of them in float32."""
    program, state, _, _ = program_of(make_full_model(1), 1, weights)
    program = dataclasses.replace(program, max_grad_norm=None, bound=None, by_tensor=False, micro_batches=micro_batches)
    sums = placed(jax.eval_shape(program.zero_sums, state.trainable))
    with H200.lowering():
        lowered = jax.jit(program.update, donate_argnums=(0, 1)).lower(state, sums)
    assert compiled(lowered).temp_size_in_bytes < 1.01 * (4 + 2 + 8 / 256) * VOCAB * HIDDEN


@pytest.mark.full
def test_adapters_are_updated_at_once_and_in_place():
    """Their moments are not copied, and beside them there is one tensor's direction at a time."""
    program, state, sums, _ = program_of(make_model(2, True), 2)
    program = dataclasses.replace(program, bound=update_bound(OptimConfig(name="adamw_8bit"), 1.0))
    with H200.lowering():
        lowered = jax.jit(program.update, donate_argnums=(0, 1)).lower(state, sums)
    program = lowered.compile(compiler_options=compiler_options("gpu", deterministic=False))
    text, tensors = program.as_text(), jax.tree.leaves(state.trainable)
    kernels = text.count('custom_call_target="mosaic_gpu_v2"')
    assert kernels == sum(a.size >= 4096 for a in tensors) > 0
    assert not re.search(r"= u8\S* copy\(", text)
    assert program.memory_analysis().temp_size_in_bytes < 1.1 * 4 * max(a.size for a in tensors)


@pytest.mark.full
def test_an_adapters_states_on_the_host_are_on_the_device_once():
    """In the update alone, which the plan counts so; no micro-batch is under way then."""
    program, state, sums, _ = program_of(make_model(4, True), 4, name="adamw", offload=True)
    program = dataclasses.replace(program, bound=update_bound(OptimConfig(), 1.0), micro_batches=2)
    results = program.shardings(state, where()), jax.tree.map(lambda a: where(), sums), where()
    with H200.lowering():
        lowered = jax.jit(program.update, donate_argnums=(0, 1), out_shardings=results).lower(state, sums)
    found, hosted = compiled(lowered), optimizer_offload.hosted_bytes(state.opt_state)
    assert found.host_argument_size_in_bytes == found.host_alias_size_in_bytes == hosted > 0
    assert 0 < found.temp_size_in_bytes < 1.1 * hosted


@pytest.mark.full
def test_an_update_needs_room_for_a_tensor_not_for_the_model():
    two, four = update_of(2)[0].temp_size_in_bytes, update_of(4)[0].temp_size_in_bytes
    assert abs(four - two) < 1e8
    assert two < 1.01 * 4 * VOCAB * HIDDEN  # the embedding's direction in float32, and nothing else
    assert update_of(4)[0].alias_size_in_bytes >= 0.99 * update_of(4)[0].argument_size_in_bytes


@pytest.mark.full
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_states_on_the_host_leave_the_device(name):
    """All but a few small ones; they are updated in place there too, and the update needs room for one
    tensor: with AdamW its states thrice, with 8 bits its direction and states, and a moment of the next tensor."""
    kept, state, _, _ = update_of(1, name)
    there, _, _, _ = update_of(1, name, offload=True)
    parameters = sum(a.size for a in jax.tree.leaves(nnx.state(make_full_model(1), nnx.Param)))
    states = (8 if name == "adamw" else 2 + 8 / 256) * parameters
    assert kept.argument_size_in_bytes - there.argument_size_in_bytes == pytest.approx(states, rel=1e-3)
    assert there.host_argument_size_in_bytes == there.host_alias_size_in_bytes == pytest.approx(states, rel=1e-3)
    assert there.host_temp_size_in_bytes == 0
    room = 24 if name == "adamw" else 4 + 1.5 * (2 + 8 / 256)
    assert there.temp_size_in_bytes < 1.01 * room * VOCAB * HIDDEN
    assert state > states


@pytest.mark.full
def test_qat_leaves_no_rounded_weight_behind():
    """Over NF4 with adapters: one group's rounded weights at a time, not those of the layers."""
    layers = 2
    found = []
    for model in (make_model(layers, True), nnx.eval_shape(lambda: prepare_qat(make_model(layers, True)))):
        program, state, sums, frozen = program_of(model, layers)
        with H200.lowering():
            batch, index = placed(Batch.empty(ROWS, LENGTH)), placed(jax.ShapeDtypeStruct((), jnp.int32))
            lowered = jax.jit(program.accumulate, donate_argnums=0).lower(sums, state, frozen, batch, index)
        found.append(compiled(lowered).temp_size_in_bytes)
    plain, qat = found
    assert qat - plain < 3 * HIDDEN * INNER * 4  # bytes: less than one layer's MLP, merged in float32
