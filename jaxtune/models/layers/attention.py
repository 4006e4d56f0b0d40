"""Softmax attention, a mixer: query, key and value projections, attention within the documents of a row, output
projection."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.fitted import ATTENTION_BYTES, ATTENTION_STAGE, WIDE_ATTENTION_TIME
from jaxtune.models.layers.segment import INPUT, OUTPUT, Context, Residual, Segment, Sizes
from jaxtune.models.linear import Linear, apply_fused
from jaxtune.models.norm import norm_of
from jaxtune.models.rope import rotate, scaled_by_position
from jaxtune.pallas import dispatch
from jaxtune.pallas.attention import attention_backward, attention_forward
from jaxtune.pallas.decode_attention import (
    cache_capacity,
    cache_of,
    chunk_attention,
    chunk_written,
    decode_attention,
    written,
)


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """The settings of an attention that differ from the decoder's, given as Part.config; None takes the decoder's
    setting.

    Window and rotary base are not set here: the LayerSpec has them.
    """

    num_heads: int | None = None  # query heads
    num_kv_heads: int | None = None  # key and value heads
    head_dim: int | None = None  # size of a head
    attention_scale: float | None = None  # factor on the scores before the softmax
    # norm of queries and keys: of each head, of the whole projection, or "none"
    qk_norm: Literal["head", "projection", "none"] | None = None
    value_norm: bool | None = None  # whether each head's values are normed, without a weight
    values_are_keys: bool | None = None  # whether values are the projected keys before their norm; there is no v_proj
    qkv_bias: bool | None = None  # whether the query, key and value projections have biases
    out_bias: bool | None = None  # whether the output projection has a bias
    attention_gate: bool | None = None  # whether each head's output is multiplied by the sigmoid of a gate
    # whether each head has a learned logit that takes part in its softmax and has no value
    attention_sinks: bool | None = None
    # a name under which later layers can take its keys and values; None: it gives none away
    gives_keys: str | None = None
    # the layer has no keys and values of its own and takes those that an earlier layer gives under this name; None: it
    # has its own
    takes_keys: str | None = None
    hf_name: str = "self_attn"  # the part's name in Hugging Face's tensor names

    def make(self, config: DecoderConfig, key: jax.Array, dtype) -> Attention:
        """The attention module, with the decoder's settings (`config`) where this shape has none; `key` draws the
        weights, in `dtype`."""
        own = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        del own["hf_name"]
        sharing = own.pop("gives_keys", None), own.pop("takes_keys", None)
        if self.qk_norm == "none":
            own["qk_norm"] = None
        return Attention(dataclasses.replace(config, **own), key, dtype, *sharing)


class Attention(nnx.Module):
    """Grouped-query attention with q_proj, k_proj, v_proj (or one qkv_proj) and o_proj, and optional norms of queries
    and keys.

    With `attention_gate`, q_proj gives each head a gate after its query; the sigmoid of the gate multiplies the head's
    output.

    With `values_are_keys` there is no v_proj: values are the keys as k_proj gives them, before norm and rotation.

    Where queries, keys or values are normed, the residuals are the projections before the norm. The norm's derivative
    reads its input, which a matrix product would otherwise compute again. The backward norms and rotates them once
    more. Values that are keys are no residual of their own.

    An attention that gives its keys and values to later layers (`gives`) has them normed and rotated as residuals, so
    that the later layers need none of its weights. One that takes them (`takes`) projects queries alone.

    Args:
      config: gives the sizes and the features.
      key: draws the initial weights.
      dtype: of the weights.
      gives_keys, takes_keys: the fields of AttentionShape with these names.
    """

    def __init__(
        self, config: DecoderConfig, key: jax.Array, dtype, gives_keys: str | None = None, takes_keys: str | None = None
    ):
        if takes_keys is not None and (gives_keys is not None or config.fused_qkv):
            raise ValueError("takes_keys: such an attention has no fused qkv_proj, and gives no keys away")
        self.config = config
        self.gives_keys, self.takes_keys = gives_keys, takes_keys
        keys = jax.random.split(key, 4)
        hidden, std = config.hidden_size, config.initializer_range

        def linear(k, in_size, out_size, bias):
            return Linear(in_size, out_size, bias=bias, std=std, key=k, dtype=dtype)

        if config.fused_qkv:
            self.qkv_proj = linear(keys[0], hidden, config.query_size + 2 * config.kv_size, config.qkv_bias)
        else:
            queries = config.query_size * (2 if config.attention_gate else 1)
            self.q_proj = linear(keys[0], hidden, queries, config.qkv_bias)
            if not self.takes:
                self.k_proj = linear(keys[1], hidden, config.kv_size, config.qkv_bias)
            if not self.takes and not config.values_are_keys:
                self.v_proj = linear(keys[2], hidden, config.kv_size, config.qkv_bias)
        self.o_proj = linear(keys[3], config.query_size, hidden, config.out_bias)
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), dtype)) if config.attention_sinks else None
        if config.qk_norm:
            whole = config.qk_norm == "projection"
            sizes = (config.query_size, config.kv_size) if whole else (config.head_dim, config.head_dim)
            self.q_norm = norm_of(config, sizes[0], dtype)
            if not self.takes:
                self.k_norm = norm_of(config, sizes[1], dtype)

    @property
    def gives(self) -> dict[str, str]:
        """{residual: the name under which later layers take it}: its keys and values, or nothing (LayerPart.gives)."""
        return (
            {} if self.gives_keys is None else dict(zip(("key", "value"), _shared_names(self.gives_keys), strict=True))
        )

    @property
    def takes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape for one token} of an earlier layer's keys and values, or nothing (LayerPart.takes)."""
        heads = (self.config.num_kv_heads, self.config.head_dim)
        return {} if self.takes_keys is None else dict.fromkeys(_shared_names(self.takes_keys), heads)

    @property
    def state_reads(self) -> tuple[str, ...]:
        """Names of the residuals from which the caches are filled after a prompt (Mixer.state_reads): none where keys
        and values are another layer's."""
        if self.takes:
            return ()
        return ("key",) if self.config.values_are_keys and self._normed_late else ("key", "value")

    @property
    def in_matrices(self) -> tuple[str, ...]:
        """Names of the linears that read the layer's input: projections of queries, keys and values."""
        if self.config.fused_qkv:
            return ("qkv_proj",)
        if self.takes:
            return ("q_proj",)
        return ("q_proj", "k_proj") if self.config.values_are_keys else ("q_proj", "k_proj", "v_proj")

    @property
    def _normed_late(self) -> bool:
        """Whether the residuals query, key and value are projections before a norm (as the class says), so that
        attention norms and rotates them when it reads them. Taken keys and values are normed and rotated already."""
        features = self.config.qk_norm is not None or self.config.value_norm or self.config.values_are_keys
        return bool(self.takes) or (features and not self.gives)

    def segments(self) -> tuple[Segment, ...]:
        """Its segments: `project` (query, key, value), `attend` (attention) and `mix` (output projection)."""
        width = self.config.query_size
        gates = (Residual("output_gate"),) if self.config.attention_gate else ()
        given = bool(self.gives)
        own = (Residual("key", small=given), Residual("value", decided_with="key", small=given))
        slower = (1.0, 1.0)
        if self.config.head_dim > 256:
            wide = WIDE_ATTENTION_TIME.of("mosaic", dispatch.device_kind() or "")
            slower = (wide.forward, wide.backward)

        def multiplications(tokens: int, length: int, backward: bool) -> float:
            fit = ATTENTION_STAGE.of("cudnn", dispatch.device_kind() or "")
            whole = fit.slower * (1 + fit.half_tokens / length) * tokens * width * length
            return whole * (fit.backward if backward else 1.0) * slower[backward]

        return (
            Segment(
                "project",
                (INPUT,),
                (
                    Residual("query"),
                    *own[: len(self.state_reads)],
                    *gates,
                ),
                Attention._project,
                matrices=self.in_matrices,
            ),
            Segment(
                "attend",
                ("query", *self.state_reads, *self.takes),
                (
                    Residual("attention_out"),
                    Residual("lse", decided_with="attention_out"),
                ),
                Attention._attend,
                backward=_attend_backward,
                attention_width=width,
                attention_slower=slower,
                multiplications=multiplications,
            ),
            Segment(
                "mix",
                ("attention_out", *(gate.name for gate in gates)),
                (Residual(OUTPUT),),
                Attention._mix,
                matrices=("o_proj",),
            ),
        )

    def options(self, window: int | None) -> dict[str, Any]:
        """Keyword arguments of the attention functions that are the same for training and generation.

        window: the layer's sliding window in tokens (LayerSpec.window); None: full attention.
        """
        sinks = None if self.sinks is None else self.sinks[...]
        config = self.config
        return dict(scale=config.attention_scale, window=window, soft_cap=config.attention_soft_cap, sinks=sinks)

    def project(self, x: jax.Array, rotary, key: jax.Array | None = None):
        """x [B, T, hidden] -> query [B, T, heads, D], key and value [B, T, kv_heads, D], normed and rotated.

        With attention_gate, the gates [B, T, heads, D] follow. `rotary` is the layer's rotary table (Context.rotary),
        or None. `key` draws the adapters' dropout masks; None: no dropout.
        """
        query, key_, *others = self._projections(x, key)
        value = self._value(key_ if self.config.values_are_keys else others.pop(0))
        return self._query(query, rotary), self._key(key_, rotary), value, *others

    def _projections(self, x: jax.Array, key: jax.Array | None):
        """(query, key, value, gates) of `project` before norms and rotation, each [B, T, heads or kv_heads, D]. There
        is no value where values are keys, neither key nor value where both are another layer's, and no gates without
        attention_gate. x: [B, T, hidden]. key: draws the adapters' dropout masks; None: no dropout."""
        config = self.config
        if config.fused_qkv:
            both = self.qkv_proj(x, key)
            q, kv = config.query_size, config.kv_size
            query, *heads = both[..., :q], both[..., q : q + kv], both[..., q + kv :]
        else:
            query, *heads = apply_fused(x, tuple(getattr(self, name) for name in self.in_matrices), key)
        gates = ()
        if config.attention_gate:
            query, *gates = jnp.split(query.reshape(*x.shape[:2], config.num_heads, -1), 2, axis=-1)
        heads = (a.reshape(*a.shape[:2], -1, config.head_dim) for a in (query, *heads))
        return *heads, *gates

    def _query(self, x: jax.Array, rotary) -> jax.Array:
        """x, a projected query [B, T, heads, D], normed, and rotated by the rotary table (None: not rotated), whose
        third array, if it has one, scales the query by its position."""
        return scaled_by_position(rotate(self._normed("q_norm", x), rotary, self.config.interleaved_rotary), rotary)

    def _key(self, x: jax.Array, rotary) -> jax.Array:
        """x, a projected key [B, T, kv_heads, D], normed, and rotated by the rotary table (None: not rotated)."""
        return rotate(self._normed("k_norm", x), rotary, self.config.interleaved_rotary)

    def _value(self, x: jax.Array) -> jax.Array:
        """x, a projected value [B, T, kv_heads, D]; where values are normed (value_norm), divided by each head's root
        mean square, computed in float32."""
        if not self.config.value_norm:
            return x
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.config.norm_eps)).astype(x.dtype)

    def _normed(self, norm: str, x: jax.Array) -> jax.Array:
        """x [B, T, heads, D] after the norm of that attribute, if there is one, which norms each head or all heads as
        one vector."""
        if self.config.qk_norm is None:
            return x
        shape = x.shape if self.config.qk_norm == "head" else (*x.shape[:2], -1)
        return getattr(self, norm)(x.reshape(shape)).reshape(x.shape)

    def output(self, out: jax.Array, gate: jax.Array | None = None, key: jax.Array | None = None) -> jax.Array:
        """o_proj of the heads' outputs, `out`: [B, T, heads, D] -> [B, T, hidden].

        gate: [B, T, heads, D], whose sigmoid multiplies the outputs first; None: no gate. key: draws the adapter's
        dropout mask; None: no dropout.
        """
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return self.o_proj(out.reshape(*out.shape[:2], -1), key)

    def _project(self, context: Context, x: jax.Array):
        """`run` of the segment `project`: (query, key, value, gates) from the layer's normed input x [B, T, hidden];
        some may be missing (_projections). context: has the rotary tables and the dropout key.

        Queries and keys are normed and rotated here only where nothing is normed; otherwise `attended` does it.
        """
        if self._normed_late:
            return self._projections(x, context.key)
        return self.project(x, context.rotary, context.key)

    def attended(self, context: Context, query: jax.Array, key: jax.Array, *value: jax.Array) -> tuple[jax.Array, ...]:
        """(query, key, value) in the form in which attention reads them, normed and rotated, from the residuals of the
        segment `project`, or key and value as an earlier layer gives them. value: empty where values are keys. context:
        has the rotary tables."""
        if not self._normed_late:
            return query, key, *value
        if self.takes:
            return self._query(query, context.rotary), key, *value
        [value_] = value or (key,)
        return self._query(query, context.rotary), self._key(key, context.rotary), self._value(value_)

    def _attend(self, context: Context, *residuals: jax.Array):
        """`run` of the segment `attend`: (output [B, T, heads, D], the log-sum-exp of each query's scores). context:
        has the document boundaries and the window.

        residuals: query, key and, unless values are keys, value, as the segment `project` gives them, or an earlier
        layer gives key and value.
        """
        query, key, value = self.attended(context, *residuals)
        return attention_forward(query, key, value, context.layout, **self.options(context.spec.window))

    def _mix(self, context: Context, out: jax.Array, *gates: jax.Array):
        """`run` of the segment `mix`: (`output` [B, T, hidden],) from the heads' outputs `out` [B, T, heads, D], and
        their gates if there are any. context: has the dropout key."""
        return (self.output(out, *gates, key=context.key),)

    # ---- generation

    def first_state(self, values: Mapping[str, jax.Array], lengths: jax.Array, new_tokens: int, context: Context):
        """The caches (keys, values), each [B, kv_heads, capacity, D], filled with the prompts; () where keys and values
        are another layer's.

        The capacity has room for `new_tokens` more, or only for the window if the layer has one. values: {name: value}
        of the residuals that state_reads names; lengths: int32[B], tokens of each prompt; context: that of the prompts.
        """
        if self.takes:
            return ()
        key, value = values["key"], values[self.state_reads[-1]]
        if self._normed_late:
            key, value = self._key(key, context.rotary), self._value(value)
        capacity = cache_capacity(key.shape[1] + new_tokens, context.spec.window)
        return cache_of(key, lengths, capacity), cache_of(value, lengths, capacity)

    def step(self, x: jax.Array, state, at: jax.Array, context: Context):
        """Runs the next N tokens of each row: x [B, N, hidden] -> (output [B, N, hidden], the state after them).

        The state is (keys, values) as from `first_state`. at: int32[B], the position of the first of the N tokens,
        which is also the number of tokens in the state; negative for a row that does not decode. context: its layout
        has the rotary tables of these positions; where keys and values are another layer's, `taken` has them.
        """
        return self.step_giving(x, state, at, context)[:2]

    def step_giving(self, x: jax.Array, state, at: jax.Array, context: Context):
        """`step`, with the same arguments (x, state, at, context), and with a third result: {name: (cache, new)} of
        the keys and of the values that this layer gives to later layers; {} if it gives none.

        A cache [B, kv_heads, capacity, D] contains the N tokens if N is 1, and `new` is None. Otherwise it is the
        cache before them, because a window's cache has no room for them and for all that they see, and `new` is their
        keys or values [B, N, kv_heads, D].
        """
        options, chunk = self.options(context.spec.window), x.shape[1] > 1
        if self.takes:
            query, *gates = self._projections(x, None)
            query = self._query(query, context.rotary)
            taken: dict[str, tuple] = dict(context.taken)
            (keys, key), (values, value) = (taken[name] for name in self.takes)
        else:
            query, key, value, *gates = self.project(x, context.rotary)
            keys, values = state
            write = chunk_written if chunk else _written_one
            state = tuple(write(kept, new, at) for kept, new in zip(state, (key, value), strict=True))
        if chunk:
            out = chunk_attention(query, key, value, keys, values, at, **options)
        else:
            keys, values = (keys, values) if self.takes else state
            key = value = None
            out = decode_attention(query[:, 0], keys, values, at + 1, **options)[:, None]
        given = dict(zip(self.gives.values(), ((keys, key), (values, value)), strict=True)) if self.gives else {}
        return self.output(out, *gates), state, given

    # ---- for the planner

    def waiting_bytes(self, sizes: Sizes) -> float:
        """Bytes of partial results that exist while the feed-forward's backward runs, for the planner.

        They are a multiple of the query's bytes, fitted to compiled programs (models/fitted.py). sizes: the bytes of
        the layer's residuals by name.
        """
        return ATTENTION_BYTES.of("cudnn", sizes.device).waiting * sizes["query"]

    def backward_bytes(self, sizes: Sizes) -> float:
        """Bytes of its backward in addition to the residuals, for the planner.

        They are the gradients of query, key and value, a second array of the query's size, values of the residual
        stream (a multiple of the layer's input), and the normed queries, keys and values if attention norms them when
        it reads them. If layers run in tiles of tokens, the backward's work space, a multiple of the query, comes in
        addition, and the stream has one value less. sizes: the bytes of the layer's residuals by name.
        """
        fit = ATTENTION_BYTES.of("cudnn", sizes.device)
        stream = fit.stream * sizes["layer_input"]
        value = sizes[self.state_reads[-1]] if self.state_reads else 0.0
        if self._normed_late:
            stream += sizes["query"] + sizes["key"] + (value if self.config.value_norm else 0)
        if sizes.tiles == 1:
            return 2 * sizes["query"] + sizes["key"] + value + stream
        own = (2 + fit.work_space) * sizes["query"]
        return own + sizes["key"] + value + stream - sizes["layer_input"]


