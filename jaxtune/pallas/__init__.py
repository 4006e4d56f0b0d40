"""How the hot operations run. JAX only: every operation here is usable alone, in research code too."""
