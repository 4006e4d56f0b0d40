"""The compiled train step: its loss (loss.py), its gradients and its update (step.py), how devices add gradients
(gradient_sync.py), functions over all tensors (tensors.py) and the step's FLOPs (flops.py); the programs of a run and
their compilation (programs.py), the model that they work on (trained_model.py), XLA's options (xla_options.py), and
the cache of compiled programs (program_cache.py)."""
