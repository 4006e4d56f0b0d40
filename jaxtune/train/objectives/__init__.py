"""Objectives: what a model is trained for. An objective converts rows to batches and defines a batch's loss.

The training loop, planner and checkpoints use an objective's named sums, whatever they mean. `objective` has the
interface, `sft` the smallest one, `named` makes what a config names.
"""
