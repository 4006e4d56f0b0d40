"""model_type of a config.json -> its family module."""

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

# Models with a vision tower, of which the text part is loaded: model_type -> that of the text part, or those that it
# may say itself, of which the first is meant where it says none.
TEXT_PARTS = {
    "gemma3": ("gemma3_text",),
    "mistral3": ("mistral", "ministral3"),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
# Families of whose checkpoints all is saved again, and how the names begin of tensors that no layer here has.
_CARRIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_CARRIED = ("model.visual.", "visual.", "mtp.")
_LANGUAGE = "model.language_model."


def text_config(hf: dict) -> dict:
    """A config.json as it is, or the text part of a model with more to it, as a config of its own."""
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
    """The name that a tensor has in the text model alone; None for tensors of the other parts."""
    if any(part in name for part in ("vision_tower.", "multi_modal_projector.")):
        return None
    # transformers 4 wrote language_model.model.layers..., 5 writes model.language_model.layers...
    return name.replace(_LANGUAGE, "model.").removeprefix("language_model.")


def is_carried(name: str, model_type: str) -> bool:
    """Whether a tensor of a checkpoint is no layer's, but saved again with the model; model_type: of the text part."""
    return model_type in _CARRIES and name.startswith(_CARRIED)


def is_nested(hf: dict) -> bool:
    """Whether transformers makes a model with a vision tower of a config.json, for AutoModelForCausalLM too, which of
    Qwen3.5 makes the text model alone."""
    return hf.get("model_type") in tuple(TEXT_PARTS) and text_config(hf)["model_type"] not in _CARRIES


def whole_tensor_name(name: str) -> str:
    """The name that a tensor of the text model has in a checkpoint with more to it."""
    return name if not name.startswith("model.") else _LANGUAGE + name.removeprefix("model.")


def family(model_type: str | None) -> ModuleType:
    """The family of a model_type; see families/common.py for what it has.

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
    """The name of the format of a checkpoint's linears by its config.json, such as "nf4"; None: 16 bits or more, which
    gpt-oss's MXFP4 becomes too.

    Raises:
      ValueError: as anything else, which is not read here.
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
    said = {key: settings[key] for key in ("quant_method", "format", "load_in_8bit", "quant_algo") if settings.get(key)}
    raise ValueError(
        f"config.json: quantization_config says {', '.join(f'{key} = {value!r}' for key, value in said.items())}; of "
        f"quantised checkpoints these can be loaded: {'; '.join(layout.title for layout in layouts())}: use the "
        "16-bit original"
    )


def config_from_hf(hf: dict) -> DecoderConfig:
    """DecoderConfig of a parsed config.json.

    Raises:
      ValueError: a feature that is not supported, or a value that cannot be, by name and value.
    """
    hf = checked(text_config(hf))
    module = family(hf.get("model_type"))
    weights_stored_in(hf)  # or refused
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
