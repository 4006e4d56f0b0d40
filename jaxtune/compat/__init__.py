"""The names of Unsloth, TRL and PEFT as thin maps onto jaxtune, so that scripts written for them run here.

    from jaxtune.compat import FastLanguageModel, SFTConfig, SFTTrainer, train_on_responses_only

Arguments are those of unsloth 2026.10 and trl 1.16. One is followed; or has no effect here, which is printed; or is an
error that says what to use instead. These scripts expect training to change `model`, and jaxtune's modules are values:
their model is a `CompatModel`, which refers to the current `jaxtune.Decoder`.
"""

import difflib
from typing import Any

from jaxtune.compat import rewards
from jaxtune.compat.adapters import LoraConfig
from jaxtune.compat.callbacks import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState
from jaxtune.compat.command_line import HfArgumentParser, TrlParser
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
    PatchFastRL,
    RewardConfig,
    RewardTrainer,
)
from jaxtune.compat.rewarded import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, generate_rollout_completions
from jaxtune.compat.scripts import (
    DatasetConfig,
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    clone_chat_template,
    get_dataset,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from jaxtune.compat.seeds import set_seed
from jaxtune.compat.settings import SFTConfig, TrainingArguments
from jaxtune.compat.texts import get_chat_template, setup_chat_format, standardize_data_formats, standardize_sharegpt
from jaxtune.compat.trainer import SFTTrainer, train_on_responses_only, unsloth_train
from jaxtune.compat.transformers_names import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
)
from jaxtune.compat.vision import (
    AutoModelForImageTextToText,
    AutoProcessor,
    FastVisionModel,
    UnslothVisionDataCollator,
)
from jaxtune.compat.vllm_names import SamplingParams
from jaxtune.system import timing

UnslothTrainer, UnslothTrainingArguments = SFTTrainer, SFTConfig
is_bf16_supported = is_bfloat16_supported  # both names are Unsloth's

__all__ = [
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSequenceClassification",
    "AutoPeftModelForCausalLM",
    "AutoProcessor",
    "AutoTokenizer",
    "BitsAndBytesConfig",
    "CompatModel",
    "DatasetConfig",
    "DatasetMixtureConfig",
    "DPOConfig",
    "DPOTrainer",
    "DistillationConfig",
    "DistillationTrainer",
    "EarlyStoppingCallback",
    "EvalPrediction",
    "FastLanguageModel",
    "FastModel",
    "FastVisionModel",
    "GKDConfig",
    "GKDTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "HfArgumentParser",
    "KTOConfig",
    "KTOTrainer",
    "LoraConfig",
    "ModelConfig",
    "ORPOConfig",
    "ORPOTrainer",
    "PatchDPOTrainer",
    "PatchFastRL",
    "PeftModel",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "ScriptArguments",
    "SFTConfig",
    "SFTTrainer",
    "SamplingParams",
    "TaskType",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "TrlParser",
    "UnslothTrainer",
    "UnslothTrainingArguments",
    "UnslothVisionDataCollator",
    "clone_chat_template",
    "generate_rollout_completions",
    "get_chat_template",
    "get_dataset",
    "get_kbit_device_map",
    "get_peft_config",
    "get_peft_model",
    "get_quantization_config",
    "is_bf16_supported",
    "is_bfloat16_supported",
    "prepare_model_for_kbit_training",
    "rewards",
    "set_seed",
    "setup_chat_format",
    "standardize_data_formats",
    "standardize_sharegpt",
    "train_on_responses_only",
    "unsloth_train",
]

timing.record(timing.process_start())
timing.imported()
timing.follow_jax()

