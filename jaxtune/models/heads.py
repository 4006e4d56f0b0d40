"""Heads: what a model gives for a token, how checkpoints and adapters call that, and what follows from it.

A head that is not a language model's replaces that (models/reward.py) and trains whole with adapters. Everything that a
head needs elsewhere is read from its declaration here. To add one, add it to HEADS; an objective asks for it by its
attribute `head`.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Head:
    """A linear map of the hidden states after the final norm.

    name: its module in a checkpoint.
    outputs: numbers for each token; None: a logit for each token of the vocabulary.
    architecture: how the names of Hugging Face's classes with it end, in place of ForCausalLM.
    task_type: PEFT's word in adapter_config.json.
    what: what refusals say of a model with it.
    """

    name: str
    outputs: int | None
    architecture: str
    task_type: str
    what: str

    @property
    def is_text(self) -> bool:
        """Whether it is a language model's: its logits can be scaled and capped, sampled from, and tied."""
        return self.outputs is None

    def hf_config(self) -> dict[str, Any]:
        """Its keys of config.json beside `architectures`."""
        labels = {} if self.outputs is None else {str(index): f"LABEL_{index}" for index in range(self.outputs)}
        return labels and {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}

    def architecture_of(self, causal: str) -> str:
        """Hugging Face's class with this head, of that of the language model."""
        return causal.replace(TEXT.architecture, self.architecture)


TEXT = Head("lm_head", None, "ForCausalLM", "CAUSAL_LM", "this is a language model")
SCORE = Head("score", 1, "ForSequenceClassification", "SEQ_CLS", "this model scores texts (a reward model)")
HEADS = [TEXT, SCORE]


def head_of_class(architecture: str) -> Head:
    """The head of a class of transformers; that of texts where no other says so."""
    return next((head for head in HEADS if architecture.endswith(head.architecture)), TEXT)


def head_of_task(task_type: object) -> Head:
    """The head of an adapter's task_type; that of texts where no other says so."""
    return next((head for head in HEADS if head.task_type == task_type), TEXT)
