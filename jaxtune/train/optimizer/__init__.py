"""The optimizer: its updates, its learning rate, its state in 8 bits and in host memory."""
