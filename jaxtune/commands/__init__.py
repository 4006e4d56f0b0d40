"""The commands of `jaxtune`, one file each, and modules that they share. cli.py lists the commands and calls the `run`
of one, which takes the words of the command line after the command's name and returns the exit code; None means 0.
`COMMAND --help` prints the docstring of `run`, except for `train`, and `jaxtune --help` its first paragraph, for all
commands. The shared modules are common.py (parsers, options, loading a model), sampling.py (options of `generate` and
`chat`), answers.py (the work of `generate`) and machine_checks.py (that of `doctor`)."""
