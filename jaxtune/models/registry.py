"""The supported model families: finds the family of a config.json's model_type (`family`), converts config.json to a
DecoderConfig (`config_from_hf`), and says in which format a checkpoint is quantised (`weights_stored_in`).

Of models with a vision tower (`text_parts`) only the text part is loaded. `text_config` finds its config,
`text_tensor_name` and `whole_tensor_name` convert the names of its tensors, `is_passthrough` finds tensors that are
only copied, `tower_modules` names the other modules, and `is_nested` says whether transformers builds the whole model.
"""

from __future__ import annotations

import dataclasses

from jaxtune.models import values
from jaxtune.models.config import DecoderConfig
from jaxtune.models.families import (
    cohere2,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    gemma4_unified,
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
from jaxtune.models.families.common import Family
from jaxtune.models.heads import head_of_class
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
    )
}
_LANGUAGE = "model.language_model."


def text_parts() -> dict[str, tuple[str, ...]]:
    """Lists the models with a vision tower, of which only the text part is loaded: {the whole model's model_type: the
    model_types that its text part may have}. A text part whose config names none has the first. text_config and
    is_nested recognise such models by it, and `family` lists them in its error."""
    parts: dict[str, tuple[str, ...]] = {}
    for name, declared in FAMILIES.items():
        for whole in declared.text_of:
            parts[whole] = (*parts.get(whole, ()), name)
    return parts


def text_config(hf: dict) -> dict:
    """The config of the text model: `hf`, a parsed config.json, unchanged if it is not one of a model with a vision
    tower (`text_parts`); otherwise its entry text_config, with the outer file's quantisation, special tokens, dtype and
    tied embeddings where it has none of its own, and the model_type of a family that is supported (if only one can be
    the text part, that one, whatever the entry says). Loading and config_from_hf read configs by it.

    Raises:
      ValueError: a model with a vision tower whose config has no text_config, or one whose model_type is none of the
        several that can be its text part. Other model_types are not checked (`family` does).
    """
    parts = text_parts()
    if hf.get("model_type") not in tuple(parts):  # a tuple, because the value may be of a type that has no hash
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
    first, *others = parts[hf["model_type"]]
    said = text.get("model_type", first) if others else first
    if said not in (first, *others):
        raise ValueError(
            f"config.json: text_config.model_type {said!r} of a {hf['model_type']!r} model is not supported; "
            f"supported: {', '.join((first, *others))}"
        )
    return {key: hf[key] for key in outer if key in hf} | text | {"model_type": said}


def text_tensor_name(name: str) -> str | None:
    """Converts the name of a tensor in a checkpoint of a model with a vision tower to its name in the text model alone,
    such as model.layers.0...; None for a name with "vision_tower." or "multi_modal_projector.", whose tensor is not
    loaded. It reads the names that transformers 4 and 5 write. Towers with other names are passthrough tensors, which
    the caller, loading, has taken out (is_passthrough)."""
    if any(part in name for part in ("vision_tower.", "multi_modal_projector.")):
        return None
    # transformers 4 wrote language_model.model.layers..., 5 writes model.language_model.layers...
    return name.replace(_LANGUAGE, "model.").removeprefix("language_model.")


def is_passthrough(name: str, model_type: str) -> bool:
    """Whether the tensor of this name in a checkpoint is a passthrough tensor, such as a vision tower's: it is not
    loaded, but copied when the model is saved. Loading sorts a folder's tensors by it. model_type: that of the text
    part; ValueError if it is not supported."""
    return name.startswith(family(model_type).passthrough_tensors)


def tower_modules(model_type: str) -> tuple[str, ...]:
    """The names of the modules that a model has beside its text model: those of the family's passthrough tensors, or
    ("vision_tower", "multi_modal_projector") if it declares none. model_type: that of the text part; ValueError if it
    is not supported.

    The config of an adapter excludes them if transformers builds the whole model for its base (is_nested), because
    their linears can have the same names as the text model's."""
    declared = tuple(prefix.removeprefix("model.").rstrip(".") for prefix in family(model_type).passthrough_tensors)
    return declared or ("vision_tower", "multi_modal_projector")


