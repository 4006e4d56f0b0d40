"""axolotl's configs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtune.convert import common
from jaxtune.convert.translation import Translation
from jaxtune.train.config import ConfigError

_METHODS = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo", "grpo": "grpo", "gdpo": "grpo"}
_PAIRS = ("dpo", "orpo", "simpo", "reward")
_IS_FILE = re.compile(r"\.(jsonl?|csv|parquet)$")
_READERS = ("json", "csv", "parquet", "text", "arrow")


def translate(made: Translation, folder: Path) -> None:
    del folder
    made.set("model.path", made["base_model"])
    if made.says("tokenizer_config") and made["tokenizer_config"] != made["base_model"]:
        made.set("model.tokenizer", made["tokenizer_config"])
    method = _objective(made)
    _chat_template(made)
    _data(made, method)
    _adapter(made)
    documents = {"kto": "answers", "grpo": "answers"}.get(method, "pairs" if method in _PAIRS else "rows")
    if made.says("batch_size") and not made.says("gradient_accumulation_steps"):
        made.set("rows_per_step", made["batch_size"])
    else:
        common.batch(made, "micro_batch_size", documents)
    common.length_of_run(made, "num_epochs")
    common.warmup(made, implied_ratio=0.03)
    if made.get("schedule.warmup_ratio") == 0.03 and not made.says("warmup_ratio"):
        made.notes.append("schedule.warmup_ratio: axolotl's 3 % has at most 100 steps")
    made.choose(("optimizer",), "optim.name", made.table.optimizers)
    common.schedule(made, "lr_scheduler")
    bf16, fp16 = made.first("bf16", "bfloat16"), made.first("fp16", "float16")
    common.precision(made, bf16 in (True, "auto", "full") and not made["float32"], bool(fp16), "bf16", "fp16")
    common.held_out(made, "val_set_size")
    common.saves(made)
    if (noise := made["noisy_embedding_alpha"]) and not made.says("neftune_noise_alpha"):
        made.set("neftune_noise_alpha", noise)
    made.same(made.table.top, made.config, made.defaults, "optim.")
    for prefix in ("schedule.min_ratio", "max_grad_norm", "seed", "neftune", "output", "checkpoint.keep", "metrics."):
        made.same(made.table.top, made.config, made.defaults, prefix)
    for prefix in ("data.num_workers", "evaluation.at_start", "deterministic"):
        made.same(made.table.top, made.config, {}, prefix)
    if method == "dpo" and made["precompute_ref_log_probs"]:
        made.set("objective.precompute_ref_log_probs", True)
    if qat := made["qat"]:
        made.lack("qat", qat, "qat.format is int4, int8, fp8, nvfp4, mxfp4 and others")
    made.leftovers(made.table.top, made.config)


def _objective(made: Translation) -> str:
    rl = made["rl"]
    if made["reward_model"]:
        made.set("objective.name", "reward")
        if (weight := made["center_rewards_coefficient"]) is not None:
            made.set("objective.center_rewards_coefficient", weight)
        return "reward"
    if not rl:
        return "sft"
    if rl not in _METHODS:
        raise ConfigError(f"rl = {rl!r}: a method of axolotl that jaxtune does not have; {', '.join(_METHODS)}")
    name = _METHODS[rl]
    made.set("objective.name", name)
    if name == "grpo":
        _grpo(made, rl)
        return name
    beta = made.first("rl_beta", "dpo_beta", "orpo_alpha")
    if beta is not None:
        made.set("objective.beta", beta)
    if rl == "ipo":
        made.set("objective.loss_type", "ipo")
    elif name == "dpo" and (losses := common.listed(made["dpo_loss_type"])):
        if losses in (["sigmoid"], ["ipo"], ["hinge"]):
            made.set("objective.loss_type", losses[0])
        else:
            raise ConfigError(f"dpo_loss_type = {losses}: jaxtune has sigmoid, ipo and hinge, one at a time")
    if name == "dpo" and made["dpo_label_smoothing"]:
        made.set("objective.label_smoothing", made["dpo_label_smoothing"])
    if name == "simpo" and made["simpo_gamma"] is not None:
        made.set("objective.simpo_gamma", made["simpo_gamma"])
    if name == "kto":
        for key, ours in (("kto_desirable_weight", "desirable"), ("kto_undesirable_weight", "undesirable")):
            if made[key]:
                made.set(f"objective.{ours}_weight", made[key])
    return name


def _grpo(made: Translation, rl: str) -> None:
    section = made.table.sections["trl"]
    given = {key: value for key, value in (made["trl"] or {}).items() if value is not None}
    made.same(section, given, {})
    beta = given.get("beta", made["rl_beta"])
    if beta is not None:
        made.set("objective.beta", beta)
    if rl == "gdpo" and "multi_objective_aggregation" not in given:
        made.set("objective.multi_objective_aggregation", "normalize_then_sum")
    if "scale_rewards" in given:
        scale = given["scale_rewards"]
        made.set("objective.scale_rewards", {True: "group", False: "none"}.get(scale, scale))
    functions = common.functions(made, common.listed(given.get("reward_funcs")))
    if given.get("rollout_func"):
        made.set("objective.rollout_func", common.functions(made, [given["rollout_func"]])[0])
    if functions:
        made.set("objective.reward_funcs", functions)
    elif not given.get("rollout_func"):
        raise ConfigError("trl.reward_funcs is empty: grpo needs reward functions, as module.function")
    rows = (made["micro_batch_size"] or 1) * (made["gradient_accumulation_steps"] or 1)
    if size := given.get("generation_batch_size"):
        if size % rows:
            made.lack("generation_batch_size of trl", size, f"not a multiple of the {rows} answers of a step")
        elif size > rows:
            made.set("objective.steps_per_generation", size // rows)
    made.leftovers(section, given, "trl")


def _chat_template(made: Translation) -> None:
    name = made["chat_template"]
    if made["chat_template_jinja"]:
        made.set("data.template", made["chat_template_jinja"])
    elif name is None:
        return
    elif str(name) in made.table.templates:
        made.set("data.template", made.table.templates[str(name)])
    elif str(name).startswith("tokenizer_default"):
        made.set("data.template", "tokenizer")
    else:
        made.lack("chat_template", name, "data.template names a packaged template or a .jinja file")


def _data(made: Translation, method: str) -> None:
    pretraining = made["pretraining_dataset"]
    entries = pretraining or made["datasets"] or []
    entries = [
        {"path": one} if isinstance(one, str) else one
        for one in ([entries] if isinstance(entries, Mapping | str) else entries)
    ]
    common.rows(
        made, "data.train", [rows for entry in entries for rows in _entry(made, entry, method, bool(pretraining))]
    )
    common.rows(
        made,
        "data.eval",
        [rows for entry in made["test_datasets"] or [] for rows in _entry(made, entry, method, False)],
    )
    if pretraining or made["streaming"]:
        if (made["max_steps"] or 0) > 0:
            made.set("data.streaming", True)
        else:
            made.notes.append("data.streaming is off, as epochs of a stream cannot be counted")
    if pretraining:
        made.set("data.train_on", "all")
    if method != "grpo":
        made.set("data.length", made["sequence_len"], "sequence_len")
    long = str(made["excess_length_strategy"] or "drop")
    overflow = {"drop": "drop", "truncate": "truncate", "raise": "error"}.get(long)
    if overflow and method != "grpo":
        made.set("data.overflow", overflow, "excess_length_strategy")
    packs = bool(made["sample_packing"]) or bool(pretraining)
    if method != "grpo":
        common.packing(made, packs and method == "sft", *(("sample_packing",) if made.says("sample_packing") else ()))
    if made["train_on_inputs"]:
        made.set("data.train_on", "all")


def _entry(made: Translation, entry: Mapping[str, Any], method: str, pretraining: bool) -> list[str]:
    """The names of the rows of one entry of `datasets`, with its columns and template in the recipe."""
    section = made.table.sections["datasets"]
    path, files = str(entry.get("path")), entry.get("data_files")
    config, split = entry.get("name"), entry.get("split")
    if files:
        names = _files(made, path, files)
    elif (config or split not in (None, "train")) and not _IS_FILE.search(path):
        names = [f"{path}:{config or ''}:{split or 'train'}"]
    else:
        names = [path]
    of = ", ".join(names)
    kind = entry.get("type")
    if pretraining:
        common.columns(made, {"text": entry.get("text_column") or "text"}, of)
    elif isinstance(kind, Mapping):
        _own_format(made, kind, of, method)
    elif method in ("sft", "reward") and not (method == "reward" and kind is None):
        _supervised(made, entry, kind, of, method)
    elif method != "grpo":
        _preferences(made, entry, str(kind or "chat_template.default"), of)
    elif kind is not None:
        made.lack(f"type of {of}", kind, "rows with a column prompt; the other columns go to the reward functions")
    for key in ("shards", "skip"):
        if entry.get(key):
            made.lack(f"{key} of {of}", entry[key], "[:N] behind a file or name reads its first N rows")
    if (weight := entry.get("weight")) not in (None, 1, 1.0):
        made.lack(f"weight of {of}", weight, "data.train = [[rows, weight], ...] mixes during the run, with steps")
    plain = {key: value for key, value in entry.items() if not _is_usual(key, value, made)}
    made.leftovers(section, plain, of)
    return names


def _is_usual(key: str, value: Any, made: Translation) -> bool:
    """Whether an entry's key says what rows are read as anyway."""
    usual = {
        "message_property_mappings": ({"role": "role", "content": "content"}, {"role": "from", "content": "value"}),
        "message_field_role": ("role", "from"),
        "message_field_content": ("content", "value"),
        "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]),
        "train_on_eos": ("turn",),
        "train_on_eot": ("turn",),
        "field_tools": ("tools",),
        "message_field_training": ("training", "train", "weight"),
        "chat_template": (made["chat_template"], None),
        "revision": ("main",),
    }
    return value in usual.get(key, ())


