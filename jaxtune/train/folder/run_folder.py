"""Names of those files and folders in a run's folder that several modules use: the config, the checkpoints, the
adapter, the merged model, the results and the state. Some are named elsewhere: display/metrics.py metrics.jsonl
(JSONL), folder_lock.py run.lock in the folder of checkpoints (LOCK_NAME), trainer.py loss.png and profile. This module
imports nothing, so that reading a folder is quick."""

from __future__ import annotations

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
ADAPTER, MERGED = "adapter", "merged"
RESULTS = "results.json"
STATE = "state.json"  # see run_state.py
