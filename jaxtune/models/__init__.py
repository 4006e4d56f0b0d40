"""What a model is: plain flax.nnx modules, one composable decoder, one short file a family."""
