"""What the golden test and the live parity test both ask of a model."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.families.common import tensor_name
from jaxtune.models.hf import from_pretrained
from jaxtune.models.registry import family

PROMPT_TOKENS, NEW_TOKENS = 10, 12  # together past longrope's original context


def load(folder: Path, dtype="float32"):
    return from_pretrained(folder, dtype=dtype)[0]


def mean_loss(model, tokens) -> jax.Array:
    """Mean cross entropy of the next token over all positions but the last: transformers' loss for labels = tokens."""
    logits = jax.nn.log_softmax(model(tokens)[:, :-1])
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()


def gradients(model, tokens) -> dict[str, np.ndarray]:
    """{Hugging Face name: gradient of mean_loss}."""
    grads = nnx.grad(mean_loss)(model, jnp.asarray(tokens))
    norms = family(model.config.family).NORMS
    return {tensor_name(path, norms): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(grads)}


def greedy(model, tokens, new_tokens: int) -> np.ndarray:
    """Greedy continuation by whole forward passes, one length for all so that one program is compiled."""
    rows, start = tokens.shape
    ids = np.zeros((rows, start + new_tokens), np.int32)
    ids[:, :start] = tokens
    forward = jax.jit(lambda ids, segments: model(ids, segments))
    for at in range(start, ids.shape[1]):
        # Padding after the text: causal attention and longrope's choice see only what is there.
        segments = np.broadcast_to((np.arange(ids.shape[1]) < at).astype(np.int32), ids.shape)
        ids[:, at] = np.asarray(forward(ids, segments))[:, at - 1].argmax(-1)
    return ids[:, start:]
