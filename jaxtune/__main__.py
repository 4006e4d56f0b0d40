"""`python -m jaxtune COMMAND`, the same as `jaxtune COMMAND`: it runs the command and exits with its exit code."""

import sys

from jaxtune.cli import console

if __name__ == "__main__":
    sys.exit(console())
