"""Which arguments are followed under which name, and which are only taken at the values that ask for nothing."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

# ---- arguments that are not followed: name -> the values at which they ask for nothing

FIXED_LOAD = {
    "load_in_8bit": (False,), "load_in_fp8": (False,), "token": (None,), "device_map": ("sequential", "auto", None),
    "device_map_planner_kwargs": (None,), "rope_scaling": (None,), "fix_tokenizer": (True,),
    "trust_remote_code": (False,), "resize_model_vocab": (None,), "revision": (None,),
    "use_exact_model_name": (False,), "offload_embedding": (False, "auto"), "float32_mixed_precision": (None,),
    "fast_inference": (False,), "gpu_memory_utilization": (0.5,), "float8_kv_cache": (False,), "max_lora_rank": (64,),
    "disable_log_stats": (True,), "qat_scheme": (None,), "unsloth_tiled_mlp": (False,), "text_only": (False,),
    "quantization_config": (None,),
}  # fmt: skip

FIXED_PEFT = {
    "bias": ("none",), "layers_to_transform": (None,), "layers_pattern": (None,), "finetune_last_n_layers": (None,),
    "init_lora_weights": (True,), "loftq_config": (None, {}),
    "qat_scheme": (None,), "target_parameters": (None,), "ensure_weight_tying": (None, True), "offload_layers": (None,),
    "checkpoint_skip_layers": (0,), "finetune_language_layers": (True,), "finetune_attention_modules": (True,),
    "finetune_mlp_modules": (True,),
}  # fmt: skip

FIXED_SFT = {
    "packing_strategy": ("bfd",), "padding_free": (None, False), "pad_to_multiple_of": (None, "auto"),
    "eval_packing": (None,), "loss_type": ("nll",), "truncation_mode": ("keep_start",), "chat_template_path": (None,),
    "eos_token": (None,), "pad_token": (None,), "shuffle_dataset": (False,), "activation_offloading": (False,),
    "dataset_kwargs": (None,), "model_init_kwargs": (None,), "use_liger_kernel": (False,),
    "neftune_noise_alpha": (None,), "group_by_length": (False,), "length_column_name": ("length",),
    "remove_unused_columns": (True,), "label_smoothing_factor": (0, 0.0), "label_names": (None,),
    "logging_strategy": ("steps",), "logging_first_step": (False,), "logging_dir": (None,), "run_name": (None,),
    "lr_scheduler_kwargs": (None, {}), "optim_args": (None,), "optim_target_modules": (None,), "data_seed": (None,),
    "load_best_model_at_end": (False,), "metric_for_best_model": (None,), "greater_is_better": (None,),
    "push_to_hub": (False,), "hub_model_id": (None,), "hub_token": (None,), "auto_find_batch_size": (False,),
    "torch_compile": (False,), "deepspeed": (None,), "fsdp": (None, "", []), "tf32": (None,),
    "dataloader_num_workers": (0,), "dataloader_pin_memory": (True,), "dataloader_drop_last": (False,),
    "gradient_checkpointing_kwargs": (None,), "average_tokens_across_devices": (True,), "disable_tqdm": (None, False),
    "eval_accumulation_steps": (None, 2), "torch_empty_cache_steps": (None, 250), "full_determinism": (False,),
    "eval_on_start": (False,), "include_tokens_per_second": (False,), "save_safetensors": (True,),
    "save_only_model": (False,), "overwrite_output_dir": (False,), "ignore_data_skip": (False,),
}  # fmt: skip

FIXED_TRAINER = {
    "data_collator": (None,), "compute_metrics": (None,), "callbacks": (None, []), "peft_config": (None,),
    "optimizers": (None, (None, None)), "preprocess_logits_for_metrics": (None,), "compute_loss_func": (None,),
    "optimizer_cls_and_kwargs": (None,),
}  # fmt: skip

FIXED_SAVE = {
    "max_shard_size": ("5GB",), "push_to_hub": (False,), "token": (None,), "safe_serialization": (True,),
    "is_main_process": (True,), "maximum_memory_usage": (0.9,),
}  # fmt: skip

FIXED_GENERATE = {
    "use_cache": (True,), "streamer": (None,), "top_k": (None, 0), "top_p": (None, 1.0), "min_p": (None, 0.0),
    "num_beams": (1,), "repetition_penalty": (None, 1.0), "num_return_sequences": (1,), "synced_gpus": (None, False),
}  # fmt: skip

FIXED_RESPONSES = {
    "force_match": (True,), "return_function": (False,), "mask_out_tokens": (None,), "num_proc": (None,),
}  # fmt: skip

# ---- values that are followed under another name

DTYPES = ("bfloat16", "float16", "float32")
# Checkpointing asks for memory: the planner then recomputes or carries what does not fit, and no more.
RESIDUALS = {True: None, "unsloth": None, "true": None, False: "keep", "false": "keep"}
OPTIMIZERS = {
    "adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit", "adamw_torch": "adamw", "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw", "adafactor": "adafactor", "sgd": "sgd",
}  # fmt: skip
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}


def refuse(where: str, others: Mapping[str, Any], fixed: Mapping[str, tuple], callee: Callable | None = None) -> None:
    """Raises ValueError for an argument that is not followed and asks for something, or that nobody knows.

    Args:
      others: the arguments that `callee` does not follow. fixed: name -> values at which one asks for nothing.
    """
    for name, value in others.items():
        if name not in fixed:
            known = inspect.signature(callee).parameters if callee is not None else ()
            near = difflib.get_close_matches(name, [*known, *fixed], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{where}: {name} = {value!r} is not an argument that jaxtune.compat knows{hint}")
        if not any(value is allowed or (type(value) is type(allowed) and value == allowed) for allowed in fixed[name]):
            raise ValueError(f"{where}: {name} = {value!r} is not supported; leave it at {fixed[name][0]!r}")


def choose(where: str, name: str, value: Any, table: Mapping[Any, Any]) -> Any:
    if value not in table:
        raise ValueError(f"{where}: {name} = {value!r} is not supported; supported: {', '.join(map(repr, table))}")
    return table[value]
