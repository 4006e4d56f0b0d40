"""Sums over tokens from which the losses of a router of a mixture of experts are computed.

Sums over layers and devices, which have different rows, can be added; the losses, quotients and products of sums,
cannot. A step's loss is the mean of its micro-batches' losses, weighted by their numbers of targets.
"""

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
    """Sums over the tokens of a router, float32, which can be added with +. `probability` and `square` are
    differentiable in the logits.
    """

    pairs: jax.Array  # [E]: the number of tokens that chose each expert; a token that chose k counts for k experts
    probability: jax.Array  # [E]: the sum over tokens of each expert's probability, the softmax over all experts
    square: jax.Array  # []: the sum over tokens of the squared log-sum-exp of their logits
    tokens: jax.Array  # []: the number of tokens, those without an expert (padding) left out, as in the other sums

    def __add__(self, other: RouterSums) -> RouterSums:
        return jax.tree.map(jnp.add, self, other)

    def load_balancing_loss(self) -> jax.Array:
        """float32[]: E sum_e f_e p_e, where f_e is the number of tokens that chose expert e over the number of tokens,
        and p_e the expert's mean probability. It is k if all experts are used equally often, at most E, and 0 without
        tokens.

        With sums over all layers it equals transformers' load_balancing_loss_func (Switch Transformers, arXiv
        2101.03961, equations 4 to 6).
        """
        count = jnp.maximum(self.tokens, 1.0)
        return self.pairs.shape[0] * (self.pairs / count * (self.probability / count)).sum()

    def z_loss(self) -> jax.Array:
        """float32[]: the mean over tokens of the squared log-sum-exp of their logits, which keeps logits small; 0
        without tokens. It equals transformers' router_z_loss_func (ST-MoE, arXiv 2202.08906, equation 5).
        """
        return self.square / jnp.maximum(self.tokens, 1.0)


@on_any_mesh
def router_sums(logits: jax.Array, choice: jax.Array) -> RouterSums:
    """The sums over the tokens that have an expert.

    logits: [T, E], bfloat16, float16 or float32.
    choice: int32[T, k]; a token all of whose choices are E (padding) is in none of the sums.
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
