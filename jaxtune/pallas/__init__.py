"""GPU kernels written with Pallas and Triton, and the operations built on them, each with a reference implementation in
plain JAX that runs on any machine, and the formats of quantised weights (formats). Beside jaxtune.system it imports
only JAX and numpy, and Triton and jax-triton where a Triton kernel runs, so every operation can be used alone in other
code."""
