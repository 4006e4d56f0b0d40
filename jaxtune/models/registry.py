"""model_type of a config.json -> its family module."""

from __future__ import annotations

from types import ModuleType

from jaxtune.models.config import DecoderConfig
from jaxtune.models.families import gemma2, gemma3, llama, mistral, olmo2, phi3, qwen2, qwen3, smollm3

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
}


def family(model_type: str | None) -> ModuleType:
    """The family of a model_type; see families/common.py for what it has.

    Raises:
      ValueError: an unknown model_type, with the known ones.
    """
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported (code that comes with a checkpoint is never run); "
            f"supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def config_from_hf(hf: dict) -> DecoderConfig:
    """DecoderConfig of a parsed config.json.

    Raises:
      ValueError: a feature that is not supported, by name and value.
    """
    module = family(hf.get("model_type"))
    quantization = hf.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ValueError(
            f"config.json: quantization_config says quant_method {method!r}; checkpoints that are quantised already "
            "cannot be loaded yet: use the 16-bit original"
        )
    return module.from_hf(hf)
