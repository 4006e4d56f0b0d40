"""The heads that a model can have: what each computes for a token, and its names in checkpoints and adapters.

A head that is not a language model's replaces that one (models/reward.py) and is trained whole beside adapters. All
code that depends on the head reads its declaration here. To add a head, add it to HEADS; an objective requests it by
its attribute `head`.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Head:
    """The declaration of a head: a linear map of the hidden states after the final norm."""

    name: str  # of its module in a checkpoint
    outputs: int | None  # how many numbers it gives for each token; None: one logit for each token of the vocabulary
    architecture: str  # the end of the names of Hugging Face's classes with this head
    task_type: str  # PEFT's name of it in adapter_config.json
    what: str  # describes a model with this head in error messages

    @property
    def is_text(self) -> bool:
        """Whether it is a language model's head, whose logits can be scaled and capped, sampled from, and tied to the
        embedding."""
        return self.outputs is None

    def hf_config(self) -> dict[str, Any]:
        """The entries of config.json that describe it (id2label and label2id), beside `architectures`; {} for a
        language model's head."""
        labels = {} if self.outputs is None else {str(index): f"LABEL_{index}" for index in range(self.outputs)}
        return labels and {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}

    def architecture_of(self, causal: str) -> str:
        """The name of Hugging Face's class with this head, from `causal`, the name of the language model's class, such
        as "LlamaForCausalLM"."""
        return causal.replace(TEXT.architecture, self.architecture)


TEXT = Head("lm_head", None, "ForCausalLM", "CAUSAL_LM", "this is a language model")
SCORE = Head("score", 1, "ForSequenceClassification", "SEQ_CLS", "this model scores texts (a reward model)")
HEADS = [TEXT, SCORE]


def head_of_class(architecture: str) -> Head:
    """The head of a model class of the transformers library, by the class's name `architecture`, such as
    "LlamaForSequenceClassification"; the language model's head if no other fits."""
    return next((head for head in HEADS if architecture.endswith(head.architecture)), TEXT)


def head_of_task(task_type: object) -> Head:
    """The head that the task_type of an adapter_config.json names, such as "SEQ_CLS"; the language model's if no other
    fits."""
    return next((head for head in HEADS if head.task_type == task_type), TEXT)
