"""Losses (linear_cross_entropy, linear_token_losses) and log-probabilities (linear_log_probs) from hidden states and a
vocabulary head, without storing the logits of all tokens, which would be the largest array of a training step."""

from jaxtune.pallas.linear_cross_entropy.api import (
    chunk_length,
    linear_cross_entropy,
    linear_log_probs,
    linear_token_losses,
)
from jaxtune.pallas.linear_cross_entropy.reference import filled_up, fills_up

__all__ = ["chunk_length", "filled_up", "fills_up", "linear_cross_entropy", "linear_log_probs", "linear_token_losses"]
