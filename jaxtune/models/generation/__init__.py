"""Text from a model: greedy and sampled generation (generate.py for one list of prompts, sampler.py for servers and for
training from samples, divided.py on several devices), conversations in a chat template (chat.py), and the interface of
lm-eval, which scores models (harness.py). The other modules are parts of the sampler, but for ends.py, the tokens at
which texts end."""
