"""Every argument of Unsloth's, TRL's and transformers' signatures that is not followed: why, or what to use instead.

unsloth 2026.10, trl 1.16, transformers 5.23, peft 0.21, and older names that scripts still have.
"""

from __future__ import annotations

import re

from jaxtune.compat.arguments import Argument, idle, refused

_ONE_PROCESS = "one process drives all devices"
_NO_LOADER = "rows are tokenised once and kept in a file that batches are read from"
_PLANNER = "the planner keeps, offloads or recomputes what fits the device best"
_NO_PREDICTIONS = "evaluation sums the loss; compute_metrics is given one row after the other"
_ON_HUB = "only what push_to_hub takes at the end goes to the hub"
_TRACKIO = "trackio is written to on this machine only; `trackio sync` brings a project to a Space"
_MESH = "several GPUs: TrainConfig's mesh, see the page on several GPUs"

LOAD: dict[str, Argument] = {
    "token": idle("the hub's client takes the token of `hf auth login`, or HF_TOKEN", None),
    "cache_dir": idle("HF_HOME says where the hub's files are kept", None),
    "local_files_only": idle("the local cache comes first, and HF_HUB_OFFLINE=1 stays with it", False),
    "device_map": idle("the model lies on the one device that trains", "sequential", "auto", None),
    "device_map_planner_kwargs": idle("there is no map of devices", None),
    "attn_implementation": idle("the kernel is chosen by what the device supports: jaxtune info --kernels", None),
    "fix_tokenizer": idle("the tokenizer is used as its files say", True),
    "use_exact_model_name": idle("the named model is always the one that is loaded", False),
    "offload_embedding": idle(_PLANNER, False, "auto"),
    "unsloth_tiled_mlp": idle(_PLANNER, False),
    "gpu_memory_utilization": idle("it belongs to vLLM, which is not started", 0.5),
    "max_lora_rank": idle("it belongs to vLLM, which is not started", 64),
    "disable_log_stats": idle("it belongs to vLLM, which is not started", True),
    "unsloth_vllm_standby": idle("it belongs to vLLM, which is not started", False),
    "text_only": idle("the text part of a model is what is loaded", False),
    "load_in_8bit": refused("load_in_4bit=True, or 16 bits with load_in_4bit=False", False),
    "load_in_fp8": refused("load_in_4bit=True, or 16 bits with load_in_4bit=False", False),
    "quantization_config": refused("load_in_4bit=True, which is NF4 with double quantisation", None),
    "rope_scaling": refused("rope_scaling in the config.json of the model's folder", None),
    "trust_remote_code": refused("a model of a supported family; its code is part of jaxtune", False),
    "resize_model_vocab": refused("a tokenizer without added tokens", None),
    "revision": refused("hf download NAME --revision R --local-dir FOLDER, and FOLDER as model_name", None),
    "tokenizer_revision": refused("a folder with the tokenizer's files", None),
    "tokenizer_name": refused("a folder with the tokenizer's files beside the model's", None),
    "float32_mixed_precision": refused("dtype and SFTConfig's bf16, fp16", None),
    "fast_inference": refused("vLLM on the folder of save_pretrained_merged", False),
    "float8_kv_cache": refused("vLLM on the folder of save_pretrained_merged", False),
    "qat_scheme": refused("qat of jaxtune.train.TrainConfig", None),
    "model_patcher": refused("a change of model.module, a Flax module", None),
    "on_model_resolved": refused("code after from_pretrained returned", None),
}

