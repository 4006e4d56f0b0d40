"""axolotl's configs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtune.convert import common, factory_templates
from jaxtune.convert.translation import Translation
from jaxtune.train.config import ConfigError
from jaxtune.train.data.rendering.packaged import PACKAGED

_METHODS = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo", "grpo": "grpo", "gdpo": "grpo"}


def translate(recipe: Translation, folder: Path) -> None:
    """Fills the recipe from axolotl's config, in an order in which later keys read what earlier ones set. ConfigError
    for a method that no recipe can mean.
    """
    del folder
    recipe.set("model.path", recipe["base_model"])
    if recipe.sets("tokenizer_config") and recipe["tokenizer_config"] != recipe["base_model"]:
        recipe.set("model.tokenizer", recipe["tokenizer_config"])
    for key in ("overrides_of_model_config", "model_config"):
        common.model_options(recipe, key)
    if scaling := recipe["rope_scaling"]:
        common.rope_scaling(recipe, "rope_scaling", scaling if isinstance(scaling, dict) else {"type": scaling})
    method = _objective(recipe)
    _chat_template(recipe)
    _data(recipe, method)
    _tokens(recipe)
    _pictures(recipe)
    _adapter(recipe)
    if recipe.sets("batch_size") and not recipe.sets("gradient_accumulation_steps"):
        recipe.set("rows_per_step", recipe["batch_size"])
    else:
        common.batch(recipe, "micro_batch_size", method)
    common.length_of_run(recipe, "num_epochs")
    common.warmup(recipe, implied_ratio=0.03)
    if recipe.get("schedule.warmup_ratio") == 0.03 and not recipe.sets("warmup_ratio"):
        recipe.notes.append("schedule.warmup_ratio: axolotl's 3 % has at most 100 steps")
    recipe.choose(("optimizer",), "optim.name", recipe.table.optimizers)
    common.schedule(recipe, "lr_scheduler")
    bf16, fp16 = recipe.first("bf16", "bfloat16"), recipe.first("fp16", "float16")
    half = bf16 in (True, "auto") and not recipe["float32"]
    common.precision(recipe, half, bool(fp16), "bf16", "fp16")
    common.weights(recipe, half and not recipe.sets("deepspeed", "fsdp", "fsdp_config"), "bf16")
    common.held_out(recipe, "val_set_size")
    common.saves(recipe)
    common.early_stop(recipe, "early_stopping_patience")
    if (noise := recipe["noisy_embedding_alpha"]) and not recipe.sets("neftune_noise_alpha"):
        recipe.set("neftune_noise_alpha", noise)
    recipe.set_same(recipe.table.top, recipe.config, recipe.defaults, "optim.")
    if recipe["lr_scheduler"] == "cosine":
        recipe.set_same(recipe.table.top, recipe.config, recipe.defaults, "schedule.min_ratio")
    elif recipe.sets("cosine_min_lr_ratio"):
        recipe.notes.append("cosine_min_lr_ratio: axolotl reads it with lr_scheduler = cosine only")
    for prefix in ("max_grad_norm", "seed", "neftune", "output", "checkpoint.keep", "metrics."):
        recipe.set_same(recipe.table.top, recipe.config, recipe.defaults, prefix)
    for prefix in ("data.num_workers", "evaluation.at_start", "deterministic"):
        recipe.set_same(recipe.table.top, recipe.config, {}, prefix)
    if method == "dpo" and recipe["precompute_ref_log_probs"]:
        recipe.set("objective.precompute_ref_log_probs", True)
    if qat := recipe["qat"]:
        recipe.lack("qat", qat, "qat.format is int4, int8, fp8, nvfp4, mxfp4 and others")
    ours = {key: value for key, value in recipe.config.items() if not _of_kernels(key)}
    recipe.leftovers(recipe.table.top, ours)


_KERNELS = ("liger_", "cut_cross_entropy")  # keys of plugins that change no number


def _of_kernels(key: str) -> bool:
    return key.startswith(_KERNELS)


def _pictures(recipe: Translation) -> None:
    """Rows of a model with a processor, whose masks the program finds by its chat_template."""
    if recipe["processor_type"]:
        recipe.lack(
            "processor_type",
            recipe["processor_type"],
            "answers are trained on; there all text of rows with pictures, unless the program knows the template's "
            "turns: for that data.train_on=all",
        )


def _tokens(recipe: Translation) -> None:
    """Special tokens that change the rows, and plugins that are more than kernels."""
    tokens = {key: value for key, value in (recipe["special_tokens"] or {}).items() if value and key != "pad_token"}
    template = PACKAGED.get(str(recipe.get("data.template")))
    if template is not None and str(tokens.get("eos_token")) in template.text:
        del tokens["eos_token"]  # the template ends turns with it
    if tokens:
        recipe.lack("special_tokens", tokens, "a tokenizer whose special tokens are these (model.tokenizer)")
    plugins = [name for name in recipe["plugins"] or [] if str(name).split(".")[2:3] not in _PLUGINS]
    if plugins:
        recipe.lack("plugins", plugins, "kernels and losses are part of jaxtune")
    if recipe["num_labels"] not in (None, 1):
        recipe.lack("num_labels", recipe["num_labels"], "a reward model has one score (objective: reward)")


_PLUGINS = (["liger"], ["cut_cross_entropy"], ["kernels"])


def _objective(recipe: Translation) -> str:
    """Sets `objective`, and returns its name. ConfigError for a method that is not here."""
    rl = recipe["rl"]
    if recipe["reward_model"]:
        recipe.set("objective.name", "reward")
        if (weight := recipe["center_rewards_coefficient"]) is not None:
            recipe.set("objective.center_rewards_coefficient", weight)
        return "reward"
    if not rl:
        return "sft"
    if rl not in _METHODS:
        raise ConfigError(f"rl = {rl!r}: a method of axolotl that jaxtune does not have; {', '.join(_METHODS)}")
    name = _METHODS[rl]
    recipe.set("objective.name", name)
    if name == "grpo":
        _grpo(recipe, rl)
        return name
    beta = recipe.first("rl_beta", "dpo_beta", "orpo_alpha")
    if beta is not None:
        recipe.set("objective.beta", beta)
    if rl == "ipo":
        recipe.set("objective.loss_type", "ipo")
    elif name == "dpo" and (losses := common.listed(recipe["dpo_loss_type"])):
        if losses in (["sigmoid"], ["ipo"], ["hinge"]):
            recipe.set("objective.loss_type", losses[0])
        else:
            raise ConfigError(f"dpo_loss_type = {losses}: jaxtune has sigmoid, ipo and hinge, one at a time")
    if name == "dpo" and recipe["dpo_label_smoothing"]:
        recipe.set("objective.label_smoothing", recipe["dpo_label_smoothing"])
    if name == "simpo" and recipe["simpo_gamma"] is not None:
        recipe.set("objective.simpo_gamma", recipe["simpo_gamma"])
    if name == "kto":
        for key, ours in (("kto_desirable_weight", "desirable"), ("kto_undesirable_weight", "undesirable")):
            if recipe[key]:
                recipe.set(f"objective.{ours}_weight", recipe[key])
    return name


def _grpo(recipe: Translation, rl: str) -> None:
    """Sets the objective's keys of the section `trl`."""
    section = recipe.table.sections["trl"]
    trl_values = recipe.fitted(section.types, recipe["trl"] or {}, "trl")
    recipe.set_same(section, trl_values, {})
    beta = trl_values.get("beta", recipe["rl_beta"])
    if beta is not None:
        recipe.set("objective.beta", beta)
    if rl == "gdpo" and "multi_objective_aggregation" not in trl_values:
        recipe.set("objective.multi_objective_aggregation", "normalize_then_sum")
    if "scale_rewards" in trl_values:
        scale = trl_values["scale_rewards"]
        recipe.set("objective.scale_rewards", {True: "group", False: "none"}.get(scale, scale))
    functions = common.functions(recipe, common.listed(trl_values.get("reward_funcs")))
    if rollout := common.functions(recipe, common.listed(trl_values.get("rollout_func")), "rollout_func"):
        recipe.set("objective.rollout_func", rollout[0])
    if functions:
        recipe.set("objective.reward_funcs", functions)
    elif not trl_values.get("rollout_func"):
        raise ConfigError("trl.reward_funcs is empty: grpo needs reward functions, as module.function")
    rows = (recipe["micro_batch_size"] or 1) * (recipe["gradient_accumulation_steps"] or 1)
    if size := trl_values.get("generation_batch_size"):
        if size % rows:
            recipe.lack("generation_batch_size of trl", size, f"not a multiple of the {rows} answers of a step")
        elif size > rows:
            recipe.set("objective.steps_per_generation", size // rows)
    recipe.leftovers(section, trl_values, "trl")


def _chat_template(recipe: Translation) -> None:
    name = recipe["chat_template"]
    if recipe["chat_template_jinja"]:
        recipe.set("data.template", recipe["chat_template_jinja"])
    elif name is None:
        return
    elif str(name) in recipe.table.templates:
        recipe.set("data.template", recipe.table.templates[str(name)])
    elif str(name).startswith("tokenizer_default"):
        recipe.set("data.template", "tokenizer")
    else:
        recipe.lack("chat_template", name, "data.template names a packaged template or a .jinja file")


def _data(recipe: Translation, method: str) -> None:
    """Sets data.train and data.eval of all entries, and how their rows are read."""
    types, pretraining = recipe.table.sections["datasets"].types, recipe["pretraining_dataset"]
    entries = pretraining or recipe["datasets"] or []
    entries = [
        recipe.fitted(types, {"path": dataset} if isinstance(dataset, str) else dataset, "datasets")
        for dataset in ([entries] if isinstance(entries, Mapping | str) else entries)
    ]
    common.rows(
        recipe, "data.train", [rows for entry in entries for rows in _entry(recipe, entry, method, bool(pretraining))]
    )
    plain = [str(entry.get("path")) for entry in entries if method == "sft" and entry.get("type") == "alpaca"]
    common.plain_prompts(recipe, plain, len(entries))
    common.rows(
        recipe,
        "data.eval",
        [
            rows
            for entry in recipe["test_datasets"] or []
            for rows in _entry(recipe, recipe.fitted(types, entry, "test_datasets"), method, False)
        ],
    )
    if pretraining or recipe["streaming"]:
        if (recipe["max_steps"] or 0) > 0:
            recipe.set("data.streaming", True)
        else:
            recipe.notes.append("data.streaming is off, as epochs of a stream cannot be counted")
    if pretraining:
        recipe.set("data.train_on", "all")
    if method != "grpo":
        recipe.set("data.length", recipe["sequence_len"], "sequence_len")
    long = str(recipe["excess_length_strategy"] or "drop")
    overflow = {"drop": "drop", "truncate": "truncate", "raise": "error"}.get(long)
    if overflow and method != "grpo":
        recipe.set("data.overflow", overflow, "excess_length_strategy")
    packs = bool(recipe["sample_packing"]) or bool(pretraining)
    if method != "grpo":
        common.packing(recipe, method, packs, *(("sample_packing",) if recipe.sets("sample_packing") else ()))
    if recipe["train_on_inputs"]:
        recipe.set("data.train_on", "all")


def _entry(recipe: Translation, entry: Mapping[str, Any], method: str, pretraining: bool) -> list[str]:
    """The names of an entry's rows in `datasets`; sets its columns and template in the recipe."""
    section = recipe.table.sections["datasets"]
    path, files = str(entry.get("path")), entry.get("data_files")
    config, split = entry.get("name"), entry.get("split")
    if files or common.is_local(path):
        names = common.files_of(recipe, path, files) if files else [path]
        names = common.of_split(recipe, names, split, ", ".join(names))
    elif config or split not in (None, "train"):
        names = [f"{path}:{config or ''}:{split or 'train'}"]
    else:
        names = [path]
    label = ", ".join(names)
    if (files or common.is_local(path)) and entry.get("ds_type") not in (None, *common.READERS[:3]):
        recipe.lack(f"ds_type of {label}", entry["ds_type"], f"one of {', '.join(common.READERS[:3])}")
    kind, sets = entry.get("type"), len(recipe.renames)
    if pretraining:
        common.columns(recipe, {"text": entry.get("text_column") or "text"}, label)
    elif isinstance(kind, Mapping):
        _own_format(recipe, kind, label, method)
    elif method in ("sft", "reward") and not (method == "reward" and kind is None):
        _supervised(recipe, entry, kind, label, method)
    elif method != "grpo":
        _preferences(recipe, entry, str(kind or "chat_template.default"), label)
    elif kind is not None:
        recipe.lack(f"type of {label}", kind, "rows with a column prompt; the other columns go to the reward functions")
    if len(recipe.renames) == sets:  # nothing was renamed
        common.columns(recipe, {}, label)
    for key in ("shards", "skip"):
        if entry.get(key):
            recipe.lack(f"{key} of {label}", entry[key], "[:N] behind a file or name reads its first N rows")
    if (weight := entry.get("weight")) not in (None, 1, 1.0):
        recipe.lack(f"weight of {label}", weight, "data.train = [[rows, weight], ...] mixes during the run, with steps")
    plain = {key: value for key, value in entry.items() if not _is_usual(key, value, recipe)}
    recipe.leftovers(section, plain, label)
    return names


def _is_usual(key: str, value: Any, recipe: Translation) -> bool:
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
        "chat_template": (recipe["chat_template"], None),
        "field_thinking": ("reasoning_content", "thinking"),
        "template_thinking_key": ("reasoning_content", "thinking"),
        "revision": ("main",),
    }
    if key == "roles":
        value = recipe.fitted(dict.fromkeys(value, "list[text]"), value, "roles of datasets")
        return all(name == role or name in _ROLES.get(role, ()) for role, names in value.items() for name in names)
    return value in usual.get(key, ())


