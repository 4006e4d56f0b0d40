"""The train step as functions: gradients, update, and sums of gradients over devices."""
