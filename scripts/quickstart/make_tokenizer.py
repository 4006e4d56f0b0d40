"""Trains the base model's tokenizer on the pretraining text and the questions, and writes its folder.

    python scripts/quickstart/make_tokenizer.py TEXT.jsonl FOLDER

Byte-level BPE over lower-case words. Digits, capitals and spaces stand alone, so that a number or a word in capitals is
as many tokens as it has characters: what the skills need.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

from skills import SKILLS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 640
PAGES = 5_000
END, PAD = "<|end|>", "<|pad|>"  # END closes a page of text and a turn of a conversation
SPECIAL = [END, PAD, "<|system|>", "<|user|>", "<|assistant|>"]

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|assistant|>' }}
{%- generation %}{{ message.content + '<|end|>' }}{% endgeneration %}
{%- elif message.role in ('system', 'user') %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- else %}{{ raise_exception('roles are system, user and assistant, not ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def build(texts: list[str], marks: Sequence[str] = (), template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """marks: more special tokens."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"\d|[A-Z]| ?[a-z]+|\s|[^\sA-Za-z\d]+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL, *marks],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[*SPECIAL[2:], *marks],
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    with arguments.text.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in itertools.islice(lines, PAGES)]
    rng = random.Random(0)
    for skill in SKILLS.values():  # the words of questions are tokens too, though no question is pretrained on
        texts += [question.format(**skill.draw(rng)) for question in skill.questions for _ in range(50)]
    build(texts).save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
