"""Held-out rows: metrics of answers, exact match, and when to stop early."""
