"""What is trained for: an objective is a value that says what rows become, and what the loss of a batch of them is.

The loop, the step, the planner and the checkpoints know sums and what they are called, not what they mean.
"""
