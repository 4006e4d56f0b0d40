"""The output of a run: its metrics and their loggers, the terminal, and its HTML page."""
