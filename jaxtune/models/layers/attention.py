"""Softmax attention, a mixer: the projections of queries, keys and values, attention within the documents of a row, and
the output projection. `Attention` runs in three segments (project, attend, mix) in training and prefills, and decodes
with caches of keys and values (`_written_one` writes a token into one). AttentionShape has the settings in which one
layer's attention differs from the decoder's, such as heads and norms, but not its window and rotary base. Layers can
share keys and values under the names from `_shared_names`. The segment `attend` has the hand-written derivative
`_attend_backward`."""

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
from jaxtune.models.norm import Normed, norm_of
from jaxtune.models.rope import rotate, rotate_normed, scaled_by_position
from jaxtune.pallas.attention import attention_backward, attention_forward
from jaxtune.pallas.decode_attention import (
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
    """The settings of an attention that differ from the decoder's, given as Part.config; a field that is None takes the
    decoder's setting (DecoderConfig's field of the same name). So layers of one model can have different attentions.

    Sliding window and rotary base are not set here: the LayerSpec has them. `make` builds the module."""

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
        """Builds the attention module; Block's constructor calls it. config: the decoder's settings, which hold where
        this shape has None. key: draws the initial weights. dtype: of the weights. Raises ValueError as Attention does,
        for takes_keys with gives_keys or with a fused qkv_proj."""
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
    output. With `values_are_keys` there is no v_proj: values are the keys as k_proj gives them, before norm and
    rotation.

    Where queries, keys or values are normed, the residuals are the projections before the norm. The norm's derivative
    reads its input, which a matrix product would otherwise compute again. The backward norms and rotates them once
    more. Values that are keys are no residual of their own, unless later layers take them.

    An attention can share its keys and values with later layers. One that gives them (`gives`) has query, key and value
    as residuals normed and rotated, so that later layers need none of its weights. One that takes them (`takes`) makes
    queries alone. `in_matrices` and `state_reads` name its input projections and the residuals that fill its caches;
    `first_state` and `step` run it in generation, and `backward_bytes` and `waiting_bytes` are estimates for the
    planner.

    Args:
      config: gives the sizes and the features.
      key: draws the initial weights.
      dtype: of the weights.
      gives_keys, takes_keys: the name under which it gives its keys and values to later layers, and the name under
        which it takes an earlier layer's in place of its own; None: it does not. It cannot do both.
    Raises:
      ValueError: takes_keys with gives_keys, or with a fused qkv_proj.
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
            """A Linear of these sizes, whose initial weight k draws."""
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
        """{residual: the name under which later layers take it}, for this attention's residuals `key` and `value`; {}
        if it gives none to later layers. The block reads it to pass these on."""
        return (
            {} if self.gives_keys is None else dict(zip(("key", "value"), _shared_names(self.gives_keys), strict=True))
        )

    @property
    def takes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape for one token} of the keys and values that it takes from an earlier layer; {} if it has its own.
        `attend` reads the values by these names, `step` in Context.taken. The planner reads the shapes."""
        heads = (self.config.num_kv_heads, self.config.head_dim)
        return {} if self.takes_keys is None else dict.fromkeys(_shared_names(self.takes_keys), heads)

    @property
    def state_reads(self) -> tuple[str, ...]:
        """Names of the residuals from which `first_state` fills the caches of keys and values after a prompt: ("key",
        "value"), or ("key",) where the values are computed from the same residual; () where keys and values are another
        layer's. Generation keeps these residuals of a prompt's pass."""
        if self.takes:
            return ()
        return ("key",) if self.config.values_are_keys and self._normed_late else ("key", "value")

    @property
    def in_matrices(self) -> tuple[str, ...]:
        """Names of the linears that read the layer's input: the projections of queries, keys and values that this
        attention has, or its fused qkv_proj. They are applied in one operation. get_peft_model draws the initial
        weights of their adapters in this order."""
        if self.config.fused_qkv:
            return ("qkv_proj",)
        if self.takes:
            return ("q_proj",)
        return ("q_proj", "k_proj") if self.config.values_are_keys else ("q_proj", "k_proj", "v_proj")

    @property
    def _normed_late(self) -> bool:
        """True: the residuals query, key and value are projections before norm and rotation, which `attended` and
        `first_state` apply (keys and values of another layer have both already). False: `project` has applied both. It
        is True for one that takes keys and values; False for one that gives them; of others, True for those with a
        norm of queries and keys or of values, or with values that are keys."""
        features = self.config.qk_norm is not None or self.config.value_norm or self.config.values_are_keys
        return bool(self.takes) or (features and not self.gives)

    def segments(self) -> tuple[Segment, ...]:
        """Its three segments in the order in which they run: `project` (query, key, value), `attend` (attention) and
        `mix` (output projection). They tell the stack how to run the attention and the planner what it costs. An
        attention that takes an earlier layer's keys and values makes the query alone in `project`, and reads those in
        `attend`."""
        width = self.config.query_size
        gates = (Residual("output_gate"),) if self.config.attention_gate else ()
        given = bool(self.gives)
        own = (Residual("key", small=given), Residual("value", decided_with="key", small=given))
        slower = (1.0, 1.0)
        if self.config.head_dim > 256:
            wide = WIDE_ATTENTION_TIME.of("mosaic", device_name())
            slower = (wide.forward, wide.backward)

        def multiplications(tokens: int, length: int, backward: bool) -> float:
            """The duration of attention over rows of `length` tokens, for Segment.multiplications
            (models/fitted.py)."""
            fit = ATTENTION_STAGE.of("cudnn", device_name())
            whole = fit.slower * (1 + fit.half_tokens / length) * tokens * width * length
            return whole * (fit.backward if backward else 1.0) * slower[backward]

        return (
            Segment(
                "project",
                (INPUT,),
                (Residual("query"), *own[: len(self.state_reads)], *gates),
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
        """The keyword arguments of the attention functions (scale, window, soft_cap, sinks), which are the same for
        training and generation; sinks and soft_cap are None if the config has none.

        window: the layer's sliding window in tokens (LayerSpec.window); None: full attention."""
        sinks = None if self.sinks is None else self.sinks[...]
        config = self.config
        return dict(scale=config.attention_scale, window=window, soft_cap=config.attention_soft_cap, sinks=sinks)

    def project(self, x: jax.Array | Normed, rotary, key: jax.Array | None = None):
        """Computes queries, keys and values of an attention that has its own, ready for the kernels (queries and keys
        normed and rotated, values normed, where the config says so): (query [B, T, heads, D], key and value [B, T,
        kv_heads, D]); with attention_gate, the gates [B, T, heads, D] follow. Generation calls it, and the segment
        `project` unless `attended` norms (_normed_late).

        Args:
          x: [B, T, hidden], the layer's normed input.
          rotary: the layer's rotary table (Context.rotary); None: queries and keys are not rotated.
          key: draws the adapters' dropout masks; None: no dropout.
        """
        query, key_, *others = self._projections(x, key)
        value = self._value(key_ if self.config.values_are_keys else others.pop(0))
        return self._query(query, rotary), self._key(key_, rotary), value, *others

    def _projections(self, x: jax.Array | Normed, key: jax.Array | None):
        """Returns a tuple of the projections of x without norms and rotation, in the order query, key, value, gates. An
        array that this layer does not have is left out, so the tuple is shorter; it is not None. There is no value
        where values are keys, neither key nor value where both are another layer's, and no gates without
        attention_gate. Query and gates are [B, T, heads, D], key and value [B, T, kv_heads, D].

        x: [B, T, hidden]. key: draws the adapters' dropout masks; None: no dropout."""
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
        """Norms a projected query x [B, T, heads, D] and rotates it. rotary: the rotary table; if it has a third array,
        that scales the query by its position. None: the query is not rotated."""
        return scaled_by_position(self._rotated("q_norm", x, rotary), rotary)

    def _key(self, x: jax.Array, rotary) -> jax.Array:
        """Norms a projected key x [B, T, kv_heads, D] and rotates it by the rotary table, if that is not None."""
        return self._rotated("k_norm", x, rotary)

    def _value(self, x: jax.Array) -> jax.Array:
        """The values as attention reads them, [B, T, kv_heads, D], from projected values (or, where values are keys,
        projected keys) x of that shape. With value_norm each head's values are divided by their root mean square,
        computed in float32; otherwise x is returned unchanged."""
        if not self.config.value_norm:
            return x
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.config.norm_eps)).astype(x.dtype)

    def _rotated(self, norm: str, x: jax.Array, rotary) -> jax.Array:
        """Norms queries or keys x [B, T, heads, D] by the norm in the attribute `norm`, over each head or all heads as
        one vector (qk_norm), and rotates them. rotary: the rotary table; None: they are not rotated."""
        interleaved = self.config.interleaved_rotary
        if self.config.qk_norm == "head":
            return rotate_normed(x, getattr(self, norm), rotary, interleaved)
        if self.config.qk_norm == "projection":
            x = getattr(self, norm)(x.reshape(*x.shape[:2], -1)).reshape(x.shape)
        return rotate(x, rotary, interleaved)

    def output(self, out: jax.Array, gate: jax.Array | None = None, key: jax.Array | None = None) -> jax.Array:
        """Projects the heads' outputs `out` [B, T, heads, D] by o_proj: [B, T, hidden]. The segment `mix` calls it, and
        `step_giving` in generation.

        gate: [B, T, heads, D], whose sigmoid multiplies `out` first; None: no gate. key: draws the dropout mask of the
        adapter of o_proj; None: no dropout."""
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return self.o_proj(out.reshape(*out.shape[:2], -1), key)

    def _project(self, context: Context, x: jax.Array | Normed):
        """The function `run` of the segment `project`: (query, key, value, gates) from the layer's normed input x [B,
        T, hidden], without those that this attention does not have (_projections). They are normed and rotated here
        only if `_normed_late` is False; otherwise `attended` does it. context: has rotary tables and dropout key."""
        if self._normed_late:
            return self._projections(x, context.key)
        return self.project(x, context.rotary, context.key)

    def attended(self, context: Context, query: jax.Array, key: jax.Array, *value: jax.Array) -> tuple[jax.Array, ...]:
        """(query, key, value) in the form in which the attention kernels read them, normed and rotated. Queries, keys
        and values that are already so are returned unchanged. Forward and backward of the segment `attend` call it.

        Args:
          context: has the rotary tables.
          query: the residual of the segment `project`.
          key, value: residuals of the same segment (state_reads), or as an earlier layer gives them; where values are
            keys and not given to later layers, no value is passed, and the returned one is computed from `key`.
        """
        if not self._normed_late:
            return query, key, *value
        if self.takes:
            return self._query(query, context.rotary), key, *value
        [value_] = value or (key,)
        return self._query(query, context.rotary), self._key(key, context.rotary), self._value(value_)

    def _attend(self, context: Context, *residuals: jax.Array):
        """The function `run` of the segment `attend`: (output [B, T, heads, D], the log-sum-exp of each query's scores,
        float32[B, heads, T], which the backward reads). Tokens attend within their document, to themselves and earlier
        ones. context: has the document boundaries and the window.

        residuals: query, key and, if it is a residual of its own (state_reads), value. The segment `project` makes
        them, except a key and value that an earlier layer gives."""
        query, key, value = self.attended(context, *residuals)
        return attention_forward(query, key, value, context.layout, **self.options(context.spec.window))

    def _mix(self, context: Context, out: jax.Array, *gates: jax.Array):
        """The function `run` of the segment `mix`: (`output` [B, T, hidden],) from the heads' outputs `out` [B, T,
        heads, D], and from their gates if there is an attention_gate. context: has the dropout key."""
        return (self.output(out, *gates, key=context.key),)

    # ---- generation

    def first_state(self, values: Mapping[str, jax.Array], lengths: jax.Array, new_tokens: int, context: Context):
        """The caches (keys, values) for generation, each [B, kv_heads, capacity, D], filled with the prompts as
        attention reads them: keys normed and rotated, and values normed if the config has value_norm. The capacity is
        in tokens (cache_capacity). The result is () where keys and values are another layer's.

        Args:
          values: {name: value} of the residuals that state_reads names, computed from the prompts.
          lengths: int32[B], tokens of each prompt.
          new_tokens: for how many tokens behind the padded prompts the caches have room; with a sliding window they
            have room for the window at the most (rounded up to 128 tokens).
          context: the one with which the prompts ran, which has their rotary tables.
        """
        if self.takes:
            return ()
        key, value = values["key"], values[self.state_reads[-1]]
        if self._normed_late:
            key, value = self._key(key, context.rotary), self._value(value)
        capacity = cache_capacity(key.shape[1] + new_tokens, context.spec.window)
        return cache_of(key, lengths, capacity), cache_of(value, lengths, capacity)

    def step(self, x: jax.Array, state, at: jax.Array, context: Context):
        """Runs the next N tokens of each row in generation: (output [B, N, hidden], the state after them, with their
        keys and values). Block.step calls it if this attention gives no keys, else `step_giving`.

        Args:
          x: [B, N, hidden], the layer's normed input.
          state: (keys, values), from `first_state` or the previous step; () where keys and values are another layer's.
          at: int32[B], the position of the first of the N tokens, which is also the number of tokens in the state;
            negative for a row that does not decode.
          context: its layout has the rotary tables of these positions; where keys and values are another layer's, its
            `taken` has them.
        """
        return self.step_giving(x, state, at, context)[:2]

    def step_giving(self, x: jax.Array, state, at: jax.Array, context: Context):
        """Runs the next N tokens of each row as `step` does (x: [B, N, hidden]; state: the caches; at: int32[B], the
        first position; context), and has a third result: {name under which later layers take them: (cache, new)} of the
        keys and of the values that this layer gives to later layers; {} if it gives none. Block.step calls it for an
        attention that gives them.

        If N is 1, `cache` [B, kv_heads, capacity, D] contains the new token, and `new` is None. Otherwise `cache` is
        the one before the N tokens, because a window's cache has no room for them and for all that they see, and `new`
        is their keys or values [B, N, kv_heads, D].
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
        """An estimate of the bytes of attention's partial results that are in memory while the backward of the layer's
        feed-forward runs; the planner adds it to what that backward needs if the feed-forward covers the mixer
        (Scratch.covers_mixer), else it does not count. It is a multiple of the query's bytes, fitted to compiled
        programs (models/fitted.py). sizes: the bytes of the layer's residuals by name, of one micro-batch on one
        device, and the device's name."""
        return ATTENTION_BYTES.of("cudnn", sizes.device).waiting * sizes["query"]

    def backward_bytes(self, sizes: Sizes) -> float:
        """An estimate of the bytes that attention's backward needs in addition to the residuals; the planner adds it to
        the layer's peak.

        They are the gradients of query, key and value, a second array of the query's size, values of the residual
        stream (a multiple of the layer's input), and, if `_normed_late`, queries and keys (with value_norm also values)
        as attention reads them. Keys and values of another layer count 0. If layers run in tiles, the work space, a
        multiple of the query, is added, and the stream has one value less. sizes: the bytes of the layer's residuals by
        name, of one micro-batch on one device, with the number of tiles and the device's name."""
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
    """The names ("{name}_key", "{name}_value") of the keys and the values that layers share, under which the stack and
    generation pass them from one layer to another. name: the value of gives_keys or takes_keys."""
    return f"{name}_key", f"{name}_value"


