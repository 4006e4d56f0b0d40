"""What clients have of something that all share: rows, and memory for bodies and pictures."""

from __future__ import annotations

import collections
from collections.abc import Hashable


class Shares:
    """Amounts by client, below `most` in sum. A client may have as much as then stays free for others, which is half of
    it while nobody else has any.
    """

    def __init__(self, most: int):
        self.most, self.total = most, 0
        self._amounts: collections.Counter[Hashable] = collections.Counter()

    def amount(self, client: Hashable) -> int:
        return self._amounts[client]

    def take(self, client: Hashable, amount: int) -> bool:
        """Whether the client may have so much more, and then has it."""
        may = not amount or self._amounts[client] + amount <= self.most - self.total - amount
        if may:
            self._set(client, self._amounts[client] + amount)
        return may

    def give_back(self, client: Hashable, amount: int) -> None:
        self._set(client, self._amounts[client] - amount)

    def _set(self, client: Hashable, amount: int) -> None:
        self.total += amount - self._amounts[client]
        self._amounts[client] = amount
        if not amount:
            del self._amounts[client]