PEFT: dict[str, Argument] = {
    "temporary_location": idle("nothing is written while adapters are made", "_unsloth_temporary_saved_buffers"),
    "ensure_weight_tying": idle("tied heads stay tied", None, True),
    "checkpoint_skip_layers": idle(_PLANNER, 0),
    "task_type": idle("every model is a causal language model", "CAUSAL_LM", None),
    "inference_mode": idle("an adapter trains until it is merged", False),
    "base_model_name_or_path": idle("the base is the model that is given", None),
    "autocast_adapter_dtype": idle("adapters are kept in float32", True),
    "layers_pattern": idle("layers are found by their own name", None, "layers"),
    "finetune_vision_layers": idle("there are no vision layers", True, False),
    "finetune_language_layers": refused("get_peft_model is for the language layers; skip it", True),
    "finetune_attention_modules": refused("target_modules with the modules that you want", True),
    "finetune_mlp_modules": refused("target_modules with the modules that you want", True),
    "exclude_modules": refused("target_modules with the modules that you want", None),
    "loftq_config": refused("the plain start of LoRA", None, {}),
    "qat_scheme": refused("qat of jaxtune.train.TrainConfig", None),
    "offload_layers": refused("load_in_4bit=True, for smaller frozen layers", None),
    "fan_in_fan_out": refused("nothing: no supported family stores its weights transposed", False),
    "lora_bias": refused("lora_bias=False", False),
    "trainable_token_indices": refused("modules_to_save=['embed_tokens', 'lm_head']", None),
    "layer_replication": refused("a model of the wanted depth", None),
    "eva_config": refused("the plain start of LoRA", None),
    "corda_config": refused("the plain start of LoRA", None),
}

