"""Decoder language models as plain flax.nnx modules. One composable decoder (decoder.py) is built from a config that a
short file for each model family makes (families/). The other files and folders load, save, quantise, adapt (LoRA),
divide over devices and sample from such a model. Training (jaxtune/train) builds on this package, which itself builds
on the kernels of jaxtune/pallas."""
