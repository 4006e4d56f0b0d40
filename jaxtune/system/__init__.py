"""Basics that every package may import: files, the terminal, signals, runs of several processes."""
