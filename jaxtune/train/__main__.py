"""`python -m jaxtune.train RECIPE [key=value ...]` is `jaxtune train`."""

import sys

from jaxtune.cli import console

if __name__ == "__main__":
    sys.exit(console(["train", *sys.argv[1:]]))
