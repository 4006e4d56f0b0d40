"""`python -m jaxtune COMMAND` is `jaxtune COMMAND`."""

import sys

from jaxtune.cli import console

if __name__ == "__main__":
    sys.exit(console())
