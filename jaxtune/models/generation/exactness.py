"""Which models can be sampled and trained with the same bits (pallas/ordered.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.attention import Attention
from jaxtune.models.layers.block import Block
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.layers.experts import MoE
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.linear import GatedLora, Linear
from jaxtune.models.lora import has_adapter
from jaxtune.models.norm import LayerNorm, RMSNorm


def require_exact(model: Decoder, where: str) -> None:
    """ValueError if `exact` does not cover the model or the device, with what it is that differs."""
    if (reason := refusal(model)) is not None:
        raise ValueError(f"{where}: exact: {reason}")


def refusal(model: Decoder) -> str | None:
    """Why a token's log-probability could have other bits in training than in sampling, or None."""
    if jax.default_backend() != "cpu":
        return "a GPU's kernels do not add up in one order in training and sampling yet; leave it out"
    if model.vision is not None or model.per_layer is not None:
        return "the model reads pictures, or has embeddings for each layer"
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
        elif type(part) is not MLP:
            return f"a {type(part).__name__}, which keeps no keys and values"
    return None