_ROLES = {
    "user": ("human",),
    "assistant": ("gpt", "function_call"),
    "tool": ("observation",),
}  # what rows may call a role


def _own_format(recipe: Translation, kind: Mapping[str, Any], label: str, method: str) -> None:
    names = {"instruction": "field_instruction", "input": "field_input", "output": "field_output"}
    if method != "sft":
        names = {"prompt": "field_prompt", "chosen": "field_chosen", "rejected": "field_rejected"}
        names |= {"completion": "field_completion", "label": "field_label"}
    names |= {"system": "field_system"}
    common.columns(recipe, {ours: kind[source] for ours, source in names.items() if kind.get(source)}, label)
    for key in kind.keys() - names.values():
        if kind[key]:
            recipe.lack(f"{key} of {label}", kind[key], "data.template: a .jinja file that writes it")


def _supervised(recipe: Translation, entry: Mapping[str, Any], kind: Any, label: str, method: str) -> None:
    """Sets columns, template and train_on of an entry for fine-tuning. kind: its `type`; label: what messages call
    it.
    """
    family = str(kind).partition(".")[0]
    if kind == "completion":
        common.columns(recipe, {"text": entry.get("field") or "text"}, label)  # texts train whole
    elif family == "chat_template":
        field = entry.get("field_messages", "messages")
        common.columns(recipe, {} if field in ("messages", "conversations") else {"messages": field}, label)
        if recipe.get("data.template") is None:
            common.template(recipe, "tokenizer", label)
        recipe.only_rows = True
        if recipe.get("data.template") == "qwen-3":
            recipe.set("data.template", _thought_untrained())
    elif kind == "alpaca":
        recipe.apart = True
    elif method == "reward" and kind in ("bradley_terry.chat_template", "bradley_terry.llama3"):
        recipe.lack(f"type of {label}", kind, "a system message that is empty is left out; there its turn is written")
        if kind.endswith("llama3"):
            common.template(recipe, "llama-3", label)
    elif kind is not None:
        recipe.lack(f"type of {label}", kind, "data.template: a .jinja file that writes this form")


