"""What every room stands on: files, the terminal, processes, the command line, and the private parts of
JAX that are used."""
