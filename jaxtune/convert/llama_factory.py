"""LLaMA-Factory's configs, with the data sets that its dataset_info.json registers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtune.convert import common
from jaxtune.convert.translation import Translation
from jaxtune.train.config import ConfigError
from jaxtune.train.config.sections import OPTIMIZERS

_STAGES = {"sft": "sft", "pt": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto"}
_LOSSES = {"sigmoid": "dpo", "ipo": "dpo", "hinge": "dpo", "orpo": "orpo", "simpo": "simpo"}
_OTHER_OPTIMIZERS = ("use_galore", "use_apollo", "use_badam", "use_adam_mini")
_ELSEWHERE = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")  # rows that no reader reaches
# Its templates whose turns ours write; all others are written by the tokenizer's own.
_TEMPLATES = {
    "alpaca": "alpaca",
    "chatml": "chatml",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma-3",
    "gpt_oss": "gpt-oss",
    "llama3": "llama-3",
    "mistral": "mistral",
    "phi": "phi-3",
    "phi4": "phi-4",
    "qwen": "qwen-2.5",
    "qwen3": "qwen-3",
    "qwen3_nothink": "qwen-3-instruct",
}


def translate(made: Translation, folder: Path) -> None:
    path = made["model_name_or_path"]
    if made["train_from_scratch"]:
        made.set("model.from_config", str(Path(path) / "config.json"))
        made.set("model.tokenizer", path)
    else:
        made.set("model.path", path)
    stage = made["stage"]
    if stage not in _STAGES:
        raise ConfigError(
            f"stage = {stage!r}: jaxtune has no such method; learning from rewards is objective.name=grpo, with "
            "functions or a reward model behind one"
        )
    method = _objective(made, stage)
    _data(made, folder, stage, method)
    _adapter(made)
    common.batch(made, "per_device_train_batch_size", {"sft": "rows", "kto": "answers"}.get(method, "pairs"))
    common.length_of_run(made, "num_train_epochs")
    common.warmup(made)
    for key in _OTHER_OPTIMIZERS:
        if made[key]:
            made.lack(key, True, f"optim.name: {', '.join(OPTIMIZERS)}")
    made.choose(("optim",), "optim.name", made.table.optimizers)
    if made["use_muon"]:
        made.set("optim.name", "muon")
    common.schedule(made, "lr_scheduler_type")
    common.precision(made, bool(made["bf16"] or made["pure_bf16"]), bool(made["fp16"]), "bf16", "fp16", "pure_bf16")
    if made["pure_bf16"] and made.get("adapter") is None:
        made.set("optim.weights", "bf16")
    common.held_out(made, "val_size")
    common.saves(made)
    common.trainer_keys(made)
    if made.get("data.streaming"):
        made.same(made.table.top, made.config, made.defaults, "data.buffer_size")
    made.leftovers(made.table.top, made.config)


def _objective(made: Translation, stage: str) -> str:
    name = _STAGES[stage]
    if name == "dpo":
        loss = made["pref_loss"]
        if loss not in _LOSSES:
            raise ConfigError(f"pref_loss = {loss!r}: jaxtune has {', '.join(_LOSSES)}")
        name = _LOSSES[loss]
        made.set("objective.name", name)
        if loss in ("ipo", "hinge"):
            made.set("objective.loss_type", loss)
        if made["dpo_label_smoothing"] and loss == "sigmoid":
            made.set("objective.label_smoothing", made["dpo_label_smoothing"])
        if name == "simpo":
            made.set("objective.simpo_gamma", made["simpo_gamma"])
    elif name != "sft":
        made.set("objective.name", name)
    if name in ("dpo", "orpo", "simpo", "kto"):
        made.set("objective.beta", made["pref_beta"])
    if name == "kto":
        made.set("objective.desirable_weight", made["kto_chosen_weight"])
        made.set("objective.undesirable_weight", made["kto_rejected_weight"])
    return name


def _data(made: Translation, folder: Path, stage: str, method: str) -> None:
    known = _dataset_info(folder, str(made["dataset_dir"]))
    most = made["max_samples"]
    for key, source in (("data.train", "dataset"), ("data.eval", "eval_dataset")):
        names = [_registered(made, name, known, method) for name in common.listed(made[source])]
        common.rows(made, key, [f"{name}[:{most}]" if most else name for name in names])
    made.set("data.length", made["cutoff_len"], "cutoff_len")
    if made["streaming"]:
        if made["max_steps"] > 0:
            made.set("data.streaming", True)
        else:
            made.notes.append("data.streaming is off, as epochs of a stream cannot be counted")
    _mixture(made)
    packs = bool(made["neat_packing"]) or (stage == "pt" if made["packing"] is None else bool(made["packing"]))
    common.packing(made, packs and method == "sft", *(("packing",) if made.says("packing", "neat_packing") else ()))
    if made["train_on_prompt"] or stage == "pt":
        made.set("data.train_on", "all")
    if made["mask_history"]:
        made.set("data.last_response_only", True)
    if stage == "pt":
        return
    name = made["template"]
    made.set("data.template", _TEMPLATES.get(str(name), "tokenizer"))
    if name is not None and str(name) not in _TEMPLATES:
        made.lack("template", name, "the tokenizer's own chat template is taken; data.template names another")
    elif name is not None:
        made.notes.append(
            "data.template: an instruction and its input are separated by an empty line, there by a line break"
        )


def _mixture(made: Translation) -> None:
    """data.train with shares, if rows are interleaved by probabilities."""
    shares = [float(part) for part in common.listed(made["interleave_probs"])]
    names = made.get("data.train")
    if not shares or made["mix_strategy"] == "concat" or not isinstance(names, list):
        return
    if len(shares) != len(names) or not made["max_steps"] > 0:
        made.lack("interleave_probs", shares, "data.train = [[rows, weight], ...], which needs max_steps")
    else:
        made.set("data.train", [[name, share] for name, share in zip(names, shares, strict=True)])


def _adapter(made: Translation) -> None:
    bits = made["quantization_bit"]
    if bits not in (None, 4, 8):
        raise ConfigError(f"quantization_bit = {bits}: 4 (model.load_in=nf4) or 8 (int8)")
    if made["quantization_method"] not in ("bnb", "bitsandbytes"):
        made.lack("quantization_method", made["quantization_method"], "model.load_in")
    common.quantised(made, bits == 4, bits == 8)
    kind = made["finetuning_type"]
    if kind not in ("lora", "full"):
        raise ConfigError(f"finetuning_type = {kind!r}: a method that jaxtune does not have; lora and full")
    if path := made["adapter_name_or_path"]:
        if made["create_new_adapter"]:
            made.lack("create_new_adapter", True, "export the adapter merged, and train a new one over that")
        made.set("adapter.path", path)
        return
    if kind == "full":
        made.set("adapter", None)
        return
    rank = made["lora_rank"]
    made.set("adapter.r", rank)
    made.set("adapter.lora_alpha", made["lora_alpha"] if made["lora_alpha"] is not None else 2 * rank)
    if made["lora_dropout"]:
        made.set("adapter.lora_dropout", made["lora_dropout"])
    modules = common.listed(made["lora_target"])
    made.set("adapter.target_modules", "all-linear" if modules == ["all"] else modules)
    if parameters := common.listed(made["lora_target_parameters"]):
        made.set("adapter.target_parameters", parameters)
    if more := common.listed(made["additional_target"]):
        made.set("adapter.modules_to_save", more)
    for key in ("use_rslora", "use_dora"):
        if made[key]:
            made.set(f"adapter.{key}", True)


def _dataset_info(folder: Path, name: str) -> dict[str, Any]:
    """The entries of dataset_info.json in `folder`/`name`, or in `name` below the current folder, each with the folder
    of its file as "base". Raises ConfigError if it is no JSON of such entries."""
    for base in (folder, Path()):
        path = base / name / "dataset_info.json"
        if path.is_file():
            try:
                entries = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{path} is no JSON: {error}") from None
            if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
                raise ConfigError(f"{path} is no object of data sets, each an object such as {{'file_name': 'a.json'}}")
            return {key: {**entry, "base": str(base / name)} for key, entry in entries.items()}
    return {}


def _registered(made: Translation, name: str, known: Mapping[str, Any], method: str) -> str:
    """The file or hub name of a registered data set; its columns go into the recipe."""
    entry = known.get(name)
    if entry is None:
        made.lack(f"data set {name}", name, "it is not in dataset_info.json: put its file or hub name there")
        return name
    common.columns(made, _columns(entry, method, made, name), name)
    tags = entry.get("tags") or {}
    usual = {"role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": ("human", "user")}
    usual |= {"assistant_tag": ("gpt", "assistant"), "system_tag": ("system",)}
    usual |= {"observation_tag": ("observation", "tool"), "function_tag": ("function_call", "function")}
    for tag, value in tags.items():
        if value not in usual.get(tag, ()):
            made.lack(f"{tag} of {name}", value, "rename it in the rows")
    lost = {"num_samples": f"{name}[:N] behind its file or name reads its first N rows"}
    if file := entry.get("file_name"):
        source = str(Path(entry["base"]) / file)
    elif "hf_hub_url" in entry:
        lost["folder"] = "a file, or a data set with these rows at its top"
        source = ":".join([entry["hf_hub_url"], entry.get("subset") or "", entry.get("split") or ""]).rstrip(":")
    else:
        lost |= dict.fromkeys(_ELSEWHERE, "a file, or a data set of huggingface.co")
        source = name
    for key, fix in lost.items():
        if entry.get(key):
            made.lack(f"{key} of {name}", entry[key], fix)
    return source


def _columns(entry: Mapping[str, Any], method: str, made: Translation, name: str) -> dict[str, str]:
    """{our column: source} of an entry."""
    own = dict(entry.get("columns") or {})
    pairs = method != "sft"
    for key in ("images", "videos", "audios"):
        if own.pop(key, None):
            made.lack(f"{key} of {name}", key, "only text can be trained on")
    if history := own.pop("history", None):
        made.lack(f"history of {name}", history, "turns before the last one: rows of messages")
    names = {ours: own[ours] for ours in ("system", "tools", "chosen", "rejected") if own.get(ours)}
    if own.get("kto_tag"):
        names["label"] = own["kto_tag"]
    if entry.get("formatting", "alpaca") == "alpaca":
        prompt, query, response = own.get("prompt"), own.get("query"), own.get("response")
        if not own:
            prompt, query, response = "instruction", "input", "output"
        if not pairs:
            return names | {
                ours: source
                for ours, source in (("instruction", prompt), ("input", query), ("output", response))
                if source
            }
        if prompt:
            names["prompt"] = prompt
        if query and method != "sft":
            made.lack(f"query of {name}", query, "a prompt of one column: join the two in the rows")
        if method == "kto" and response:
            names["completion"] = response
        return names
    field = own.get("messages") or "conversations"
    if pairs and method != "kto" and field not in ("messages", "conversations"):
        return names | {"prompt": field}
    return names if field in ("messages", "conversations") else names | {"messages": field}
