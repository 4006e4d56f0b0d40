"""What several tests ask of a model, such as the golden test and the live parity test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.families.common import tensor_name
from jaxtune.models.generation.generate import generate
from jaxtune.models.hf import from_pretrained
from jaxtune.models.registry import config_from_hf, names_of
from jaxtune.models.stack.residual_plan import LayerPlan, ResidualPlan
from jaxtune.models.stack.stack import run_stack

PROMPT_TOKENS, NEW_TOKENS = 10, 12  # together past longrope's original context


def tensors(model) -> dict[str, np.ndarray]:
    """{Hugging Face name: value} of a model."""
    norms = names_of(model.config)
    layers, flat = model.config.layers, nnx.to_flat_state(nnx.state(model))
    return {tensor_name(path, norms, layers): np.asarray(v.get_value()) for path, v in flat}


def shapes_of(hf: dict) -> dict[str, tuple[int, ...]]:
    """{Hugging Face name: shape} of our model of a config.json."""
    config = config_from_hf(hf)
    model = nnx.eval_shape(lambda: Decoder(config, jax.random.key(0)))
    norms = names_of(config)
    flat = nnx.to_flat_state(nnx.state(model))
    return {tensor_name(path, norms, config.layers): v.get_value().shape for path, v in flat}


def load(folder: Path, dtype="float32"):
    return from_pretrained(folder, dtype=dtype)[0]


def mean_loss(model, tokens) -> jax.Array:
    """Mean cross entropy of the next token over all positions but the last: transformers' loss for labels = tokens."""
    logits = jax.nn.log_softmax(model(tokens)[:, :-1])
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()


def gradients(model, tokens) -> dict[str, np.ndarray]:
    """{Hugging Face name: gradient of mean_loss}."""
    grads = nnx.grad(mean_loss)(model, jnp.asarray(tokens))
    norms = names_of(model.config)
    layers = model.config.layers
    return {tensor_name(path, norms, layers): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(grads)}


def stack_gradients(model, plan: LayerPlan, shape: tuple[int, int]):
    """The gradients of a sum over the stack's output, to the trainables and to its input, for rows of this shape. The
    plan is that of every layer."""
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    x = jax.random.normal(jax.random.key(5), (*shape, model.config.hidden_size))
    probe = jax.random.normal(jax.random.key(6), x.shape)
    plans = ResidualPlan.uniform(plan, len(model.layers))

    def total(trainable, x):
        model = nnx.merge(graph, trainable, frozen)
        return (run_stack(model.layers, model.config.layers, x, model.layout(shape), plans)[0] * probe).sum()

    return jax.jit(jax.grad(total, (0, 1)))(trainable, x)


def assert_gradients_are(found, want) -> None:
    """That stack_gradients found those that are wanted, but for rounding."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(want), strict=True)
    for (path, one), other in pairs:
        near = 2e-6 * float(np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=near, err_msg=jax.tree_util.keystr(path))


def greedy(model, tokens, new_tokens: int) -> np.ndarray:
    """Greedy continuation with the key/value cache; no token ends it."""
    return np.asarray(generate(model, tokens.tolist(), max_new_tokens=new_tokens, eos_token_ids=()), np.int32)


def of_a_checkpoint(linear: Callable[[str], np.ndarray], matrix: str, experts: int) -> np.ndarray:
    """A matrix of a model as a checkpoint that names each linear has it.

    Args:
        linear: Gives the float32 weight [out, in] of a linear by its name in the checkpoint.
        matrix: The name of the matrix in the model. Those of experts are stacked there [experts, out, in], and gate and
            up are one.
        experts: How many experts there are.
    """
    if ".experts." not in matrix:
        return linear(matrix)
    prefix, name = matrix.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
    return np.stack([np.concatenate([linear(f"{prefix}.{e}.{part}") for part in parts]) for e in range(experts)])


def assert_same_bytes(written: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Asserts that two checkpoints have the same tensors: names, dtypes, shapes and bytes."""
    assert written.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (written[name].dtype, written[name].shape) == (tensor.dtype, tensor.shape), name
        assert written[name].tobytes() == tensor.tobytes(), name
