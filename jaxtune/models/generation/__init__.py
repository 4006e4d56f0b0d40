"""Text from a model: greedy and sampled generation (generate.py for one list of prompts, sampler.py for servers and for
training from samples, divided.py on several devices), conversations in a chat template (chat.py), and the interface of
lm-eval, which scores models (harness.py). ends.py has the tokens at which texts end, and the other modules are parts of
the sampler."""
