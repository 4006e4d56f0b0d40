"""The commands of `jaxtune`, one file each. Their `run` takes the arguments and returns the exit code; None means 0."""
