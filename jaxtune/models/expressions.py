"""Matches regular expressions from adapter files and recipes with a limit of time, so that a file from elsewhere cannot
hang a program: an expression that may backtrack for long is matched in a process with limits of time and memory.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence

LIMIT_SECONDS = 20.0  # for all names, which usually take milliseconds
_MEMORY_BYTES = 1 << 30
# With at most this many repeats and groups, and no repeated group, the time to match is at worst a small power of the
# name's length.
_FEW = 3
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_SCRIPT = """
import json, re, resource, sys
pattern, names, seconds, memory_bytes = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (seconds + 1, seconds + 1))
resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
try:
    expression = re.compile(pattern)
except Exception as error:
    print(json.dumps(str(error) or type(error).__name__))
else:
    print(json.dumps([name for name in names if expression.fullmatch(name)]))
"""


def matching(key: str, pattern: str, names: Sequence[str]) -> list[str]:
    """The names that a regular expression matches as a whole, in the order of `names`.

      key: the config key of the expression, for errors.
      pattern: the expression, in Python's syntax; it runs with limits because users write it.
      names: the strings to try.

    Raises ValueError for an expression that is invalid, or needs more than LIMIT_SECONDS or 1 GiB because it
    backtracks.
    """
    try:
        if _is_quick(pattern):
            expression = re.compile(pattern)
            return [name for name in names if expression.fullmatch(name)]
    except (re.error, OverflowError) as error:
        raise ValueError(f"{key}: {pattern!r} is not a regular expression: {error}") from None
    work = json.dumps([pattern, list(names), math.ceil(LIMIT_SECONDS), _MEMORY_BYTES])
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SCRIPT],
            input=work,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        raise ValueError(
            f"{key}: the regular expression {pattern[:80]!r} takes over {LIMIT_SECONDS:g} s on the model's names "
            "(it backtracks without end): write it without repeats inside repeats, or list the names"
        ) from None
    matches = json.loads(process.stdout)
    if isinstance(matches, str):
        raise ValueError(f"{key}: {pattern[:80]!r} is not a regular expression: {matches}")
    return matches


def _is_quick(pattern: str) -> bool:
    """Whether an expression cannot backtrack for long. Escaped characters count too, which costs only time."""
    repeats = sum(map(pattern.count, "*+?{"))
    return repeats <= _FEW and pattern.count("(") <= _FEW and not _REPEATED_GROUP.search(pattern)
