"""How often Python's threads take turns."""

from __future__ import annotations

import sys

_SECONDS = 0.001


def take_often() -> None:
    """Threads take turns each millisecond, not each five: one that reads a tensor asks for Python's lock a dozen times,
    and waits for its turn each time while another one imports or traces.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SECONDS))
