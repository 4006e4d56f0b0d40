"""LLaMA-Factory's configs, with the data sets that its dataset_info.json registers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtune.convert import common, factory_templates
from jaxtune.convert.translation import Translation, short
from jaxtune.system.files import read_plain
from jaxtune.train.config import ConfigError
from jaxtune.train.config.sections import OPTIMIZERS

_STAGES = {"sft": "sft", "pt": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto"}
_LOSSES = {"sigmoid": "dpo", "ipo": "dpo", "hinge": "dpo", "orpo": "orpo", "simpo": "simpo"}
_OTHER_OPTIMIZERS = ("use_galore", "use_apollo", "use_badam", "use_adam_mini")
_TYPES = dict.fromkeys(("file_name", "hf_hub_url", "subset", "split", "folder"), "text") | {"columns": "mapping"}
_TYPES |= {"tags": "mapping", "ranking": "bool", "num_samples": "int", "formatting": '"alpaca"|"sharegpt"|"openai"'}
_ELSEWHERE = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")  # rows that no reader reaches


def translate(recipe: Translation, folder: Path) -> None:
    """Fills the recipe from LLaMA-Factory's config, in an order in which later keys read what earlier ones set.
    ConfigError for a stage that no recipe can mean. folder: the config's, for dataset_info.json.
    """
    path = recipe["model_name_or_path"]
    if recipe["train_from_scratch"] and recipe["finetuning_type"] != "full":
        raise ConfigError("train_from_scratch = true: random weights are all trained; set finetuning_type: full")
    if recipe["train_from_scratch"]:
        recipe.set("model.from_config", str(Path(path) / "config.json"))
        recipe.set("model.tokenizer", path)
    else:
        recipe.set("model.path", path)
    stage = recipe["stage"]
    if not recipe["do_train"] and recipe.sets("do_train", "do_predict", "do_eval", "predict_with_generate"):
        recipe.lack("do_train", False, "a recipe trains; `jaxtune evaluate` and `jaxtune generate` do not")
    if stage not in _STAGES:
        raise ConfigError(
            f"stage = {stage!r}: jaxtune has no such method; learning from rewards is objective.name=grpo, with "
            "functions or a reward model behind one"
        )
    method = _objective(recipe, stage)
    _data(recipe, folder, stage, method)
    _adapter(recipe)
    common.batch(recipe, "per_device_train_batch_size", method)
    common.length_of_run(recipe, "num_train_epochs")
    common.warmup(recipe)
    for key in _OTHER_OPTIMIZERS:
        if recipe[key]:
            recipe.lack(key, True, f"optim.name: {', '.join(OPTIMIZERS)}")
    recipe.choose(("optim",), "optim.name", recipe.table.optimizers)
    if recipe["use_muon"]:
        recipe.set("optim.name", "muon")
    common.schedule(recipe, "lr_scheduler_type")
    common.precision(
        recipe, bool(recipe["bf16"] or recipe["pure_bf16"]), bool(recipe["fp16"]), "bf16", "fp16", "pure_bf16"
    )
    common.weights(recipe, bool(recipe["pure_bf16"]), "pure_bf16")
    common.held_out(recipe, "val_size")
    common.saves(recipe)
    common.early_stop(recipe, "early_stopping_steps")
    common.trainer_keys(recipe)
    if recipe.get("data.streaming"):
        recipe.set_same(recipe.table.top, recipe.config, recipe.defaults, "data.buffer_size")
    recipe.leftovers(recipe.table.top, recipe.config)


def _objective(recipe: Translation, stage: str) -> str:
    """Sets `objective`, and returns its name. ConfigError for a loss that is not here."""
    name = _STAGES[stage]
    if name == "dpo":
        loss = recipe["pref_loss"]
        if loss not in _LOSSES:
            raise ConfigError(f"pref_loss = {loss!r}: jaxtune has {', '.join(_LOSSES)}")
        name = _LOSSES[loss]
        recipe.set("objective.name", name)
        if loss in ("ipo", "hinge"):
            recipe.set("objective.loss_type", loss)
        if recipe["dpo_label_smoothing"] and loss == "sigmoid":
            recipe.set("objective.label_smoothing", recipe["dpo_label_smoothing"])
        if name == "simpo":
            recipe.set("objective.simpo_gamma", recipe["simpo_gamma"])
    elif name != "sft":
        recipe.set("objective.name", name)
    if name in ("dpo", "orpo", "simpo", "kto"):
        recipe.set("objective.beta", recipe["pref_beta"])
    if name == "kto":
        recipe.set("objective.desirable_weight", recipe["kto_chosen_weight"])
        recipe.set("objective.undesirable_weight", recipe["kto_rejected_weight"])
    return name


def _data(recipe: Translation, folder: Path, stage: str, method: str) -> None:
    """Sets the section `data`. folder: the config's, where dataset_info.json is looked for."""
    dataset_info = _dataset_info(folder, str(recipe["dataset_dir"]))
    most = recipe["max_samples"]
    for key, source in (("data.train", "dataset"), ("data.eval", "eval_dataset")):
        names = [_registered(recipe, name, dataset_info, method) for name in common.listed(recipe[source])]
        common.rows(recipe, key, [f"{name}[:{most}]" if most else name for name in names])
    _pictures(recipe, dataset_info)
    recipe.set("data.length", recipe["cutoff_len"], "cutoff_len")
    recipe.notes.append("data.length: longer rows lose their end; there of each turn the question and the answer do")
    if recipe["streaming"]:
        if recipe["max_steps"] > 0:
            recipe.set("data.streaming", True)
        else:
            recipe.notes.append("data.streaming is off, as epochs of a stream cannot be counted")
    _mixture(recipe)
    packs = bool(recipe["neat_packing"]) or (stage == "pt" if recipe["packing"] is None else bool(recipe["packing"]))
    common.packing(recipe, method, packs, *(("packing",) if recipe.sets("packing", "neat_packing") else ()))
    if packs and stage != "pt" and not recipe["neat_packing"]:
        recipe.notes.append("data.packing: documents of a row do not see each other; there only with neat_packing")
    if recipe["train_on_prompt"] or stage == "pt":
        recipe.set("data.train_on", "all")
    if recipe["mask_history"]:
        recipe.set("data.last_response_only", True)
    if stage == "pt":
        recipe.lack(
            "BOS of texts", True, "a tokenizer that writes BOS does so here; there if its add_bos_token says so"
        )
        if packs:
            recipe.set("data.overflow", "split")
            recipe.notes.append("data.packing: texts stay whole in a row; there blocks of cutoff_len cut through them")
        return
    _template(recipe, method)


