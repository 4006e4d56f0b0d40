"""What lies in a run's folder, beside metrics.jsonl; a module of its own, for who only looks there needs no more."""

from __future__ import annotations

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
ADAPTER, MERGED = "adapter", "merged"
RESULTS = "results.json"
