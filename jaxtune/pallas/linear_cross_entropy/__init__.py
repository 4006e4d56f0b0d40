"""Losses, log-probabilities and divergences of next tokens from hidden states and a vocabulary head, without the logits
of all tokens, which would be a training step's largest array.
"""

from jaxtune.pallas.linear_cross_entropy.api import (
    chunk_length,
    linear_cross_entropy,
    linear_log_probs,
    linear_token_losses,
)
from jaxtune.pallas.linear_cross_entropy.divergence import linear_divergence
from jaxtune.pallas.linear_cross_entropy.reference import filled_up, fills_up
from jaxtune.pallas.linear_cross_entropy.top_k import linear_top_k, linear_top_k_divergence

__all__ = [
    "chunk_length",
    "filled_up",
    "fills_up",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "linear_token_losses",
    "linear_top_k",
    "linear_top_k_divergence",
]
