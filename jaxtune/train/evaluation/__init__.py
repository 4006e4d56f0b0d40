"""Held-out rows: losses, metrics of answers, scores, and when to stop early."""
