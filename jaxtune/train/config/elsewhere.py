"""Configs of axolotl and LLaMA-Factory, as the recipe that they mean.

`recipe_of` makes the recipe, which `jaxtune convert` prints: `_axolotl` or `_llama_factory` translates the keys of one
program, then `_common` those of both. `program_of` says whose config it is, and a `Translation` has the recipe with
what it lacks. Names and defaults are those of the two programs' documentation.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxtune.train.config import ConfigError

AXOLOTL, LLAMA_FACTORY = "axolotl", "LLaMA-Factory"


@dataclasses.dataclass
class Translation:
    """A recipe made of another program's config, and what could not be translated. `recipe_of` makes it and fills it
    key by key; the values are not checked (`config_from_dict` does that)."""

    program: str
    """The program that the config is for: "axolotl" or "LLaMA-Factory"."""
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The recipe, as nested values."""
    lacking: list[str] = dataclasses.field(default_factory=list)
    """What has no counterpart and is left out, a sentence each."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What the recipe does in another way than the config, or the user should look at, a sentence each."""

    def set(self, key: str, value: Any) -> None:
        """Sets the dotted key `key`, such as "optim.eps", of the recipe `values` to `value`, and adds the sections in
        which the key is if the recipe does not have them yet."""
        *sections, last = key.split(".")
        inner = self.values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value


def program_of(values: Mapping[str, Any]) -> str | None:
    """The program that a config is for, by the key that names its model: "axolotl" (base_model), "LLaMA-Factory"
    (model_name_or_path), or None for neither, and for a config that has the key `model`, as a recipe does. values: the
    YAML file's keys and values. `recipe_of` chooses the translation by it; `load_config` refuses a config by it."""
    if "base_model" in values and "model" not in values:
        return AXOLOTL
    if "model_name_or_path" in values and "model" not in values:
        return LLAMA_FACTORY
    return None


def recipe_of(values: Mapping[str, Any], folder: Path) -> Translation:
    """Translates the config of another program into the recipe that it means, without checking the recipe's values, for
    `jaxtune convert`.

    Args:
      values: the keys and values of the config, which stay as they are.
      folder: where the config is, below which (and then below the current folder) LLaMA-Factory's dataset_info.json is
        looked for.
    Returns:
      The recipe. Keys without a counterpart are no error; they are listed in `lacking`, but those whose value is null,
        auto, false, 0 or empty, and keys that have no effect here (`_IDLE`, such as gradient_checkpointing), are left
        out without a note.
    Raises:
      ConfigError: the config is neither axolotl's nor LLaMA-Factory's, or its model is null.
      ValueError: dataset_info.json is not JSON.
    """
    program = program_of(values)
    if program is None:
        raise ConfigError(
            "the config has neither base_model (axolotl) nor model_name_or_path (LLaMA-Factory): it is of no program "
            "that convert knows"
        )
    made = Translation(program)
    left = {name: value for name, value in values.items() if value is not None and (value != "auto" or name == "bf16")}
    if (key := "base_model" if program == AXOLOTL else "model_name_or_path") not in left:
        raise ConfigError(f"{key} = null: the config names no model; set it to a model's folder or hub name")
    made.set("model.path", left.pop(key))
    (_axolotl if program == AXOLOTL else _llama_factory)(made, left, folder)
    _common(made, left)
    for name, value in left.items():
        if name in _IDLE or value in (False, "", [], {}):
            continue
        instead = _INSTEAD.get(name)
        made.lacking.append(f"{name}: {_short(value)}" + (f" ({instead})" if instead else ""))
    return made


