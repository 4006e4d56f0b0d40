"""The short causal convolution of each channel along a row, restarted with each document, and silu of it, in plain jnp:
of whole rows (`forward`, or `in_parts` for queries, keys and values), and of the next token in generation (`step`).

out[t] = silu(sum over j of weight[k - 1 - j] x[t - j]), over those j for which t - j is a token of t's document.

The gradient of x has a Triton kernel for NVIDIA GPUs, by which `in_parts` is differentiated where `refusal` does not
refuse: XLA needs a pass that joins the parts' gradients, one that stores the gradients of the sums in float32, and one
that adds them up, which move three times as much.
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


@jax.checkpoint
def forward(x, weight, layout):
    """Returns silu of the causal convolution of each channel of x [B, T, C] along its document, [B, T, C] in x's dtype,
    0 at padding. weight [C, k]: the last column multiplies the token itself, the first the token k - 1 before it.
    layout: the document bounds, which the convolution does not cross. The derivative stores x and weight and recomputes
    the float32 sums, which are twice as large as a 16-bit x. short_convolution calls this."""
    length, taps = x.shape[1], weight.shape[1]
    index = jnp.arange(length)
    total = jnp.zeros(x.shape, jnp.float32)
    for back in range(min(taps, length)):
        inside = index - back >= layout.doc_start
        earlier = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :length].astype(jnp.float32)
        total = total + jnp.where(inside[..., None], earlier, 0.0) * weight[:, taps - 1 - back].astype(jnp.float32)
    return jnp.where((index < layout.doc_end)[..., None], jax.nn.silu(total), 0.0).astype(x.dtype)


def divided(out, parts):
    """Divides the channels of out [B, T, C] into parts of these sizes: a tuple of arrays [B, T, size]."""
    return tuple(jnp.split(out, list(itertools.accumulate(parts))[:-1], axis=-1))


def refusal(x, weight, parts) -> str | None:
    """Returns the reason why the kernel cannot compute the gradient of x [B, T, C], or None: no GPU that runs Triton
    kernels, or no jax-triton; a dtype other than bfloat16 and float16; other than four taps or three parts; parts that
    are no multiples of 256 channels; or a difference from plain jnp in the check at first use on this GPU."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {x.dtype}"
    if weight.shape[1] != _TAPS or len(parts) != 3:
        return f"{weight.shape[1]} taps and {len(parts)} parts; it serves {_TAPS} and 3"
    if any(size % _WIDTH for size in parts):
        return f"parts of {', '.join(map(str, parts))} channels; they must be multiples of {_WIDTH}"
    return _first_use(jnp.dtype(x.dtype))


def _first_use(dtype) -> str | None:
    """Returns the reason why this GPU must not run the kernel in `dtype`, or None. It compares a small packed case with
    plain jnp, once; see dispatch.first_use, also for when it is None without a check."""

    def compare():
        runs = ((1, 70), (0, 5), (2, 1), (3, 2), (4, 64), (0, 3))
        ids = np.concatenate([np.repeat(number, tokens) for number, tokens in runs])[None].astype(np.int32)
        layout, parts = packed_layout(ids.shape, jnp.asarray(ids)), (_WIDTH, _WIDTH, 2 * _WIDTH)
        keys = jax.random.split(jax.random.key(0), 3)
        x, dout = (jax.random.normal(key, (*ids.shape, sum(parts))).astype(dtype) for key in keys[:2])
        weight = jax.random.normal(keys[2], (sum(parts), _TAPS)).astype(dtype)
        wide = tuple(array.astype(jnp.float32) for array in (x, weight, dout))
        got = jax.jit(lambda *douts: _gradient(x, douts, layout.doc_start, layout.doc_end, weight))(
            *divided(dout, parts)
        )
        exact = dispatch.exactly(lambda x, weight, dout: jax.vjp(lambda x: forward(x, weight, layout), x)[1](dout))
        return (got,), exact(*wide)

    return dispatch.first_use("short_convolution", "triton", dtype.name, compare)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def in_parts(x, weight, layout, parts):
    """Returns `forward` divided into `parts` along the channels, with a custom derivative, whose gradient of x the
    kernel computes. `refusal` says which calls are supported."""
    return divided(forward(x, weight, layout), parts)


def _in_parts_fwd(x, weight, layout, parts):
    """The forward rule of `in_parts`: (its result, the residuals (x, weight, layout))."""
    return in_parts(x, weight, layout, parts), (x, weight, layout)


def _in_parts_bwd(parts, residuals, douts):
    """The backward rule of `in_parts`: (the gradients of x and weight, None for the layout), from the gradients of its
    parts. XLA removes that of weight if it is frozen."""
    del parts
    x, weight, layout = residuals
    dx = meshes.on_each_device(_gradient, rows=4)(x, douts, layout.doc_start, layout.doc_end, weight)
    (dweight,) = jax.vjp(lambda weight: forward(x, weight, layout), weight)[1](jnp.concatenate(douts, axis=-1))
    return dx, dweight, None


in_parts.defvjp(_in_parts_fwd, _in_parts_bwd)


def _gradient(x, douts, doc_start, doc_end, weight):
    """Calls the kernel for x [B, T, C], the gradients of the three parts, and int32[B, T] bounds of documents: the
    gradient of x."""
    from jaxtune.pallas.delta_rule import convolution_kernel

    rows, length, channels = x.shape
    bounds = (jnp.broadcast_to(bound, (rows, length)) for bound in (doc_start, doc_end))
    (dx,) = compat.triton_call(
        convolution_kernel.convolution_gradient_kernel,
        (x, weight, *bounds, *douts),
        (jax.ShapeDtypeStruct(x.shape, x.dtype),),
        (channels // _WIDTH, -(-length // _TOKENS), rows),
        warps=2,
        stages=1,
        LENGTH=length,
        CHANNELS=channels,
        FIRST=douts[0].shape[-1],
        SECOND=douts[1].shape[-1],
        TOKENS=_TOKENS,
        WIDTH=_WIDTH,
    )
    return dx


def step(x, weight, window):
    """Returns (out [B, 1, C] in x's dtype, silu of the convolution; the next window [B, k - 1, C]) for one more token x
    [B, 1, C] of each row in generation. weight [C, k]: the last column multiplies the token itself. window [B, k - 1,
    C]: the k - 1 tokens before it, in order, 0 where there were none; the next one ends with x. short_convolution_step
    calls this."""
    seen = jnp.concatenate([window, x], axis=1)
    total = (seen.astype(jnp.float32) * weight.T.astype(jnp.float32)).sum(1, keepdims=True)
    return jax.nn.silu(total).astype(x.dtype), seen[:, 1:]
