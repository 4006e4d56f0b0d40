"""The supported model families: a family by model_type, and config.json as a DecoderConfig. Configs and tensor names of
the parts of models with a vision tower are found here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jaxtune.models import values
from jaxtune.models.config import DecoderConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.families import (
    cohere2,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    gemma4_unified,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    lfm2,
    lfm2_moe,
    llama,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
)
from jaxtune.models.families.common import Family, tensor_name
from jaxtune.models.heads import head_of_class
from jaxtune.models.vision.tower import TowerConfig
from jaxtune.pallas.formats import Layout, format_of, layouts

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (
        llama,
        mistral,
        qwen2,
        qwen3,
        gemma2,
        gemma3,
        phi3,
        olmo2,
        smollm3,
        mixtral,
        qwen3_moe,
        gpt_oss,
        qwen3_next,
        qwen3_5,
        qwen3_5_moe,
        qwen2_moe,
        gemma,
        olmo3,
        ministral3,
        seed_oss,
        granite,
        glm4,
        cohere2,
        exaone4,
        gemma4,
        gemma4_unified,
        lfm2,
        lfm2_moe,
        glm4_moe,
    )
}
_LANGUAGE = "model.language_model."


def text_parts() -> dict[str, tuple[str, ...]]:
    """The models with a vision tower: {the whole model's model_type: the model_types that its text part may have}. A
    text part whose config names none has the first.
    """
    parts: dict[str, tuple[str, ...]] = {}
    for name, declared in FAMILIES.items():
        for whole_type in declared.text_of:
            parts[whole_type] = (*parts.get(whole_type, ()), name)
    return parts


def text_config(hf: dict) -> dict:
    """The text model's config: a parsed config.json unchanged if it has no vision tower; otherwise its text_config,
    with the outer file's quantisation, special tokens, dtype and tied embeddings where it has none, and a supported
    model_type.

    Raises ValueError for a missing text_config, or a model_type that is none of several possible ones.
    """
    text_types = text_parts()
    if hf.get("model_type") not in tuple(text_types):  # a tuple, because the value may be of a type that has no hash
        return hf
    text = hf.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"config.json of a {hf['model_type']!r} model lacks 'text_config', which holds its sizes")
    outer = (
        "quantization_config",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "dtype",
        "torch_dtype",
        "tie_word_embeddings",
    )
    first, *other_types = text_types[hf["model_type"]]
    text_type = text.get("model_type", first) if other_types else first
    if text_type not in (first, *other_types):
        raise ValueError(
            f"config.json: text_config.model_type {text_type!r} of a {hf['model_type']!r} model is not supported; "
            f"supported: {', '.join((first, *other_types))}"
        )
    return {key: hf[key] for key in outer if key in hf} | text | {"model_type": text_type}


def text_tensor_name(name: str, tower: TowerConfig | None = None) -> str | None:
    """The name here of a tensor of a model with a vision tower, as transformers 4 or 5 writes it: of a text tensor that
    in the text model alone, of a tower's that of transformers 5; None for "vision_tower." and "multi_modal_projector."
    unless they are of the tower that is loaded.
    """
    if tower is not None:
        if f"model.{name}".startswith(tower.prefixes):  # as transformers 4 wrote Gemma 3's
            name = f"model.{name}"
        loaded = _with_beginnings(name, {stored: name for name, stored in tower.stored_names.items()})
        if loaded.startswith(tower.prefixes):
            return loaded
    if name.startswith("visual."):
        return f"model.{name}"
    if any(module in name for module in ("vision_tower.", "multi_modal_projector.")):
        return None
    # transformers 4 wrote language_model.model.layers..., 5 writes model.language_model.layers...
    return name.replace(_LANGUAGE, "model.").removeprefix("language_model.")


def is_passthrough(name: str, model_type: str, tower: TowerConfig | None = None) -> bool:
    """Whether the tensor is not loaded but copied when the model is saved.

    model_type: the text part's.
    tower: the one that is loaded; None: none is.
    """
    loaded = tower is not None and (text_tensor_name(name, tower) or name).startswith(tower.prefixes)
    return not loaded and name.startswith(family(model_type).passthrough_tensors)


def tower_config(hf: dict) -> TowerConfig:
    """The TowerConfig of a parsed config.json. Raises ValueError for a model whose pictures are not supported, or a
    value that is not.
    """
    declared = family(text_config(hf).get("model_type"))
    if declared.tower is None or hf.get("model_type") not in declared.text_of:
        whole_types = [
            name
            for declared_family in FAMILIES.values()
            if declared_family.tower is not None
            for name in declared_family.text_of
        ]
        raise ValueError(
            f"pictures of a {hf.get('model_type')!r} model are not supported; they are of {', '.join(whole_types)}"
        )
    if not isinstance(hf.get("vision_config"), dict):
        raise ValueError(f"config.json of a {hf['model_type']!r} model lacks 'vision_config', which pictures need")
    return declared.tower(hf)


def names_of(config: DecoderConfig) -> dict[str, str]:
    """{norm, part or module: its name in checkpoints}, for `tensor_name`."""
    return {**family(config.family).norms, **dict(config.module_names)}


def tensor_names(model: Decoder) -> Callable[[Sequence[object]], str]:
    """The function from a tensor's path of attributes and indices in a model to its name: a text tensor's in the text
    model alone, a tower's in the whole model. Arrays may be abstract.
    """
    config, tower = model.config, model.vision
    names = names_of(config)

    def name_of(path: Sequence[object]) -> str:
        if tower is not None and path[0] == "vision":
            return tower.config.tensor_name(path[1:])
        return tensor_name(path, names, config.layers, config.head.name)

    return name_of


def tower_modules(model_type: str) -> tuple[str, ...]:
    """The modules beside the text model. An adapter's config excludes them if transformers builds the whole model,
    because their linears can have the text model's names. model_type: the text part's.
    """
    declared = tuple(prefix.removeprefix("model.").rstrip(".") for prefix in family(model_type).passthrough_tensors)
    return declared or ("vision_tower", "multi_modal_projector")


def is_nested(hf: dict) -> bool:
    """Whether transformers builds the whole model from a config.json, even as AutoModelForCausalLM, so that the text
    model's tensors and an adapter's have longer names: it does for Gemma 3 and 4 and Mistral 3, not for Qwen3.5.
    """
    if hf.get("model_type") not in tuple(text_parts()):
        return False
    return not family(text_config(hf)["model_type"]).text_alone


def _with_beginnings(name: str, changes: Mapping[str, str]) -> str:
    first = next((first for first in changes if name == first or name.startswith(f"{first}.")), None)
    return name if first is None else changes[first] + name.removeprefix(first)


def stored_tensor_name(name: str, tower: TowerConfig | None) -> str:
    """The name of a tensor of the text model alone, or of its tower, in checkpoints of the whole model."""
    return _with_beginnings(whole_tensor_name(name), {} if tower is None else tower.stored_names)


def whole_tensor_name(name: str) -> str:
    """The inverse of text_tensor_name, as transformers 5 writes it ("model.language_model." in place of "model.", but
    not of towers).
    """
    towers = ("model.vision_tower.", "model.multi_modal_projector.")
    towers += tuple(prefix for declared in FAMILIES.values() for prefix in declared.passthrough_tensors)
    text = name.startswith("model.") and not name.startswith(towers)
    return _LANGUAGE + name.removeprefix("model.") if text else name


def family(model_type: str | None) -> Family:
    """The Family of a text model's model_type. Raises ValueError for an unknown one or None."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported (a checkpoint's custom code is never run); "
            f"supported: {', '.join((*FAMILIES, *text_parts()))}"
        )
    return FAMILIES[model_type]


