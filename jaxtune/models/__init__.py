"""Decoder language models as flax.nnx modules: one composable decoder (decoder.py), built from a config that a short
file for each model family makes (families/), with loading, saving, quantisation, LoRA, division over devices and
generation.
"""
