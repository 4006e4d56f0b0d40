"""The names of Unsloth, TRL and PEFT as thin maps onto jaxtune, so that scripts written for them run here.

    from jaxtune.compat import FastLanguageModel, SFTConfig, SFTTrainer, train_on_responses_only

Argument names and defaults are those of unsloth 2026.10 and trl 1.16 as Unsloth sets them. An argument is followed; or
it has no effect here, which is printed as one line; or it is an error that says what to use instead. The page
"Arguments of other libraries" lists all of them.

jaxtune's modules are values: training returns a new one. These scripts expect `model` itself to change, so their model
is a `CompatModel`, which refers to the current module. `SFTTrainer.train` puts the trained module into it, so everybody
with a reference to the model sees the trained weights. `model.module` is a plain `jaxtune.Decoder`.

UnslothTrainer and UnslothTrainingArguments are other names of SFTTrainer and SFTConfig. The import of a name that does
not exist here raises ImportError, which says what to use instead.
"""

from typing import Any

from jaxtune.compat.adapters import LoraConfig
from jaxtune.compat.callbacks import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState
from jaxtune.compat.distilled import DistillationConfig, DistillationTrainer, GKDConfig, GKDTrainer
from jaxtune.compat.measures import EvalPrediction
from jaxtune.compat.model import CompatModel, FastLanguageModel, FastModel, is_bfloat16_supported
from jaxtune.compat.peft_names import (
    AutoPeftModelForCausalLM,
    PeftModel,
    TaskType,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from jaxtune.compat.preference import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    PatchDPOTrainer,
    RewardConfig,
    RewardTrainer,
)
from jaxtune.compat.rewarded import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, generate_rollout_completions
from jaxtune.compat.settings import SFTConfig, TrainingArguments
from jaxtune.compat.texts import get_chat_template, setup_chat_format, standardize_data_formats, standardize_sharegpt
from jaxtune.compat.trainer import SFTTrainer, train_on_responses_only
from jaxtune.compat.transformers_names import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

UnslothTrainer, UnslothTrainingArguments = SFTTrainer, SFTConfig

__all__ = [
    "AutoModelForCausalLM",
    "AutoPeftModelForCausalLM",
    "AutoTokenizer",
    "BitsAndBytesConfig",
    "CompatModel",
    "DPOConfig",
    "DPOTrainer",
    "DistillationConfig",
    "DistillationTrainer",
    "EarlyStoppingCallback",
    "EvalPrediction",
    "FastLanguageModel",
    "FastModel",
    "GKDConfig",
    "GKDTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "LoraConfig",
    "ORPOConfig",
    "ORPOTrainer",
    "PatchDPOTrainer",
    "PeftModel",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "TaskType",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "UnslothTrainer",
    "UnslothTrainingArguments",
    "generate_rollout_completions",
    "get_chat_template",
    "get_peft_model",
    "is_bfloat16_supported",
    "prepare_model_for_kbit_training",
    "setup_chat_format",
    "standardize_data_formats",
    "standardize_sharegpt",
    "train_on_responses_only",
]

# Other names that scripts import, and what to do about them.
_ELSEWHERE = {
    "FastVisionModel": "images are not supported; FastLanguageModel loads the text part of Gemma 3, Gemma 4, Qwen3.5, "
    "Mistral Small 3.1 and 3.2, and Ministral 3",
    "UnslothVisionDataCollator": "images are not supported",
    "SamplingParams": "GRPOConfig has temperature, top_p, top_k, min_p and repetition_penalty; model.generate too",
    "PatchFastRL": "nothing has to be patched: leave the call out",
    "CPOTrainer": "use jaxtune.train with objective=simpo",
    "PPOTrainer": "use GRPOTrainer or RLOOTrainer, which need no value model",
    "Trainer": "use SFTTrainer, whose rows need not be tokenised before",
    "PeftConfig": "use LoraConfig, or PeftModel.from_pretrained, which reads the adapter's own",
    "AutoModelForSequenceClassification": "use RewardTrainer with the model's name",
    "AutoModelForSeq2SeqLM": "a causal language model is what can be trained",
    "HfArgumentParser": "import it from transformers",
    "TrlParser": "use argparse, or a recipe of jaxtune.train, whose keys are command-line options",
    "TextStreamer": "import it from transformers",
    "DataCollatorForSeq2Seq": "import it from transformers, or leave data_collator out: rows are padded already",
    "DataCollatorForLanguageModeling": "leave data_collator out: rows are packed or padded already",
    "DataCollatorForCompletionOnlyLM": "use train_on_responses_only, or completion_only_loss of SFTConfig",
}


def __getattr__(name: str) -> Any:
    """Called by Python for a name that the package does not define, as in `from jaxtune.compat import PPOTrainer`:
    raises ImportError, which says what to use instead or lists the names that exist. For a name that begins with two
    underscores it raises AttributeError, as Python expects. hasattr therefore raises ImportError for another missing
    name instead of returning False."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    hint = _ELSEWHERE.get(name, f"there are: {', '.join(__all__)}")
    raise ImportError(f"jaxtune.compat has no {name}: {hint}")
