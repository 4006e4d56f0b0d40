"""The training loop: steps, their metrics and guards, and when a state is saved."""
