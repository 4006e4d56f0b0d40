"""The optimizer of a run: the update of weights (optim.py), learning rates (schedule.py), and optimizer states in 8
bits (adam8.py) or in host memory (optimizer_offload.py). The train step (train/program/step.py) calls them."""