def _short(value: Any) -> str:
    """`value` as JSON, cut to at most 60 characters, for messages in `lacking` about what could not be translated."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- keys that both programs have, or that mean the same in both

_SAME = {
    "learning_rate": "optim.learning_rate",
    "embedding_lr": "optim.embedding_learning_rate",
    "weight_decay": "optim.weight_decay",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.eps",
    "max_grad_norm": "max_grad_norm",
    "warmup_steps": "schedule.warmup_steps",
    "warmup_ratio": "schedule.warmup_ratio",
    "cosine_min_lr_ratio": "schedule.min_ratio",
    "seed": "seed",
    "neftune_noise_alpha": "neftune_noise_alpha",
    "output_dir": "output",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "logging_steps": "metrics.log_every",
    "wandb_project": "metrics.wandb_project",
    "lora_alpha": "adapter.lora_alpha",
    "lora_dropout": "adapter.lora_dropout",
}
_ADAPTERS = ("lora_alpha", "lora_dropout", "lora_r", "lora_rank")
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw_32bit"), "adamw"),
    "adafactor": "adafactor",
    "sgd": "sgd",
}
_SCHEDULES = {
    **{name: name for name in ("linear", "cosine", "constant", "cosine_with_restarts")},
    "constant_with_warmup": "constant",
}
_OBJECTIVES = ("dpo", "orpo", "kto", "simpo")
# Keys without an effect here: the planner places residuals, kernels are chosen by the device, rows have one length.
_IDLE_NAMES = """
adapter_type auto_resume_from_checkpoints bnb_4bit_use_double_quant dataloader_num_workers dataloader_pin_memory
dataloader_prefetch_factor dataset_exact_deduplication dataset_prepared_path dataset_processes ddp_timeout debug
device_map do_eval do_train double_quantization eager_attention eval_batch_size eval_strategy evaluation_strategy
finetuning_type flash_attention flash_attn gradient_checkpointing gradient_checkpointing_kwargs group_by_length
is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model load_in_4bit
load_in_8bit local_rank logging_dir lora_fan_in_fan_out lora_mlp_kernel lora_o_kernel lora_qkv_kernel
low_cpu_mem_usage model_type overwrite_cache overwrite_output_dir packing pad_to_sequence_len
per_device_eval_batch_size plot_loss quantization_method quantization_type report_to run_name s2_attention
save_safetensors save_strategy sdp_attention shuffle_merged_datasets special_tokens stage strict tf32 tokenizer_type
torch_compile torch_dtype trust_remote_code use_cache use_fast_tokenizer use_tensorboard wandb_entity
wandb_log_model wandb_mode wandb_name wandb_run_id wandb_watch xformers_attention
"""
_IDLE = frozenset(_IDLE_NAMES.split())
_INSTEAD = {
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), "several GPUs: mesh.data and mesh.fsdp"),
    "resume_from_checkpoint": "the same command continues from the last checkpoint in output",
    "early_stopping_patience": "EarlyStoppingCallback of jaxtune.compat",
    "hub_model_id": "`jaxtune export` pushes to the hub",
    "push_to_hub": "`jaxtune export` pushes to the hub",
    "export_hub_model_id": "`jaxtune export` pushes to the hub",
    "evals_per_epoch": "evaluation.every_steps",
    "saves_per_epoch": "checkpoint.every_steps, or checkpoint.every_minutes",
    "tokens": "embeddings are not added; a model whose vocabulary has them",
    "plugins": "kernels and losses are part of jaxtune",
    "interleave_probs": "data.train = [[rows, weight], ...]",
    "mix_strategy": "data.train = [[rows, weight], ...]",
    "freeze_trainable_layers": "adapter.target_modules as a regular expression",
    "unfrozen_parameters": "adapter.target_modules as a regular expression",
}


def _common(made: Translation, left: dict[str, Any]) -> None:
    """Translates the keys that both programs have: those of `_SAME` (such as learning_rate), the batch size
    (rows_per_step is rows x micro-batches), steps or epochs, optimizer, schedule, precision, held-out rows. Called
    after `_axolotl` or `_llama_factory`, as it reads what they have set. made: the recipe, which is extended. left: the
    config's keys that are not translated yet; those that this function translates are removed from it. Some are removed
    without effect, such as lora_alpha and lora_dropout if the recipe makes no new adapter, the number of epochs beside
    max_steps, warmup_ratio beside warmup_steps, and eval_steps if there are no held-out rows."""
    adapted = (adapter := made.values.get("adapter")) is not None and "path" not in adapter
    for name, key in _SAME.items():
        if name in left and (value := left.pop(name)) is not None and (adapted or name not in _ADAPTERS):
            made.set(key, value)
    if "warmup_steps" in made.values.get("schedule", {}):
        made.values["schedule"].pop("warmup_ratio", None)
    rows = left.pop("micro_batch_size", None) or left.pop("per_device_train_batch_size", None) or 1
    parts = left.pop("gradient_accumulation_steps", None) or 1
    made.set("rows_per_step", rows * parts)
    if rows * parts > 1:
        made.notes.append(
            f"rows_per_step: {rows} rows x {parts} micro-batches of one GPU (of several, multiply by their number); "
            "the planner chooses the micro-batches"
        )
    if (steps := left.pop("max_steps", None)) and steps > 0:
        made.set("steps", steps)
        for name in ("num_epochs", "num_train_epochs"):
            left.pop(name, None)
    elif (epochs := left.pop("num_epochs", None) or left.pop("num_train_epochs", None)) is not None:
        made.set("epochs", float(epochs))
    _choose(made, left, ("optimizer", "optim"), "optim.name", _OPTIMIZERS)
    _choose(made, left, ("lr_scheduler", "lr_scheduler_type"), "schedule.name", _SCHEDULES)
    if left.pop("fp16", None) is True:
        made.set("precision", "fp16")
    if left.pop("bf16", None) in (True, "auto", "full"):
        made.set("precision", "bf16")
    held_out = left.pop("val_set_size", None) or left.pop("val_size", None)
    if held_out and "eval" not in made.values.get("data", {}):
        made.set("data.eval_rows", held_out)
    if (every := left.pop("eval_steps", None)) and {"eval", "eval_rows"} & made.values.get("data", {}).keys():
        made.set("evaluation.every_steps", every)


def _choose(
    made: Translation, left: dict[str, Any], names: tuple[str, str], key: str, table: Mapping[str, str]
) -> None:
    """Sets the recipe's dotted key `key` from whichever of two names, one of each program, has a value of the table in
    `left`, and removes that name; if both do, both are removed and the second decides. If neither does, nothing is set.

    Args:
      made: the recipe.
      left: the keys not translated yet; a value that the table lacks stays there, and is then reported as lacking.
      names: axolotl's name of the key, and LLaMA-Factory's.
      key: the dotted key of the recipe: optim.name or schedule.name, which `_common` translates so.
      table: {value in the other program: value in the recipe}.
    """
    for name in names:
        if str(left.get(name)) in table:
            made.set(key, table[str(left.pop(name))])


def _packing(made: Translation, packs: bool) -> None:
    """For both programs: sets data.packing of the recipe `made`. packs: whether the other program packs several
    documents into a row. If it does, data.packing becomes True. If it does not, each update of that program trains on a
    fixed number of documents; data.packing then becomes "step", with which a step here trains on the same number, and a
    note in made.notes says so."""
    made.set("data.packing", True if packs else "step")
    if not packs:
        made.notes.append("data.packing: step: an update has as many documents as there; true makes fewer updates")


def _columns(made: Translation, columns: Mapping[str, str], of: str) -> None:
    """Sets data.columns of the recipe `made` to `columns` without the names that are the same in both; nothing if none
    is left. A recipe has one such map for all rows, so if it has a different one already, `columns` is reported as
    lacking instead. columns: {name of a column in a format of jaxtune: its name in these rows}. of: the rows' name."""
    columns = {ours: source for ours, source in columns.items() if ours != source}
    known = made.values.get("data", {}).get("columns")
    if columns and known not in (None, columns):
        made.lacking.append(f"columns of {of}: {_short(columns)} (data.columns is one map for all rows)")
    elif columns:
        made.set("data.columns", columns)


