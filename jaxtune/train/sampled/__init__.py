"""What samples from the model: rollouts, tools, rewards, and rows that the model answers."""
