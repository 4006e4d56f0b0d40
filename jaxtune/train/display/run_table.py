"""The numbers of runs as a table for spreadsheets and pandas."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from jaxtune.train.log import metrics as m

_FIRST = ("run", "step", "time")


def run_table(folders: Sequence[Path]) -> str:
    """CSV with a row for each line of metrics.jsonl and a column for each number; ValueError without metrics."""
    rows: list[dict[str, object]] = []
    for folder in folders:
        if not (folder / m.JSONL).is_file():
            raise ValueError(f"{folder} is not a run's folder: there is no {m.JSONL} in it")
        for line in m.read_metrics(folder / m.JSONL):
            numbers = {key: value for key, value in line.items() if type(value) in (int, float)}
            rows.append({"run": folder.resolve().name, **numbers})
    names = dict.fromkeys([*_FIRST, *(key for row in rows for key in row)])
    text = io.StringIO()
    table = csv.DictWriter(text, list(names), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()
