"""What a sampler's cache in e4m3 loses on real weights: the loss of real texts, token by token as they are decoded.

    python -m benchmarks.cache_loss --model FOLDER|FILE.gguf --texts FILE.jsonl --output FILE.json [--rows 32]
        [--new 256] [--dtype float32]

Texts (all strings of a line, joined, the next lines' behind them) are tokens that are forced: a prompt of 16, then
`new` ones. `loss` is their mean in nats with a cache in the model's dtype, `more` the mean difference with each other
cache, its standard error over the rows, and the mean absolute difference of a token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import mismatch
from benchmarks.record import environment, write

_PROMPT = 16


def texts_of(file: Path, tokenizer: Any, rows: int, length: int) -> list[list[int]]:
    """`rows` runs of `length` tokens, each of lines of its own."""
    found: list[list[int]] = []
    ids: list[int] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        ids += tokenizer("\n".join(v for v in json.loads(line).values() if isinstance(v, str)) + "\n\n")["input_ids"]
        if len(ids) >= length:
            found.append(ids[:length])
            ids = []
        if len(found) == rows:
            return found
    raise ValueError(f"{file}: {len(found)} runs of {length} tokens; {rows} are needed")


def losses(model: Any, texts: list[list[int]], cache: str | None) -> Any:
    """float64[rows, new], of each token in nats."""
    import numpy as np

    import jaxtune
    from jaxtune.models.generation import slots

    new = len(texts[0]) - _PROMPT
    tokens = np.array([text[_PROMPT:] for text in texts])
    with (
        mismatch.replaced(slots, _chosen=mismatch.forced([tokens])),
        jaxtune.Sampler(model, len(texts), len(texts[0]), cache=cache) as sampler,
    ):
        rows = list(sampler.run([text[:_PROMPT] for text in texts], new, temperature=1.0, eos_token_ids=()))
    assert [row.ids for row in rows] == tokens.tolist()
    return -np.array([row.logprobs for row in rows], np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    import numpy as np

    import jaxtune

    model, tokenizer = jaxtune.from_pretrained(options.model, dtype=options.dtype)
    texts = texts_of(options.texts, tokenizer, options.rows, _PROMPT + options.new)
    record: dict[str, Any] = {"benchmark": "cache_loss", "model": Path(options.model).name, "dtype": options.dtype}
    record |= {"texts": options.texts.name, "rows": options.rows, "new": options.new, **environment()}
    exact = losses(model, texts, None)
    record["loss"] = float(exact.mean())
    for cache in ("fp8",):
        apart = losses(model, texts, cache) - exact
        of_rows = apart.mean(1)
        record[cache] = {
            "more": float(apart.mean()),
            "standard_error": float(of_rows.std(ddof=1) / np.sqrt(len(of_rows))),
            "absolute": float(np.abs(apart).mean()),
            "largest": float(np.abs(apart).max()),
        }
        write(options.output, record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
