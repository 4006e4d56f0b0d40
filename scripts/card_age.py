"""Says how many commits ago `make card` was run on a GPU, and which rooms have changed since."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "card.json"


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.strip()


def age(record: dict) -> str:
    commit = record["commit"]
    count = git("rev-list", "--count", f"{commit}..HEAD")
    if count is None:
        return f"card.json is of {commit}, which this checkout does not have"
    changed = (git("diff", "--name-only", commit, "HEAD", "--", "jaxtune") or "").splitlines()
    rooms = sorted({"/".join(Path(name).parts[:2]) for name in changed})
    failed = f"; failed there: {', '.join(record['failed'])}" if record["failed"] else ""
    since = f"; changed since: {', '.join(rooms)}" if rooms else "; nothing of the package changed since"
    return f"card.json is of {commit[:8]}, {count} commits ago ({record['device']}){since}{failed}"


if __name__ == "__main__":
    print(age(json.loads(RECORD.read_text(encoding="utf-8"))) if RECORD.exists() else "no card.json: run make card")
