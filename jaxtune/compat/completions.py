"""Sampled answers as a table in the terminal, as TRL prints them with log_completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from jaxtune.system.terminal import console, printable
from jaxtune.train.callbacks import Callback
from jaxtune.train.data.batches import Rollout


class Completions(Callback):
    """Prints the first `most` answers (None: all) of the latest generation every `logging_steps` steps."""

    is_users = False

    def __init__(self, logging_steps: int, most: int | None):
        self._every, self._most = logging_steps, most
        self._rollouts: Sequence[Rollout] = ()

    def sampled(self, step: int, rollouts: Sequence[Rollout]) -> None:
        self._rollouts = rollouts

    def stepped(self, step: int, metrics: dict[str, Any]) -> None:
        if step % self._every or not self._rollouts:
            return
        names = list(self._rollouts[0].get("rewards", {}))
        extra = list(self._rollouts[0].get("extra", {}))
        table = Table("prompt", "completion", *names, *extra, "advantage", title=f"step {step}", show_lines=True)
        for row in self._rollouts[: self._most]:
            rewards = [_cell(row.get("rewards", {}).get(name)) for name in names]
            extra_cells = [_cell(row.get("extra", {}).get(name)) for name in extra]
            cells = (
                _cell(row.get("prompt")),
                _cell(row.get("answer")),
                *rewards,
                *extra_cells,
                _cell(row.get("advantage")),
            )
            table.add_row(*(printable(cell) for cell in cells))
        console(stderr=True).print(table)
        self._rollouts = ()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.2f}"
    if isinstance(value, list) and all(isinstance(turn, Mapping) for turn in value):
        return "\n".join(
            f"{turn.get('role')}: {turn.get('content') or json.dumps(turn, default=str)}" for turn in value
        )
    return str(value)
