"""The names of Unsloth, TRL and PEFT as thin maps onto jaxtune, so that scripts written for them run here.

    from jaxtune.compat import FastLanguageModel, SFTConfig, SFTTrainer, train_on_responses_only

Argument names and defaults are those of unsloth 2026.10 and trl 1.16 as Unsloth sets them. An argument is followed; or
it has no effect here, which is printed as one line; or it is an error that says what to use instead. The page
"Arguments of other libraries" lists all of them.

jaxtune's modules are values: training returns a new one. These scripts expect `model` itself to change, so their model
is a `CompatModel`, which refers to the current module. `SFTTrainer.train` puts the trained module into it, so everybody
with a reference to the model sees the trained weights. `model.module` is a plain `jaxtune.Decoder`.
"""

from typing import Any

from jaxtune.compat.adapters import LoraConfig
from jaxtune.compat.callbacks import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState
from jaxtune.compat.measures import EvalPrediction
from jaxtune.compat.model import CompatModel, FastLanguageModel, FastModel, is_bfloat16_supported
from jaxtune.compat.preference import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    RewardConfig,
    RewardTrainer,
)
from jaxtune.compat.settings import SFTConfig, TrainingArguments
from jaxtune.compat.texts import get_chat_template, standardize_data_formats, standardize_sharegpt
from jaxtune.compat.trainer import SFTTrainer, train_on_responses_only

__all__ = [
    "CompatModel",
    "DPOConfig",
    "DPOTrainer",
    "EarlyStoppingCallback",
    "EvalPrediction",
    "FastLanguageModel",
    "FastModel",
    "KTOConfig",
    "KTOTrainer",
    "LoraConfig",
    "ORPOConfig",
    "ORPOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "get_chat_template",
    "is_bfloat16_supported",
    "standardize_data_formats",
    "standardize_sharegpt",
    "train_on_responses_only",
]

# Other names that scripts import, and what to do about them.
_ELSEWHERE = {
    "FastVisionModel": "images are not supported; FastLanguageModel loads the text part of Gemma 3",
    "UnslothTrainer": "use SFTTrainer",
    "UnslothTrainingArguments": "use SFTConfig",
    "UnslothVisionDataCollator": "images are not supported",
    "GRPOTrainer": "set objective.name=grpo in a recipe of jaxtune.train (docs/rewards.md)",
    "GRPOConfig": "set objective.name=grpo in a recipe of jaxtune.train (docs/rewards.md)",
    "PatchDPOTrainer": "nothing has to be patched: leave the call out",
    "CPOTrainer": "use jaxtune.train with objective=simpo",
    "TextStreamer": "import it from transformers",
    "get_peft_model": "use FastLanguageModel.get_peft_model, or SFTTrainer(peft_config=...)",
    "AutoModelForCausalLM": "use FastLanguageModel.from_pretrained, or give SFTTrainer the model's name",
    "AutoTokenizer": "import it from transformers",
    "DataCollatorForSeq2Seq": "import it from transformers, or leave data_collator out: rows are padded already",
    "DataCollatorForLanguageModeling": "leave data_collator out: rows are packed or padded already",
    "DataCollatorForCompletionOnlyLM": "use train_on_responses_only, or completion_only_loss of SFTConfig",
}


def __getattr__(name: str) -> Any:
    """Raises ImportError with advice for a name that does not exist here."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    hint = _ELSEWHERE.get(name, f"there are: {', '.join(__all__)}")
    raise ImportError(f"jaxtune.compat has no {name}: {hint}")
