"""The gated delta net, a mixer: linear attention whose state restarts with each document (Qwen3-Next, Qwen3.5). It has
input projections, a short convolution over queries, keys and values, the gated delta rule, a gated norm and an output
projection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models import initial, values
from jaxtune.models.config import DecoderConfig
from jaxtune.models.fitted import DELTA_NET_BYTES, DELTA_RULE_TIME
from jaxtune.models.layers.segment import INPUT, OUTPUT, Context, Residual, Segment, Sizes
from jaxtune.models.linear import Linear, apply_fused
from jaxtune.models.norm import RMSNorm
from jaxtune.pallas.attention import packed_layout
from jaxtune.pallas.delta_rule import (
    delta_rule_chunk,
    delta_rule_state,
    delta_rule_step,
    gated_delta_rule,
    short_convolution,
    short_convolution_parts,
    short_convolution_step,
)
from jaxtune.pallas.delta_rule.chunked import CHUNK, GROUP_TOKENS
from jaxtune.pallas.fitted import device_name

_OUT = "remembered"  # the recurrence's output, by the name that checkpoints of earlier runs have in their plans


@dataclasses.dataclass(frozen=True)
class DeltaNetShape:
    """The sizes of a gated delta net. Raises ValueError, with the key of Hugging Face's config.json, for a size that is
    not a positive integer, or `heads` that key_heads does not divide.
    """

    hf_name: ClassVar[str] = "linear_attn"  # the part's name in Hugging Face's tensor names

    key_heads: int  # number of heads of queries, and of keys; divides `heads`
    heads: int  # number of heads of values
    key_dim: int  # size of a query or key head
    value_dim: int  # size of a value head
    taps: int  # length of the short convolution: each of its outputs is a weighted sum over this many tokens
    # True (Qwen3-Next): one matrix gives queries, keys, values and gates, key head by key head, and another one b and a
    # (from which beta and decay are computed); False (Qwen3.5): there is one matrix for queries, keys and values, and
    # one each for gates, b and a
    fused: bool = False

    def __post_init__(self):
        for key, value in (
            ("linear_num_key_heads", self.key_heads),
            ("linear_num_value_heads", self.heads),
            ("linear_key_head_dim", self.key_dim),
            ("linear_value_head_dim", self.value_dim),
            ("linear_conv_kernel_dim", self.taps),
        ):
            values.whole(key, value)
        if self.heads % self.key_heads:
            raise ValueError(
                f"linear_num_value_heads {self.heads} is not a multiple of linear_num_key_heads {self.key_heads}"
            )

    @property
    def key_size(self) -> int:
        """How many numbers a token's queries have over all heads; its keys have as many."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """How many numbers a token's values have over all heads."""
        return self.heads * self.value_dim

    def make(self, config: DecoderConfig, key: jax.Array, dtype) -> DeltaNet:
        """Builds the delta net with random weights. config: the decoder's. key: draws the weights. dtype: of the
        weights as stored.
        """
        return DeltaNet(self, config, key, dtype)

    def derivative_bytes(self, sizes: Sizes) -> float:
        """Bytes, for one micro-batch on one device, that the kernels keep from the recomputation of `recur` until its
        gradient arrives: queries and keys after the convolution, prediction errors, and for each chunk two matrices and
        the state. The reference keeps less.
        """
        numbers = 2 * self.key_size + self.value_size + 2 * self.heads * CHUNK
        state = self.heads * self.key_dim * self.value_dim / CHUNK
        return sizes[_OUT] / self.value_size * (numbers + state)


class Convolution(nnx.Module):
    """The weight [channels, 1, taps] of the depthwise short convolution, under the name of Hugging Face's conv1d."""

    def __init__(self, channels: int, taps: int, std: float, key: jax.Array, dtype):
        self.weight = nnx.Param(initial.normal(key, (channels, 1, taps), std, dtype))