def _rows(made: Translation, key: str, names: list[str]) -> None:
    """For both programs: sets `key`, data.train or data.eval, of the recipe `made` to `names`, files or data sets as
    data.train takes them: one name, a list of several, or nothing if there is none. data.eval gets only the first; the
    others are added to made.lacking."""
    if names:
        made.set(key, names[0] if len(names) == 1 else names)
    if key == "data.eval" and len(names) > 1:
        made.set(key, names[0])
        made.lacking.append(f"{', '.join(names[1:])} (data.eval is one file or data set)")


# ---- axolotl

_TEMPLATES = {
    **{name: name for name in ("chatml", "alpaca", "mistral", "gemma", "gpt-oss")},
    "llama3": "llama-3",
    "gemma3": "gemma-3",
    "phi_3": "phi-3",
    "phi_35": "phi-3",
    "phi_4": "phi-4",
    "qwen_25": "qwen-2.5",
    "qwen3": "qwen-3",
}


def _axolotl(made: Translation, left: dict[str, Any], folder: Path) -> None:
    """Translates the keys that only axolotl has: rows, length, packing, template, model.load_in, adapter, objective.
    made: the recipe, which is extended, as is what it lacks. left: the config's keys; those that it translates are
    removed, but load_in_8bit and load_in_4bit stay, which have no effect later (`_IDLE`). folder: not used; `recipe_of`
    calls `_llama_factory`, which needs it, in the same way."""
    del folder
    for key, name in (("data.train", "datasets"), ("data.eval", "test_datasets")):
        entries = left.pop(name, None) or []
        _rows(made, key, [rows for one in entries for rows in _axolotl_rows(made, one)])
    made.set("data.length", left.pop("sequence_len", 2048))
    _packing(made, bool(left.pop("sample_packing", False)))
    left.pop("eval_sample_packing", None)
    if left.pop("train_on_inputs", False):
        made.set("data.train_on", "all")
    template = left.pop("chat_template", None)
    if str(template) in _TEMPLATES:
        made.set("data.template", _TEMPLATES[str(template)])
    elif template not in (None, "tokenizer_default"):
        made.lacking.append(f"chat_template: {_short(template)} (data.template names a packaged template or a file)")
    kind = left.pop("adapter", None)
    if left.get("load_in_8bit"):
        made.set("model.load_in", "int8")
    elif left.get("load_in_4bit") or kind == "qlora":
        made.set("model.load_in", "nf4")
    if path := left.pop("lora_model_dir", None):
        made.set("adapter.path", path)
    elif kind in ("lora", "qlora"):
        made.set("adapter.r", left.pop("lora_r", 8))
        linear, modules = left.pop("lora_target_linear", False), left.pop("lora_target_modules", None)
        made.set("adapter.target_modules", "all-linear" if linear or not modules else modules)
        _take(
            made, left, peft_use_rslora="use_rslora", peft_use_dora="use_dora", lora_modules_to_save="modules_to_save"
        )
    elif kind is not None:
        made.lacking.append(f"adapter: {kind} (lora and qlora)")
    else:
        made.set("adapter", None)
    objective = left.pop("rl", None)
    if objective in (*_OBJECTIVES, "ipo"):
        made.set("objective.name", "dpo" if objective == "ipo" else objective)
        if objective == "ipo":
            made.set("objective.loss_type", "ipo")
        beta = left.pop("rl_beta", None) or left.pop("dpo_beta", None) or left.pop("orpo_alpha", None)
        if beta is not None:
            made.set("objective.beta", beta)
    elif objective is not None:
        made.lacking.append(f"rl: {objective} ({', '.join(_OBJECTIVES)}, and grpo with objective.reward_funcs)")


