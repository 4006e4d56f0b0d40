"""Turns of clients at something of which there are few, such as the processes that read bodies."""

from __future__ import annotations

import collections
import itertools
import re
import threading
from concurrent.futures import Future, InvalidStateError

type Client = tuple[str, str]  # an address, and who asks from there, as a body says

_SAID = re.compile(rb'"(?:safety_identifier|user)"\s*:\s*"([^"\\]{1,512})"')
_LOOKED_AT = 4096  # bytes of a body's beginning and end


def client_of(host: str, body: bytes) -> Client:
    """Who sent a body that is not read yet."""
    said = _SAID.search(body[:_LOOKED_AT]) or _SAID.search(body[-_LOOKED_AT:])
    return host, said[1].decode("utf-8", "replace") if said else ""


class Turns:
    """Of `count` places. The next one goes to the address that has the fewest, or whose last turn was the longest ago,
    and of its clients to such a one. A client leaves one place free for others. Safe in threads.
    """

    def __init__(self, count: int):
        self._free, self._most = count, max(1, count - 1)
        self._lock, self._numbers = threading.Lock(), itertools.count(1)
        self._waiting: list[tuple[Client, Future[None]]] = []
        self._have: collections.Counter[Client | str] = collections.Counter()
        self._last: dict[Client | str, int] = {}  # the number of its last turn

    def ask(self, client: Client) -> Future[None]:
        """Done when the client has its turn, which `end` ends; it may be cancelled before."""
        turn: Future[None] = Future()
        with self._lock:
            self._waiting.append((client, turn))
            given = self._given()
        self._tell(given)
        return turn

    def end(self, client: Client) -> None:
        with self._lock:
            self._free += 1
            self._have.subtract((client, client[0]))
            given = self._given()
            here = {name for name, _ in self._waiting} | {name for name, count in self._have.items() if count}
            here |= {name[0] for name in here if isinstance(name, tuple)}
            self._last = {name: number for name, number in self._last.items() if name in here}
            self._have += collections.Counter()  # without zeros
        self._tell(given)

    def _given(self) -> list[tuple[Client, Future[None]]]:
        """Those that get their turn now; with the lock."""
        given = []
        self._waiting = [one for one in self._waiting if not one[1].cancelled()]
        while self._free:
            may = [one for one in self._waiting if self._have[one[0]] < self._most]
            if not may:
                break
            one = min(may, key=lambda one: (*self._place(one[0][0]), *self._place(one[0])))
            self._waiting.remove(one)
            self._free -= 1
            for name in (one[0], one[0][0]):
                self._have[name] += 1
                self._last[name] = next(self._numbers)
            given.append(one)
        return given

    def _place(self, name: Client | str) -> tuple[int, int]:
        return self._have[name], self._last.get(name, 0)

    def _tell(self, given: list[tuple[Client, Future[None]]]) -> None:
        for client, turn in given:
            try:
                turn.set_result(None)
            except InvalidStateError:  # it was cancelled meanwhile
                self.end(client)