class DeltaNet(nnx.Module):
    """The gated delta net; attributes have the names of Hugging Face's tensors. A head's log decay is -exp(A_log)
    softplus(a + dt_bias), and its beta sigmoid(b); a and b are called rates.
    """

    state_reads = ("qkv", "rates")
    has_cache = False

    def __init__(self, shape: DeltaNetShape, config: DecoderConfig, key: jax.Array, dtype):
        self.shape = shape
        keys = initial.split(key, 7)
        hidden, std = config.hidden_size, config.initializer_range
        mixed = 2 * shape.key_size + shape.value_size

        def linear(k, in_size, out_size):
            return Linear(in_size, out_size, bias=False, std=std, key=k, dtype=dtype)

        if shape.fused:
            self.in_proj_qkvz = linear(keys[0], hidden, mixed + shape.value_size)
            self.in_proj_ba = linear(keys[1], hidden, 2 * shape.heads)
        else:
            self.in_proj_qkv = linear(keys[0], hidden, mixed)
            self.in_proj_z = linear(keys[1], hidden, shape.value_size)
            self.in_proj_b = linear(keys[2], hidden, shape.heads)
            self.in_proj_a = linear(keys[3], hidden, shape.heads)
        self.conv1d = Convolution(mixed, shape.taps, std, keys[4], dtype)

        def decays() -> jax.Array:
            return jnp.log(jax.random.uniform(keys[5], (shape.heads,), jnp.float32, 0.01, 16)).astype(dtype)

        self.A_log = nnx.Param(initial.drawn(decays, (shape.heads,), dtype))
        self.dt_bias = nnx.Param(initial.full((shape.heads,), 1, dtype))
        self.norm = RMSNorm(shape.value_dim, config.norm_eps, dtype=dtype)
        self.out_proj = linear(keys[6], shape.value_size, hidden)

    def segments(self) -> tuple[Segment, ...]:
        shape, time = self.shape, DELTA_RULE_TIME.of("triton", device_name())
        # Per token and head: the state is read twice and written once; two triangular matrices of a chunk count half.
        products = shape.heads * (3 * shape.key_dim * shape.value_dim + CHUNK * (shape.key_dim + shape.value_dim))
        apart = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return (
            Segment(
                "project",
                (INPUT,),
                (
                    Residual("qkv"),
                    Residual("output_gate"),
                    Residual("rates", decided_with="qkv"),
                ),
                DeltaNet._project,
                matrices=("in_proj_qkvz", "in_proj_ba") if shape.fused else apart,
            ),
            Segment(
                "recur",
                ("qkv", "rates"),
                (Residual(_OUT),),
                DeltaNet._recur,
                token_flops=2.0 * products,
                kernel_bytes=(time.forward * shape.value_size, time.backward * shape.value_size),
                derivative_bytes=shape.derivative_bytes,
            ),
            Segment(
                "mix",
                (_OUT, "output_gate"),
                (Residual(OUTPUT),),
                lambda net, context, out, gate: (net.output(out, gate, context.key),),
                matrices=("out_proj",),
            ),
        )

    def _project(self, context: Context, x: jax.Array):
        return self.project(x, context.key)

    def project(self, x: jax.Array, key: jax.Array | None = None):
        """x [B, T, hidden] -> (queries, keys and values, concatenated [B, T, 2 key_size + value_size]; gates [B, T,
        heads, value_dim]; rates b and a, concatenated [B, T, 2 heads]).

          key: draws the adapters' dropout masks; None: no dropout.
        """
        shape = self.shape
        if not shape.fused:
            qkv, gate, b, a = apply_fused(x, (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a), key)
            return qkv, gate.reshape(*x.shape[:2], -1, shape.value_dim), jnp.concatenate([b, a], -1)
        projected, rates = apply_fused(x, (self.in_proj_qkvz, self.in_proj_ba), key)
        projected, rates = (array.reshape(*x.shape[:2], shape.key_heads, -1) for array in (projected, rates))
        shared = shape.value_size // shape.key_heads  # numbers of the values that share one key head
        sections = jnp.split(projected, (shape.key_dim, 2 * shape.key_dim, 2 * shape.key_dim + shared), axis=-1)
        *qkv, gate = (section.reshape(*x.shape[:2], -1) for section in sections)
        rates = (section.reshape(*x.shape[:2], -1) for section in jnp.split(rates, 2, axis=-1))
        return (
            jnp.concatenate(qkv, -1),
            gate.reshape(*x.shape[:2], -1, shape.value_dim),
            jnp.concatenate([*rates], -1),
        )

    def _recur(self, context: Context, qkv: jax.Array, rates: jax.Array):
        return (gated_delta_rule(*self.tokens(qkv, rates, context.layout), context.layout),)

    def tokens(self, qkv: jax.Array, rates: jax.Array, layout):
        """The recurrence's inputs for whole rows: (query and key [B, T, key_heads, key_dim], value [B, T, heads,
        value_dim], log decay and beta float32[B, T, heads]). The convolution does not cross the documents of `layout`.

          qkv, rates: the residuals of these names, [B, T, ...].
          layout: the documents of the rows.
        """
        sizes = (self.shape.key_size, self.shape.key_size, self.shape.value_size)
        query, key, value = short_convolution_parts(qkv, self._taps(), layout, sizes)
        return self._in_heads(query, key, value, rates)

    def _taps(self) -> jax.Array:
        """[channels, taps]."""
        return self.conv1d.weight[...][:, 0]

    def _split(self, qkv: jax.Array, rates: jax.Array):
        query, key, value = jnp.split(qkv, (self.shape.key_size, 2 * self.shape.key_size), axis=-1)
        return self._in_heads(query, key, value, rates)

    def _in_heads(self, query: jax.Array, key: jax.Array, value: jax.Array, rates: jax.Array):
        """The recurrence's inputs from convolved query and key [B, T, key_size], value [B, T,
        value_size], and rates.
        """
        shape = self.shape
        query, key = (x.reshape(*x.shape[:2], shape.key_heads, shape.key_dim) for x in (query, key))
        b, a = jnp.split(rates.astype(jnp.float32), 2, axis=-1)
        step = jax.nn.softplus(a + self.dt_bias[...].astype(jnp.float32))
        decay = -jnp.exp(self.A_log[...].astype(jnp.float32)) * step
        return query, key, value.reshape(*value.shape[:2], -1, shape.value_dim), decay, jax.nn.sigmoid(b)

    def output(self, out: jax.Array, gate: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """The recurrence's output, normed and times SiLU(gate), through the output projection: [B, T, hidden] in gate's
        dtype.

          out: [B, T, heads, value_dim].
          gate: [B, T, heads, value_dim].
          key: draws the adapter's dropout mask; None: no dropout.
        """
        out = self.norm(out).astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        return self.out_proj(out.astype(gate.dtype).reshape(*gate.shape[:2], -1), key)

    # ---- generation

    def first_state(self, values: Mapping[str, jax.Array], lengths: jax.Array, new_tokens: int, context: Context):
        """(qkv of each prompt's last tokens [B, taps - 1, 2 key_size + value_size], zero before the prompt; the
        recurrence's state float32[B, heads, key_dim, value_dim]). It does not grow.

          values: {name: value} of "qkv" and "rates".
          lengths: int32[B], tokens of each prompt.
          new_tokens, context: not used, because the state holds no position.
        """
        qkv, rates = values["qkv"], values["rates"]
        rows, length = rates.shape[:2]
        _, key, value, decay, beta = self.tokens(qkv, rates, packed_layout((rows, length)))
        indices = lengths[:, None] + jnp.arange(1 - self.shape.taps, 0)
        window = jnp.take_along_axis(qkv, jnp.maximum(indices, 0)[..., None], axis=1)
        return jnp.where((indices >= 0)[..., None], window, 0), delta_rule_state(key, value, decay, beta, lengths)

    def step(self, x: jax.Array, state, positions: jax.Array, context: Context):
        """Runs the next N tokens of each row: (output [B, N, hidden], the state after them).

        x: [B, N, hidden], the layer's normed input.
        state: of `first_state`.
        positions: not used, because the state holds no position.
        context: its layout says which tokens are padding.
        """
        window, state = state
        qkv, gate, rates = self.project(x)
        if x.shape[1] > 1:
            history = jnp.concatenate([window, qkv], axis=1)
            window_length, layout = window.shape[1], context.layout
            qkv = short_convolution(history, self._taps(), packed_layout((len(history), history.shape[1])))[
                :, window_length:
            ]
            query, key, value, decay, beta = self._split(qkv, rates)
            real = (layout.doc_end > layout.doc_start)[..., None]  # padding neither decays the state nor writes to it
            decay, beta = jnp.where(real, decay, 0), jnp.where(real, beta, 0)
            out, state = delta_rule_chunk(query, key, value, decay, beta, state)
            last = layout.counts()[:, None] + jnp.arange(window_length, dtype=jnp.int32)
            return self.output(out, gate), (jnp.take_along_axis(history, last[..., None], axis=1), state)
        qkv, window = short_convolution_step(qkv, self._taps(), window)
        out, state = delta_rule_step(*self._split(qkv, rates), state)
        return self.output(out, gate), (window, state)

    # ---- for the planner: counted from chunked.py and triton.py; their memory has not been measured on a GPU yet.

    def waiting_bytes(self, sizes: Sizes) -> float:
        return DELTA_NET_BYTES.of("triton", sizes.device).waiting * sizes[_OUT]

    def backward_bytes(self, sizes: Sizes) -> float:
        """Queries, keys and values after the convolution, and their gradients, each as [B, T, ...] and in chunks; two
        arrays of the output's size; values of the residual stream; and the larger need of the two implementations. The
        reference stores the first state of each group of chunks and, for one group at a time in float32, what it
        computes; the kernels two matrices and two states a chunk, the errors and the values' gradients.
        """
        shape = self.shape
        tokens = sizes[_OUT] / (shape.value_size * sizes.dtype.itemsize)
        group = min(tokens, GROUP_TOKENS)
        state = shape.key_dim * shape.value_dim
        states = 4.0 * shape.heads * state * (group / CHUNK + max(tokens / group, tokens / sizes.length))
        wide = shape.heads * (8 * CHUNK + 6 * shape.value_dim) + 6 * shape.key_size
        kernels = 2 * tokens * shape.heads * (CHUNK + state / CHUNK + shape.value_dim) * sizes.dtype.itemsize
        implementation_bytes = max(states + 4.0 * group * wide, kernels)
        stream = DELTA_NET_BYTES.of("triton", sizes.device).stream * sizes["layer_input"]
        return 4 * sizes["qkv"] + 2 * sizes[_OUT] + implementation_bytes + stream
