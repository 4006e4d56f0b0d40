"""GPU kernels in Pallas and Triton, and operations on them with a reference in plain JAX that runs anywhere. Beside
jaxtune.system only JAX and numpy are imported, and Triton and jax-triton for Triton kernels, so that operations can be
used alone.
"""
