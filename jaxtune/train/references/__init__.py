"""Log-probabilities of other models: references and teachers."""
