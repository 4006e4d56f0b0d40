"""Which models can be sampled and trained with the same bits (pallas/one_order/README.md)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.plain_layer import is_plain
from jaxtune.models.layers.attention import Attention
from jaxtune.models.layers.block import Block
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.layers.experts import MoE
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.layers.routers import Router
from jaxtune.models.linear import GatedLora, Linear
from jaxtune.models.lora import has_adapter
from jaxtune.models.norm import LayerNorm, RMSNorm
from jaxtune.pallas import one_order, targets
from jaxtune.pallas.decode.few_rows import experts_triton
from jaxtune.pallas.quant_matmul import few_thin


def require_exact(model: Decoder, where: str, trains: bool = False) -> None:
    """ValueError if `exact` does not cover the model or the device, with what it is that differs. trains: the sampler
    follows a training of the model.
    """
    reason = refusal(model)
    if reason is None and trains:
        reason = _of_masters(model)
    if reason is not None:
        raise ValueError(f"{where}: exact: {reason}")


def refusal(model: Decoder) -> str | None:
    """Why a token's log-probability could have other bits in training than in sampling, or None."""
    if targets.here() is not None and (reason := _of_gpu(model)) is not None:
        return reason
    if model.vision is not None or model.per_layer is not None:
        return "the model reads pictures, or has embeddings for each layer"
    if any(rope.kind == "longrope" for rope in model.config.rotary):
        return "longrope, whose factors change with a row's length"
    if has_adapter(model) and model.weight_dtype != jnp.dtype(model.dtype):
        return f"training computes in {model.dtype} over weights in {model.weight_dtype}, in which sampling computes"
    for index, layer in enumerate(model.layers):
        if (reason := _of_layer(layer)) is not None:
            return f"layers.{index}: {reason}"
        for part, name, matrix in layer.matrices():
            if (reason := _of_matrix(matrix)) is not None:
                return f"layers.{index}.{part}.{name}: {reason}"
    norms = [module for _, module in nnx.iter_modules(model) if isinstance(module, RMSNorm | LayerNorm)]
    if any(isinstance(norm, LayerNorm) or norm.compute is not None for norm in norms):
        return "a LayerNorm, or a norm with a dtype of its own"
    return None


def _of_masters(model: Decoder) -> str | None:
    """What trains as float32 numbers that a forward reads before they are rounded as the sampler's are."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, RMSNorm) and module.float32:
            weight: object = module.weight
        elif type(module) is Attention:
            weight = module.sinks
        else:
            weight = module.bias if type(module) is Router else None
        if isinstance(weight, nnx.Param) and weight.get_value().dtype != jnp.float32:
            name = ".".join(map(str, path))
            return f"{name}: a {type(module).__name__} that trains and is read in float32; train an adapter"
    return None


def _of_gpu(model: Decoder) -> str | None:
    """What of the model has no kernels that add up in one order."""
    if (reason := one_order.triton.refusal(jnp.dtype(model.dtype))) is not None:
        return f"this GPU: {reason}"
    for index, (layer, spec) in enumerate(zip(model.layers, model.config.layers, strict=True)):
        attention = layer.parts.get("mixer")
        if not is_plain(layer, spec) or type(attention) is not Attention:
            reason = "attention or a feed-forward that decoding computes operation by operation"
        elif spec.window is not None:
            reason = f"attention with a window of {spec.window}, whose tiles do not begin with a document"
        elif any(type(module) is Router and module.compute is not None for _, module in nnx.iter_modules(layer)):
            reason = "a router in a dtype of its own"
        else:
            reason = _not_measured(layer)
        if reason is not None:
            return f"layers.{index}: {reason}, on a GPU"
        for part, name, matrix in layer.matrices():
            rank = 0 if matrix.lora is None else matrix.lora.rank
            if rank > one_order.triton.MOST_RANK:
                return f"layers.{index}.{part}.{name}: an adapter of rank {rank}; up to {one_order.triton.MOST_RANK}"
    return None


def _not_measured(layer: Block) -> str | None:
    """What of a plain layer has kernels whose bits were not compared on a GPU yet."""
    config, matrices = layer.parts["mixer"].config, [matrix for _, _, matrix in layer.matrices()]
    mlp = layer.parts["mlp"]
    found = {
        f"the activation {mlp.config.activation}": mlp.config.activation != "silu",
        f"heads of {config.head_dim} numbers": config.head_dim not in (64, 128),
        "sinks": config.attention_sinks,
        "soft caps": config.attention_soft_cap is not None or config.final_soft_cap is not None,
        "biases": any(matrix.bias is not None for matrix in matrices),
    }
    if type(mlp) is MoE:
        found |= {
            "a router's bias": mlp.moe.router_bias,
            "experts whose weights do not sum to one": not mlp.moe.renormalize,
            "gates and ups of experts that alternate": mlp.moe.interleaved,
            "limits of experts' gates": mlp.moe.swiglu_limit is not None,
            "a shared expert": mlp.moe.shared_size is not None,
            f"adapters of experts of ranks above {few_thin.MOST_RANK}": any(
                isinstance(matrix, ExpertLinear) and matrix.lora is not None and matrix.lora.rank > few_thin.MOST_RANK
                for matrix in matrices
            ),
            f"more than {experts_triton.MOST_CHOICES} experts a token": (
                mlp.moe.experts_per_token > experts_triton.MOST_CHOICES
            ),
        }
    return next((f"{name}, not measured" for name, is_there in found.items() if is_there), None)


def _of_matrix(matrix: Linear | ExpertLinear) -> str | None:
    if matrix.fp8:
        return "a product in FP8"
    if matrix.fake_quant is not None or matrix.compute is not None:
        return "QAT, or a dtype of its own"
    if isinstance(matrix, ExpertLinear):
        return "matrices of experts that are stored transposed" if matrix.transposed else None
    lora = matrix.lora
    if matrix.clips is not None or matrix.observer is not None or isinstance(lora, GatedLora):
        return "limits of inputs, or adapters of several models"
    if lora is not None and lora.magnitude is not None:
        return "DoRA"
    return f"the adapter's dropout of {lora.rate}" if lora is not None and lora.rate > 0 else None


def _of_layer(layer: Block) -> str | None:
    if layer.takes or layer.gives:
        return "values of another layer"
    for part in layer.parts.values():
        if type(part) is Attention:
            if part.config.value_norm or part.config.attention_gate:
                return "attention with gates, or norms of values"
        elif type(part) is MoE:
            if part.moe.scaled_router:
                return "a router of Gemma 4's"
            if part.moe.sigmoid:
                return "a router of sigmoids"
        elif type(part) is not MLP:
            return f"a {type(part).__name__}, which keeps no keys and values"
    return None
