"""A decoding step of a plain layer, attention and a feed-forward after RMS norms, in as few kernels as possible: a step
of few rows is bound by the bytes of the weights and the number of kernels. One kernel adds up and norms the residual
stream, also across layers; another norms, rotates and caches a token's heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import LayerSpec
from jaxtune.models.generation.exchanged import is_wide, part_of, sent_back, stays_divided
from jaxtune.models.layers.attention import Attention
from jaxtune.models.layers.block import Block
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.layers.experts import MoE
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.layers.routers import Router
from jaxtune.models.layers.segment import INPUT, OUTPUT, STREAM, Context
from jaxtune.models.linear import Linear, apply_fused
from jaxtune.models.norm import RMSNorm
from jaxtune.models.placement import gathers, partition
from jaxtune.pallas import dispatch
from jaxtune.pallas.decode.few_rows import (
    added_norm,
    added_norm_coded,
    attended,
    experts_down,
    experts_gated,
    experts_have_kernels,
    gated_product,
    products,
    unsharded,
)
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.gated import ACTIVATIONS
from jaxtune.pallas.quant_matmul import LoraWeights, few_product, fp8_few
from jaxtune.pallas.quant_matmul.fp8_few import Coded

# (an operation's name, its result) -> the result as the next operations read it; differences.py looks at them.
type Tap = Callable[[str, jax.Array], jax.Array]


def _untapped(name: str, value: jax.Array) -> jax.Array:
    return value


class Stream(NamedTuple):
    """The residual stream of one new token a row, and its norm from the same kernel."""

    x: jax.Array  # [N, hidden]
    normed: jax.Array  # [N, hidden]: x after the norm of what reads it next, a part of a layer or the head
    coded: Coded | None = None  # normed in e4m3, where FP8 products of codes read it

    def of(self, wide: bool, rows: int) -> Stream:
        """For the rows of all devices that divide weights, or this device's, which are `rows`."""
        if wide == (len(self.x) > rows):
            return self
        moved = gathers.rows_of_all if wide else functools.partial(gathers.own_of_all, rows=rows)
        return Stream(moved(self.x), moved(self.normed))


def is_plain(block: Block, spec: LayerSpec) -> bool:
    """Whether `step` can run a layer: attention without gates, then a feed-forward, each between an RMS norm and a
    plain residual sum; no exchange with other layers; no norm with a dtype of its own; queries and keys with no norm or
    one a head, rotated over the whole head in halves without a scale by position, or not at all; values without a norm
    that are not the keys.
    """
    stage_layout = [[(part.name, part.norm, part.post_norm) for part in stage.parts] for stage in spec.stages]
    if stage_layout != [[("mixer", True, False)], [("mlp", True, False)]] or any(
        stage.post_norm for stage in spec.stages
    ):
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
    whole_heads = rope is None or not (rope.llama_4_scaling_beta or rope.partial_rotary_factor != 1.0)
    return plain and whole_heads and all(type(norm) is RMSNorm and norm.compute is None for norm in norms)


def norm_before(block: Block, part: str) -> RMSNorm:
    """The norm before `part`, "mixer" or "mlp"."""
    return getattr(block, f"{part}_norm")


def rounding(norm: RMSNorm) -> dict:
    """Arguments for kernels that compute the norm: eps is added to the mean square, offset to the weight; float32: the
    product with the weight is in fp32.
    """
    return dict(eps=norm.eps, offset=norm.offset, float32=norm.float32)


