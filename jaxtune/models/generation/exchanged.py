"""Linears of a decoding step whose weights devices divide: each multiplies the rows of all by its part."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import jax
from flax import nnx

from jaxtune.models.layers.attention import Attention
from jaxtune.models.layers.block import Block
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.linear import Linear, Lora
from jaxtune.models.placement import gathers, partition
from jaxtune.models.placement.partition import TENSORS, Shard
from jaxtune.pallas.formats import Stored


def stays_divided(linear: Linear) -> bool:
    """Whether devices divide the weight, and a step can multiply by a part of it."""
    value = linear.stored_weight
    parts = partition.shards(value)
    if not parts or any(part.axis for part in parts) or type(linear.lora) not in (type(None), Lora):
        return False
    if linear.fake_quant is not None or linear.clips is not None or linear.observer is not None:
        return False
    return isinstance(value, Shard) or (isinstance(value, Stored) and value.cuts_rows(parts[0].count))


def linears_of_step(block: Block) -> list[Linear]:
    """Those of a plain layer by whose parts a step multiplies."""
    attention, mlp = block.parts["mixer"], block.parts["mlp"]
    assert type(attention) is Attention
    linears = [attention.o_proj, *(getattr(attention, name) for name in attention.in_matrices)]
    if type(mlp) is MLP:
        of_mlp = [mlp.gate_up_proj] if mlp.config.fused_gate_up else [mlp.gate_proj, mlp.up_proj]
        of_mlp.append(mlp.down_proj)
        linears += of_mlp if all(map(stays_divided, of_mlp)) else []
    return [linear for linear in linears if stays_divided(linear)]


def is_wide(block: Block) -> bool:
    """Whether devices divide all linears of a plain layer, which then takes and gives the rows of all devices."""
    mlp = block.parts["mlp"]
    return type(mlp) is MLP and not mlp.config.fused_gate_up and len(linears_of_step(block)) == len(block.matrices())


def keep_device_rows(block: Block) -> None:
    """Leaves of biases and adapters of `linears_of_step` this device's rows, in place; once for all steps."""
    for linear in linears_of_step(block):
        rows = linear.sizes[0] // partition.shards(linear.stored_weight)[0].count
        cut = functools.partial(gathers.own_of_all, rows=rows)
        if linear.bias is not None:
            linear.bias = nnx.Param(cut(linear.bias[...]))
        if linear.lora is not None:
            linear.lora = lora = copy.copy(linear.lora)
            lora.b = nnx.Param(cut(lora.b[...]))
            if lora.magnitude is not None:
                lora.magnitude = nnx.Param(cut(lora.magnitude[...]))


def part_of(linear: Linear) -> Linear:
    """The linear of this device's rows of the weight. For one of `linears_of_step` after `keep_device_rows`."""
    part, value = copy.copy(linear), linear.stored_weight
    local = partition.undivided(value)
    if isinstance(local, Stored):
        local = local.rows_of(jax.lax.axis_index(TENSORS), partition.shards(value)[0].count)
    part.weight = linear.weight.replace(local)
    return part


def sent_back(products: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """The products [N, size] of this device's rows from those of its parts, [rows of all, sum of parts]."""
    whole = gathers.own_rows(products)  # of each device side by side
    by_device = whole.reshape(len(whole), -1, products.shape[-1])
    count, outs, start = by_device.shape[1], [], 0
    for size in sizes:
        outs.append(by_device[:, :, start : start + size // count].reshape(len(whole), size))
        start += size // count
    return outs
