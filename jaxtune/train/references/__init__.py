"""Log-probabilities of other models, computed before a run: references and teachers."""
