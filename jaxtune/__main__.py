"""`python -m jaxtune COMMAND` is `jaxtune COMMAND`."""

from jaxtune.cli import process

if __name__ == "__main__":
    process()
