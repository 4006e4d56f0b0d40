"""`jaxtune doctor --exact MODEL`: in which operations sampler and training forward compute other bits."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence

from jaxtune.commands import common
from jaxtune.system import timing
from jaxtune.system.terminal import say

_ROWS, _PROMPT, _NEW = 8, 80, 48  # of the rows that are sampled; their prompts have up to twice as many tokens


@dataclasses.dataclass
class _Line:
    """What was compared of an operation in all layers and steps."""

    phase: str
    operation: str
    first: int | None = None  # the first layer that differs
    numbers: int = 0
    differing: int = 0
    largest: float = 0.0

    def to_text(self) -> str:
        text = f"{self.phase}: {self.operation}: {self.differing:,} of {self.numbers:,} differ"
        if not self.differing:
            return text
        layer = "" if self.first is None else f", from layer {self.first} on"
        return f"{text}, by up to {self.largest:.3g}{layer}"


@timing.during("check", "exact", "comparing sampler and training")
def run(options: argparse.Namespace) -> int:
    """Prints how log-probabilities of sampled tokens differ, and then each operation. Returns 1 if anything
    differs although `exact` covers model and device, else 0. ValueError: there is no such model.

      options: model, dtype, load_in.
    """
    common.begin_import()
    from jaxtune.models.generation.differences import NotPlainError
    from jaxtune.models.generation.exactness import refusal

    model, _ = common.load(options)
    reason = refusal(model)
    say("exact: sums in one order" if reason is None else f"as usual, because exact does not cover this: {reason}")
    wrong = 0
    try:
        for line in _lines(model, reason is None):
            say(line.to_text(), flush=True)
            wrong += line.differing
    except NotPlainError as error:
        say(f"operations of {options.model} were not compared: {error}")
    if reason is None:
        say("exact does not hold: the first operation above that differs says where" if wrong else "all bits are equal")
    return int(reason is None and wrong > 0)


def _lines(model, exact: bool) -> Iterator[_Line]:
    import numpy as np

    from jaxtune.models.generation.differences import differences
    from jaxtune.models.generation.generate import training_logprobs
    from jaxtune.models.generation.sampler import Sampler
    from jaxtune.pallas import one_order

    draw = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    prompts = [draw.integers(0, vocabulary, draw.integers(1, 2 * _PROMPT)).tolist() for _ in range(_ROWS)]
    # The training forward runs in the other half of the free memory.
    with Sampler(model, _ROWS, 2 * _PROMPT + _NEW, memory_share=0.5, exact=exact) as sampler:
        rows = sorted(sampler.run(prompts, _NEW, temperature=1.0, eos_token_ids=()), key=lambda row: row.index)
    answers: Sequence[list[int]] = [row.ids for row in rows]
    trained = training_logprobs(model, prompts, answers, _NEW, exact=exact)
    apart = np.abs(np.array([row.logprobs for row in rows]) - np.array(trained))
    yield _Line("sampled", "log-probabilities", None, apart.size, int((apart > 0).sum()), float(apart.max()))
    lines: dict[tuple[str, str], _Line] = {}
    with one_order.exact(exact):
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        for compared in differences(model, texts, [len(prompt) for prompt in prompts], sampled=sampler.model):
            key = compared.phase, compared.operation
            line = lines.setdefault(key, _Line(*key))
            line.numbers += compared.numbers
            line.differing += compared.differing
            line.largest = max(line.largest, compared.largest)
            line.first = compared.layer if compared.differing and line.first is None else line.first
    yield from lines.values()
