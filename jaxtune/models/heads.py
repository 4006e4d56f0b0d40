"""The heads that a model can have: linear maps of the hidden states after the final norm, each with its names in
checkpoints and adapters. A head other than a language model's, such as a reward model's (models/reward.py), is trained
whole beside adapters. A new head needs an entry in HEADS.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Head:
    """The declaration of a head, a linear map of the hidden states after the final norm."""

    name: str  # the name of the head's module in a checkpoint, such as "lm_head"
    outputs: int | None  # how many numbers it computes for each token; None: one logit for each token of the vocabulary
    architecture: str  # how the names of Hugging Face's classes with this head end, such as "ForCausalLM"
    task_type: str  # PEFT's name of it in adapter_config.json, such as "CAUSAL_LM"
    # a clause that describes a model with this head, used in error messages, such as "this is a language model"
    what: str

    @property
    def is_text(self) -> bool:
        """Whether it is a language model's head, whose logits can be scaled, capped, sampled from, and tied to the
        embedding.
        """
        return self.outputs is None

    def hf_config(self) -> dict[str, Any]:
        """The entries id2label ({"0": "LABEL_0", ...}) and label2id of config.json; {} for a language model's head."""
        labels = {} if self.outputs is None else {str(index): f"LABEL_{index}" for index in range(self.outputs)}
        return labels and {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}

    def architecture_of(self, causal: str) -> str:
        """Hugging Face's class with this head, such as "LlamaForSequenceClassification", for the family's language
        model class `causal`; a name without "ForCausalLM" is returned unchanged.
        """
        return causal.replace(TEXT.architecture, self.architecture)


TEXT = Head("lm_head", None, "ForCausalLM", "CAUSAL_LM", "this is a language model")
SCORE = Head("score", 1, "ForSequenceClassification", "SEQ_CLS", "this model scores texts (a reward model)")
HEADS = [TEXT, SCORE]


def head_of_class(architecture: str) -> Head:
    """The Head of a transformers class such as "LlamaForSequenceClassification"; TEXT for other endings."""
    return next((head for head in HEADS if architecture.endswith(head.architecture)), TEXT)


def head_of_task(task_type: object) -> Head:
    """The Head of an adapter_config.json's task_type, such as "SEQ_CLS"; TEXT if none has it."""
    return next((head for head in HEADS if head.task_type == task_type), TEXT)
