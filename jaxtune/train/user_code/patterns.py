"""Regular expressions from data, in a process that is killed at a limit, as some backtrack without end. Standard
library alone.
"""

from __future__ import annotations

import pickle
import re
import resource
from collections.abc import Sequence

LIMIT_SECONDS = 10.0  # for all texts of a call, which usually take milliseconds
_MEMORY_BYTES = 1 << 30


def searched(patterns: Sequence[str], texts: Sequence[str]) -> list[bool]:
    """Whether each pattern is found in its text. ValueError for no regular expression, or beyond LIMIT_SECONDS or 1
    GiB.
    """
    from jaxtune.train.user_code.processes import process_of

    sent = pickle.dumps(dict(patterns=list(patterns), texts=list(texts)))
    try:
        answer = process_of(__name__).ask(
            pickle.dumps(_searched), pickle.dumps((sent, [])), "regex", LIMIT_SECONDS, looks=False
        )
    except TimeoutError:
        pattern = repr(patterns[0][:80]) if len(patterns) == 1 else f"one of {len(patterns)} patterns"
        raise ValueError(
            f"{pattern} took longer than {LIMIT_SECONDS:g} s, and its process was ended: it backtracks without end; "
            "write it without repeats inside repeats"
        ) from None
    return pickle.loads(answer)[0]


def _searched(patterns: Sequence[str], texts: Sequence[str]) -> list[bool]:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    matches = []
    for pattern, text in zip(patterns, texts, strict=True):
        try:
            matches.append(re.search(pattern, text) is not None)
        except (re.error, OverflowError) as error:
            raise ValueError(f"{pattern[:80]!r} is no regular expression: {error}") from None
        except MemoryError:
            raise ValueError(f"{pattern[:80]!r} needs more than 1 GiB") from None
    return matches
