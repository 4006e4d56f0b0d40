"""Writes the base model's pretraining text: short pages of plain statements, as JSONL rows {"text": ...}.

    python scripts/quickstart/make_pretraining_text.py FILE.jsonl [--pages N] [--seed N] [--skills a,b] [--workers N]

The same arguments give the same file, however many processes write it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
from pathlib import Path

from skills import SKILLS

PAGES = 320_000  # about 43 million tokens
PAGES_A_CHUNK = 2_000


def page(rng: random.Random, names: list[str]) -> str:
    """2 to 12 statements, a line each, each of any skill."""
    lines = []
    weights = [SKILLS[name].weight for name in names]
    for name in rng.choices(names, weights, k=rng.randint(2, 12)):
        skill = SKILLS[name]
        lines.append(rng.choice(skill.statements).format(**skill.draw(rng)))
    return "\n".join(lines)


def chunk(job: tuple[int, int, list[str]]) -> str:
    """The JSONL lines of one chunk of pages."""
    seed, count, names = job
    rng = random.Random(seed)
    return "".join(json.dumps({"text": page(rng, names)}) + "\n" for _ in range(count))


def write(file: Path, pages: int, seed: int, names: list[str], workers: int | None) -> None:
    jobs = [
        (seed * 1_000_003 + start, min(PAGES_A_CHUNK, pages - start), names) for start in range(0, pages, PAGES_A_CHUNK)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.Pool(workers) as pool, file.open("w", encoding="utf-8") as out:
        out.writelines(pool.imap(chunk, jobs))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--pages", type=int, default=PAGES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skills", default=",".join(SKILLS), help="comma-separated; default: all")
    parser.add_argument("--workers", type=int, default=None)
    arguments = parser.parse_args()
    write(arguments.file, arguments.pages, arguments.seed, arguments.skills.split(","), arguments.workers)


if __name__ == "__main__":
    main()
