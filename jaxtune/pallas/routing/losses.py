"""The sums over tokens (RouterSums) from which the losses of a mixture's router are computed. They can be added over
layers, devices and parts of a batch, which the losses themselves cannot."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.meshes import on_any_mesh
from jaxtune.pallas.routing import reference


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterSums:
    """Sums over the tokens of a router, float32; differentiable with respect to its logits, except `pairs`."""

    pairs: jax.Array  # [E]: number of pairs of a token and an expert, by expert
    probability: jax.Array  # [E]: sum of the softmax over all experts
    square: jax.Array  # []: sum of the squared log-sum-exp of the logits
    tokens: jax.Array  # []: number of tokens

    def __add__(self, other: RouterSums) -> RouterSums:
        """The sums over the tokens of both, for example of two layers or two parts of a batch."""
        return jax.tree.map(jnp.add, self, other)

    def load_balancing_loss(self) -> jax.Array:
        """float32[]: E sum_e f_e p_e, where f_e is the number of pairs of expert e per token, and p_e its mean
        probability.

        With sums over all layers it is transformers' load_balancing_loss_func (Switch Transformers, arXiv 2101.03961,
        equations 4 to 6): k if all experts are used equally often, E at most.
        """
        count = jnp.maximum(self.tokens, 1.0)
        return self.pairs.shape[0] * (self.pairs / count * (self.probability / count)).sum()

    def z_loss(self) -> jax.Array:
        """float32[]: the mean square of the tokens' log-sum-exp, transformers' router_z_loss_func (ST-MoE, arXiv
        2202.08906, equation 5)."""
        return self.square / jnp.maximum(self.tokens, 1.0)


@on_any_mesh
def router_sums(logits: jax.Array, choice: jax.Array) -> RouterSums:
    """The sums for logits [T, E] and choice int32[T, k] from choose_experts; tokens without an expert do not count.

    Raises:
      TypeError, ValueError: an argument is not as described here.
    """
    check = Arguments("router_sums")
    check.array("logits", logits, "T E", FLOATS)
    check.array("choice", choice, "T k", jnp.int32)
    experts = logits.shape[1]
    real = (choice < experts).any(1).astype(jnp.float32)
    logits = logits.astype(jnp.float32)
    return RouterSums(
        pairs=reference.expert_counts(choice, experts, real),
        probability=(jax.nn.softmax(logits, axis=-1) * real[:, None]).sum(0),
        square=(jax.nn.logsumexp(logits, axis=-1) ** 2 * real).sum(),
        tokens=real.sum(),
    )
