"""The commands of `jaxtune`, one file each, and modules that they share. The `run` of a command takes the words of the
command line after the command's name and returns the exit code; None means 0. Except for `train`, --help prints its
docstring. The shared modules are common.py (parsers, options, loading a model), sampling.py (options of `generate` and
`chat`), answers.py (the work of `generate`) and machine_checks.py (that of `doctor`)."""
