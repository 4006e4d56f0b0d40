"""Writes the quickstart's instruction set: questions with one checkable answer, in chat form.

    python scripts/quickstart/make_instructions.py [FOLDER]

FOLDER (by default the package's own, jaxtune/quickstart) receives train.jsonl and eval.jsonl. The same code always
gives the same files. The operands of a held-out question occur in no training question of its skill.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from skills import SKILLS, key

NAMES = tuple(SKILLS)
TRAIN_ROWS, EVAL_ROWS = 250, 20  # of each skill
SEED = 1
FOLDER = Path(__file__).resolve().parents[2] / "jaxtune" / "quickstart"


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training rows, held-out rows), each {"skill", "messages"}, shuffled over the skills. The files have the messages
    only."""
    rng = random.Random(SEED)
    train, held_out = [], []
    for name in NAMES:
        skill = SKILLS[name]
        seen = set()
        made = []
        while len(made) < EVAL_ROWS + TRAIN_ROWS:
            problem = skill.draw(rng)
            if key(problem) in seen:
                continue
            seen.add(key(problem))
            question = rng.choice(skill.questions).format(**problem)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": problem["x"]}]
            made.append({"skill": name, "messages": messages})
        held_out += made[:EVAL_ROWS]
        train += made[EVAL_ROWS:]
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in zip(("train", "eval"), rows(), strict=True):
        text = "".join(json.dumps({"messages": row["messages"]}) + "\n" for row in made)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
