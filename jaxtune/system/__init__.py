"""What every room stands on: files, the terminal, processes, and the private parts of JAX that are used."""