def _thought_untrained() -> str:
    """The template qwen-3, without training on an empty thought before an answer."""
    text, mark, write = PACKAGED["qwen-3"].text, "{%- generation %}\n", "{{- '<think>\\n' + thought.strip('\\n')"
    condition = "loop.index0 > asked.last and (loop.last or thought)"
    if not all(text.count(piece) == 1 for piece in (mark, write, condition)):
        raise AssertionError("the template qwen-3 has another form")
    empty = "{{ '<think>\\n\\n</think>\\n\\n' }}"
    empty_thought = "{%- if loop.index0 > asked.last and loop.last and not thought %}" + empty + "{% endif %}\n"
    text = text.replace(mark, "").replace(f"{{%- if {condition} %}}", empty_thought + mark + f"{{%- if {condition} %}}")
    return text.replace(write, "{{- '' if not thought else '<think>\\n' + thought.strip('\\n')")


def _preferences(recipe: Translation, entry: Mapping[str, Any], kind: str, label: str) -> None:
    """Sets columns and template of an entry with pairs. kind: its `type`; label: what messages call it."""
    family, _, form = kind.partition(".")
    fields = {side: entry.get(f"field_{side}") or side for side in ("chosen", "rejected")}
    if family == "chat_template" and recipe["rl"] == "orpo":
        common.columns(recipe, fields, label)
        if recipe["chat_template"] == "chatml":  # its trainer adds EOS behind the line break of the last turn
            form = factory_templates.forms()["chatml"].copy()
            form["efficient_eos"], form["replace_eos"] = True, False
            recipe.set("data.template", factory_templates.jinja(form, None, True, False))
            recipe.set("data.train_on", "turns")
        else:
            recipe.lack(f"type of {label}", kind, "there EOS is added behind what the template writes after an answer")
            common.template(recipe, str(recipe.get("data.template") or "tokenizer"), label)
    elif family == "chat_template":
        prompt = {} if form == "argilla_chat" else {"prompt": entry.get("field_messages") or "messages"}
        if prompt.get("prompt") in ("messages", "conversations"):
            prompt = {}
        common.columns(recipe, {**prompt, **fields}, label)
        if recipe.get("data.template") is None:
            common.template(recipe, "tokenizer", label)
        if recipe.get("data.template") == "llama-3":
            recipe.lack(f"type of {label}", kind, "BOS is written once; there the template and the tokenizer write it")
    elif family in ("chatml", "llama3"):
        # Texts as they are; packaged templates strip them.
        common.template(recipe, factory_templates.jinja(factory_templates.forms()[family], None, True, False), label)
        prompt_column = {"intel": "question", "icr": "input", "ultra": "prompt", "prompt_pairs": "prompt"}.get(form)
        if prompt_column:
            common.columns(recipe, {"prompt": prompt_column, **fields}, label)
        elif form not in ("", "default", "argilla_chat", "argilla"):
            recipe.lack(f"type of {label}", kind, "rows with prompt, chosen and rejected")
    else:
        recipe.lack(f"type of {label}", kind, "rows with prompt, chosen and rejected; data.template writes their form")


