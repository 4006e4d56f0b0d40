"""`python -m jaxtune COMMAND`, the same as `jaxtune COMMAND`."""

import sys

from jaxtune.cli import console

if __name__ == "__main__":
    sys.exit(console())
