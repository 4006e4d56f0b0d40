"""The kernels of jaxtune and the operations built on them. The package needs only JAX and numpy, so every operation can
be used alone in other code."""
