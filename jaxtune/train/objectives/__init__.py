"""Objectives: what a model is trained for. An objective converts rows to batches and defines the loss of a batch.

The training loop, the step, the planner and the checkpoints work with an objective's named sums and do not depend on
what they mean. `objective.py` defines the interface, and `sft.py` is the smallest objective. `preference.py` has DPO,
ORPO and SimPO, `kto.py` KTO, and `reward.py` reward models; `references.py` computes the log-probabilities of a
reference model before training and checks them in the first step. `policy.py` has GRPO and RLOO, with the losses of
`grpo.py`, the prompts of `prompts.py`, the batch source of `rollouts.py`, the packing of `packed_answers.py`, the
rewards of `reward_functions.py` and the metrics of `answer_report.py`. `answering.py` samples their answers, in which
the model may call `tools.py` in the form of `tool_formats.py`, or has a function of the user's sample them
(`rollout_function.py`); `train/user_code` loads and calls such functions. `distillation.py` has distillation,
`teachers.py` the model that it learns from, `stored_teachers.py` that model's log-probabilities if they are stored
before the run, and `own_samples.py` the batch source if the student's answers are sampled. `named.py` makes the
objective that a config names.
"""
