"""The output of a run: metrics.jsonl and other loggers, the terminal, and the HTML page that shows runs."""
