"""What a sampler's settings may be, without JAX."""

import numpy as np

MOST_RANKED = 20  # the most tokens of which top_logprobs gives log-probabilities
MOST_BIASES = 1024  # the most tokens with a bias in one row
NO_MASK = np.uint32(0xFFFFFFFF)  # a word of Rows.masks that allows every token
