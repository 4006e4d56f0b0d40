"""Softmax attention, a mixer: projections of queries, keys and values, attention within the documents of a row, and the
output projection. The segment `attend` has a hand-written derivative.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models import initial
from jaxtune.models.config import DecoderConfig
from jaxtune.models.fitted import ATTENTION_BYTES, ATTENTION_STAGE, WIDE_ATTENTION_TIME
from jaxtune.models.layers.gradients import pulled_back
from jaxtune.models.layers.segment import INPUT, OUTPUT, Context, Residual, Segment, Sizes
from jaxtune.models.linear import Linear, apply_fused
from jaxtune.models.norm import Normed, norm_of
from jaxtune.models.rope import rotate, rotate_normed, scaled_by_position
from jaxtune.pallas.attention import attention_backward, attention_forward
from jaxtune.pallas.decode.attention import (
    as_cached,
    cache_capacity,
    cache_of,
    chunk_attention,
    chunk_written,
    decode_attention,
    written,
)
from jaxtune.pallas.fitted import device_name


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """The settings of an attention that differ from the decoder's; a field that is None takes DecoderConfig's of the
    same name. Window and rotary base are the LayerSpec's.
    """

    num_heads: int | None = None  # number of query heads
    num_kv_heads: int | None = None  # number of key and value heads
    head_dim: int | None = None  # size of a head
    attention_scale: float | None = None  # factor on the scores before the softmax
    # what each norm of queries and keys is computed over: one head, or the whole projection (all heads as one vector);
    # "none": there is no such norm
    qk_norm: Literal["head", "projection", "none"] | None = None
    value_norm: bool | None = None  # whether each head's values are normed, without a weight
    values_are_keys: bool | None = None  # whether values are the projected keys before their norm; there is no v_proj
    qkv_bias: bool | None = None  # whether the query, key and value projections have biases
    out_bias: bool | None = None  # whether the output projection has a bias
    attention_gate: bool | None = None  # whether each head's output is multiplied by the sigmoid of a gate
    # whether each head has a learned logit that takes part in its softmax and has no value
    attention_sinks: bool | None = None
    # a name under which later layers can take this attention's keys and values; None: it gives none away
    gives_keys: str | None = None
    # the layer has no keys and values of its own and takes those that an earlier layer gives under this name; None: it
    # has its own
    takes_keys: str | None = None
    hf_name: str = "self_attn"  # the part's name in Hugging Face's tensor names

    def make(self, config: DecoderConfig, key: jax.Array, dtype) -> Attention:
        """Builds the attention with random weights. config: the decoder's. key: draws the weights. dtype: of the
        weights as stored.
        """
        settings = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        del settings["hf_name"]
        sharing = settings.pop("gives_keys", None), settings.pop("takes_keys", None)
        if self.qk_norm == "none":
            settings["qk_norm"] = None
        return Attention(dataclasses.replace(config, **settings), key, dtype, *sharing)


class Attention(nnx.Module):
    """Grouped-query attention with q_proj, k_proj, v_proj (or one qkv_proj) and o_proj. With `attention_gate`, q_proj
    gives each head a gate after its query, whose sigmoid multiplies the head's output. With `values_are_keys` values
    are the keys before norm and rotation.

    Where queries, keys or values are normed, the residuals are the projections before the norm: its derivative reads
    its input, which a product would otherwise compute again. The backward norms and rotates once more. An attention
    that gives keys and values to later layers has them as residuals normed and rotated, so that those layers need none
    of its weights.

      gives_keys, takes_keys: the names under which it gives keys and values to later layers, or takes an earlier
        layer's.

    Attributes:
      cache_dtype: of caches in generation; None: the keys'.

    Raises ValueError for takes_keys with gives_keys, or with a fused qkv_proj.
    """

    has_cache = True
    cache_dtype: str | None = None

    def __init__(
        self, config: DecoderConfig, key: jax.Array, dtype, gives_keys: str | None = None, takes_keys: str | None = None
    ):
        if takes_keys is not None and (gives_keys is not None or config.fused_qkv):
            raise ValueError("takes_keys: such an attention has no fused qkv_proj, and gives no keys away")
        self.config = config
        self.gives_keys, self.takes_keys = gives_keys, takes_keys
        keys = initial.split(key, 4)
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
        self.sinks = nnx.Param(initial.full((config.num_heads,), 0, dtype)) if config.attention_sinks else None
        if config.qk_norm:
            over_projection = config.qk_norm == "projection"
            sizes = (config.query_size, config.kv_size) if over_projection else (config.head_dim, config.head_dim)
            self.q_norm = norm_of(config, sizes[0], dtype)
            if not self.takes:
                self.k_norm = norm_of(config, sizes[1], dtype)

    @property
    def gives(self) -> dict[str, str]:
        return (
            {} if self.gives_keys is None else dict(zip(("key", "value"), _shared_names(self.gives_keys), strict=True))
        )

    @property
    def takes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape for one token} of the keys and values of an earlier layer; {} if it has its own."""
        heads = (self.config.num_kv_heads, self.config.head_dim)
        return {} if self.takes_keys is None else dict.fromkeys(_shared_names(self.takes_keys), heads)

    @property
    def state_reads(self) -> tuple[str, ...]:
        """("key", "value"), or ("key",) where the values come from the same residual; () where both are another
        layer's.
        """
        if self.takes:
            return ()
        return ("key",) if self.config.values_are_keys and self._normed_late else ("key", "value")

    @property
    def in_matrices(self) -> tuple[str, ...]:
        """The linears that read the layer's input, in the order in which adapters' initial weights are drawn."""
        if self.config.fused_qkv:
            return ("qkv_proj",)
        if self.takes:
            return ("q_proj",)
        return ("q_proj", "k_proj") if self.config.values_are_keys else ("q_proj", "k_proj", "v_proj")

    @property
    def _normed_late(self) -> bool:
        """Whether the residuals query, key and value are projections before norm and rotation, which `attended`
        applies.
        """
        features = self.config.qk_norm is not None or self.config.value_norm or self.config.values_are_keys
        return bool(self.takes) or (features and not self.gives)

    def segments(self) -> tuple[Segment, ...]:
        width = self.config.query_size
        gates = (Residual("output_gate"),) if self.config.attention_gate else ()
        shared = bool(self.gives)
        key_and_value = (Residual("key", small=shared), Residual("value", decided_with="key", small=shared))
        slower = (1.0, 1.0)
        if self.config.head_dim > 256:
            wide = WIDE_ATTENTION_TIME.of("mosaic", device_name())
            slower = (wide.forward, wide.backward)

        def multiplications(tokens: int, length: int, backward: bool) -> float:
            """The duration of attention alone, as multiplications that large products do in that time."""
            fit = ATTENTION_STAGE.of("cudnn", device_name())
            forward = fit.slower * (1 + fit.half_tokens / length) * tokens * width * length
            return forward * (fit.backward if backward else 1.0) * slower[backward]

        return (
            Segment(
                "project",
                (INPUT,),
                (Residual("query"), *key_and_value[: len(self.state_reads)], *gates),
                Attention._project,
                matrices=self.in_matrices,
                norms=True,
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
                head_dim=self.config.head_dim,
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
        """The keyword arguments of the attention functions, the same for training and generation."""
        sinks = None if self.sinks is None else self.sinks[...]
        config = self.config
        return dict(scale=config.attention_scale, window=window, soft_cap=config.attention_soft_cap, sinks=sinks)

    def project(self, x: jax.Array | Normed, rotary, key: jax.Array | None = None):
        """(query [B, T, heads, D], key and value [B, T, kv_heads, D], and with attention_gate gates [B, T, heads, D]),
        normed and rotated, of an attention that has its own keys and values.

          x: [B, T, hidden], the layer's normed input.
          rotary: the layer's rotary table; None: queries and keys are not rotated.
          key: draws the adapters' dropout masks; None: no dropout.
        """
        query, key_, *value_and_gates = self._projections(x, key)
        value = self._value(key_ if self.config.values_are_keys else value_and_gates.pop(0))
        return self._query(query, rotary), self._key(key_, rotary), value, *value_and_gates

    def _projections(self, x: jax.Array | Normed, key: jax.Array | None):
        """(query, key, value, gates) of x [B, T, hidden] before norms and rotation, each [B, T, heads, D], without
        absent ones.
        """
        config = self.config
        if config.fused_qkv:
            fused = self.qkv_proj(x, key)
            q, kv = config.query_size, config.kv_size
            query, *heads = fused[..., :q], fused[..., q : q + kv], fused[..., q + kv :]
        else:
            query, *heads = apply_fused(x, tuple(getattr(self, name) for name in self.in_matrices), key)
        gates = ()
        if config.attention_gate:
            query, *gates = jnp.split(query.reshape(*x.shape[:2], config.num_heads, -1), 2, axis=-1)
        heads = (a.reshape(*a.shape[:2], -1, config.head_dim) for a in (query, *heads))
        return *heads, *gates

    def _query(self, x: jax.Array, rotary) -> jax.Array:
        return scaled_by_position(self._rotated("q_norm", x, rotary), rotary)

    def _key(self, x: jax.Array, rotary) -> jax.Array:
        return self._rotated("k_norm", x, rotary)

    def _value(self, x: jax.Array) -> jax.Array:
        """Values [B, T, kv_heads, D] (or keys), with value_norm divided by their root mean square over each head."""
        if not self.config.value_norm:
            return x
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.config.norm_eps)).astype(x.dtype)

    def _rotated(self, norm: str, x: jax.Array, rotary) -> jax.Array:
        """Norms x [B, T, heads, D] by the attribute `norm`, over each head or all as one vector (qk_norm), and rotates
        it.
        """
        interleaved, parts = self.config.interleaved_rotary, self.config.rotary_parts
        if parts > 1:
            assert self.config.qk_norm == "head"
            halves = getattr(self, norm)(x).reshape(*x.shape[:-1], parts, 2, -1)
            # Queries and keys in the same other order, in which the first halves of all parts come first.
            return rotate(halves.swapaxes(-3, -2).reshape(x.shape), rotary)
        if self.config.qk_norm == "head":
            return rotate_normed(x, getattr(self, norm), rotary, interleaved)
        if self.config.qk_norm == "projection":
            x = getattr(self, norm)(x.reshape(*x.shape[:2], -1)).reshape(x.shape)
        return rotate(x, rotary, interleaved)

    def output(self, out: jax.Array, gate: jax.Array | None = None, key: jax.Array | None = None) -> jax.Array:
        """The heads' outputs through the output projection, [B, T, hidden].

        out: [B, T, heads, D].
        gate: [B, T, heads, D], whose sigmoid multiplies `out`; None: no gate.
        key: draws the adapter's dropout mask; None: no dropout.
        """
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return self.o_proj(out.reshape(*out.shape[:2], -1), key)

    def _project(self, context: Context, x: jax.Array | Normed):
        if self._normed_late:
            return self._projections(x, context.key)
        return self.project(x, context.rotary, context.key)

    def attended(self, context: Context, query: jax.Array, key: jax.Array, *value: jax.Array) -> tuple[jax.Array, ...]:
        """(query, key, value) as the attention kernels read them, normed and rotated.

        context: its layout has the rotary tables.
        query, key, value: residuals, or an earlier layer's key and value; no value is passed where it comes from `key`.
        """
        if not self._normed_late:
            return query, key, *value
        if self.takes:
            return self._query(query, context.rotary), key, *value
        [value_] = value or (key,)
        return self._query(query, context.rotary), self._key(key, context.rotary), self._value(value_)

    def _attend(self, context: Context, *residuals: jax.Array):
        """(output [B, T, heads, D], the log-sum-exp of each query's scores, float32[B, heads, T])."""
        query, key, value = self.attended(context, *residuals)
        return attention_forward(query, key, value, context.layout, **self.options(context.spec.window))

    def _mix(self, context: Context, out: jax.Array, *gates: jax.Array):
        return (self.output(out, *gates, key=context.key),)

    # ---- generation

    def first_state(self, values: Mapping[str, jax.Array], lengths: jax.Array, new_tokens: int, context: Context):
        """The caches (keys, values), each [B, kv_heads, capacity, D], filled as attention reads them; () where both are
        another layer's. With a sliding window they have room for the window at most (rounded up to 128 tokens).

          values: {name: value} of the residuals that `state_reads` names.
          lengths: int32[B], tokens of each prompt.
          new_tokens: for which the caches have room beyond the prompts.
          context: its layout has one prompt a row, with rotary tables.
        """
        if self.takes:
            return ()
        key, value = values["key"], values[self.state_reads[-1]]
        if self._normed_late:
            key, value = self._key(key, context.rotary), self._value(value)
        capacity = cache_capacity(key.shape[1] + new_tokens, context.spec.window)
        key, value = self._cached(key), self._cached(value)
        return cache_of(key, lengths, capacity), cache_of(value, lengths, capacity)

    def _cached(self, numbers: jax.Array) -> jax.Array:
        return as_cached(numbers, jnp.dtype(self.cache_dtype or numbers.dtype))

    def step(self, x: jax.Array, state, positions: jax.Array, context: Context):
        """Runs the next N tokens of each row: (output [B, N, hidden], the caches with them).

        x: [B, N, hidden], the layer's normed input.
        state: (keys, values), each [B, kv_heads, capacity, D]; () where both are another layer's.
        positions: int32[B], the position of each row's first token; negative for a row that does not decode.
        context: its layout has the rotary tables of these positions.
        """
        return self.step_giving(x, state, positions, context)[:2]

    def step_giving(self, x: jax.Array, state, positions: jax.Array, context: Context):
        """`step` with a third result: {name under which later layers take them: (cache, new)} of keys and values; {} if
        the layer gives none. If N is 1, `cache` contains the new token and `new` is None. Otherwise `cache` is the one
        before the N tokens, because a window's cache has no room for them and all that they see, and `new` is [B, N,
        kv_heads, D].

          x: [B, N, hidden], the layer's normed input.
          state: (keys, values), each [B, kv_heads, capacity, D]; () where both are another layer's.
          positions: int32[B], the position of each row's first token; negative for a row that does not decode.
          context: its layout has the rotary tables of these positions, `taken` another layer's (cache, new).
        """
        options, chunk = self.options(context.spec.window), x.shape[1] > 1
        if self.takes:
            query, *gates = self._projections(x, None)
            query = self._query(query, context.rotary)
            shared_caches: dict[str, tuple] = dict(context.taken)
            (keys, key), (values, value) = (shared_caches[name] for name in self.takes)
        else:
            query, key, value, *gates = self.project(x, context.rotary)
            keys, values = state
            write = functools.partial(chunk_written, counts=context.layout.counts()) if chunk else _written_one
            news = self._cached(key), self._cached(value)
            state = tuple(write(cache, new, positions) for cache, new in zip(state, news, strict=True))
        if chunk:
            out = chunk_attention(query, key, value, keys, values, positions, **options)
        else:
            keys, values = (keys, values) if self.takes else state
            key = value = None
            out = decode_attention(query[:, 0], keys, values, positions + 1, **options)[:, None]
        given_caches = dict(zip(self.gives.values(), ((keys, key), (values, value)), strict=True)) if self.gives else {}
        return self.output(out, *gates), state, given_caches

    # ---- for the planner

    def waiting_bytes(self, sizes: Sizes) -> float:
        return ATTENTION_BYTES.of("cudnn", sizes.device).waiting * sizes["query"]

    def backward_bytes(self, sizes: Sizes) -> float:
        """The gradients of query, key and value, a second array of the query's size, values of the residual stream, and
        if `_normed_late` what attention reads. In tiles, work space is added, and the stream has one value less.
        """
        fit = ATTENTION_BYTES.of("cudnn", sizes.device)
        stream = fit.stream * sizes["layer_input"]
        value = sizes[self.state_reads[-1]] if self.state_reads else 0.0
        if self._normed_late:
            stream += sizes["query"] + sizes["key"] + (value if self.config.value_norm else 0)
        if sizes.tiles == 1:
            return 2 * sizes["query"] + sizes["key"] + value + stream
        query_bytes = (2 + fit.work_space) * sizes["query"]
        return query_bytes + sizes["key"] + value + stream - sizes["layer_input"]


def _shared_names(name: str) -> tuple[str, str]:
    return f"{name}_key", f"{name}_value"


def _written_one(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """Writes one token's keys or values [B, 1, kv_heads, D] into a ring cache; a negative position writes nothing."""
    return written(cache, new[:, 0], positions)


def _attend_backward(module_of, trainable, context: Context, inputs, outputs, gradients):
    """The derivative of `attend`, a Backward, from the saved output and log-sum-exp."""
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
    dtrainable, *dresiduals = pulled_back(pullback, (dquery, dkey, dvalue, None if sinks is None else dsinks))
    return dtrainable, tuple(dresiduals)
