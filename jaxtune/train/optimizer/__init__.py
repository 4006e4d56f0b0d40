"""The optimizer of a run, its learning rates, and optimizer states in 8 bits or in host memory."""