def _own_format(made: Translation, kind: Mapping[str, Any], of: str, method: str) -> None:
    names = {"instruction": "field_instruction", "input": "field_input", "output": "field_output"}
    if method != "sft":
        names = {"prompt": "field_prompt", "chosen": "field_chosen", "rejected": "field_rejected"}
        names |= {"completion": "field_completion", "label": "field_label"}
    names |= {"system": "field_system"}
    common.columns(made, {ours: kind[source] for ours, source in names.items() if kind.get(source)}, of)
    for key in kind.keys() - names.values():
        if kind[key]:
            made.lack(f"{key} of {of}", kind[key], "data.template: a .jinja file that writes it")


def _supervised(made: Translation, entry: Mapping[str, Any], kind: Any, of: str, method: str) -> None:
    family = str(kind).partition(".")[0]
    if kind == "completion":
        common.columns(made, {"text": entry.get("field") or "text"}, of)
        made.set("data.train_on", "all")
    elif family == "chat_template":
        field = entry.get("field_messages", "messages")
        common.columns(made, {} if field in ("messages", "conversations") else {"messages": field}, of)
        if made.get("data.template") is None:
            common.template(made, "tokenizer", of)
    elif kind == "alpaca":
        common.template(made, "alpaca", of)
    elif method == "reward" and kind in ("bradley_terry.chat_template", "bradley_terry.llama3"):
        if kind.endswith("llama3"):
            common.template(made, "llama-3", of)
    elif kind is not None:
        made.lack(f"type of {of}", kind, "data.template: a .jinja file that writes this form")