def _take(made: Translation, left: dict[str, Any], **names: str) -> None:
    """For both programs: sets keys of the section `adapter` of the recipe `made` from keys of `left`, which are
    removed; those missing, null, false or empty stay unset. names: {name of a key in that program: in the section}."""
    for source, ours in names.items():
        if value := left.pop(source, None):
            made.set(f"adapter.{ours}", value)


def _axolotl_rows(made: Translation, one: Mapping[str, Any]) -> list[str]:
    """Translates one entry of axolotl's `datasets` (`one`): returns the names of the rows as data.train takes them (its
    data_files; else a path, or a hub name, with ":config:split" if it names a config or a split other than train), and
    sets data.columns in `made`. What has no counterpart is reported as lacking."""
    path, files = str(one.get("path")), one.get("data_files")
    config, split = one.get("name"), one.get("split")
    names = _data_files(made, path, files) if files else [path]
    if files:
        path = ", ".join(names)
    elif (config or split not in (None, "train")) and not _IS_FILE.search(path):
        names = [path := f"{path}:{config or ''}:{split or 'train'}"]
    kind = one.get("type")
    if isinstance(kind, Mapping):  # a format of one's own
        named = {"instruction": "field_instruction", "input": "field_input", "output": "field_output"}
        named |= {"system": "field_system"}
        _columns(made, {ours: kind[source] for ours, source in named.items() if source in kind}, path)
        if {"format", "no_input_format", "system_prompt"} & kind.keys():
            made.lacking.append(f"format of {path}: {_short(kind.get('format'))} (data.template: a file)")
    elif kind == "completion":
        _columns(made, {"text": one.get("field", "text")}, path)
    elif kind == "chat_template":
        field = one.get("field_messages", "messages")
        _columns(made, {} if field in ("messages", "conversations") else {"messages": field}, path)
    elif kind is not None and kind.split(".")[0] not in ("alpaca", "sharegpt", "alpaca_chat", "chatml", "llama3"):
        made.lacking.append(f"type of {path}: {_short(kind)} (the form of rows is read from their columns)")
    for name in ("shards", "roles_to_train", "train_on_eos", "message_property_mappings"):
        if one.get(name) not in (None, {}, {"role": "role", "content": "content"}, ["assistant"], "turn"):
            made.lacking.append(f"{name} of {path}: {_short(one[name])}")
    return names


