"""Matches regular expressions from adapter files and recipes (`matching`), with a time limit, so that a file from
elsewhere cannot make a program hang.

An expression can backtrack for longer than anybody waits, and nothing in its process can stop it meanwhile. An
expression that may do so is therefore matched in a process of its own, which has limits of time and memory. Nearly all
expressions cannot (`_is_quick`), and are matched here."""

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
    """The names that a regular expression matches as a whole, in the order of `names`. An expression that may backtrack
    for long is matched in another Python process, with limits of time and memory, for which this call waits. LoRA's
    target_modules, rank_pattern and alpha_pattern are matched so, and of adapters that are loaded exclude_modules too.

    Args:
      key: the config key that has the expression, often after a file's name, for errors.
      pattern: the regular expression, from an adapter's config or a recipe.
      names: of modules or tensors.
    Raises:
      ValueError: an expression that is not valid, or that needs more than LIMIT_SECONDS or 1 GiB because it backtracks.
    """
    try:
        if _is_quick(pattern):
            expression = re.compile(pattern)
            return [name for name in names if expression.fullmatch(name)]
    except (re.error, OverflowError) as error:
        raise ValueError(f"{key}: {pattern!r} is not a regular expression: {error}") from None
    work = json.dumps([pattern, list(names), math.ceil(LIMIT_SECONDS), _MEMORY_BYTES])
    try:
        done = subprocess.run(
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
    found = json.loads(done.stdout)
    if isinstance(found, str):
        raise ValueError(f"{key}: {pattern[:80]!r} is not a regular expression: {found}")
    return found


def _is_quick(pattern: str) -> bool:
    """Whether a regular expression (`pattern`) cannot backtrack for long, so that `matching` may match it in this
    process: it has at most three repeats (*, +, ? and {) and three groups, and no group is repeated. Escaped characters
    count too, so that some quick expressions are not found; that costs only time."""
    repeats = sum(map(pattern.count, "*+?{"))
    return repeats <= _FEW and pattern.count("(") <= _FEW and not _REPEATED_GROUP.search(pattern)
