"""The optimizer of a run: the update of weights (optim.py), learning rates (schedule.py), states in 8 bits (adam8.py)
or in host memory (optimizer_offload.py), and stochastic rounding of weights in bfloat16 (rounding.py)."""