def _shared_names(name: str) -> tuple[str, str]:
    """The names under which a layer's keys and values are known to the later layers that read them: (`name`_key,
    `name`_value)."""
    return f"{name}_key", f"{name}_value"


def _written_one(cache: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
    """Writes one token of each row into a cache of keys or of values, and returns the new cache: cache [B, kv_heads,
    capacity, D], new [B, 1, kv_heads, D], at the positions `at`, int32[B]; a row with a negative position is left as
    it is."""
    return written(cache, new[:, 0], at)


def _attend_backward(module_of, trainable, context: Context, inputs, outputs, gradients):
    """The hand-written derivative of the segment `attend` (a Backward, models/layers/segment.py), by the attention
    kernels' backward, which reads the saved output and log-sum-exp. Norms and rotation are computed again.

    Args:
      module_of: builds the Attention from trainable tensors.
      trainable: its trainable tensors.
      context: what the forward received: the layer's spec and the batch's layout.
      inputs: the residuals query, key and, unless values are keys, value; or query, and an earlier layer's key and
        value.
      outputs: (the output, the log-sum-exp of each query's scores).
      gradients: (the gradient of the output,).
    Returns:
      (gradients of the trainable tensors, or None if attention reads none of them; one gradient for each input)
    """
    attention: Attention = module_of(trainable)
    options = attention.options(context.spec.window)
    out, lse = outputs

    def read(trainable, *residuals):
        attention: Attention = module_of(trainable)
        sinks = attention.sinks[...] if isinstance(attention.sinks, nnx.Param) else None
        return *attention.attended(context, *residuals), sinks

    (query, key, value, sinks), pullback = jax.vjp(read, trainable, *inputs)
    dquery, dkey, dvalue, dsinks = attention_backward(
        query, key, value, out, lse, gradients[0], context.layout, **options
    )
    if sinks is None and not attention._normed_late:
        return None, (dquery, dkey, dvalue)
    dtrainable, *dresiduals = pullback((dquery, dkey, dvalue, None if sinks is None else dsinks))
    return dtrainable, tuple(dresiduals)