def step(
    block: Block,
    stream: Stream,
    state: Mapping[str, tuple[jax.Array, jax.Array]],
    positions: jax.Array,
    context: Context,
    next_weight: jax.Array,
    batch_invariant: bool,
    tap: Tap = _untapped,
) -> tuple[Stream, dict[str, tuple[jax.Array, jax.Array]]]:
    """Runs the next token of each row through a plain layer: (output and the same normed with next_weight, {"mixer":
    updated caches}).

      block: a layer for which `is_plain` holds.
      stream: [N, hidden], with the norm before attention; of the rows of all devices if the layer `is_wide`.
      state: {"mixer": (keys, values)}, each [N, kv_heads, capacity, head_dim].
      positions: int32[N], positions; -1 for a row that does not decode.
      context: its layout has the rotary tables of `positions`.
      next_weight: [hidden], of the next norm, which rounds as this layer's do.
      batch_invariant: a row must have the same bits in any batch.
      tap: called with the result of each operation, in their order; in a wide layer of attention, stream and norm.
    """
    attention, norm = block.parts["mixer"], norm_before(block, "mlp")
    options = rounding(norm)
    table = None if context.rotary is None else tuple(angles[:, 0] for angles in context.rotary)
    head_options, norms = options, None
    if attention.config.qk_norm:
        head_options, norms = rounding(attention.q_norm), (attention.q_norm.weight[...], attention.k_norm.weight[...])
    linears, wide = [getattr(attention, name) for name in attention.in_matrices], is_wide(block)
    of_heads = _own_heads(stream.normed, attention) if wide else _parts(stream.normed, linears, stream.coded)
    masking = attention.options(context.spec.window)
    masking |= dict(batch_invariant=batch_invariant, dtype=stream.x.dtype)
    of_heads = of_heads if wide else tap("query, key, value", of_heads)
    out, keys, values = attended(of_heads, *state["mixer"], positions, table, norms, **head_options, **masking)
    out, mlp = tap("attention", out).reshape(len(out), -1), block.parts["mlp"]
    if wide:
        partial_sums = _columns_of_all(gathers.rows_of_all(out), attention.o_proj)
    else:
        partial_sums = tap("output", _parts(out, [attention.o_proj]))
    stream = _normed(stream.x, partial_sums, norm.weight[...], options, _gate_and_up(mlp))
    stream = Stream(tap("stream", stream.x), tap("norm", stream.normed), stream.coded)
    if wide:
        partial_sums = _of_all_rows(mlp, stream.normed)
    else:
        partial_sums = tap("down", _feed_forward(mlp, stream, context, tap))
    # The next layer's linears are expected to be as this one's.
    stream = _normed(stream.x, partial_sums, next_weight, options, linears)
    return stream, {"mixer": (keys, values)}


def first_stream(block: Block, x: jax.Array) -> Stream:
    """The stream before a model's first layer. x: [N, hidden]."""
    normed, attention = norm_before(block, "mixer")(x), block.parts["mixer"]
    blocks = _rounding([getattr(attention, name) for name in attention.in_matrices], x)
    return Stream(x, normed, None if blocks is None else fp8_few.rounded(normed, blocks))


def _normed(x, partial_sums, weight, options: dict, linears: Sequence[Linear]) -> Stream:
    """linears: what reads the norm."""
    blocks = _rounding(linears, x)
    if blocks is None:
        return Stream(*added_norm(x, partial_sums, weight, **options))
    return Stream(*added_norm_coded(x, partial_sums, weight, blocks, **options))


def _rounding(linears: Sequence[Linear], x, activation: str | None = None) -> bool | None:
    """Whether fp8_few reads x [N, in] rounded in blocks (True) or rows (False); None: it does not."""
    if not linears or not all(_is_only_fp8(linear, x.dtype) and not stays_divided(linear) for linear in linears):
        return None
    weights, loras = [linear.stored_weight for linear in linears], _adapters(linears)
    table = {"triton": lambda: fp8_few.refusal(weights, x.dtype, len(x), activation, loras), "fp8_matmul": lambda: None}
    return fp8_few.in_blocks(weights) if dispatch.choose("fp8_few", table, None) == "triton" else None


def _rounded(x: jax.Array, blocks: bool, coded: Coded | None) -> Coded:
    """x in e4m3 with scales of blocks or rows; coded: x, where another layer's norm has rounded it, maybe otherwise."""
    same = coded is not None and (coded.scales.ndim == 2) == blocks
    return coded if coded is not None and same else fp8_few.rounded(x, blocks)


def _gate_and_up(feed_forward) -> list[Linear]:
    """An MLP's, if they are apart."""
    if type(feed_forward) is not MLP or feed_forward.config.fused_gate_up:
        return []
    return [feed_forward.gate_proj, feed_forward.up_proj]


