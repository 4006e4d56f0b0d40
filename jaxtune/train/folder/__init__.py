"""The folder of a run: its record, checkpoints, rows, results and lock."""
