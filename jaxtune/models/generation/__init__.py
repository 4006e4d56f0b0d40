"""Text from a model: greedy and sampled generation (generate.py, sampler.py), conversations in a chat template
(chat.py), and the interface of lm-eval, which scores models (harness.py)."""