def _feed_forward(feed_forward, stream: Stream, context: Context, tap: Tap) -> jax.Array:
    """[splits, N, hidden], partial sums that the kernel of the residual stream adds up."""
    if type(feed_forward) is MLP and stays_divided(feed_forward.down_proj):
        return _of_divided(feed_forward, stream.normed)
    if linears := _gate_and_up(feed_forward):
        gate, up = linears
        if all(_is_plain(linear, stream.x.dtype) for linear in (gate, up, feed_forward.down_proj)):
            activation, loras = feed_forward.config.activation, _adapters((gate, up))
            gated = gated_product(stream.normed, gate.weight[...], up.weight[...], activation, loras)
            return _parts(tap("gated", gated), [feed_forward.down_proj])
        if all(_is_only_codes(linear, stream.x.dtype) for linear in (gate, up)):
            weights = gate.stored_weight, up.stored_weight
            gated = few_product(stream.normed, weights, feed_forward.config.activation, _adapters(linears))
            if gated is not None:
                return _parts(tap("gated", gated), [feed_forward.down_proj])
        activation = feed_forward.config.activation
        blocks = _rounding(linears, stream.x, activation)
        if blocks is not None:
            coded = _rounded(stream.normed, blocks, stream.coded)
            weights, loras = [gate.stored_weight, up.stored_weight], _adapters(linears)
            gated = fp8_few.product(coded, weights, activation, stream.normed, loras)
            return _parts(tap("gated", gated[0]), [feed_forward.down_proj])
    if type(feed_forward) is MoE:
        partial_sums = _of_experts(feed_forward, stream.normed, context, tap)
        if partial_sums is not None:
            return partial_sums
    values = {INPUT: stream.normed[:, None], STREAM: stream.x[:, None]}
    for segment in feed_forward.segments():
        if not segment.aux:
            outputs = segment.run(feed_forward, context, *(values[name] for name in segment.reads))
            values |= zip(segment.outputs, outputs, strict=True)
            if "choice" in segment.outputs:
                values["choice"] = tap("choice", values["choice"])
    return values[OUTPUT][None, :, 0]


def _of_divided(mlp: MLP, x: jax.Array) -> jax.Array:
    """The feed-forward [1, N, hidden] of x, normed, whose weights devices divide."""
    if mlp.config.fused_gate_up:
        gate, up = jnp.split(_exchanged(x, [mlp.gate_up_proj])[0], 2, axis=-1)
    else:
        gate, up = _exchanged(x, [mlp.gate_proj, mlp.up_proj])
    return _parts(ACTIVATIONS[mlp.config.activation](gate) * up, [mlp.down_proj])


def _of_all_rows(mlp: MLP, rows: jax.Array) -> jax.Array:
    """The feed-forward of the normed rows of all devices, as `_columns_of_all`."""
    activation, linears = mlp.config.activation, [part_of(mlp.gate_proj), part_of(mlp.up_proj)]
    gated = None
    if all(_is_plain(linear, rows.dtype) for linear in linears):
        gate, up = (linear.weight[...] for linear in linears)
        gated = gated_product(rows, gate, up, activation, _adapters(linears))
    elif all(_is_only_codes(linear, rows.dtype) for linear in linears):
        weights = [linear.stored_weight for linear in linears]
        gated = few_product(rows, weights, activation, _adapters(linears))
    if gated is None:
        gate, up = apply_fused(rows[:, None], tuple(linears))
        gated = (ACTIVATIONS[activation](gate) * up)[:, 0]
    return _columns_of_all(gathers.shards_of_all(gated), mlp.down_proj)


def _columns_of_all(rows: jax.Array, linear: Linear) -> jax.Array:
    """The product of the rows of all devices, in shards [1, devices, R, out / devices]. rows: [R, in], or in shards
    [devices, R, in / devices].
    """
    local = part_of(linear)
    if rows.ndim > 2 and not _is_plain(local, rows.dtype):
        rows = unsharded(rows)
    return gathers.shards_of_all(_added(_parts(rows, [local]), rows.dtype))[None]


def _of_experts(moe: MoE, x: jax.Array, context: Context, tap: Tap) -> jax.Array | None:
    """Experts without a sort of tokens: [k, N, hidden], a partial sum for each of a token's k experts; or None."""
    settings, experts = moe.moe, (moe.experts.gate_up_proj, moe.experts.down_proj)
    unsupported = settings.shared_size is not None or settings.swiglu_limit is not None or settings.interleaved
    if unsupported or type(moe.router) is not Router or not all(_are_plain(matrix, x.dtype) for matrix in experts):
        return None
    gate_up, down = (matrix.weight[...] for matrix in experts)
    loras = experts[0].adapter(), experts[1].adapter()
    activation = moe.config.activation
    if not experts_have_kernels(x, (gate_up, down), settings.experts_per_token, activation, loras):
        return None
    choice = tap("choice", moe.choose(x[:, None], context.layout.doc_end > 0))
    weights = tap("router's weights", moe.router.weights(moe.router(x), choice))
    gated = tap("gated", experts_gated(x, gate_up, choice, weights, activation, loras[0]))
    return experts_down(gated, down, choice, loras[1])


def _are_plain(matrix: ExpertLinear, dtype) -> bool:
    """Whether few_rows' kernels can multiply by the matrices: plain arrays [E, out, in], at most with adapters."""
    weight, extras = matrix.stored_weight, (matrix.bias, matrix.fake_quant, matrix.compute)
    plain = not matrix.transposed and all(extra is None for extra in extras)
    return plain and isinstance(weight, jax.Array) and weight.dtype == dtype