def _preferences(made: Translation, entry: Mapping[str, Any], kind: str, of: str) -> None:
    family, _, form = kind.partition(".")
    fields = {side: entry.get(f"field_{side}") or side for side in ("chosen", "rejected")}
    if family == "chat_template":
        prompt = {} if form == "argilla_chat" else {"prompt": entry.get("field_messages") or "messages"}
        if prompt.get("prompt") in ("messages", "conversations"):
            prompt = {}
        common.columns(made, {**prompt, **fields}, of)
        if made.get("data.template") is None:
            common.template(made, "tokenizer", of)
    elif family in ("chatml", "llama3"):
        common.template(made, {"chatml": "chatml", "llama3": "llama-3"}[family], of)
        asked = {"intel": "question", "icr": "input", "ultra": "prompt", "prompt_pairs": "prompt"}.get(form)
        if asked:
            common.columns(made, {"prompt": asked, **fields}, of)
        elif form not in ("", "default", "argilla_chat", "argilla"):
            made.lack(f"type of {of}", kind, "rows with prompt, chosen and rejected")
    else:
        made.lack(f"type of {of}", kind, "rows with prompt, chosen and rejected; data.template writes their form")


def _files(made: Translation, path: str, files: Any) -> list[str]:
    names = [files] if isinstance(files, str) else files
    if isinstance(names, list) and (path in _READERS or Path(path).expanduser().is_dir()):
        return [str(name) if path in _READERS else str(Path(path) / str(name)) for name in names]
    made.lack(f"data_files of {path}", files, "local files: data.train names each of them")
    return [path]


def _adapter(made: Translation) -> None:
    kind = made["adapter"]
    common.quantised(made, bool(made["load_in_4bit"]) or kind == "qlora", bool(made["load_in_8bit"]))
    if made["lora_model_dir"]:
        made.set("adapter.path", made["lora_model_dir"])
    elif kind in ("lora", "qlora"):
        for key, ours, default in (("lora_r", "r", 8), ("lora_alpha", "lora_alpha", 8)):
            made.set(f"adapter.{ours}", default if made[key] is None else made[key])
        if made["lora_dropout"]:
            made.set("adapter.lora_dropout", made["lora_dropout"])
        _targets(made)
    elif kind is not None:
        raise ConfigError(f"adapter = {kind!r}: a method of axolotl that jaxtune does not have; lora, qlora, or none")
    else:
        made.set("adapter", None)
        if made.get("model.load_in"):
            raise ConfigError("load_in_4bit without adapter: quantised weights train through an adapter alone")


def _targets(made: Translation) -> None:
    modules, parameters = made["lora_target_modules"], made["lora_target_parameters"]
    if made["lora_target_linear"] or not (modules or parameters):
        made.set("adapter.target_modules", "all-linear")
    elif modules:
        made.set("adapter.target_modules", modules)
    if parameters:
        made.set("adapter.target_parameters", common.listed(parameters))
        if not modules and not made["lora_target_linear"]:
            made.set("adapter.target_modules", [])
    more = {"lora_modules_to_save": "modules_to_save", "peft_use_rslora": "use_rslora", "peft_use_dora": "use_dora"}
    more |= {"lora_rank_pattern": "rank_pattern", "lora_alpha_pattern": "alpha_pattern"}
    for key, ours in more.items():
        if made[key]:
            made.set(f"adapter.{ours}", made[key])