def _written_one(cache: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
    """Writes the keys or the values of one token of each row into a cache, and returns the new cache; `step_giving`
    calls it when rows decode token by token.

    cache: [B, kv_heads, capacity, D]. new: [B, 1, kv_heads, D]. at: int32[B], the token's position, which is written
    at the index position % capacity; a row with a negative position is left unchanged."""
    return written(cache, new[:, 0], at)


def _attend_backward(module_of, trainable, context: Context, inputs, outputs, gradients):
    """The hand-written derivative of the segment `attend` (a Backward, models/layers/segment.py), by the attention
    kernels' backward, which reads the saved output and log-sum-exp. Norms and rotation are computed again.

    Args:
      module_of: builds the Attention from trainable tensors.
      trainable: its trainable tensors.
      context: what the forward received: the layer's spec and the batch's layout.
      inputs: what `_attend` read: query, key and, where it is a residual of its own, value; or query, and an earlier
        layer's key and value.
      outputs: (the output [B, T, heads, D], the log-sum-exp of each query's scores, float32[B, heads, T]).
      gradients: (the gradient of the output,); the log-sum-exp has none.
    Returns:
      (gradients of the trainable tensors, or None if no sinks train and `_normed_late` is False; one for each input)
    """
    attention: Attention = module_of(trainable)
    options = attention.options(context.spec.window)
    out, lse = outputs

    def read(trainable, *residuals):
        """(query, key, value) as the attention kernels read them, and the sinks if they train, else None."""
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
