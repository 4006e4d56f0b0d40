"""bitsandbytes' side of the four-bit checks, on a CPU."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes.functional as bnb
import numpy as np
import reference
import torch
import transformers


def dynamic_map() -> np.ndarray:
    return bnb.create_dynamic_map().numpy()


def quantize(array: np.ndarray, double: bool, quant_type: str = "nf4") -> dict[str, np.ndarray | None]:
    """codes, absmax, nested_absmax, offset, quant_map; `decoded` only where its CPU kernel decodes rightly."""
    codes, state = bnb.quantize_4bit(torch.from_numpy(array), compress_statistics=double, quant_type=quant_type)
    # Rows that are not whole blocks are decoded wrongly by its CPU kernel (0.50.2).
    decodes = array.shape[-1] % 64 == 0
    return {
        "codes": codes.numpy().reshape(-1),
        "absmax": state.absmax.numpy(),
        "nested_absmax": state.state2.absmax.numpy() if double else None,
        "offset": state.offset.numpy() if double else None,
        "quant_map": state.code.numpy(),
        "decoded": bnb.dequantize_4bit(codes, state).numpy() if decodes else None,
    }


def make_checkpoint(base: Path, folder: Path, **settings) -> Path:
    """A 16- or 32-bit checkpoint quantised by transformers and bitsandbytes; settings of BitsAndBytesConfig."""
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, **({"bnb_4bit_quant_type": "nf4"} | settings))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    model.save_pretrained(folder)
    return folder


def decoded_tensor(stored: dict[str, np.ndarray], name: str) -> np.ndarray:
    """float32, by bitsandbytes, of a tensor's parts in a safetensors file."""
    parts = {key: torch.from_numpy(array) for key, array in stored.items() if key.startswith(f"{name}.")}
    state = bnb.QuantState.from_dict(parts, device=torch.device("cpu"))
    return bnb.dequantize_4bit(torch.from_numpy(stored[name]), state).float().numpy()


def dequantised(folder: Path) -> tuple[dict[str, np.ndarray], set[str]]:
    """({tensor name: float32 array} of a four-bit checkpoint as transformers loads it, names of those in four bits)."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", output_loading_info=True)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], (key, info[key])
    arrays, packed = {}, set()
    for name, parameter in model.named_parameters():
        value = parameter.data
        if getattr(parameter, "quant_state", None) is not None:
            parameter.quant_state.dtype = torch.float32
            value = bnb.dequantize_4bit(value, parameter.quant_state)
            packed.add(name)
        arrays[name] = value.float().numpy()
    return arrays, packed


def dequantised_logits(folder: Path, hf: dict, tokens: np.ndarray) -> np.ndarray:
    """transformers' fp32 logits over the dequantised weights (bitsandbytes' own CPU product is far less precise)."""
    arrays, _ = dequantised(folder)
    hf = {key: value for key, value in hf.items() if key != "quantization_config"}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**hf), attn_implementation="eager"
    )
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(v) for k, v in arrays.items()}, strict=False)
    assert not unexpected and set(missing) <= set(model.all_tied_weights_keys), (missing, unexpected)
    return reference.logits(model.eval().float(), tokens)
