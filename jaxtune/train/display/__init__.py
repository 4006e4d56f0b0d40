"""What a run says of itself: its metrics and their sinks, the terminal, and its page in a browser."""