def weights_stored_in(hf: dict) -> str | None:
    """The format, such as "nf4", of a checkpoint's quantised weights by its config.json; None for no
    quantization_config, or a format that is decoded on loading, such as MXFP4. Raises ValueError for a quantisation
    that cannot be read.
    """
    layout = stated_layout(hf)
    return None if layout is None or layout.decoded_on_load else format_of(layout).name


def stated_layout(hf: dict) -> Layout | None:
    """The layout that quantization_config of a parsed config.json names; None without that key. Raises as
    weights_stored_in.
    """
    hf = text_config(hf)
    quantization = hf.get("quantization_config")
    if not quantization:
        return None
    settings = quantization if isinstance(quantization, dict) else {"quant_method": quantization}
    for layout in layouts():
        if (layout.families is None or hf.get("model_type") in layout.families) and layout.recognises(settings):
            layout.check(settings)
            return layout
    named = {
        key: settings[key] for key in ("quant_method", "format", "load_in_8bit", "quant_algo") if settings.get(key)
    }
    raise ValueError(
        f"config.json: quantization_config says {', '.join(f'{key} = {value!r}' for key, value in named.items())}; "
        f"of quantised checkpoints these can be loaded: {'; '.join(layout.title for layout in layouts())}: use the "
        "16-bit original"
    )


def config_from_hf(hf: dict) -> DecoderConfig:
    """The DecoderConfig of a parsed config.json, or of its text part. A ...ForSequenceClassification with one label is
    a reward model; with more it is refused.

    Raises ValueError, with key and value, for an unsupported feature or a value that cannot be right.
    """
    hf = text_config(hf)
    if hf.get("model_type") is not None:
        values.text("config.json: model_type", hf["model_type"])
    declared = family(hf.get("model_type"))
    weights_stored_in(hf)  # raises for a quantisation that cannot be read
    config = declared.from_hf(hf)
    architecture = str(next(iter(hf.get("architectures") or ()), ""))
    head = head_of_class(architecture)
    if head.is_text:
        return config
    labels = hf.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # as transformers has it
    if len(labels) != head.outputs:
        raise ValueError(
            f"config.json: {len(labels)} labels (id2label) of {architecture}: of models that classify only "
            "those with one label, reward models, can be loaded"
        )
    return dataclasses.replace(config, head=head, tie_embeddings=False)
