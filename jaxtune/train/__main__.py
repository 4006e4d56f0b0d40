"""`python -m jaxtune.train RECIPE [key.sub=value ...]`, the same command as `jaxtune train`."""

import sys

from jaxtune.cli import console

if __name__ == "__main__":
    sys.exit(console(["train", *sys.argv[1:]]))
