"""The supported model families: maps the model_type of a config.json to its family, and config.json to
DecoderConfig."""

from __future__ import annotations

import dataclasses
from types import ModuleType

from jaxtune.models.config import DecoderConfig
from jaxtune.models.families import (
    cohere2,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm4,
    gpt_oss,
    granite,
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
from jaxtune.models.families.types import checked
from jaxtune.models.heads import head_of_class
from jaxtune.pallas.formats import format_of, layouts

FAMILIES: dict[str, ModuleType] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "phi3": phi3,
    "olmo2": olmo2,
    "smollm3": smollm3,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen2_moe": qwen2_moe,
    "gemma": gemma,
    "olmo3": olmo3,
    "ministral3": ministral3,
    "seed_oss": seed_oss,
    "granite": granite,
    "glm4": glm4,
    "cohere2": cohere2,
    "exaone4": exaone4,
}

# Models with a vision tower, of which only the text part is loaded: {model_type: the model_types that the text part may
# have}; a text part that names none has the first.
TEXT_PARTS = {
    "gemma3": ("gemma3_text",),
    "mistral3": ("mistral", "ministral3"),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
# The families whose passthrough tensors are saved again, and the prefixes of these tensors.
_KEEPS_OTHER_PARTS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_OTHER_PARTS = ("model.visual.", "visual.", "mtp.")
_LANGUAGE = "model.language_model."


def text_config(hf: dict) -> dict:
    """A config.json unchanged if it is a text model's; else the text part of it, as a config of its own.

    Raises:
      ValueError: a model with a vision tower whose text part is missing or not supported.
    """
    if hf.get("model_type") not in tuple(TEXT_PARTS):
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
    first, *others = TEXT_PARTS[hf["model_type"]]
    said = text.get("model_type", first) if others else first
    if said not in (first, *others):
        raise ValueError(
            f"config.json: text_config.model_type {said!r} of a {hf['model_type']!r} model is not supported; "
            f"supported: {', '.join((first, *others))}"
        )
    return {key: hf[key] for key in outer if key in hf} | text | {"model_type": said}


def text_tensor_name(name: str) -> str | None:
    """The name of a tensor in the text model alone; None for a tensor of a vision tower or projector."""
    if any(part in name for part in ("vision_tower.", "multi_modal_projector.")):
        return None
    # transformers 4 wrote language_model.model.layers..., 5 writes model.language_model.layers...
    return name.replace(_LANGUAGE, "model.").removeprefix("language_model.")


def is_passthrough(name: str, model_type: str) -> bool:
    """Whether a tensor of a checkpoint is not loaded but saved again with the model; model_type is the text part's."""
    return model_type in _KEEPS_OTHER_PARTS and name.startswith(_OTHER_PARTS)


def is_nested(hf: dict) -> bool:
    """Whether transformers builds a model with a vision tower from a config.json, even as AutoModelForCausalLM.

    It does so for Gemma 3 and Mistral 3, but builds the text model alone for Qwen3.5.
    """
    return hf.get("model_type") in tuple(TEXT_PARTS) and text_config(hf)["model_type"] not in _KEEPS_OTHER_PARTS


def whole_tensor_name(name: str) -> str:
    """The name of a text model's tensor in a checkpoint that also has a vision tower."""
    return name if not name.startswith("model.") else _LANGUAGE + name.removeprefix("model.")


def family(model_type: str | None) -> ModuleType:
    """The module of a model_type's family; families/common.py says what such a module defines.

    Raises:
      ValueError: an unknown model_type, with the known ones.
    """
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported (code that comes with a checkpoint is never run); "
            f"supported: {', '.join((*FAMILIES, *TEXT_PARTS))}"
        )
    return FAMILIES[model_type]


def weights_stored_in(hf: dict) -> str | None:
    """The name of the format of a checkpoint's linears by its config.json, such as "nf4".

    None: weights of 16 bits or more, or gpt-oss's MXFP4, which is decoded on loading.

    Raises:
      ValueError: a quantisation that cannot be read.
    """
    hf = text_config(hf)
    quantization = hf.get("quantization_config")
    if not quantization:
        return None
    settings = quantization if isinstance(quantization, dict) else {"quant_method": quantization}
    for layout in layouts():
        if (layout.families is None or hf.get("model_type") in layout.families) and layout.says(settings):
            layout.check(settings)
            return None if layout.opens else format_of(layout).word
    found = {
        key: settings[key] for key in ("quant_method", "format", "load_in_8bit", "quant_algo") if settings.get(key)
    }
    raise ValueError(
        f"config.json: quantization_config says {', '.join(f'{key} = {value!r}' for key, value in found.items())}; of "
        f"quantised checkpoints these can be loaded: {'; '.join(layout.title for layout in layouts())}: use the "
        "16-bit original"
    )


def config_from_hf(hf: dict) -> DecoderConfig:
    """The DecoderConfig of a parsed config.json.

    Raises:
      ValueError: a feature that is not supported or a value that cannot be right, with its key and value.
    """
    hf = checked(text_config(hf))
    module = family(hf.get("model_type"))
    weights_stored_in(hf)  # raises for a quantisation that cannot be read
    config = module.from_hf(hf)
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
