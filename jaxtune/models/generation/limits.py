"""What a sampler's settings may be, without JAX."""

from collections.abc import Mapping

import numpy as np

MOST_RANKED = 20  # the most tokens of which top_logprobs gives log-probabilities
MOST_BIASES = 1024  # the most tokens with a bias in one row
# What leaves tokens out, and the values that do nothing: without an effect at temperature 0.
FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
NO_MASK = np.uint32(0xFFFFFFFF)  # a word of Rows.masks that allows every token


def that_count(settings: Mapping[str, float]) -> dict[str, float]:
    """Sampling settings that programs send, without the filters where temperature 0 takes the likeliest token. In
    Python's calls they are errors.
    """
    return {**settings, **FILTERS} if settings["temperature"] == 0 else {**settings}
