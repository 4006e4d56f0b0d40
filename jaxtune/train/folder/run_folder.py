"""Names of the files in a run's folder, except metrics.jsonl. The module imports nothing, so that reading a folder is
quick."""

from __future__ import annotations

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
ADAPTER, MERGED = "adapter", "merged"
RESULTS = "results.json"
STATE = "state.json"  # see run_state.py