SFT: dict[str, Argument] = {
    # ---- of TRL
    "dataset_kwargs": refused("rows in one of the known formats, or formatting_func", None, {}),
    "eos_token": refused("tokenizer.eos_token, before the trainer is made", None),
    "pad_token": refused("tokenizer.pad_token, before the trainer is made", None),
    "truncation_mode": refused("rows that are cut before", "keep_start"),
    "packing_strategy": refused("'bfd': whole documents, fitted into rows", "bfd"),
    "loss_type": refused("jaxtune.train.Trainer(objective=...) for a loss of your own", "nll", "chunked_nll"),
    "trust_remote_code": refused("a model of a supported family", False),
    "shuffle_dataset": idle("rows are shuffled anew for every epoch", False),
    "padding_free": idle("packed documents never see each other, and there is no padding between them", None, False),
    "pad_to_multiple_of": idle("every row has max_length tokens", None, "auto"),
    "eval_packing": idle("evaluation rows are packed as training rows are; the loss of a token is the same", None),
    "activation_offloading": idle(_PLANNER, False),
    "use_liger_kernel": idle("the loss never holds all logits, and norms and activations are fused", False),
    # ---- of transformers
    "per_device_eval_batch_size": idle("evaluation uses the rows of a training step; the mean loss is the same", None),
    "gradient_checkpointing_kwargs": idle(_PLANNER, None),
    "activation_checkpointing": idle(_PLANNER, None),
    "activation_checkpointing_kwargs": idle(_PLANNER, None),
    "auto_find_batch_size": idle("the planner splits a step into micro-batches that fit", False),
    "torch_empty_cache_steps": idle("the step's memory is planned before it begins", None, 250),
    "torch_compile": idle("XLA compiles the whole step", False),
    "torch_compile_backend": idle("XLA compiles the whole step", None),
    "torch_compile_mode": idle("XLA compiles the whole step", None),
    "jit_mode_eval": idle("XLA compiles the whole step", False),
    "use_cache": idle("training keeps no cache of keys and values, generation always does", False, True),
    "liger_kernel_config": idle("the loss never holds all logits, and norms and activations are fused", None),
    "group_by_length": idle("rows are filled to one length", False),
    "length_column_name": idle("rows are filled to one length", "length"),
    "train_sampling_strategy": refused("'random': rows are shuffled anew for every epoch", "random"),
    "remove_unused_columns": idle("columns that the format does not have are never read", True),
    "logging_first_step": idle("the terminal shows the first step; logging_steps says which are logged", False),
    "logging_dir": idle("TensorBoard's files stand in output_dir", None),
    "logging_nan_inf_filter": idle("a step that is not finite is skipped, counted and said", True),
    "log_level": idle("what is printed does not depend on it", "passive"),
    "log_level_replica": idle(_ONE_PROCESS, "warning"),
    "log_on_each_node": idle(_ONE_PROCESS, True),
    "disable_tqdm": idle("a bar is drawn on a terminal only", None, False),
    "run_name": idle("a run is named by its output_dir", None),
    "trackio_space_id": idle(_TRACKIO, None),
    "trackio_bucket_id": idle(_TRACKIO, None),
    "trackio_static_space_id": idle(_TRACKIO, None),
    "include_num_input_tokens_seen": idle("metrics.jsonl has the tokens of every step", "no", False),
    "include_tokens_per_second": idle("metrics.jsonl has tokens_per_second", False),
    "skip_memory_metrics": idle("metrics.jsonl has the peak memory", True),
    "bf16_full_eval": idle("evaluation computes in the dtype of training", False),
    "fp16_full_eval": idle("evaluation computes in the dtype of training", False),
    "prediction_loss_only": idle(_NO_PREDICTIONS, False),
    "eval_accumulation_steps": idle(_NO_PREDICTIONS, None, 2),
    "eval_do_concat_batches": idle(_NO_PREDICTIONS, True),
    "eval_use_gather_object": idle(_NO_PREDICTIONS, False),
    "include_for_metrics": refused("compute_metrics of predictions and labels", []),
    "batch_eval_metrics": refused("compute_metrics of all rows at once", False),
    "do_train": idle("train() trains", False, True),
    "do_eval": idle("evaluate() evaluates", False, True),
    "do_predict": idle("model.generate answers", False),
    "resume_from_checkpoint": idle("train(resume_from_checkpoint=True) goes on from a checkpoint", None),
    "save_only_model": idle("a checkpoint holds what it takes to go on", False),
    "save_on_each_node": idle(_ONE_PROCESS, False),
    "save_safetensors": idle("models are always saved as safetensors", True),
    "enable_jit_checkpoint": idle("SIGTERM saves and ends the run at the next step", False),
    "restore_callback_states_from_checkpoint": idle("callbacks keep their own state", False),
    "dataloader_num_workers": idle(_NO_LOADER, 0),
    "dataloader_pin_memory": idle(_NO_LOADER, True),
    "dataloader_persistent_workers": idle(_NO_LOADER, False),
    "dataloader_prefetch_factor": idle(_NO_LOADER, None),
    "dataloader_multiprocessing_context": idle(_NO_LOADER, None),
    "dataloader_in_order": idle(_NO_LOADER, True),
    "ddp_find_unused_parameters": idle(_ONE_PROCESS, None),
    "ddp_bucket_cap_mb": idle(_ONE_PROCESS, None),
    "ddp_broadcast_buffers": idle(_ONE_PROCESS, None),
    "ddp_static_graph": idle(_ONE_PROCESS, None),
    "ddp_backend": idle(_ONE_PROCESS, None),
    "ddp_timeout": idle(_ONE_PROCESS, 1800),
    "local_rank": idle(_ONE_PROCESS, -1),
    "hub_model_id": idle(_ON_HUB, None),
    "hub_token": idle(_ON_HUB, None),
    "hub_private_repo": idle(_ON_HUB, None),
    "hub_strategy": idle(_ON_HUB, "every_save"),
    "hub_always_push": idle(_ON_HUB, False),
    "hub_revision": idle(_ON_HUB, None),
    "optim_args": refused("the arguments of the optimizer by name: adam_beta1, weight_decay, ...", None),
    "optim_target_modules": refused("optim='adamw_8bit' for small optimizer states", None),
    "average_tokens_across_devices": refused("True: the loss is the mean over all tokens of a step", True),
    "label_smoothing_factor": refused("linear_cross_entropy(label_smoothing=...) in a loop of your own", 0, 0.0),
    "tf32": refused("bf16=True, or float32 as XLA computes it", None),
    "logging_strategy": refused("logging_steps", "steps"),
    "label_names": refused("rows with a response, whose tokens are the labels", None, ["labels"]),
    "eval_delay": refused("eval_steps", 0),
    "push_to_hub": refused("model.push_to_hub(NAME) after train()", False),
    "ignore_data_skip": refused("another seed for another order", False),
    "data_seed": refused("seed, which orders the rows too", None),
    "use_cpu": refused("JAX_PLATFORMS=cpu in the environment", False),
    "accelerator_config": refused(_MESH, None),
    "parallelism_config": refused(_MESH, None),
    "fsdp": refused(_MESH, None, "", []),
    "fsdp_config": refused(_MESH, None),
    "deepspeed": refused(_MESH, None),
    "debug": refused("JAXTUNE_TRACEBACK=1, or jaxtune.profile", "", []),
    "dataloader_drop_last": refused("steps and rows that fit", False),
    "overwrite_output_dir": refused("another output_dir", False),
    "embedding_learning_rate": refused("one learning_rate, or jaxtune.train.Trainer(optimizer=...)", None),
}

