"""Writes tests/goldens/nvfp4_modelopt.npz: a weight that nvidia-modelopt quantised to NVFP4, and what its own reader
makes of it. In an environment with torch and nvidia-modelopt (0.47.0 wrote the file):

    python tests/parity/regenerate_nvfp4.py
"""

from pathlib import Path

import numpy as np
import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

if __name__ == "__main__":
    torch.manual_seed(0)
    weight = (torch.randn(24, 64) * torch.logspace(-3, 1, 24)[:, None]).to(torch.bfloat16)
    packed, scales, whole = NVFP4QTensor.quantize(weight.clone(), 16)
    settings = {"scale": scales, "double_scale": whole, "block_sizes": {-1: 16}}
    read = {name: packed.dequantize(dtype=getattr(torch, name), **settings) for name in ("float32", "bfloat16")}
    np.savez(
        Path(__file__).resolve().parents[1] / "goldens" / "nvfp4_modelopt.npz",
        codes=packed._quantized_data.numpy(),
        scales=scales.view(torch.uint8).numpy(),
        scale_2=whole.numpy(),
        **{name: tensor.float().numpy() for name, tensor in read.items()},
    )
