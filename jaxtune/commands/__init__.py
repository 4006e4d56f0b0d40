"""The commands of `jaxtune`, a file each. `run` takes the words after the command's name and returns the exit code
(None: 0); its docstring is the text of --help, except for `train`, and its first paragraph stands in `jaxtune --help`.
"""
