"""The reward functions of trl.rewards. Completions are lists of messages, or texts."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence

type Completion = str | Sequence[Mapping[str, object]]  # messages: the first is the answer
LogExtra = Callable[[str, list], None]


def _text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else str(completion[0].get("content") or "")


def _verified(texts: Sequence[str], solutions: Sequence[str], log_extra: LogExtra | None) -> list[float | None]:
    """1 where a text's mathematics is its solution's, 0 where not, None where no solution can be read."""
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError:
        raise ImportError("this reward reads mathematics with math-verify: pip install math-verify") from None
    # Its timeouts are signals, which only the main thread gets.
    main = threading.current_thread() is threading.main_thread()
    parsing, verifying = (10, 5) if main else (None, None)
    boxed_first = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    rewards: list[float | None] = []
    parsed_texts: dict[str, list[str]] = {"gold_parsed": [], "answer_parsed": []}
    for text, solution in zip(texts, solutions, strict=True):
        gold = parse(solution, parsing_timeout=parsing)
        answer = (
            parse(text, extraction_config=[boxed_first], extraction_mode="first_match", parsing_timeout=parsing)
            if gold
            else []
        )
        rewards.append(float(verify(gold, answer, timeout_seconds=verifying)) if gold else None)
        parsed_texts["gold_parsed"].append(str(gold) if gold else "[unparseable]")
        parsed_texts["answer_parsed"].append(str(answer) if answer else "[unparseable]" if gold else "[skipped]")
    if log_extra is not None:
        log_extra("solution", list(solutions))
        for name, values in parsed_texts.items():
            log_extra(name, values)
    return rewards


def accuracy_reward(
    completions: Sequence[Completion], solution: Sequence[str], log_extra: LogExtra | None = None, **kwargs: object
) -> list[float | None]:
    """1 where an answer's mathematics is that of the column `solution`, else 0; None where the solution cannot be read.
    Needs math-verify. completions: texts, or lists of messages.
    """
    del kwargs
    return _verified([_text(completion) for completion in completions], solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str],
    reasoning_delimiters: list[str] | None = None,
    log_extra: LogExtra | None = None,
    **kwargs: object,
) -> list[float | None]:
    """accuracy_reward of the text after the last of the delimiters (None: "</think>"); 0 without one.

    log_extra: called with a column's name and its values, for a table of answers.
    kwargs: the rows' other columns, not used.
    """
    del kwargs
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    ends = []
    for text in map(_text, completions):
        after = [text.rpartition(delimiter)[2] for delimiter in delimiters if delimiter in text]
        ends.append(min(after, key=len) if after else None)
    rewards = _verified(["" if end is None else end for end in ends], solution, log_extra)
    return [0.0 if end is None else reward for end, reward in zip(ends, rewards, strict=True)]


def think_format_reward(completions: Sequence[Completion], **kwargs: object) -> list[float]:
    """1 for an answer that begins with <think>, has no other one, and closes it; else 0."""
    del kwargs
    return [
        float(bool(re.match(r"<think>(?!.*<think>).*</think>", _text(answer), re.DOTALL))) for answer in completions
    ]


class _Named:
    """A reward function with a name of its own, which can be pickled."""

    def __init__(self, name: str, **settings: float):
        self.__name__, self.settings = name, settings


class _CosineScaled(_Named):
    def __call__(
        self,
        completions: Sequence[Completion],
        solution: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **kwargs: object,
    ) -> list[float | None]:
        del kwargs
        settings, rewards = self.settings, []
        for right, ids in zip(accuracy_reward(completions, solution), completion_ids, strict=True):
            short, long = (
                ("max_value_correct", "min_value_correct") if right else ("min_value_wrong", "max_value_wrong")
            )
            share = 0.5 * (1.0 + math.cos(math.pi * min(len(ids) / settings["max_len"], 1.0)))
            rewards.append(None if right is None else settings[long] + share * (settings[short] - settings[long]))
        return rewards


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """accuracy_reward, scaled along a cosine of the answer's length in tokens, from 0 to max_len: right answers fall
    from max_value_correct to min_value_correct, wrong ones rise from min_value_wrong to max_value_wrong.

    From arXiv 2502.03373.
    """
    return _CosineScaled(
        "cosine_scaled_reward",
        max_len=max_len,
        min_value_wrong=min_value_wrong,
        max_value_wrong=max_value_wrong,
        min_value_correct=min_value_correct,
        max_value_correct=max_value_correct,
    )


class _Repetition(_Named):
    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: object) -> list[float]:
        del kwargs
        size, rewards = int(self.settings["ngram_size"]), []
        for ids in completion_ids:
            runs = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
            repeated = 1 - len(set(runs)) / len(runs) if runs else 0.0
            rewards.append(repeated * self.settings["max_penalty"] if repeated else 0.0)
        return rewards


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """max_penalty (0 or less) times the share of an answer's n-grams that occurred before (arXiv 2502.03373)."""
    if max_penalty > 0:
        raise ValueError(f"get_repetition_penalty_reward: max_penalty = {max_penalty}: must be 0 or less")
    return _Repetition("repetition_penalty_reward", ngram_size=ngram_size, max_penalty=max_penalty)


class _Overlong(_Named):
    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: object) -> list[float]:
        del kwargs
        most, cache = self.settings["max_completion_len"], self.settings["soft_punish_cache"]
        return [
            0.0 if len(ids) <= most - cache else (most - cache - len(ids)) / cache if len(ids) <= most else -1.0
            for ids in completion_ids
        ]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """0 up to max_completion_len - soft_punish_cache tokens, falling to -1 at max_completion_len (arXiv 2503.14476)."""
    return _Overlong(
        "soft_overlong_punishment_reward", max_completion_len=max_completion_len, soft_punish_cache=soft_punish_cache
    )
