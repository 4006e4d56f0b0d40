"""`python -m jaxtune.train RECIPE [key.sub=value ...]`, the same command as `jaxtune train`."""

import sys

from jaxtune.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
