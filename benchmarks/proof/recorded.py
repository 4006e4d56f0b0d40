"""`jaxtune train` that also writes which implementation every product chose.

python -m benchmarks.proof.recorded RECIPE [key=value ...] output=FOLDER
"""

from __future__ import annotations

import atexit
import collections
import json
import sys
from pathlib import Path


def main() -> int:
    from jaxtune import cli
    from jaxtune.pallas import dispatch

    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    choose = dispatch.choose

    def counted(op: str, table: dispatch.Table, implementation: str | None) -> str:
        name = choose(op, table, implementation)
        counts[op][name] += 1
        return name

    dispatch.choose = counted
    output = next(word.removeprefix("output=") for word in sys.argv if word.startswith("output="))

    def written() -> None:
        if Path(output).is_dir():
            text = json.dumps({op: dict(names) for op, names in sorted(counts.items())})
            (Path(output) / "products.json").write_text(text, encoding="utf-8")

    atexit.register(written)
    return cli.console(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
