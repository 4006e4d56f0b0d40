"""What a base model knows: for each skill the share of statements that it finishes rightly.

python scripts/quickstart/evaluate_base.py MODEL_FOLDER [--problems N] [--skills a,b] [--show N]
"""

from __future__ import annotations

import argparse
import random
import re

from skills import SKILLS

import jaxtune

SEED = 2
MAX_NEW_TOKENS = 16


def problems(name: str, count: int) -> list[tuple[str, str]]:
    """(text up to the answer, answer)."""
    rng, skill, found = random.Random(SEED), SKILLS[name], []
    for _ in range(count):
        problem = skill.draw(rng)
        before = rng.choice(skill.statements).split("{x}")[0]
        found.append((before.format(**problem), problem["x"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--skills", default=",".join(SKILLS))
    parser.add_argument("--show", type=int, default=0, help="print this many wrong ones of each skill")
    arguments = parser.parse_args()
    model, tokenizer = jaxtune.from_pretrained(arguments.model, dtype="float32")
    newline = tokenizer("\n")["input_ids"][0]
    scores = []
    for name in arguments.skills.split(","):
        asked = problems(name, arguments.problems)
        prompts = [tokenizer(text)["input_ids"] for text, _ in asked]
        ends = (newline, tokenizer.eos_token_id)
        new = jaxtune.generate(model, prompts, MAX_NEW_TOKENS, eos_token_ids=ends)
        # What follows the answer in some statements (" in digits.") does not count.
        answers = [re.split(r"[^0-9A-Z]", tokenizer.decode(ids, skip_special_tokens=True))[0] for ids in new]
        wrong = [(text, x, answer) for (text, x), answer in zip(asked, answers, strict=True) if answer != x]
        scores.append(1 - len(wrong) / len(asked))
        print(f"{name:<14}{100 * scores[-1]:6.1f} %", flush=True)
        for text, x, answer in wrong[: arguments.show]:
            print(f"    {text!r} -> {answer!r}, not {x!r}")
    print(f"{'mean':<14}{100 * sum(scores) / len(scores):6.1f} %")


if __name__ == "__main__":
    main()