_TOWERS = {(False, False): "all", (False, True): "layers", (True, False): "merger"}  # by what is frozen


def _shows(entry: Mapping[str, object]) -> bool:
    """Whether the rows of a registered data set have pictures."""
    columns = entry.get("columns")
    return isinstance(columns, Mapping) and bool(columns.get("images"))


def _pictures(recipe: Translation, dataset_info: Mapping[str, Mapping[str, object]]) -> None:
    """Sets where pictures are, how large they may be, and what of the tower trains, if a set of rows has any."""
    names = [name for key in ("dataset", "eval_dataset") for name in common.listed(recipe[key])]
    shown = [name for name in names if _shows(dataset_info.get(name, {}))]
    if not shown:
        return
    media = recipe["media_dir"]
    recipe.set("data.images", str(media or dataset_info[shown[0]]["base"]))
    recipe.set("data.max_pixels", recipe["image_max_pixels"], "image_max_pixels")
    if recipe.sets("image_min_pixels"):
        fewest = recipe["image_min_pixels"]
        recipe.lack("image_min_pixels", fewest, "the least that the model's preprocessor_config.json says is taken")
    tower = _TOWERS.get((bool(recipe["freeze_vision_tower"]), bool(recipe["freeze_multi_modal_projector"])))
    if tower is not None:
        recipe.set("model.tower", tower)
    if recipe["template"] is not None:
        recipe.set("data.template", "tokenizer")
        why = "rows with pictures are written by the tokenizer's own template"
        recipe.lack("template", recipe["template"], f"{why}, in which a system message or spaces may differ")


