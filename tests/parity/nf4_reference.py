"""bitsandbytes' side of the four-bit checks, on a CPU."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import numpy as np
import torch


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
