"""GPU kernels written with Pallas and Triton, and the operations built on them, each with a reference implementation
in plain JAX that runs on any machine. The package needs only JAX and numpy, so every operation can be used alone in
other code."""
