"""What is trained for: an objective is a value that says what rows become, and what the loss of a batch of them is.

The loop, the step, the planner and the checkpoints know sums and what they are called, not what they mean.
`objective.py` says what an objective has, `sft.py` is the smallest one, `preference.py` holds DPO, ORPO
and SimPO, `kto.py` KTO, `reward.py` reward models, `references.py` what is computed of a reference before training,
`named.py` those that a config can name.
"""
