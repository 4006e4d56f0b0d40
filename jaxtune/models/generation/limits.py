"""What a sampler's settings may be, without JAX."""

MOST_RANKED = 20  # the most tokens of which top_logprobs gives log-probabilities
MOST_BIASES = 1024  # the most tokens with a bias in one row
