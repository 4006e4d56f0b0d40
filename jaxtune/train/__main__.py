"""`python -m jaxtune.train RECIPE [key=value ...]` is `jaxtune train`."""

from jaxtune.cli import process

if __name__ == "__main__":
    process(["train"])
