"""The commands of `jaxtune`, one file each, and modules that they share. The `run` of a command takes the words of the
command line after the command's name and returns the exit code; None means 0. Except for `train`, --help prints its
docstring."""