TRAINER: dict[str, Argument] = {
    "data_collator": refused("rows in one of the known formats: batches are made of them, packed or padded", None),
    "compute_loss_func": refused("jaxtune.train.Trainer(objective=...)", None),
    "optimizers": refused("SFTConfig's optim, or jaxtune.train.Trainer(optimizer=...)", None, (None, None)),
    "optimizer_cls_and_kwargs": refused("SFTConfig's optim, or jaxtune.train.Trainer(optimizer=...)", None),
    "model_init": refused("a model that is loaded before", None),
    "quantization_config": refused("FastLanguageModel.from_pretrained(load_in_4bit=True)", None),
}

# Of preference trainers beside SFT's and SFTTrainer's.
_PREFERENCE: dict[str, Argument] = {
    "disable_dropout": idle("an adapter with dropout is an error", True),
    "pad_to_multiple_of": idle("rows have one length, data.length", "auto", None),
    "padding_free": idle("rows are packed, or padded without a cost to attention", False, True),
    "truncation_mode": refused("shorter rows: a pair is cut at its end", "keep_start"),
    "max_prompt_length": idle("a pair is cut at its end alone, to max_length", None, 512),
    "max_completion_length": idle("a pair is cut at its end alone, to max_length", None),
    "generate_during_eval": refused("jaxtune chat, or evaluation.exact_match_rows", False),
    "is_encoder_decoder": refused("a decoder", None, False),
    "padding_value": idle("padding is never looked at", None),
    "label_pad_token_id": idle("padding is never looked at", -100),
    "precompute_ref_batch_size": idle("batches are those of a step", None),
    "sync_ref_model": refused("the reference that training began with", False),
    "ref_model_mixup_alpha": idle("it belongs to sync_ref_model", 0.6),
    "ref_model_sync_steps": idle("it belongs to sync_ref_model", 512),
    "train_sampling_strategy": idle("the order of rows is a permutation by the seed", "sequential", "random"),
}
_WITHOUT_LOSSES = {name: fate for name, fate in SFT.items() if name not in ("loss_type",)}
ORPO: dict[str, Argument] = _WITHOUT_LOSSES | _PREFERENCE
DPO: dict[str, Argument] = ORPO | {
    "label_smoothing": idle("in TRL it belongs to other loss types", 0.0),
    "loss_weights": refused("one loss_type", None),
    "ld_alpha": refused("jaxtune.train.Trainer(objective=...)", None),
    "f_divergence_type": refused("jaxtune.train.Trainer(objective=...)", "reverse_kl"),
    "f_alpha_divergence_coef": idle("it belongs to f_divergence_type", 0.5),
    "use_weighting": refused("jaxtune.train.Trainer(objective=...)", False),
    "discopop_tau": idle("it belongs to loss_type='discopop'", 0.05),
}
KTO: dict[str, Argument] = ORPO | {"loss_type": refused("jaxtune.train.Trainer(objective=...)", "kto")}
REWARD: dict[str, Argument] = SFT | {
    name: _PREFERENCE[name] for name in ("disable_dropout", "pad_to_multiple_of", "train_sampling_strategy")
}
REFERENCE_MODEL: dict[str, Argument] = {
    "ref_model": refused("an adapter: the reference is the model with its adapter off", None),
}

