"""Exports an adapter in PEFT's format, reads it back, and notes which programs can load it, by the releases of 2026.

PEFT 0.21 stores an adapter of experts (`target_parameters`) as one pair of matrices for all experts of a parameter.
Servers that expect one linear per expert load such files and answer wrongly; servers without experts' adapters refuse
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jaxtune.models.adapters.adapter_config import WEIGHTS_NAME, config_of, is_nested, peft_name
from jaxtune.models.adapters.adapter_files import adapter_content, write_adapter
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.model_folder import save_companions
from jaxtune.models.lora import experts, linears
from jaxtune.system.disk import require_room

_BESIDE_BYTES = 64 << 10  # of the config and the header of the weights

_VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank, from its default on


def write(model: Decoder, folder: Path, tokenizer: Any) -> list[str]:
    """Writes a model's adapter, an embedding or head that was trained whole (modules_to_save), and the tokenizer into
    an empty folder, and verifies it. Returns `servers`' notes.

      model: has an adapter.

    Raises ValueError for no adapter or one that PEFT cannot express, values that are not finite, or a full disk;
    ArithmeticError if the files do not verify.
    """
    config, arrays, metadata = adapter_content(model)
    require_room(folder, sum(array.nbytes for array in arrays.values()) + _BESIDE_BYTES)
    write_adapter(folder, config, arrays, metadata)
    save_companions(folder, (), tokenizer)
    verify(model, load_file(folder / WEIGHTS_NAME), arrays)
    return servers(model)


def servers(model: Decoder) -> list[str]:
    """Notes for the user, at least one, on which programs (PEFT, vLLM, SGLang, TGI, llama.cpp, classes of transformers)
    can load the adapter, and where the merged model must be served instead.
    """
    adapted = [matrix.lora for _, matrix in linears(model) if matrix.lora is not None]
    of_experts = [matrix for _, matrix in experts(model) if matrix.lora is not None]
    in_parameters = bool(config_of(model)["target_parameters"])
    notes = []
    if is_nested(model):
        notes.append(
            "modules are named as in the base's model with a vision tower, which AutoModelForCausalLM or "
            "AutoModelForImageTextToText makes of its folder: the text model alone does not take the adapter"
        )
    elif (
        model.source is not None
        and model.source.passthrough is not None
        and model.source.passthrough.config is not None
    ):
        notes.append(
            "modules are named as in the base's text model, which AutoModelForCausalLM loads. vLLM and "
            "AutoModelForImageTextToText load the model with its vision tower, in which the adapter does nothing, and "
            "vLLM does not say so: serve the merged model there (--to merged)"
        )
    if of_experts:
        notes.append(
            "adapters of experts are in PEFT's layout (target_parameters): PEFT 0.18 and later load it. vLLM loads it "
            "where it keeps a model's experts stacked (gpt-oss, Qwen3-VL, Qwen3.5), and of others with "
            "--enable-mixed-moe-lora-format and is_3d_lora_weight, if gate_up_proj and down_proj are both adapted. "
            "SGLang, TGI and older versions of vLLM expect a linear for each expert, and refuse these files or answer "
            "wrongly with them: serve the merged model there (--to merged). llama.cpp loads the adapter as --to "
            "gguf-adapter writes it"
        )
    elif in_parameters:
        notes.append(
            "linears called gate_proj, up_proj or down_proj are named in target_parameters, because PEFT reads those "
            "names in target_modules as experts: PEFT loads this adapter, without DoRA and with lora_dropout 0. "
            "Servers that read only target_modules leave these linears out: serve the merged model there (--to merged)"
        )
    if any(lora.magnitude is not None for lora in adapted):
        peft = "PEFT refuses it in target_parameters, and" if in_parameters else "PEFT loads this adapter;"
        notes.append(f"DoRA: {peft} vLLM, SGLang and llama.cpp do not load it: serve the merged model there")
    if any(module is not None and module.original is not None for module in (model.embedding, model.head)):
        notes.append(
            "the embedding or head was trained whole (modules_to_save): PEFT loads it; vLLM, SGLang and llama.cpp do "
            "not: serve the merged model there"
        )
    settings = config_of(model)
    one_scale = settings["lora_alpha"] / (settings["r"] ** 0.5 if settings["use_rslora"] else settings["r"])
    every = [*adapted, *(matrix.lora for matrix in of_experts)]
    if any(not math.isclose(lora.scale, one_scale, rel_tol=1e-5) for lora in every):
        notes.append(
            "alpha_pattern or rank_pattern gives matrices scales of their own: PEFT follows them; vLLM has one "
            "lora_alpha / r for all, so its answers would be others: serve the merged model there (--to merged)"
        )
    if notes:
        return notes
    loads = "PEFT, vLLM, SGLang and TGI load this adapter; llama.cpp does as --to gguf-adapter writes it"
    return [loads, *rank_notes(max((lora.rank for lora in adapted), default=0))]


def rank_notes(rank: int) -> list[str]:
    """[what vLLM needs beyond its defaults for an adapter whose largest rank this is], or []."""
    if rank <= _VLLM_RANKS[0]:
        return []
    taken = next((most for most in _VLLM_RANKS if most >= rank), None)
    if taken is None:
        return [f"vLLM takes no rank above {_VLLM_RANKS[-1]}, and this one's is {rank}: serve the merged model there"]
    return [f"vLLM takes ranks up to {_VLLM_RANKS[0]} by default, and this one's is {rank}: --max-lora-rank {taken}"]


def verify(model: Decoder, read_back: Mapping[str, np.ndarray], written: Mapping[str, np.ndarray]) -> None:
    """Raises ArithmeticError unless tensors were read back bit for bit, and each product B A, as PEFT computes it from
    the files, is close to the model's (np.allclose). Neither alpha / r nor DoRA's magnitudes are checked.

      model: whose adapter was written.
      read_back: {name in the file: array}, from the file.
      written: {name in the file: array}, what was to be written.
    """
    wrong = [
        key
        for key in sorted(read_back.keys() | written.keys())
        if key not in read_back or key not in written or read_back[key].tobytes() != written[key].tobytes()
    ]
    if wrong:
        raise ArithmeticError(
            f"{WEIGHTS_NAME}: what was read back differs from what was written: {', '.join(wrong[:8])}"
        )
    for name, matrix in (*linears(model), *experts(model)):
        if matrix.lora is None:
            continue
        a, b = (np.asarray(side[...], np.float64) for side in (matrix.lora.a, matrix.lora.b))
        expected = b @ a
        product = _peft_product(peft_name(model, name), read_back, matrix.num_experts)
        if not np.allclose(product, expected, rtol=1e-5, atol=1e-8):
            raise ArithmeticError(f"{WEIGHTS_NAME}: {name}, merged as PEFT does it, is not what the model computes")


def _peft_product(name: str, tensors: Mapping[str, np.ndarray], count: int) -> np.ndarray:
    """float64[out, in], or [count, out, in] for experts (count 0: a linear): B A as PEFT computes it."""
    if not count:
        a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"].astype(np.float64) for side in "AB")
        return b @ a
    module, matrix = name.rsplit(".", 1)
    # The parameter that PEFT wrapped first is the innermost module.
    outer = f"base_model.model.{module}"
    both_wrapped = f"{outer}.base_layer.lora_A.weight" in tensors
    prefix = f"{outer}.base_layer" if both_wrapped and matrix == "gate_up_proj" else outer
    a, b = (tensors[f"{prefix}.lora_{side}.weight"].astype(np.float64) for side in "AB")
    return np.einsum("ore,eri->eoi", b.reshape(b.shape[0], -1, count), a.reshape(count, -1, a.shape[1]))
