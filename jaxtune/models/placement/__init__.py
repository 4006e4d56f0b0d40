"""Where arrays are: divided over a mesh, summed by collectives, moved to and from host memory."""
