"""A tiny tokenizer that is trained here, with special tokens and chat templates like those of real models."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from jaxtune.conversations.reads import noted
from jaxtune.train.data.rendering.formats import (
    LABELLED,
    PREFERENCE,
    normalize,
    normalize_labelled,
    normalize_pair,
    of_row,
    refuse_excluded,
)
from jaxtune.train.data.rows.row_errors import Excluded

# Without marks: what a response is shows only from rendering prefixes.
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (
    "Who are you? I am a bot. The sum of two and two is four. Name a colour: blue, red or green.\n\n"
    "### Instruction:\nAdd them.\n\n### Response:\nIt is 4, of course.\n<|im_start|> user assistant system tool\n"
)


def make_tokenizer(template=PLAIN_TEMPLATE, *, adds_bos=False, eos="<|im_end|>", special=True, **changes):
    """A byte-level BPE of about 400 tokens. `special=False` leaves the chat's tokens out of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"][: 4 if special else 2]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 8, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
        )
    options = {"bos_token": "<|bos|>", "eos_token": eos, "additional_special_tokens": specials[2:], **changes}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    made.chat_template = template
    return made


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def write(tmp_path: Path):
    """write(name, rows): a JSONL file of rows; strings and bytes are lines as they are."""

    def write(name: str, rows: list) -> Path:
        lines = [
            row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
            for row in rows
        ]
        path = tmp_path / name
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write


def read_of(row: dict, format: str, plain: bool = False, access=None) -> tuple[dict, list]:
    """(What is read of a row, and as what; columns that are not), also of one that a mark leaves out."""
    with noted() as reads, contextlib.suppress(Excluded):
        refuse_excluded(row)
        others = {PREFERENCE: normalize_pair, LABELLED: normalize_labelled}
        others.get(format, lambda row, access: normalize(row, format, access))(row, access)
    return of_row(row, reads, plain)


def unread(row: dict, format: str, plain: bool = False) -> list[str]:
    return read_of(row, format, plain)[1]


def spans(tokenizer, tokens, mask) -> list[str]:
    """The text of every run of trained tokens."""
    found, run = [], []
    for token, trained in zip([*tokens, 0], [*mask, False], strict=True):
        if trained:
            run.append(int(token))
        elif run:
            found.append(tokenizer.decode(run))
            run = []
    return found
