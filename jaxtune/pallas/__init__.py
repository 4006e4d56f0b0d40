"""GPU kernels in Pallas and Triton, and operations on them with a reference in plain JAX that runs anywhere. They can
be used alone: beside jaxtune.system only JAX, numpy and, for Triton kernels, Triton and jax-triton are imported.
"""