def _is_plain(linear: Linear, dtype) -> bool:
    """Whether few_rows' kernels can multiply by the weight: a plain array, at most with LoRA, not DoRA."""
    extras = (linear.bias, linear.fake_quant, linear.compute, None if linear.lora is None else linear.lora.magnitude)
    weight = linear.stored_weight
    return all(extra is None for extra in extras) and isinstance(weight, jax.Array) and weight.dtype == dtype


def _is_only_codes(linear: Linear, dtype) -> bool:
    """Whether the linear is a product with a quantised weight, decoded to dtype, and at most an adapter."""
    return not linear.fp8 and _has_only_adapters(linear, dtype) and isinstance(linear.stored_weight, Stored)


def _is_only_fp8(linear: Linear, dtype) -> bool:
    """Whether the linear is an FP8 product, of x rounded too, and at most an adapter."""
    return linear.fp8 and _has_only_adapters(linear, dtype)


def _has_only_adapters(linear: Linear, dtype) -> bool:
    """Whether the linear is a product in dtype with a frozen weight, and at most LoRA, also of rows' own, not DoRA."""
    extras = (linear.bias, linear.fake_quant, linear.observer, linear.clips)
    extras = (*extras, None if linear.lora is None else linear.lora.magnitude)
    same = linear.compute is None or linear.compute == dtype
    return same and all(extra is None for extra in extras) and not isinstance(linear.weight, nnx.Param)


def _adapters(linears: Sequence[Linear]) -> list[LoraWeights | None]:
    """Each plain linear's adapter or None; an empty list if none has one."""
    loras = [None if linear.lora is None else linear.lora.weights(linear.stored_weight) for linear in linears]
    return loras if any(lora is not None for lora in loras) else []


def _parts(x: jax.Array, linears: Sequence[Linear], coded: Coded | None = None) -> jax.Array:
    """Products of x [N, in] with several linears, concatenated: partial sums [splits, N, sum of out]."""
    if any(map(stays_divided, linears)):
        return jnp.concatenate(_exchanged(x, linears), axis=-1)[None]
    if all(_is_plain(linear, x.dtype) for linear in linears):
        return products(x, [linear.weight[...] for linear in linears], _adapters(linears))
    if all(_is_only_codes(linear, x.dtype) for linear in linears):
        out = few_product(x, [linear.stored_weight for linear in linears], None, _adapters(linears))
        if out is not None:
            return out[None]
    if (blocks := _rounding(linears, x)) is not None:
        weights = [linear.stored_weight for linear in linears]
        return fp8_few.product(_rounded(x, blocks, coded), weights, None, x, _adapters(linears))
    return jnp.concatenate(apply_fused(x[:, None], tuple(linears)), axis=-1)[None, :, 0]


def _exchanged(x: jax.Array, linears: Sequence[Linear]) -> list[jax.Array]:
    """`_parts` of linears of which devices divide some: [N, out] of each."""
    divided = [linear for linear in linears if stays_divided(linear)]
    outs = iter(_sent_back(gathers.rows_of_all(x), divided))
    return [next(outs) if stays_divided(linear) else _added(_parts(x, [linear]), x.dtype) for linear in linears]


def _sent_back(rows: jax.Array, linears: Sequence[Linear]) -> list[jax.Array]:
    """The products [N, out] of this device's rows with linears that devices divide. rows: [R, in], of all devices."""
    products_of_parts = _added(_parts(rows, list(map(part_of, linears))), rows.dtype)
    return sent_back(products_of_parts, [linear.sizes[0] for linear in linears])


def _own_heads(rows: jax.Array, attention: Attention) -> jax.Array:
    """Queries, keys and values of this device's rows, side by side [1, N, width], or in shards [1, devices, N, width /
    devices] if each has whole heads. rows: [R, in], of all devices.
    """
    linears = [getattr(attention, name) for name in attention.in_matrices]
    count = partition.shards(linears[0].stored_weight)[0].count
    if len(linears) == 3 and not attention.config.num_kv_heads % count:
        return gathers.own_rows_sharded(_added(_parts(rows, list(map(part_of, linears))), rows.dtype))[None]
    return jnp.concatenate(_sent_back(rows, linears), axis=-1)[None]


def _added(partial_sums: jax.Array, dtype) -> jax.Array:
    """[N, out] of [splits, N, out], rounded to dtype."""
    return partial_sums[0] if len(partial_sums) == 1 else partial_sums.sum(0).astype(dtype)
