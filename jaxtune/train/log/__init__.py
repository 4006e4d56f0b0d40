"""What a run logs: metrics.jsonl and other loggers, rollouts.jsonl, the progress bar."""
