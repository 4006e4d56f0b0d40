"""Arguments of Unsloth, TRL and transformers that are not followed, and values with another name here."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from jaxtune.compat.arguments import Argument
from jaxtune.convert.tables import table


def _tables() -> dict[str, dict[str, Argument]]:
    text = Path(__file__).with_name("arguments.yaml").read_text(encoding="utf-8")
    return {
        callee: {
            name: Argument("idle" in entry, entry["idle" if "idle" in entry else "error"], tuple(entry.get("free", ())))
            for name, entry in arguments.items()
        }
        for callee, arguments in yaml.load(text, getattr(yaml, "CFullLoader", yaml.FullLoader)).items()
    }


_TABLES = _tables()
LOAD, PEFT, SFT, TRAINER = (_TABLES[name] for name in ("load", "peft", "sft", "trainer"))
COLLATOR = _TABLES["vision_collator"]
SAVE, GENERATE, RESPONSES, TEMPLATE = (_TABLES[name] for name in ("save", "generate", "responses", "template"))
REFERENCE_MODEL = _TABLES["reference_model"]
AUTO, PEFT_MODEL, BITS_AND_BYTES = _TABLES["auto"], _TABLES["peft_model"], _TABLES["bits_and_bytes"]
AUTO = {name: argument for name, argument in LOAD.items() if name != "quantization_config"} | AUTO
ORPO = {name: argument for name, argument in SFT.items() if name != "loss_type"} | _TABLES["preference"]
DPO, KTO = ORPO | _TABLES["dpo"], ORPO
_REWARDED = {name: argument for name, argument in SFT.items() if name != "loss_type"} | _TABLES["rewarded"]
GRPO, RLOO = _REWARDED | _TABLES["grpo"], _REWARDED
REWARDED_TRAINER = TRAINER | _TABLES["rewarded_trainer"]
# The arguments about sampling that GRPOConfig has and DistillationConfig lacks.
_OF_REWARDS = ("num_generations_eval", "vllm_sampling_params", "log_multimodal", "remove_unused_columns")
_SAMPLED = {
    name: argument
    for name, argument in _TABLES["rewarded"].items()
    if name not in _OF_REWARDS and not name.startswith(("use_transformers", "transformers", "unsloth"))
}
DISTILLATION, GKD = SFT | _SAMPLED | _TABLES["distillation"], SFT | _TABLES["gkd"]
DISTILLATION_TRAINER = TRAINER | _TABLES["distillation_trainer"]
REWARD = SFT | {"pad_to_multiple_of": _TABLES["preference"]["pad_to_multiple_of"]}

# ---- values that are followed under another name

DTYPES = ("bfloat16", "float16", "float32")
# With gradient checkpointing the planner recomputes or offloads only what does not fit.
RESIDUALS = {True: None, "unsloth": None, "true": None, False: "keep", "false": "keep"}
_NAMES = table("trl")
OPTIMIZERS = _NAMES.optimizers
# The order of an epoch's rows by train_sampling_strategy; see jaxtune.train.data.batches.
ORDERS = {"random": "torch", "sequential": "given"}
# Unsloth's names of GGUF types. Its further quantised types (q5_k_m, ...) have to be made by llama.cpp.
GGUF = {
    "fast_quantized": "q8_0",
    "q8_0": "q8_0",
    "quantized": "q4_k_m",
    "q4_k_m": "q4_k_m",
    "q6_k": "q6_k",
    "q4_0": "q4_0",
    "not_quantized": "f16",
    "f16": "f16",
    "bf16": "bf16",
    "f32": "f32",
}
# Types that llama.cpp makes from an f16 file.
LLAMA_CPPS = re.compile(r"i?q\d_\w+")
# Collators that pad rows of one batch to one length, and do nothing else.
PADDING_COLLATORS = (
    "DataCollatorForLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorWithPadding",
    "DefaultDataCollator",
    "DataCollatorWithFlattening",
)