def _adapter(recipe: Translation) -> None:
    """Sets `adapter`, and the format of the frozen weights; ConfigError for a kind that is not here."""
    kind = recipe["adapter"]
    common.quantised(recipe, bool(recipe["load_in_4bit"]) or kind == "qlora", bool(recipe["load_in_8bit"]))
    if recipe["lora_model_dir"]:
        recipe.set("adapter.path", recipe["lora_model_dir"])
    elif kind in ("lora", "qlora"):
        for key, ours, default in (("lora_r", "r", 8), ("lora_alpha", "lora_alpha", 8)):
            recipe.set(f"adapter.{ours}", default if recipe[key] is None else recipe[key])
        common.dropout(recipe, is_off=recipe.get("objective.name") not in (None, "grpo"))
        _targets(recipe)
    elif kind is not None:
        raise ConfigError(f"adapter = {kind!r}: a method of axolotl that jaxtune does not have; lora, qlora, or none")
    else:
        recipe.set("adapter", None)
        common.refuse_quantised(recipe, "adapter")


def _targets(recipe: Translation) -> None:
    """Sets the adapter's target_modules and target_parameters."""
    modules, parameters = recipe["lora_target_modules"], recipe["lora_target_parameters"]
    if not (recipe["lora_target_linear"] or modules or parameters):
        recipe.lack(
            "lora_target_modules", modules, "nothing to adapt; all-linear is taken, as lora_target_linear: true"
        )
    if recipe["lora_target_linear"] or not (modules or parameters):
        recipe.set("adapter.target_modules", "all-linear")
    elif isinstance(modules, str) and not re.fullmatch(r"[\w.,\s-]+", modules):
        recipe.lack("lora_target_modules", modules, "adapter.target_modules: names such as q_proj; all-linear is taken")
        recipe.set("adapter.target_modules", "all-linear")
    elif modules:
        recipe.set("adapter.target_modules", modules)
    if parameters:
        recipe.set("adapter.target_parameters", common.listed(parameters))
        if not modules and not recipe["lora_target_linear"]:
            recipe.set("adapter.target_modules", [])
    options = {"lora_modules_to_save": "modules_to_save", "peft_use_rslora": "use_rslora", "peft_use_dora": "use_dora"}
    options |= {"lora_rank_pattern": "rank_pattern", "lora_alpha_pattern": "alpha_pattern"}
    for key, ours in options.items():
        if recipe[key]:
            recipe.set(f"adapter.{ours}", recipe[key])
