"""Sums that a small model can half solve, and the checker of its answers."""

from __future__ import annotations

import random
import re
from typing import Any

_NUMBER = re.compile(r"-?\d+")
_ASKED = ("What is {}? Answer with the number alone.", "Compute {}. Give only the result.", "{} = ?")


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Questions with "answer": sums and differences of numbers below 30, and products below 10."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        sign = draw.choice("++-*")
        first, second = (draw.randrange(2, 10 if sign == "*" else 30) for _ in range(2))
        if sign == "-" and second > first:
            first, second = second, first
        value = {"+": first + second, "-": first - second, "*": first * second}[sign]
        text = draw.choice(_ASKED).format(f"{first} {sign} {second}")
        found.append({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": str(value)}]})
    return found


def score(completion: Any, answer: str) -> float:
    """1 for an answer whose only number is right, 0.5 if its last number is, else 0."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    numbers = _NUMBER.findall(text.replace(",", ""))
    if not numbers or numbers[-1] != answer.strip():
        return 0.0
    return 1.0 if len(numbers) == 1 else 0.5


def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """A reward for `objective.reward_funcs`."""
    return [score(completion, right) for completion, right in zip(completions, answer, strict=True)]
