"""The folder of a run: its record, checkpoints, exported results, state and lock."""
