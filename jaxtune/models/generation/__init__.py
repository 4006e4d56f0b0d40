"""Greedy and sampled generation of text, conversations in a chat template, and scoring with lm-eval."""
