"""Lets `python -m jaxtune.train RECIPE [key.sub=value ...]` run the train command, as `jaxtune train` does. RECIPE is
the path of a YAML file or the name of a packaged recipe; each `key.sub=value` replaces one value of it. The options,
such as --plan, are those of `jaxtune train` too."""

import sys

from jaxtune.cli import console

if __name__ == "__main__":
    sys.exit(console(["train", *sys.argv[1:]]))
