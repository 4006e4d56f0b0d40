"""The optimizer of a run: the update of weights (optim.py), the number of steps and the learning rates (schedule.py),
and optimizer states in 8 bits (adam8.py) or in host memory (optimizer_offload.py). The Trainer makes the optimizer and
the schedule (train/setup.py), the train step (train/program/step.py) applies them, and the planner of memory
(train/planning/cost.py) counts their states."""
