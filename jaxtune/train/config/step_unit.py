"""The unit of a step: what rows_per_step counts."""

from __future__ import annotations

import dataclasses
from typing import Literal

# The values of data.packing: True packs several documents into a row, False gives each a row of its own, and "step"
# packs the documents of each step separately (data/packing/steps.py).
Packing = bool | Literal["step"]


@dataclasses.dataclass(frozen=True)
class StepUnit:
    """What rows_per_step counts: rows of data.length tokens, or examples, each a row of the data (a pair, for
    preferences).
    """

    packing: Packing

    @classmethod
    def of_trainers(cls, example: str, packs: bool, known: bool) -> StepUnit:
        """That of trainers in which an update counts examples, unless it `packs` rows of text.

        example: of `objective.example_of`.
        known: whether all rows are known before the run, so that steps can be laid out.
        """
        return cls(True if packs and example == "rows" else "step" if known else False)

    @property
    def counts_examples(self) -> bool:
        """Whether a step has rows_per_step examples, in as many rows as they fill, and data.length limits a document;
        else it has rows_per_step rows, whose length is data.length.
        """
        return self.packing == "step"

    @property
    def shares_rows(self) -> bool:
        """Whether a row that is counted may hold several examples."""
        return self.packing is True
