"""An adapter in PEFT's files, checked by merging it as PEFT does, and which servers can load it.

PEFT 0.21 keeps adapters of experts as one pair of matrices for all experts of a layer (its target_parameters). Servers
that took such files for the older layout, of a linear for each expert, loaded them and answered wrongly; those that
know no experts' adapters refuse them. What is said of servers here is what their releases of 2026 do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jaxtune.models.adapters.adapter_config import WEIGHTS_NAME, config_of, is_nested, peft_name
from jaxtune.models.adapters.adapter_files import adapter_content, write_adapter
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.folders import require_space
from jaxtune.models.files.model_folder import save_companions
from jaxtune.models.lora import experts, linears


def write(model: Decoder, folder: Path, tokenizer: Any) -> list[str]:
    """Writes the adapter into an empty folder, with the tokenizer if given, and reads it back; returns notes."""
    config, arrays, metadata = adapter_content(model)
    require_space(folder, sum(array.nbytes for array in arrays.values()) + (16 << 20))
    write_adapter(folder, config, arrays, metadata)
    save_companions(folder, (), tokenizer)
    verify(model, load_file(folder / WEIGHTS_NAME), arrays)
    return servers(model)


def servers(model: Decoder) -> list[str]:
    """Which servers can load the model's adapter as it is, a sentence each."""
    adapted = [matrix.lora for _, matrix in linears(model) if matrix.lora is not None]
    of_experts = [matrix for _, matrix in experts(model) if matrix.lora is not None]
    notes = []
    if model.source is not None and model.source.carried is not None and model.source.carried.config is not None:
        notes.append(
            "modules are named as in the base's text model, which AutoModelForCausalLM makes of its folder. vLLM and "
            "AutoModelForImageTextToText make the whole model, in which the adapter does nothing, and vLLM does not "
            "say so: serve the merged model there (--to merged)"
        )
    if of_experts:
        return [
            *notes,
            "adapters of experts are in PEFT's layout (target_parameters): PEFT 0.18 and later load it. vLLM, SGLang "
            "and TGI expect a linear for each expert, and refuse these files or answer wrongly with them: serve the "
            "merged model there (--to merged). llama.cpp loads the adapter as --to gguf-adapter writes it",
        ]
    if config_of(model)["target_parameters"]:
        return [
            "linears called gate_proj, up_proj or down_proj are named in target_parameters, for PEFT takes those names "
            "among target_modules for experts': PEFT loads it so, without DoRA and with lora_dropout 0. "
            "Servers that go by target_modules leave them out: serve the merged model there (--to merged)"
        ]
    if is_nested(model):
        notes.append(
            "modules are named as in the base's model with a vision tower, which AutoModelForCausalLM or "
            "AutoModelForImageTextToText makes of its folder: the text model alone does not take the adapter"
        )
    if any(lora.magnitude is not None for lora in adapted):
        notes.append("DoRA: PEFT loads this adapter; vLLM, SGLang and llama.cpp do not: serve the merged model there")
    if any(module is not None and module.original is not None for module in (model.embedding, model.head)):
        notes.append(
            "the embedding or head was trained whole (modules_to_save): PEFT loads it; vLLM, SGLang and llama.cpp do "
            "not: serve the merged model there"
        )
    return notes or ["PEFT, vLLM, SGLang and TGI load this adapter; llama.cpp does as --to gguf-adapter writes it"]


def verify(model: Decoder, found: Mapping[str, np.ndarray], meant: Mapping[str, np.ndarray]) -> None:
    """Compares what was read with what was meant, bit for bit, and what PEFT would add to each weight with what the
    model adds, by PEFT's layout and in numpy.

    Raises:
      ArithmeticError: they differ.
    """
    wrong = [
        key
        for key in sorted(found.keys() | meant.keys())
        if key not in found or key not in meant or found[key].tobytes() != meant[key].tobytes()
    ]
    if wrong:
        raise ArithmeticError(f"{WEIGHTS_NAME}: read back, not as it was written: {', '.join(wrong[:8])}")
    for name, matrix in (*linears(model), *experts(model)):
        if matrix.lora is None:
            continue
        a, b = (np.asarray(part[...], np.float64) for part in (matrix.lora.a, matrix.lora.b))
        expected = b @ a
        product = _peft_product(peft_name(model, name), found, matrix.num_experts)
        if not np.allclose(product, expected, rtol=1e-5, atol=1e-8):
            raise ArithmeticError(f"{WEIGHTS_NAME}: {name}, merged as PEFT does it, is not what the model computes")


def _peft_product(name: str, tensors: Mapping[str, np.ndarray], count: int) -> np.ndarray:
    """B A as PEFT computes it, without its scale: [out, in], or [E, out, in] of experts."""
    if not count:
        a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"].astype(np.float64) for part in "AB")
        return b @ a
    module, matrix = name.rsplit(".", 1)
    # The parameter that PEFT wrapped first is the innermost module.
    outer = f"base_model.model.{module}"
    both = f"{outer}.base_layer.lora_A.weight" in tensors
    prefix = f"{outer}.base_layer" if both and matrix == "gate_up_proj" else outer
    a, b = (tensors[f"{prefix}.lora_{part}.weight"].astype(np.float64) for part in "AB")
    return np.einsum("ore,eri->eoi", b.reshape(b.shape[0], -1, count), a.reshape(count, -1, a.shape[1]))
