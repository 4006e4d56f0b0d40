"""The gated delta net, a mixer: linear attention whose state restarts with each document (Qwen3-Next, Qwen3.5).

`DeltaNet` consists of input projections, a short convolution over queries, keys and values (whose weight is in
`Convolution`), the gated delta rule, a gated norm and an output projection. DeltaNetShape has its sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models import values
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
    """The sizes of a gated delta net (Qwen3-Next, Qwen3.5), given as Part.config; `make` builds the module. Queries and
    keys have `key_heads` heads, and values have `heads`, a multiple of it. Raises ValueError for a size that is not a
    positive integer, or no such multiple, with the key of Hugging Face's config.json."""

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
        """Raises ValueError for a size that is not a positive integer, or `heads` that key_heads does not divide."""
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
        """key_heads * key_dim: how many numbers a token's queries have over all heads, and its keys as many. The
        projection of queries, keys and values has 2 * key_size + value_size outputs. Matrices are made and projections
        split by it, and the planner's estimates count by it."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """heads * value_dim: how many numbers a token's values have over all heads; the output before the last
        projection has as many. It is read where key_size is."""
        return self.heads * self.value_dim

    def make(self, config: DecoderConfig, key: jax.Array, dtype) -> DeltaNet:
        """Builds the gated delta net of these sizes; Block's constructor calls it. config: the decoder's, for all other
        settings. key: draws the initial weights. dtype: of the weights."""
        return DeltaNet(self, config, key, dtype)

    def derivative_bytes(self, sizes: Sizes) -> float:
        """The bytes that the derivative of the segment `recur` keeps in memory from its recomputation in the backward
        until its gradient arrives. It is the segment's Segment.derivative_bytes: the planner counts them in addition to
        the residuals if a plan recomputes the segment, and not if its output is kept.

        They are those of the kernels, in the compute dtype: queries and keys after the convolution, the prediction
        errors, and for each chunk of tokens two matrices and the state. The reference implementation keeps less. sizes:
        the bytes of the layer's residuals by name, of one micro-batch on one device; the result is for the same."""
        numbers = 2 * self.key_size + self.value_size + 2 * self.heads * CHUNK
        state = self.heads * self.key_dim * self.value_dim / CHUNK
        return sizes[_OUT] / self.value_size * (numbers + state)


class Convolution(nnx.Module):
    """The weight of the short convolution over the tokens, [channels, 1, taps], as in Hugging Face's conv1d. The class
    only holds the parameter under that name; short_convolution (pallas/delta_rule) computes with it.

    Args:
      channels: how many numbers a token's queries, keys and values have altogether; each is convolved on its own
        (depthwise).
      taps: how many tokens each output reads.
      std: the standard deviation of the initial weight.
      key: draws it.
      dtype: of the weight.
    """

    def __init__(self, channels: int, taps: int, std: float, key: jax.Array, dtype):
        self.weight = nnx.Param((jax.random.normal(key, (channels, 1, taps), jnp.float32) * std).astype(dtype))