def _template(recipe: Translation, method: str) -> None:
    """data.template: what the named template writes; ConfigError for an unknown name."""
    name = recipe["template"]
    if name is None:
        recipe.set("data.template", "tokenizer")
        if recipe["default_system"]:
            recipe.lack("default_system", recipe["default_system"], "a chat template that writes it (data.template)")
        return
    form = factory_templates.forms().get(str(name))
    if form is None:
        raise ConfigError(f"template = {name!r}: LLaMA-Factory {recipe.table.versions['llamafactory']} has no such one")
    if recipe.get("data.template") is not None:  # that of pictures
        return
    last_only = method != "sft" or (bool(recipe["mask_history"]) and not recipe["preserve_thinking"])
    text = factory_templates.jinja(form, recipe["default_system"], recipe["enable_thinking"], last_only)
    recipe.set("data.template", text)
    if recipe.get("data.train_on") is None:
        recipe.set("data.train_on", "turns")
    if form.get("efficient_eos") and method == "sft":
        recipe.notes.append(f"data.template: {name} trains on EOS between turns, too, where its rows have no EOS")
    if factory_templates.joins(form):
        recipe.lack("template", name, "an answer's first letters may share a token with its prompt; there they do not")
    if not factory_templates.begins_with_bos(form):
        recipe.notes.append(f"data.template: {name} writes no BOS; a tokenizer that adds one does so here")


def _mixture(recipe: Translation) -> None:
    """data.train with shares, if rows are interleaved by probabilities."""
    given = recipe["interleave_probs"]
    try:
        shares = [float(share) for share in common.listed(given)]
    except ValueError:
        raise ConfigError(f"interleave_probs = {short(given)}: numbers, with commas between them") from None
    names = recipe.get("data.train")
    if not shares or recipe["mix_strategy"] == "concat" or not isinstance(names, list):
        return
    if len(shares) != len(names) or not recipe["max_steps"] > 0:
        recipe.lack("interleave_probs", shares, "data.train = [[rows, weight], ...], which needs max_steps")
    else:
        recipe.set("data.train", [[name, share] for name, share in zip(names, shares, strict=True)])


def _adapter(recipe: Translation) -> None:
    """Sets `adapter`, and the format of the frozen weights; ConfigError for a method that is not here."""
    bits = recipe["quantization_bit"]
    if bits not in (None, 4, 8):
        raise ConfigError(f"quantization_bit = {bits}: 4 (model.load_in=nf4) or 8 (int8)")
    if recipe["quantization_method"] not in ("bnb", "bitsandbytes"):
        recipe.lack("quantization_method", recipe["quantization_method"], "model.load_in")
    common.quantised(recipe, bits == 4, bits == 8)
    kind = recipe["finetuning_type"]
    if kind not in ("lora", "full"):
        raise ConfigError(f"finetuning_type = {kind!r}: a method that jaxtune does not have; lora and full")
    if path := recipe["adapter_name_or_path"]:
        if recipe["create_new_adapter"]:
            recipe.lack("create_new_adapter", True, "export the adapter merged, and train a new one over that")
        recipe.set("adapter.path", path)
        return
    if kind == "full":
        recipe.set("adapter", None)
        return
    rank = recipe["lora_rank"]
    recipe.set("adapter.r", rank)
    recipe.set("adapter.lora_alpha", recipe["lora_alpha"] if recipe["lora_alpha"] is not None else 2 * rank)
    common.dropout(recipe, is_off=recipe["stage"] in ("dpo", "kto"))
    modules = common.listed(recipe["lora_target"])
    recipe.set("adapter.target_modules", "all-linear" if modules == ["all"] else modules)
    if parameters := common.listed(recipe["lora_target_parameters"]):
        recipe.set("adapter.target_parameters", parameters)
    common.set_kind(recipe, "additional_target")


def _dataset_info(folder: Path, name: str) -> dict[str, Any]:
    """Entries of dataset_info.json below `folder` or the current folder, with its folder as "base"."""
    for base in (folder, Path()):
        path = base / name / "dataset_info.json"
        if path.is_file():
            try:
                entries = json.loads(read_plain(path).decode("utf-8-sig"))
            except (ValueError, OSError) as error:
                raise ConfigError(f"{path} is no JSON: {error}") from None
            if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
                raise ConfigError(f"{path} is no object of data sets, each an object such as {{'file_name': 'a.json'}}")
            return {key: {**entry, "base": str(base / name)} for key, entry in entries.items()}
    return {}


