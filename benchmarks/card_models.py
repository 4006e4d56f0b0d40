"""Folders of models and files of rows for `benchmarks.card`: published shapes with random weights, of few layers where
depth does not matter, and a tokenizer that is trained on the rows.

    python -m benchmarks.card_models WORK ROWS.jsonl NAME ...
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SMALL_LAYERS, EXPERT_LAYERS = 8, 4
# {name: (shape, layers; None: all)}
MODELS = {
    "dense": ("llama-3.1-8b", SMALL_LAYERS),
    "whole": ("llama-3.1-8b", None),
    "experts": ("qwen3-30b-a3b", EXPERT_LAYERS),
    "pictures": ("qwen3.5-9b", SMALL_LAYERS),
}
_END = "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}" + _END + "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_VOCABULARY = 4096


def conversations(rows: Path) -> Iterator[tuple[str, str]]:
    """(question, answer) of rows of `messages`, or of `question` and `answer`."""
    with rows.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if "messages" in row:
                yield row["messages"][0]["content"], row["messages"][1]["content"]
            else:
                yield row["question"], row["answer"]


def write_rows(rows: Path, folder: Path) -> None:
    """sft.jsonl, pairs.jsonl and prompts.jsonl (of one to six questions) from the rows, and rewards.py."""
    import numpy as np

    asked = [*conversations(rows)]
    draw = np.random.default_rng(0)
    lines: dict[str, list[dict]] = {"sft": [], "pairs": [], "prompts": []}
    for number, (question, answer) in enumerate(asked):
        other = asked[number - 1][1]
        user = {"role": "user", "content": question}
        lines["sft"].append({"messages": [user, {"role": "assistant", "content": answer}]})
        if answer != other:
            lines["pairs"].append({"prompt": question, "chosen": answer, "rejected": other})
        several = [asked[index][0] for index in draw.integers(0, len(asked), draw.integers(0, 6))]
        lines["prompts"].append({"prompt": [{"role": "user", "content": " ".join([*several, question])}]})
    for name, made in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    (folder / "rewards.py").write_text(
        '"""A reward that means nothing: drawn by an answer\'s tokens."""\n\nimport random\n\n\n'
        "def drawn(completion_ids, **columns):\n"
        "    return [random.Random(repr(list(ids))).random() for ids in completion_ids]\n",
        encoding="utf-8",
    )


def trained_tokenizer(rows: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 4,096 tokens, which llama.cpp knows as gpt-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_END, "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for row in conversations(rows) for text in row), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_END, eos_token=_END, pad_token="<|pad|>", chat_template=_TEMPLATE
    )


def write_model(name: str, rows: Path, folder: Path) -> None:
    import jax

    from benchmarks import pictures
    from benchmarks.random_model import random_model
    from benchmarks.shapes import SHAPES
    from jaxtune.models.hf import save_pretrained

    shape, layers = MODELS[name]
    if shape in pictures.VISION:
        pictures.write_model(shape, layers, folder)
        return
    hf = dict(SHAPES[shape]) | ({} if layers is None else {"num_hidden_layers": layers})
    save_pretrained(random_model(hf, jax.random.key(0), on_host=layers is None), folder, trained_tokenizer(rows))


def main() -> None:
    work, rows, *names = sys.argv[1:]
    for name in names:
        began = time.monotonic()
        write_model(name, Path(rows), Path(work) / name)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
