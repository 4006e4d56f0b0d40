"""Real rows as token ids, a list in JSON a line, which step.py and trained.py pack alike.

python -m benchmarks.peers.documents ROWS.jsonl TOKENIZER FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def write_documents(rows: Path, tokenizer: Path, file: Path) -> int:
    """Renders rows (any format of `data.train`) by the template of a tokenizer's folder; returns how many tokens."""
    from jaxtune.models.files.model_folder import load_tokenizer
    from jaxtune.train.data.rendering.formats import detect_format, normalize

    loaded, documents = load_tokenizer(tokenizer), []
    if loaded is None:
        raise SystemExit(f"{tokenizer}: has no tokenizer")
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        turns = [dict(turn) for turn in normalize(row, detect_format(row)).messages or ()]
        documents.append(loaded.apply_chat_template(turns, tokenize=True, return_dict=False))
    file.write_text("".join(f"{json.dumps(document)}\n" for document in documents), encoding="utf-8")
    return sum(map(len, documents))


def read_documents(file: Path, length: int) -> list[list[int]]:
    """The documents of a file, each cut to this many tokens."""
    return [json.loads(line)[:length] for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    print(f"{write_documents(*map(Path, sys.argv[1:])):,} tokens")