def _registered(recipe: Translation, name: str, dataset_info: Mapping[str, Any], method: str) -> str:
    """The file or hub name of a registered data set; sets its columns in the recipe."""
    entry = dataset_info.get(name)
    if entry is None:
        recipe.lack(f"data set {name}", name, "it is not in dataset_info.json: put its file or hub name there")
        return name
    entry = recipe.fitted(_TYPES, entry, name)
    for key in ("columns", "tags"):
        entry[key] = recipe.fitted(
            dict.fromkeys(entry.get(key) or (), "text"), entry.get(key) or {}, f"{key} of {name}"
        )
    common.columns(recipe, _columns(entry, method, recipe, name), name)
    tags = entry["tags"]
    usual = {"role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": ("human", "user")}
    usual |= {"assistant_tag": ("gpt", "assistant"), "system_tag": ("system",)}
    usual |= {"observation_tag": ("observation", "tool"), "function_tag": ("function_call", "function")}
    for tag, value in tags.items():
        if value not in usual.get(tag, ()):
            recipe.lack(f"{tag} of {name}", value, "rename it in the rows")
    lost = {"num_samples": f"{name}[:N] behind its file or name reads its first N rows"}
    file = entry.get("file_name")
    if file and not any(entry.get(key) for key in ("hf_hub_url", *_ELSEWHERE)):  # which the program looks for first
        [source] = common.of_split(recipe, [str(Path(entry["base"]) / file)], entry.get("split"), name)
    elif "hf_hub_url" in entry:
        lost["folder"] = "a file, or a data set with these rows at its top"
        source = ":".join([entry["hf_hub_url"], entry.get("subset") or "", entry.get("split") or ""]).rstrip(":")
    else:
        lost |= dict.fromkeys(_ELSEWHERE, "a file, or a data set of huggingface.co")
        source = name
    for key, fix in lost.items():
        if entry.get(key):
            recipe.lack(f"{key} of {name}", entry[key], fix)
    return source


def _columns(entry: Mapping[str, Any], method: str, recipe: Translation, name: str) -> dict[str, str]:
    """{our column: source} of an entry."""
    entry_columns = dict(entry.get("columns") or {})
    pairs = method != "sft"
    for key in ("videos", "audios"):
        if entry_columns.pop(key, None):
            recipe.lack(f"{key} of {name}", key, "only text and pictures can be trained on")
    if entry_columns.get("tools") and recipe["template"] is not None and not entry_columns.get("images"):
        recipe.lack(f"tools of {name}", entry_columns["tools"], "data.template=tokenizer, if the model's own has tools")
    history = entry_columns.pop("history", None)
    ours_too = ("system", "tools", "chosen", "rejected", "images")
    names = {ours: entry_columns[ours] for ours in ours_too if entry_columns.get(ours)}
    if entry_columns.get("kto_tag"):
        names["label"] = entry_columns["kto_tag"]
    if entry.get("formatting", "alpaca") == "alpaca":
        prompt, query, response = entry_columns.get("prompt"), entry_columns.get("query"), entry_columns.get("response")
        if not entry_columns:
            prompt, query, response = "instruction", "input", "output"
        if recipe["stage"] == "pt":
            return {"text": prompt} if prompt else {}
        prompt_text = f"{{{prompt}}}\n{{{query}}}" if prompt and query else prompt or query
        answer = {"sft": "output", "kto": "completion"}.get(method)
        names |= {"prompt" if pairs else "instruction": prompt_text} if prompt_text else {}
        names |= {"history": history} if history else {}
        return names | ({answer: response} if answer and response else {})
    field = entry_columns.get("messages") or "conversations"
    if pairs and method != "kto" and field not in ("messages", "conversations"):
        return names | {"prompt": field}
    return names if field in ("messages", "conversations") else names | {"messages": field}
