"""A decoding step of a plain layer, attention and a feed-forward after RMS norms, in as few kernels as possible.

A step of few rows is bound by the bytes of the weights and by the number of its kernels. The operations of
pallas/few_rows are one kernel each: the residual stream is added up and normed at once, also across the border of two
layers, and a token's heads are normed, rotated and written into the caches at once. If any layer of the model is of
another kind, all run through Block.step, and so do chunks of prompts.

The sampler's steps (slots.py) use it: `is_plain` says which layers `step` can run. A Stream is what one layer hands to
the next; `norm_before` and `rounding` give the norms that the kernels compute, and their settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.models.config import LayerSpec
from jaxtune.models.layers.attention import Attention
from jaxtune.models.layers.block import Block
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.layers.experts import MoE
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.layers.routers import Router
from jaxtune.models.layers.segment import INPUT, OUTPUT, STREAM, Context
from jaxtune.models.linear import Linear, apply_fused
from jaxtune.models.norm import RMSNorm
from jaxtune.pallas.few_rows import (
    added_norm,
    attended,
    experts_down,
    experts_gated,
    experts_have_kernels,
    gated_product,
    products,
)
from jaxtune.pallas.quant_matmul import LoraWeights


class Stream(NamedTuple):
    """The residual stream of one new token a row, between two parts of a layer or two layers, with the norm that the
    same kernel computed."""

    x: jax.Array  # [N, hidden]
    normed: jax.Array  # [N, hidden]: x after the norm of what reads it next, a part of a layer or the head


def is_plain(block: Block, spec: LayerSpec) -> bool:
    """Whether `step` can run this layer (`block`, of the kind `spec`). If it cannot run one layer of a model, all run
    through Block.step, with more kernels (through_layers). It can if the layer is attention without gates, and
    then a feed-forward, each after an RMS norm and added to the residual stream without a further norm or factor; if it
    exchanges nothing with other layers; if its norms have no dtype of their own, queries and keys have none or one norm
    a head, and values are neither normed nor equal to the keys; and if queries and keys are rotated over the whole head
    in halves, without a scale by position, or not at all."""
    parts = [[(part.name, part.norm, part.post_norm) for part in stage.parts] for stage in spec.stages]
    if parts != [[("mixer", True, False)], [("mlp", True, False)]] or any(stage.post_norm for stage in spec.stages):
        return False
    attention = block.parts["mixer"]
    if block.takes or block.gives or block.layer_scalar is not None or block.residual_scale != 1.0:
        return False
    if type(attention) is not Attention:
        return False
    config = attention.config
    norms = [
        norm_before(block, "mixer"),
        norm_before(block, "mlp"),
        *([attention.q_norm, attention.k_norm] if config.qk_norm else []),
    ]
    plain = config.qk_norm in (None, "head") and not config.interleaved_rotary
    plain &= not (config.attention_gate or config.values_are_keys or config.value_norm)
    rope = None if spec.rotary is None else config.rotary[spec.rotary]
    whole = rope is None or not (rope.llama_4_scaling_beta or rope.partial_rotary_factor != 1.0)
    return plain and whole and all(type(norm) is RMSNorm and norm.compute is None for norm in norms)


def norm_before(block: Block, part: str) -> RMSNorm:
    """The norm of a layer (`block`) through which `part`, "mixer" or "mlp", reads the residual stream. The kernel that
    adds up the stream computes this norm too, so its weight is needed before the part runs."""
    return getattr(block, f"{part}_norm")


def rounding(norm: RMSNorm) -> dict:
    """The settings of an RMSNorm of the model as keyword arguments for the kernels added_norm and attended, which
    compute the same norm inside another operation: {"eps": added to the mean square, "offset": added to the weight,
    "float32": whether the product with the weight is computed in fp32}. `step` calls it."""
    return dict(eps=norm.eps, offset=norm.offset, float32=norm.float32)


def step(
    block: Block,
    stream: Stream,
    state: Mapping[str, tuple[jax.Array, jax.Array]],
    at: jax.Array,
    context: Context,
    next_weight: jax.Array,
    batch_invariant: bool,
) -> tuple[Stream, dict[str, tuple[jax.Array, jax.Array]]]:
    """Runs the next token of each row through one layer for which `is_plain` holds, for layer_steps._plain_step.

    Args:
      block: the layer.
      stream: the layer's input [N, hidden], and that input after the layer's norm before attention (mixer_norm).
      state: {"mixer": (keys, values)}, the attention's caches of all rows, each [N, kv_heads, capacity, head_dim].
      at: int32[N], the token's position in each row; -1 for a row that does not decode, whose caches stay as they are.
      context: the layer's spec, and a layout with the rotary tables of these positions.
      next_weight: [hidden], of the norm before the next layer or the head, which rounds as this layer's norms do.
      batch_invariant: whether a row must have the same bits in any batch.
    Returns:
      (Stream: the layer's output, and that normed with next_weight; {"mixer": (keys, values) with the new tokens})
    """
    attention, norm = block.parts["mixer"], norm_before(block, "mlp")
    options = rounding(norm)
    table = None if context.rotary is None else tuple(part[:, 0] for part in context.rotary)
    own, norms = options, None
    if attention.config.qk_norm:
        own, norms = rounding(attention.q_norm), (attention.q_norm.weight[...], attention.k_norm.weight[...])
    parts = _parts(stream.normed, [getattr(attention, name) for name in attention.in_matrices])
    masking = attention.options(context.spec.window)
    masking["batch_invariant"] = batch_invariant
    out, keys, values = attended(parts, *state["mixer"], at, table, norms, **own, **masking)
    x, normed = added_norm(stream.x, _parts(out.reshape(len(out), -1), [attention.o_proj]), norm.weight[...], **options)
    parts = _feed_forward(block.parts["mlp"], Stream(x, normed), context)
    return Stream(*added_norm(x, parts, next_weight, **options)), {"mixer": (keys, values)}


def _feed_forward(feed_forward, stream: Stream, context: Context) -> jax.Array:
    """Computes the output of `feed_forward`, a layer's MLP or experts, for one new token of each of N rows: [splits, N,
    hidden], partial sums, whose sum over the first axis is the output. The kernel that adds them to the residual stream
    computes that sum too. stream: the residual stream before the feed-forward. context: the layer's Context, which
    experts read."""
    if type(feed_forward) is MLP and not feed_forward.config.fused_gate_up:
        gate, up = feed_forward.gate_proj, feed_forward.up_proj
        if all(_is_plain(linear, stream.x.dtype) for linear in (gate, up, feed_forward.down_proj)):
            activation, loras = feed_forward.config.activation, _adapters((gate, up))
            gated = gated_product(stream.normed, gate.weight[...], up.weight[...], activation, loras)
            return _parts(gated, [feed_forward.down_proj])
    if type(feed_forward) is MoE:
        parts = _of_experts(feed_forward, stream.normed, context)
        if parts is not None:
            return parts
    values = {INPUT: stream.normed[:, None], STREAM: stream.x[:, None]}
    for segment in feed_forward.segments():
        if not segment.aux:
            outputs = segment.run(feed_forward, context, *(values[name] for name in segment.reads))
            values |= zip(segment.outputs, outputs, strict=True)
    return values[OUTPUT][None, :, 0]


def _of_experts(moe: MoE, x: jax.Array, context: Context) -> jax.Array | None:
    """Computes the output of a mixture of experts `moe` for one new token of each of N rows by few_rows' kernels, which
    need no sort of tokens by expert: [k, N, hidden], partial sums, one for each of a token's k experts. None if there
    are no kernels for it here: with a shared expert, another router than the plain one (Router), gpt-oss's activation,
    experts that are not plain ones (_are_plain), or where experts_have_kernels says so, as for many rows.
    `_feed_forward` then runs the experts' segments. x: [N, hidden], the experts' normed input. context: its layout
    marks the rows that do not decode as padding; they get no expert, and zeros."""
    settings, experts = moe.moe, (moe.experts.gate_up_proj, moe.experts.down_proj)
    other = settings.shared_size is not None or settings.swiglu_limit is not None or settings.interleaved
    if other or type(moe.router) is not Router or not all(_are_plain(matrix, x.dtype) for matrix in experts):
        return None
    gate_up, down = (matrix.weight[...] for matrix in experts)
    loras = experts[0].adapter(), experts[1].adapter()
    activation = moe.config.activation
    if not experts_have_kernels(x, (gate_up, down), settings.experts_per_token, activation, loras):
        return None
    choice = moe.choose(x[:, None], context.layout.doc_end > 0)
    weights = moe.router.weights(moe.router(x), choice)
    gated = experts_gated(x, gate_up, choice, weights, activation, loras[0])
    return experts_down(gated, down, choice, loras[1])


def _are_plain(matrix: ExpertLinear, dtype) -> bool:
    """Whether the experts' matrices `matrix` are plain arrays [E, out, in] of the dtype `dtype`, with or without
    adapters, and products with them are nothing else (no bias or rounding, and no dtype of its own), which few_rows'
    kernels can multiply."""
    weight, more = matrix.stored_weight, (matrix.bias, matrix.fake_quant, matrix.compute)
    plain = not matrix.transposed and all(part is None for part in more)
    return plain and isinstance(weight, jax.Array) and weight.dtype == dtype


def _is_plain(linear: Linear, dtype) -> bool:
    """Whether a linear is a product with an array of the dtype `dtype`, with or without a LoRA adapter, and nothing
    else (not quantised, no bias, rounding or DoRA, and no dtype of its own), which few_rows' kernels can multiply."""
    more = (linear.bias, linear.fake_quant, linear.compute, None if linear.lora is None else linear.lora.magnitude)
    weight = linear.stored_weight
    return all(part is None for part in more) and isinstance(weight, jax.Array) and weight.dtype == dtype


def _adapters(linears: Sequence[Linear]) -> list[LoraWeights | None]:
    """The adapters of `linears`, for which `_is_plain` holds, as few_rows' kernels take them: for each linear its
    adapter's arrays or None; an empty list if no linear has an adapter."""
    loras = [None if linear.lora is None else linear.lora.weights(linear.stored_weight) for linear in linears]
    return loras if any(lora is not None for lora in loras) else []


def _parts(x: jax.Array, linears: Sequence[Linear]) -> jax.Array:
    """The products of x [N, in] with several linears, concatenated: [splits, N, sum of the linears' out], partial sums,
    whose sum over the first axis is the product. few_rows.products computes them if all linears are plain (_is_plain),
    adapters included; otherwise the linears compute the product as usual, and splits is 1. `step` calls it for query,
    key and value and for o_proj, and `_feed_forward` for a plain MLP's down_proj (gate and up have gated_product)."""
    if all(_is_plain(linear, x.dtype) for linear in linears):
        return products(x, [linear.weight[...] for linear in linears], _adapters(linears))
    return jnp.concatenate(apply_fused(x[:, None], tuple(linears)), axis=-1)[None, :, 0]