def is_nested(hf: dict) -> bool:
    """Whether transformers builds a model with a vision tower from a config.json, even as AutoModelForCausalLM, so that
    the text model is nested in it and its tensors have longer names.

    It does so for Gemma 3 and 4 and Mistral 3, but builds the text model alone for Qwen3.5. An adapter's names must be
    those of the class that transformers builds, so loading records the answer (Source.nested). hf: the folder's parsed
    config.json; False if it is not one of a model with a vision tower; ValueError as from text_config."""
    if hf.get("model_type") not in tuple(text_parts()):
        return False
    return not family(text_config(hf)["model_type"]).text_alone


def whole_tensor_name(name: str) -> str:
    """Converts the name of a text model's tensor or module to its name in a checkpoint that also has a vision tower
    ("model.language_model." in place of "model."), as transformers 5 writes it; a name that does not begin with
    "model.", such as lm_head.weight, is returned unchanged. text_tensor_name is its inverse. A model is saved under
    these names if a vision tower's passthrough tensors are saved with it, and an adapter if transformers builds the
    whole model for its base (is_nested). load_adapter compares an adapter's targets with them if its tensors have them.
    """
    return name if not name.startswith("model.") else _LANGUAGE + name.removeprefix("model.")


def family(model_type: str | None) -> Family:
    """Looks up the Family of a text model's model_type, such as "llama": the declaration that reads and writes its
    config.json and names its tensors.

    Raises:
      ValueError: an unknown model_type, or None; the message has the known ones.
    """
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported (code that comes with a checkpoint is never run); "
            f"supported: {', '.join((*FAMILIES, *text_parts()))}"
        )
    return FAMILIES[model_type]


def weights_stored_in(hf: dict) -> str | None:
    """The name of the format, such as "nf4", in which a checkpoint says that it stores its quantised weights, by its
    parsed config.json (`hf`). Plans of models that are not loaded go by it; loading only compares the tensors with it.

    None: it has no quantization_config, so that weights have 16 bits or more, or it names a format that is decoded on
    loading, such as MXFP4.

    Raises:
      ValueError: a quantisation that cannot be read; what text_config raises.
    """
    layout = stated_layout(hf)
    return None if layout is None or layout.decoded_on_load else format_of(layout).name


def stated_layout(hf: dict) -> Layout | None:
    """The layout in which a checkpoint says that it stores its quantised weights, by the key quantization_config of its
    parsed config.json (`hf`); None if it has no such key. weights_stored_in takes the format from it, and
    quant.check_stored compares that with the tensors. It raises the errors of weights_stored_in."""
    hf = text_config(hf)
    quantization = hf.get("quantization_config")
    if not quantization:
        return None
    settings = quantization if isinstance(quantization, dict) else {"quant_method": quantization}
    for layout in layouts():
        if (layout.families is None or hf.get("model_type") in layout.families) and layout.recognises(settings):
            layout.check(settings)
            return layout
    found = {
        key: settings[key] for key in ("quant_method", "format", "load_in_8bit", "quant_algo") if settings.get(key)
    }
    raise ValueError(
        f"config.json: quantization_config says {', '.join(f'{key} = {value!r}' for key, value in found.items())}; of "
        f"quantised checkpoints these can be loaded: {'; '.join(layout.title for layout in layouts())}: use the "
        "16-bit original"
    )


def config_from_hf(hf: dict) -> DecoderConfig:
    """Converts a parsed config.json (`hf`) to the DecoderConfig by which a model is built; for a model with a vision
    tower, to that of its text part. The head follows from the first of `architectures`: a ...ForSequenceClassification
    with one label is a reward model, and with more it is refused. Loading and plans of models that are not loaded call
    it.

    Raises:
      ValueError: a feature that is not supported or a value that cannot be right, with its key and value.
    """
    hf = text_config(hf)
    if hf.get("model_type") is not None:
        values.text("config.json: model_type", hf["model_type"])
    found = family(hf.get("model_type"))
    weights_stored_in(hf)  # raises for a quantisation that cannot be read
    config = found.from_hf(hf)
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
