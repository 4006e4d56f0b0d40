"""The optimizer: updates, learning rates, 8-bit states and states in host memory."""
