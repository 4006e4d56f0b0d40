"""The sums over tokens (RouterSums, by `router_sums`) from which the losses of the router in a mixture of experts are
computed. Sums over layers and over devices, which have different rows, can be added; the losses themselves, which are
quotients and products of them, cannot. The methods RouterSums.load_balancing_loss and z_loss compute them. Training
adds the sums of all layers and devices for one micro-batch and computes the losses from these. It does not add sums
over micro-batches: a step's loss is the mean of its micro-batches' losses, weighted by their numbers of targets
(train/program/loss.py)."""

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
    """Sums over the tokens of a router, float32; `router_sums` computes them. E is the number of experts. `probability`
    and `square` are differentiable with respect to the router's logits; `pairs` and `tokens` have no gradient. They can
    be added with +. Training adds those of all layers and devices for one micro-batch, and load_balancing_loss and
    z_loss then compute the micro-batch's losses."""

    pairs: jax.Array  # [E]: the number of tokens that chose each expert; a token that chose k counts for k experts
    probability: jax.Array  # [E]: the sum over tokens of each expert's probability, the softmax over all experts
    square: jax.Array  # []: the sum over tokens of the squared log-sum-exp of their logits
    tokens: jax.Array  # []: the number of tokens, those without an expert (padding) left out, as in the other sums

    def __add__(self, other: RouterSums) -> RouterSums:
        """The sums over the tokens of both, for example of two layers or of the rows of two devices."""
        return jax.tree.map(jnp.add, self, other)

    def load_balancing_loss(self) -> jax.Array:
        """The load-balancing loss, float32[]: E sum_e f_e p_e, where f_e is the number of tokens that chose expert e
        divided by the number of tokens, and p_e is its mean probability. It is k, the number of experts of a token, if
        all experts are used equally often, and at most E. Without tokens it is 0. Training adds it for each
        micro-batch, times a coefficient that may be 0, to the loss, so that the router uses all experts.

        With sums over all layers it equals transformers' load_balancing_loss_func (Switch Transformers, arXiv
        2101.03961, equations 4 to 6).
        """
        count = jnp.maximum(self.tokens, 1.0)
        return self.pairs.shape[0] * (self.pairs / count * (self.probability / count)).sum()

    def z_loss(self) -> jax.Array:
        """The z-loss, float32[]: the mean over tokens of the squared log-sum-exp of their logits, which keeps logits
        small; 0 without tokens. It equals transformers' router_z_loss_func (ST-MoE, arXiv 2202.08906, equation 5).
        Training adds it for each micro-batch, times a coefficient that may be 0, to the loss."""
        return self.square / jnp.maximum(self.tokens, 1.0)


@on_any_mesh
def router_sums(logits: jax.Array, choice: jax.Array) -> RouterSums:
    """Computes the sums over tokens from which the load-balancing loss and the z-loss of a router are computed: the
    number of tokens that chose each expert, the softmax probabilities, the squared log-sum-exp of the logits, and the
    number of tokens (see RouterSums). A layer of experts calls it (MoE.router_sums); training adds up the sums of all
    layers and devices for a micro-batch and computes the losses from them.

    Args:
      logits: [T, E], the router's, bfloat16, float16 or float32.
      choice: int32[T, k], each token's experts, from choose_experts. A token all of whose choices are E has no expert
        (it is padding, for example), and is in none of the sums.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here; the contents of arrays are not
        checked.
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