SAVE: dict[str, Argument] = {
    "max_shard_size": idle("files are cut at 5 GB", "5GB"),
    "safe_serialization": idle("models are always saved as safetensors", True),
    "is_main_process": idle(_ONE_PROCESS, True),
    "save_function": idle("models are always saved as safetensors", None),
    "save_peft_format": idle("adapters are always saved in PEFT's format", True),
    "maximum_memory_usage": idle("tensors are written one after the other", 0.75, 0.85, 0.9),
    "temporary_location": idle("nothing is written beside the folder", "_unsloth_temporary_saved_buffers"),
    "max_seq_length": idle("it belongs to calibration, which there is none of", 2048),
    "num_calibration_samples": idle("it belongs to calibration, which there is none of", 512),
    "install_missing_dependencies": idle("nothing is ever installed", True),
    "tags": idle("a model card is yours to write", None),
    "datasets": idle("a model card is yours to write", None),
    "selected_adapters": idle("there is one adapter", None),
    "push_to_hub": refused("push_to_hub or push_to_hub_merged", False),
    "token": idle("the hub's client takes the token of `hf auth login`, or HF_TOKEN", None),
    "calibration_dataset": refused("llm-compressor on the merged folder", None),
    "state_dict": refused("a change of model.module, a Flax module", None),
    "variant": refused("another folder", None),
    "private": idle("push_to_hub(private=True) makes a private repository", None),
    "save_method": refused("save_pretrained_merged(save_method=...)", None),
    "first_conversion": idle("weights go to their type in one step", None),
    "imatrix_file": refused("llama.cpp's llama-quantize on the f16 file", None),
    "merge_is_disposable": idle("nothing is written beside the folder", True),
}

GENERATE: dict[str, Argument] = {
    "use_cache": idle("keys and values are always cached", True),
    "synced_gpus": idle(_ONE_PROCESS, None, False),
    "return_dict_in_generate": refused("the array that generate returns", None, False),
    "output_scores": refused("model(tokens), which gives logits", None, False),
    "num_beams": refused("sampling, with num_return_sequences=1", 1),
    "num_return_sequences": refused("the prompt as several rows", 1),
    "no_repeat_ngram_size": refused("repetition_penalty", None, 0),
    "length_penalty": refused("max_new_tokens", None, 1.0),
    "max_length": refused("max_new_tokens", None),
    "min_new_tokens": refused("eos_token_id=[] and max_new_tokens", None),
    "stopping_criteria": refused("eos_token_id", None),
    "logits_processor": refused("model(tokens), which gives logits, in a loop of your own", None),
    "generation_config": refused("its settings as arguments", None),
}

RESPONSES: dict[str, Argument] = {
    "force_match": idle("responses are found by the template's structure where markers fail", True, False),
    "num_proc": idle("SFTConfig's dataset_num_proc says how many processes tokenise", None),
    "return_function": refused("the trainer that is returned", False),
    "mask_out_tokens": refused("data.mask_spans of jaxtune.train.TrainConfig", None),
}

TEMPLATE: dict[str, Argument] = {
    "map_eos_token": idle("a turn ends with the token that the template names", True, False),
    "patch_saving": idle("the template is saved with the tokenizer", True),
    "use_zoo_tokenizer_patch": idle("the tokenizer is not patched", None),
    "mapping": refused("standardize_sharegpt on the data set", None,
                       {"role": "role", "content": "content", "user": "user", "assistant": "assistant"}),
    "system_message": refused("a first message with the role system", None),
}  # fmt: skip

# ---- values that are followed under another name

DTYPES = ("bfloat16", "float16", "float32")
# Checkpointing asks for memory: the planner then recomputes or carries what does not fit, and no more.
RESIDUALS = {True: None, "unsloth": None, "true": None, False: "keep", "false": "keep"}
OPTIMIZERS = {
    "adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit",
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "paged_adamw_32bit": "adamw",
    "adafactor": "adafactor", "sgd": "sgd",
}  # fmt: skip
SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "cosine_with_restarts": "cosine_with_restarts", "constant": "constant",
    "constant_with_warmup": "constant",
}  # fmt: skip
# Unsloth's names of GGUF's types; its own quantised ones (q4_k_m, ...) are llama.cpp's to make.
GGUF = {
    "fast_quantized": "q8_0", "q8_0": "q8_0", "q4_0": "q4_0", "not_quantized": "f16", "f16": "f16", "bf16": "bf16",
    "f32": "f32",
}  # fmt: skip
# Types that llama.cpp makes of an f16 file; "quantized" is Unsloth's name of q4_k_m.
LLAMA_CPPS = re.compile(r"quantized|i?q\d_\w+")