class DeltaNet(nnx.Module):
    """The gated delta net as a mixer; its attributes have the names of Hugging Face's tensors.

    These are in_proj_qkv, in_proj_z, in_proj_b and in_proj_a (or in_proj_qkvz and in_proj_ba), conv1d, norm and
    out_proj. A head's log decay is -exp(A_log) softplus(a + dt_bias), and its beta is sigmoid(b); a and b are called
    rates. `segments` divides its computation into the steps that the stack runs, in training and over prompts;
    `first_state` and `step` run it in generation; `backward_bytes` and `waiting_bytes` are estimates for the planner.
    `state_reads` names the residuals from which the state is built after a prompt.

    Args:
      shape: the sizes of the delta net.
      config: gives the hidden size, the norm's epsilon and the range of initial weights.
      key: draws the initial weights.
      dtype: of the weights.
    """

    state_reads = ("qkv", "rates")

    def __init__(self, shape: DeltaNetShape, config: DecoderConfig, key: jax.Array, dtype):
        self.shape = shape
        keys = jax.random.split(key, 7)
        hidden, std = config.hidden_size, config.initializer_range
        mixed = 2 * shape.key_size + shape.value_size

        def linear(k, in_size, out_size):
            """A Linear of these sizes without bias, whose initial weight k draws."""
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
        speed = jax.random.uniform(keys[5], (shape.heads,), jnp.float32, 0.01, 16)
        self.A_log = nnx.Param(jnp.log(speed).astype(dtype))
        self.dt_bias = nnx.Param(jnp.ones((shape.heads,), dtype))
        self.norm = RMSNorm(shape.value_dim, config.norm_eps, dtype=dtype)
        self.out_proj = linear(keys[6], shape.value_size, hidden)

    def segments(self) -> tuple[Segment, ...]:
        """Its segments in the order in which they run: `project` (the input projections), `recur` (convolution and
        recurrence) and `mix` (gated norm and out_proj). They tell the stack how to run the mixer and the planner what
        it costs."""
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
        """The function `run` of the segment `project`, from the layer's normed input x [B, T, hidden]: (queries, keys
        and values [B, T, 2 key_size + value_size]; gates [B, T, heads, value_dim]; rates [B, T, 2 heads]). context: has
        the dropout key."""
        return self.project(x, context.key)

    def project(self, x: jax.Array, key: jax.Array | None = None):
        """Projects x [B, T, hidden] to the three inputs of the delta net: (queries, keys and values; gates; rates).

        Queries, keys and values are concatenated, [B, T, 2 key_size + value_size]. Gates are [B, T, heads, value_dim].
        Rates are b and a, from which beta and decay are computed, concatenated: [B, T, 2 heads]. The segment `project`
        calls it, and `step` in generation. key: draws the adapters' dropout masks; None: no dropout."""
        shape = self.shape
        if not shape.fused:
            qkv, gate, b, a = apply_fused(x, (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a), key)
            return qkv, gate.reshape(*x.shape[:2], -1, shape.value_dim), jnp.concatenate([b, a], -1)
        both, rates = apply_fused(x, (self.in_proj_qkvz, self.in_proj_ba), key)
        both, rates = (array.reshape(*x.shape[:2], shape.key_heads, -1) for array in (both, rates))
        shared = shape.value_size // shape.key_heads  # numbers of the values that share one key head
        parts = jnp.split(both, (shape.key_dim, 2 * shape.key_dim, 2 * shape.key_dim + shared), axis=-1)
        *qkv, gate = (part.reshape(*x.shape[:2], -1) for part in parts)
        rates = (part.reshape(*x.shape[:2], -1) for part in jnp.split(rates, 2, axis=-1))
        return (
            jnp.concatenate(qkv, -1),
            gate.reshape(*x.shape[:2], -1, shape.value_dim),
            jnp.concatenate([*rates], -1),
        )

    def _recur(self, context: Context, qkv: jax.Array, rates: jax.Array):
        """The function `run` of the segment `recur`: the short convolution of qkv, decay and beta from rates, and
        the gated delta rule. Returns a tuple of one array, the rule's output [B, T, heads, value_dim].

        context: has the document boundaries (`layout`). qkv: [B, T, 2 key_size + value_size], queries, keys and values
        from `project`, before the convolution. rates: [B, T, 2 heads], b and a from `project`."""
        return (gated_delta_rule(*self.tokens(qkv, rates, context.layout), context.layout),)

    def tokens(self, qkv: jax.Array, rates: jax.Array, layout):
        """Computes the inputs of the recurrence for whole rows: (query, key, value, decay, beta) in the form in which
        gated_delta_rule takes them. Query and key are [B, T, key_heads, key_dim], value is [B, T, heads, value_dim],
        and decay (its logarithm) and beta are float32[B, T, heads]. The convolution is applied to qkv here.

        qkv: [B, T, 2 key_size + value_size], rates: [B, T, 2 heads], from `project`, for all tokens of each row.
        layout: the document boundaries of the batch, which the convolution does not cross. The segment `recur` and
        `first_state` call it.
        """
        sizes = (self.shape.key_size, self.shape.key_size, self.shape.value_size)
        query, key, value = short_convolution_parts(qkv, self._taps(), layout, sizes)
        return self._in_heads(query, key, value, rates)

    def _taps(self) -> jax.Array:
        """The weight of the convolution without its middle axis of size 1: [channels, taps], the form for
        short_convolution and short_convolution_step."""
        return self.conv1d.weight[...][:, 0]

    def _split(self, qkv: jax.Array, rates: jax.Array):
        """Divides convolved queries, keys and values, qkv [B, T, 2 key_size + value_size], and returns `_in_heads` of
        them and `rates`. `step` calls it for new tokens."""
        query, key, value = jnp.split(qkv, (self.shape.key_size, 2 * self.shape.key_size), axis=-1)
        return self._in_heads(query, key, value, rates)

    def _in_heads(self, query: jax.Array, key: jax.Array, value: jax.Array, rates: jax.Array):
        """Divides convolved queries, keys and values into heads, and computes decay and beta from the rates: (query,
        key, value, decay, beta) of the recurrence.

        Query and key are [B, T, key_heads, key_dim], value is [B, T, heads, value_dim]; decay (the logarithm of a
        head's decay) and beta are float32[B, T, heads]. query and key: [B, T, key_size], value: [B, T, value_size],
        after the convolution. rates: [B, T, 2 heads], b and a from `project`. `tokens` calls it for whole rows."""
        shape = self.shape
        query, key = (x.reshape(*x.shape[:2], shape.key_heads, shape.key_dim) for x in (query, key))
        b, a = jnp.split(rates.astype(jnp.float32), 2, axis=-1)
        step = jax.nn.softplus(a + self.dt_bias[...].astype(jnp.float32))
        decay = -jnp.exp(self.A_log[...].astype(jnp.float32)) * step
        return query, key, value.reshape(*value.shape[:2], -1, shape.value_dim), decay, jax.nn.sigmoid(b)

    def output(self, out: jax.Array, gate: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Norms the recurrence's output `out` [B, T, heads, value_dim], multiplies it by SiLU(gate), and projects it by
        out_proj: [B, T, hidden] in gate's dtype. The segment `mix` calls it, and `step` in generation.

        gate: [B, T, heads, value_dim], from `project`. key: draws the dropout mask of out_proj's adapter; None: no
        dropout."""
        out = self.norm(out).astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        return self.out_proj(out.astype(gate.dtype).reshape(*gate.shape[:2], -1), key)

    # ---- generation

    def first_state(self, values: Mapping[str, jax.Array], lengths: jax.Array, new_tokens: int, context: Context):
        """The state for generation after prompts, which `step` continues: (inputs of the convolution, the recurrence's
        state).

        The first is [B, taps - 1, 2 key_size + value_size], the qkv of each prompt's last tokens, with zeros where the
        prompt is shorter; the second is float32[B, heads, key_dim, value_dim]. The state does not grow, so `new_tokens`
        is not used, and neither is `context`; every mixer is called with them. values: {name: value} of the residuals
        qkv and rates of the prompts. lengths: int32[B], tokens of each prompt."""
        qkv, rates = values["qkv"], values["rates"]
        rows, length = rates.shape[:2]
        _, key, value, decay, beta = self.tokens(qkv, rates, packed_layout((rows, length)))
        at = lengths[:, None] + jnp.arange(1 - self.shape.taps, 0)
        window = jnp.take_along_axis(qkv, jnp.maximum(at, 0)[..., None], axis=1)
        return jnp.where((at >= 0)[..., None], window, 0), delta_rule_state(key, value, decay, beta, lengths)

    def step(self, x: jax.Array, state, at: jax.Array, context: Context):
        """Runs the next N tokens of each row in generation: x [B, N, hidden] -> (output [B, N, hidden], the state after
        them). Block.step calls it.

        state: (the inputs of the convolution [B, taps - 1, 2 key_size + value_size], the recurrence's state float32[B,
        heads, key_dim, value_dim]), from `first_state` or the previous step; the returned one has the same form. The
        step depends on no positions, so that `at` and `context`, which every mixer gets, are not used.
        """
        window, state = state
        qkv, gate, rates = self.project(x)
        if x.shape[1] > 1:
            seen = jnp.concatenate([window, qkv], axis=1)
            kept = window.shape[1]
            qkv = short_convolution(seen, self._taps(), packed_layout((len(seen), seen.shape[1])))[:, kept:]
            out, state = delta_rule_chunk(*self._split(qkv, rates), state)
            return self.output(out, gate), (seen[:, seen.shape[1] - kept :], state)
        qkv, window = short_convolution_step(qkv, self._taps(), window)
        out, state = delta_rule_step(*self._split(qkv, rates), state)
        return self.output(out, gate), (window, state)

    # ---- for the planner: counted from chunked.py and triton.py; their memory has not been measured on a GPU yet.

    def waiting_bytes(self, sizes: Sizes) -> float:
        """An estimate of the bytes of the delta net's partial results that are in memory while the backward of a later
        feed-forward of the layer runs; the planner adds it to what that backward needs if the feed-forward's estimate
        covers the mixer (Scratch.covers_mixer).

        It is the bytes of the recurrence's output times a factor (models/fitted.py), which was taken over from
        attention and not measured. sizes: the bytes of the layer's residuals by name, of one micro-batch on one device,
        and the device's name."""
        return DELTA_NET_BYTES.of("triton", sizes.device).waiting * sizes[_OUT]

    def backward_bytes(self, sizes: Sizes) -> float:
        """An estimate of the bytes that the delta net's backward needs in addition to the residuals, for the planner's
        forecast of the peak (Block.backward_bytes). It is counted from the code and was not measured.

        It is the sum of: queries, keys and values after the convolution, and their gradients, each of which exists
        twice at a time, as arrays [B, T, ...] and rearranged into chunks of tokens; two arrays of the output's size;
        values of the residual stream, a multiple of the layer's input; and the larger need of the two implementations.
        The reference implementation stores the first state of each group of chunks and, for one group at a time and in
        float32, the matrices between tokens, the states and intermediate results. The kernels store two matrices and
        two states for each chunk, and the errors and the gradients of the values.

        sizes: the bytes of the layer's residuals by name, of one micro-batch on one device, with the compute dtype, the
        tokens of a row and the device's name."""
        shape = self.shape
        tokens = sizes[_OUT] / (shape.value_size * sizes.dtype.itemsize)
        group = min(tokens, GROUP_TOKENS)
        state = shape.key_dim * shape.value_dim
        states = 4.0 * shape.heads * state * (group / CHUNK + max(tokens / group, tokens / sizes.length))
        wide = shape.heads * (8 * CHUNK + 6 * shape.value_dim) + 6 * shape.key_size
        kernels = 2 * tokens * shape.heads * (CHUNK + state / CHUNK + shape.value_dim) * sizes.dtype.itemsize
        beside = max(states + 4.0 * group * wide, kernels)
        stream = DELTA_NET_BYTES.of("triton", sizes.device).stream * sizes["layer_input"]
        return 4 * sizes["qkv"] + 2 * sizes[_OUT] + beside + stream