# Other names that scripts import, and what to do about them.
_ELSEWHERE = {
    "AutoConfig": "import it from transformers; rope_scaling of from_pretrained replaces what config.json says",
    "AutoModel": "use AutoModelForCausalLM, which is what can be trained",
    "AutoModelForCausalLMWithValueHead": "use GRPOTrainer or RLOOTrainer, which need no value model",
    "AutoModelForVision2Seq": "use AutoModelForImageTextToText",
    "BCOTrainer": "its loss is not here; KTOTrainer takes the same rows",
    "DataCollatorWithFlattening": "use packing=True of SFTConfig",
    "DataCollatorWithPadding": "leave data_collator out: rows are padded already",
    "GenerationConfig": "give its settings to model.generate, or to the trainer's config, as arguments",
    "NashMDTrainer": "its method is not here; GRPOTrainer learns from rewards of sampled answers",
    "OnlineDPOTrainer": "its method is not here; GRPOTrainer learns from rewards of sampled answers",
    "PRMTrainer": "rewards of single steps are not here; RewardTrainer scores whole answers",
    "PeftModelForCausalLM": "use PeftModel.from_pretrained, or get_peft_model",
    "Seq2SeqTrainer": "a causal language model is what can be trained: use SFTTrainer",
    "Seq2SeqTrainingArguments": "a causal language model is what can be trained: use SFTConfig",
    "StoppingCriteria": "use eos_token_id of model.generate",
    "SyncRefModelCallback": "leave it out: the reference is the model before training, or its adapter off",
    "TextIteratorStreamer": "import it from transformers",
    "XPOTrainer": "its method is not here; GRPOTrainer learns from rewards of sampled answers",
    "apply_chat_template": "leave it out: give a column `messages`, which trainers write by the tokenizer's template; "
    "get_chat_template sets another",
    "extract_prompt": "leave it out: trainers find the prompt that both answers begin with",
    "pipeline": "use model.generate, or fast_generate",
    "to_sharegpt": "give a column `messages` of [{'role': 'user', 'content': ...}, {'role': 'assistant', ...}], made "
    "by a function with dataset.map",
    "truncate_dataset": "use max_length of the trainer's config",
    "CPOTrainer": "its loss is not here; that of loss_type='simpo' with cpo_alpha=0 is jaxtune.train's objective=simpo",
    "PPOTrainer": "use GRPOTrainer or RLOOTrainer, which need no value model",
    "Trainer": "use SFTTrainer, whose rows need not be tokenised before",
    "PeftConfig": "use LoraConfig, or PeftModel.from_pretrained, which reads the adapter's own",
    "AutoModelForSeq2SeqLM": "a causal language model is what can be trained",
    "TextStreamer": "import it from transformers",
    "DataCollatorForSeq2Seq": "import it from transformers, or leave data_collator out: rows are padded already",
    "DataCollatorForLanguageModeling": "leave data_collator out: rows are packed or padded already",
    "get_logger": "use logging.getLogger(__name__)",
    "init_zero_verbose": "leave the call out",
    "create_reference_model": "leave ref_model out: the reference is the model with its adapter off",
    "RichProgressCallback": "leave it out: the run shows its progress",
    "LogCompletionsCallback": "use log_completions of GRPOConfig",
    "get_training_chat_template": "leave it out: which tokens an answer has is found without marks in the template",
    "is_conversational": "leave it out: the format of rows is found by their columns",
    "maybe_apply_chat_template": "leave it out: trainers apply the tokenizer's template",
    "maybe_extract_prompt": "leave it out: trainers find the prompt that both answers begin with",
    "maybe_unpair_preference_dataset": "rows of KTOTrainer have completion and label",
    "unpair_preference_dataset": "rows of KTOTrainer have completion and label",
    "pack_dataset": "use packing=True of SFTConfig",
    "CPOConfig": "its loss is not here; that of loss_type='simpo' with cpo_alpha=0 is jaxtune.train's objective=simpo",
    "DataCollatorForCompletionOnlyLM": "use train_on_responses_only, or completion_only_loss of SFTConfig",
}


def __getattr__(name: str) -> Any:
    """Raises ImportError that says what to use instead, so hasattr raises too; AttributeError for names with "__"."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(f"jaxtune.compat has no {name}: {_ELSEWHERE.get(name) or _near(name)}")


_MISTYPED = 0.92  # the likeness of a name with one letter wrong; names of other things are less alike


def _near(name: str) -> str:
    by_lower_case = {public_name.lower(): public_name for public_name in __all__}
    near = [
        by_lower_case[public_name]
        for public_name in difflib.get_close_matches(name.lower(), by_lower_case, 1, _MISTYPED)
    ]
    if near:
        return f"perhaps {near[0]} is meant"
    if (kind := next((kind for kind in ("Trainer", "Config") if name.endswith(kind)), None)) is not None:
        return f"it is not here; those that are: {', '.join(one for one in __all__ if one.endswith(kind))}"
    return "import it from where the script has it, if it needs no torch model; docs/compat.md lists what is here"
