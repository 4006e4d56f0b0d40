"""The backward of a gated activation as a Pallas Mosaic GPU kernel for Hopper, which writes over what it reads."""

# Pallas' annotations do not know its own references.
# pyright: reportArgumentType=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import dispatch, gpu_kernel
from jaxtune.pallas.gated import reference

_VECTOR = 8  # bfloat16 that a lane reads and writes at once: 16 bytes
_LANES = 128  # of a warpgroup


@dataclasses.dataclass(frozen=True)
class Form:
    vectors: int = 1
    warpgroups: int = 2
    resident: int = 0  # programs of a multiprocessor that go from chunk to chunk; 0: a program a chunk


_interpret: Any = None


@contextlib.contextmanager
def interpreted():
    """Runs the kernel's body in Pallas' GPU interpreter, on any machine: for tests."""
    global _interpret
    before, _interpret = _interpret, plgpu.InterpretGPUParams()
    try:
        yield
    finally:
        _interpret = before


def _sigmoid_argument(x, activation: str):
    """(z, its derivative): the activation is x sigmoid(z)."""
    if activation == "silu":
        return x, 1.0
    scale, cubic = 2 * np.sqrt(2 / np.pi), 0.044715  # gelu_tanh: (1 + tanh(z / 2)) / 2 is the sigmoid of z
    square = x * x
    return x * (scale + scale * cubic * square), scale + 3 * scale * cubic * square


def _derivatives(gate, up, dgated, activation):
    gate, up, dgated = (each.astype(jnp.float32) for each in (gate, up, dgated))
    z, slope = _sigmoid_argument(gate, activation)
    root = lax.rsqrt(1.0 + jnp.exp(-z))
    sigmoid = root * root
    active = gate * sigmoid
    dactive = sigmoid + active * (1.0 - sigmoid) * slope
    return active * up, dgated * up * dactive, dgated * active


def _kernel(gate_ref, up_ref, dgated_ref, *, activation, form):
    refs = (gate_ref, up_ref, dgated_ref)
    chunk = gate_ref.shape[1]
    layout = plgpu.Layout.WG_STRIDED((chunk,), _VECTOR)
    worker = lax.axis_index("program") * form.warpgroups + lax.axis_index("wg")
    workers = lax.axis_size("program") * form.warpgroups
    chunks = gate_ref.shape[0]

    def load(number):
        return tuple(plgpu.load(ref.at[number], layout=layout, optimized=False) for ref in refs)

    def store(number, values):
        for ref, value in zip(refs, _derivatives(*values, activation), strict=True):
            ref[number] = value.astype(ref.dtype)

    if not form.resident:
        pl.when(worker < chunks)(lambda: store(worker, load(worker)))
        return
    count = lax.div(chunks - worker + (workers - 1), workers)

    def one(index, held):
        number = worker + index * workers
        ahead = load(jnp.minimum(number + workers, chunks - 1))
        store(number, held)
        return ahead

    lax.fori_loop(0, count, one, load(jnp.minimum(worker, chunks - 1)))


def gated_backward(gate, up, dgated, activation, form=Form()):
    size = gate.size
    chunk = _VECTOR * _LANES * form.vectors
    chunks = size // chunk
    refs = [jax.new_ref(each.reshape(chunks, chunk)) for each in (gate, up, dgated)]
    programs = -(-chunks // form.warpgroups)
    if form.resident:
        programs = min(programs, form.resident * dispatch.multiprocessors())
    gpu_kernel.kernel(
        functools.partial(_kernel, activation=activation, form=form),
        _interpret,
        out_type=(),
        grid=(programs,),
        grid_names=("program",),
        num_threads=form.warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*refs)
    return tuple(ref[...].reshape(gate.shape) for ref in refs)
