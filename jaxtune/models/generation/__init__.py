"""Text from a model: greedy and sampled generation, conversations, and the interface of lm-eval."""
