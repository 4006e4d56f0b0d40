"""Where arrays are: divided over the devices of a mesh, whole again while they are used, or in host memory."""
