"""The commands of `jaxtune`, a file each: `run` takes the arguments and gives the exit code, None for 0."""