_IS_FILE = re.compile(r"\.(jsonl?|csv|parquet)$")


def _data_files(made: Translation, path: str, files: object) -> list[str]:
    """The paths, for data.train, of the local files that an entry of axolotl's `datasets` names. path: the entry's. If
    it names a reader of files, such as "json", files are relative to the current folder; if it is a folder, to that.
    files: the entry's data_files, one name or a list. In other cases (files of a data set on the hub, files by split)
    they are reported as lacking in `made`, the recipe, and [path] is returned."""
    listed = [files] if isinstance(files, str) else files
    readers = ("json", "csv", "parquet", "text", "arrow")
    if isinstance(listed, list) and (path in readers or Path(path).expanduser().is_dir()):
        return [str(name) if path in readers else str(Path(path) / str(name)) for name in listed]
    made.lacking.append(f"data_files of {path}: {_short(files)} (local files: data.train names each of them)")
    return [path]


# ---- LLaMA-Factory

_STAGES: dict[str, Callable[[Translation, dict[str, Any]], None]] = {
    "pt": lambda made, left: made.set("data.train_on", "all"),
    "rm": lambda made, left: made.set("objective.name", "reward"),
    "kto": lambda made, left: made.set("objective.name", "kto"),
    "dpo": lambda made, left: _preferences(made, left.pop("pref_loss", "sigmoid")),
}


def _preferences(made: Translation, loss: str) -> None:
    """Sets the objective of the recipe `made` for LLaMA-Factory's stage dpo by its `loss` (pref_loss): orpo, kto and
    simpo are objectives of their own, and hinge, ipo and sigmoid are losses of dpo. For any other loss the objective
    is dpo, and the loss is reported as lacking."""
    made.set("objective.name", loss if loss in _OBJECTIVES else "dpo")
    if loss in ("hinge", "ipo"):
        made.set("objective.loss_type", loss)
    elif loss not in (*_OBJECTIVES, "sigmoid"):
        made.lacking.append(f"pref_loss: {loss} (sigmoid, hinge, ipo, orpo, simpo)")


