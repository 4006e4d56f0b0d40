"""The heads that a model can have: a head is the linear map of the hidden states after the final norm. Each declaration
says what it computes for a token, and its names in checkpoints and adapters.

The usual head gives the logits of a language model. Another head, such as a reward model's, replaces it
(models/reward.py) and is trained whole beside adapters. All code that depends on the head reads its declaration, a
Head; `head_of_class` finds it by a model's class in config.json when a model is loaded, and `head_of_task` by an
adapter's task type when an adapter is. To add a head, add it to the list HEADS; an objective requests it by its
attribute `head`."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Head:
    """The declaration of a head, a linear map of the hidden states after the final norm. A model's config has one
    (DecoderConfig.head). `is_text` says whether it is a language model's; `hf_config` and `architecture_of` give what
    config.json says about it."""

    name: str  # the name of the head's module in a checkpoint, such as "lm_head"
    outputs: int | None  # how many numbers it computes for each token; None: one logit for each token of the vocabulary
    architecture: str  # how the names of Hugging Face's classes with this head end, such as "ForCausalLM"
    task_type: str  # PEFT's name of it in adapter_config.json, such as "CAUSAL_LM"
    # a clause that describes a model with this head, used in error messages, such as "this is a language model"
    what: str

    @property
    def is_text(self) -> bool:
        """True for a language model's head, whose logits can be scaled and capped, sampled from, and tied to the
        embedding; False for a head with a fixed number of outputs, such as a reward model's. Sampling, GGUF export and
        objectives that need a language model refuse others by it, and get_peft_model trains the heads of others
        whole."""
        return self.outputs is None

    def hf_config(self) -> dict[str, Any]:
        """The entries id2label and label2id of config.json, which name the outputs of a head that has a fixed number of
        them; {} for a language model's head. They are {"0": "LABEL_0", ...} and {"LABEL_0": 0, ...}. The entry
        `architectures` is not among them (`architecture_of`). Both are written to config.json when a model gets this
        head or is saved."""
        labels = {} if self.outputs is None else {str(index): f"LABEL_{index}" for index in range(self.outputs)}
        return labels and {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}

    def architecture_of(self, causal: str) -> str:
        """The name of Hugging Face's class of the same family with this head, such as "LlamaForSequenceClassification";
        it is written to config.json. causal: the name of the family's language model class, such as "LlamaForCausalLM";
        a name without "ForCausalLM" is returned unchanged."""
        return causal.replace(TEXT.architecture, self.architecture)


TEXT = Head("lm_head", None, "ForCausalLM", "CAUSAL_LM", "this is a language model")
SCORE = Head("score", 1, "ForSequenceClassification", "SEQ_CLS", "this model scores texts (a reward model)")
HEADS = [TEXT, SCORE]


def head_of_class(architecture: str) -> Head:
    """Looks up the Head of a model class of the transformers library by the class's name, `architecture`, such as
    "LlamaForSequenceClassification", which config.json names (`architectures`); the language model's head (TEXT) if the
    name ends like no other head's classes. Reading config.json gives the model's config this head."""
    return next((head for head in HEADS if architecture.endswith(head.architecture)), TEXT)


def head_of_task(task_type: object) -> Head:
    """Looks up the Head by the task_type of an adapter_config.json, such as "SEQ_CLS"; the language model's head (TEXT)
    if no Head has this name, or if it is no string. Loading an adapter gives this head to a base that has the language
    model's, and reads by it which modules the adapter trained whole."""
    return next((head for head in HEADS if head.task_type == task_type), TEXT)
