"""Conversations as people write them, the tokens that a model is asked with, and what it answered."""