def _llama_factory(made: Translation, left: dict[str, Any], folder: Path) -> None:
    """Translates the keys that only LLaMA-Factory has: rows, length, packing, stage and objective, trained tokens,
    quantisation, adapter. made: the recipe, which is extended. left: the config's keys; what is translated is removed,
    but not stage, packing, finetuning_type, which are in `_IDLE`. folder: of the config, for dataset_info.json."""
    known = _dataset_info(folder, str(left.pop("dataset_dir", "data")))
    for key, name in (("data.train", "dataset"), ("data.eval", "eval_dataset")):
        given = left.pop(name, None) or []
        names = [one.strip() for one in given.split(",")] if isinstance(given, str) else list(given)
        _rows(made, key, [_registered(made, one, known) for one in names])
    made.set("data.length", left.pop("cutoff_len", 2048))
    stage = left.get("stage", "sft")
    packs = bool(left.pop("neat_packing", False)) or left.get("packing", stage == "pt")
    if stage in ("sft", "pt"):
        _packing(made, packs)
    if stage in _STAGES:
        _STAGES[stage](made, left)
    elif stage != "sft":
        made.lacking.append(f"stage: {stage} (objective.name=grpo learns from rewards)")
    if (beta := left.pop("pref_beta", None)) is not None:
        made.set("objective.beta", beta)
    if left.pop("train_on_prompt", False):
        made.set("data.train_on", "all")
    if left.pop("mask_history", False):
        made.set("data.last_response_only", True)
    if template := left.pop("template", None):
        made.notes.append(
            f"template: {template}: the tokenizer's own chat template is taken; data.template names another"
        )
    for source, ours in (("max_samples", "data.max_rows"), ("preprocessing_num_workers", "data.num_workers")):
        if source in left:
            made.set(ours, left.pop(source))
    bits = left.pop("quantization_bit", None)
    if bits in (4, 8):
        made.set("model.load_in", "nf4" if bits == 4 else "int8")
    elif bits is not None:
        made.lacking.append(f"quantization_bit: {bits} (4 or 8)")
    if path := left.pop("adapter_name_or_path", None):
        made.set("adapter.path", path)
    elif (kind := left.get("finetuning_type", "lora")) == "lora":
        rank = left.pop("lora_rank", 8)
        made.set("adapter.r", rank)
        made.set("adapter.lora_alpha", left.pop("lora_alpha", 2 * rank))
        target = left.pop("lora_target", "all")
        modules = target if isinstance(target, list) else [one.strip() for one in target.split(",")]
        made.set("adapter.target_modules", "all-linear" if modules == ["all"] else modules)
        more = left.pop("additional_target", None)
        if more:
            made.set("adapter.modules_to_save", more if isinstance(more, list) else more.split(","))
        _take(made, left, use_rslora="use_rslora", use_dora="use_dora")
    elif kind == "full":
        made.set("adapter", None)
    else:
        made.lacking.append(f"finetuning_type: {kind} (lora and full)")


def _dataset_info(folder: Path, name: str) -> dict[str, Any]:
    """The entries of LLaMA-Factory's dataset_info.json, {name of a data set: its entry}, each with the folder of the
    file as "base"; {} if there is no such file. It is looked for in `folder`/`name`, then in `name` below the current
    folder. name: the config's dataset_dir. Raises ValueError if it is no JSON of such entries."""
    for base in (folder, Path()):
        path = base / name / "dataset_info.json"
        if path.is_file():
            entries = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
                raise ValueError(f"{path} is no object of data sets, each an object such as {{'file_name': 'a.json'}}")
            return {key: {**entry, "base": str(base / name)} for key, entry in entries.items()}
    return {}


def _registered(made: Translation, name: str, known: Mapping[str, Any]) -> str:
    """The name, as data.train takes it, of a data set that is registered in dataset_info.json as `name`: the path of
    its file, or its hub name, with ":subset:split" if it has these; its columns go to data.columns in `made`, the
    recipe. A name that is not registered is returned as it is, with a note, and one whose rows only another hub or a
    script has, with a report that this is lacking, as num_samples is. known: {name: entry}, from `_dataset_info`."""
    entry = known.get(name)
    if entry is None:
        made.notes.append(
            f"data.train: {name} is a name of LLaMA-Factory's dataset_info.json: put a file or data set there"
        )
        return name
    columns = dict(entry.get("columns", {}))
    form = {"prompt": "instruction", "query": "input", "response": "output"} if "messages" not in columns else {}
    if entry.get("formatting") == "sharegpt":
        field = columns.pop("messages", "conversations")
        columns = {} if field in ("messages", "conversations") else {"messages": field}
    columns.pop("history", None)
    _columns(made, {form.get(ours, ours): source for ours, source in columns.items()}, name)
    if entry.get("tags"):
        made.notes.append(f"{name}: its tags are read by their usual names (role and content, from and value)")
    lost = {"num_samples": f"{name}[:N] behind its file or name reads its first N rows"}
    if file := entry.get("file_name"):
        found = str(Path(entry["base"]) / file)
    elif "hf_hub_url" in entry:
        lost["folder"] = "a file, or a data set with these rows at its top"
        found = ":".join([entry["hf_hub_url"], entry.get("subset") or "", entry.get("split") or ""]).rstrip(":")
    else:
        lost |= dict.fromkeys(_ELSEWHERE, "a file, or a data set of huggingface.co")
        found = name
    made.lacking += [f"{key} of {name}: {_short(entry[key])} ({fix})" for key, fix in lost.items() if entry.get(key)]
    return found


_ELSEWHERE = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")  # where rows can be that no reader reaches
