"""The short causal convolution of each channel, restarted with each document, and silu of it or not.

out[t] = silu(sum over j of weight[k - 1 - j] x[t - j]), over those j for which t - j is a token of t's document.

XLA's forward took 0.36 ms where the bytes take 0.1 (H200, Qwen3.5-35B-A3B), and for x's gradient it moves three times a
kernel's bytes; so there are Triton kernels for queries, keys and values together.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import compat, dispatch, meshes
from jaxtune.pallas.attention import packed_layout

_TAPS = 4  # weights of a channel that the kernel takes
_WIDTH, _TOKENS = 256, 64  # channels and tokens of a program


def forward(x, weight, layout, activation: str | None = "silu"):
    """As api.short_convolution; the derivative recomputes the float32 sums."""
    return jax.checkpoint(functools.partial(_convolved, activation))(x, weight, layout)


def _convolved(activation, x, weight, layout):
    length, taps = x.shape[1], weight.shape[1]
    index = jnp.arange(length)
    total = jnp.zeros(x.shape, jnp.float32)
    for back in range(min(taps, length)):
        inside = index - back >= layout.doc_start
        earlier = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :length].astype(jnp.float32)
        total = total + jnp.where(inside[..., None], earlier, 0.0) * weight[:, taps - 1 - back].astype(jnp.float32)
    out = total if activation is None else jax.nn.silu(total)
    return jnp.where((index < layout.doc_end)[..., None], out, 0.0).astype(x.dtype)


def divided(out, part_sizes):
    return tuple(jnp.split(out, list(itertools.accumulate(part_sizes))[:-1], axis=-1))


def refusal(x, weight, part_sizes) -> str | None:
    """Why the kernels cannot compute the parts of x [B, T, C] and their gradient, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {x.dtype}"
    if weight.shape[1] != _TAPS or len(part_sizes) != 3:
        return f"{weight.shape[1]} taps and {len(part_sizes)} parts; it serves {_TAPS} and 3"
    if any(size % _WIDTH for size in part_sizes):
        return f"parts of {', '.join(map(str, part_sizes))} channels; they must be multiples of {_WIDTH}"
    return _first_use(jnp.dtype(x.dtype))


def _first_use(dtype) -> str | None:

    def compare():
        runs = ((1, 70), (0, 5), (2, 1), (3, 2), (4, 64), (0, 3))
        ids = np.concatenate([np.repeat(number, tokens) for number, tokens in runs])[None].astype(np.int32)
        layout, parts = packed_layout(ids.shape, jnp.asarray(ids)), (_WIDTH, _WIDTH, 2 * _WIDTH)
        keys = jax.random.split(jax.random.key(0), 3)
        x, dout = (jax.random.normal(key, (*ids.shape, sum(parts))).astype(dtype) for key in keys[:2])
        weight = jax.random.normal(keys[2], (sum(parts), _TAPS)).astype(dtype)

        def run(function, x, weight, douts):
            out, pull = jax.vjp(lambda x: function(x, weight, layout, parts), x)
            return (*out, *pull(douts))

        def exactly(x, weight, layout, part_sizes):
            return divided(forward(x, weight, layout), part_sizes)

        arrays = x, weight, divided(dout, parts)
        kernel_results = jax.jit(lambda x, weight, douts: run(in_parts, x, weight, douts))(*arrays)
        exact = dispatch.exactly(lambda x, weight, douts: run(exactly, x, weight, douts))
        return kernel_results, exact(*jax.tree.map(lambda array: array.astype(jnp.float32), arrays))

    return dispatch.first_use("short_convolution", "triton", dtype.name, compare)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def in_parts(x, weight, layout, part_sizes):
    """As api.short_convolution_parts, for x of 16 bits, weight [C, 4] and three sizes, multiples of 256."""

    def run(x, start, end, weight):
        return tuple(_call("convolution_kernel", x, start, end, weight, (), part_sizes, part_sizes))

    return meshes.on_each_device(run, rows=3)(x, layout.doc_start, layout.doc_end, weight)


def _in_parts_fwd(x, weight, layout, part_sizes):
    return in_parts(x, weight, layout, part_sizes), (x, weight, layout)


def _in_parts_bwd(part_sizes, residuals, douts):
    """If weight is frozen, XLA removes the computation of its gradient."""
    x, weight, layout = residuals

    def run(x, start, end, douts, weight):
        return _call("convolution_gradient_kernel", x, start, end, weight, douts, part_sizes, (sum(part_sizes),))[0]

    dx = meshes.on_each_device(run, rows=4)(x, layout.doc_start, layout.doc_end, douts, weight)
    (dweight,) = jax.vjp(lambda weight: forward(x, weight, layout), weight)[1](jnp.concatenate(douts, axis=-1))
    return dx, dweight, None


def _call(kernel: str, x, start, end, weight, extra_arrays, part_sizes, sizes) -> list[jax.Array]:
    """Outputs [B, T, size] in x's dtype, for each of `sizes`, of a kernel of convolution_kernel.py."""
    from jaxtune.pallas.delta_rule import convolution_kernel

    rows, length, channels = x.shape
    return compat.triton_call(
        getattr(convolution_kernel, kernel),
        (x, weight, start, end, *extra_arrays),
        [jax.ShapeDtypeStruct((rows, length, size), x.dtype) for size in sizes],
        (channels // _WIDTH, -(-length // _TOKENS), rows),
        warps=2,
        stages=1,
        LENGTH=length,
        CHANNELS=channels,
        FIRST=part_sizes[0],
        SECOND=part_sizes[1],
        TOKENS=_TOKENS,
        WIDTH=_WIDTH,
    )


in_parts.defvjp(_in_parts_fwd, _in_parts_bwd)


def step(x, weight, window):
    """As api.short_convolution_step: (out [B, 1, C], next window)."""
    tokens = jnp.concatenate([window, x], axis=1)
    total = (tokens.astype(jnp.float32) * weight.T.astype(jnp.float32)).sum(1, keepdims=True)
    return jax.nn.silu(total).astype(x.dtype), tokens[:, 1:]
