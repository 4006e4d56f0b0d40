"""bitsandbytes' AdamW8bit over the cases of tests/train/adam8_cases.py, on the CPU."""

from __future__ import annotations

import bitsandbytes
import numpy as np
import torch
from bitsandbytes.functional import create_dynamic_map

from tests.train import adam8_cases as c


def run() -> dict[str, np.ndarray]:
    """map_signed, map_unsigned float32[256]; and NAME_STEP, the parameter after one step and after all."""
    found = {"map_signed": create_dynamic_map(True).numpy(), "map_unsigned": create_dynamic_map(False).numpy()}
    parameters = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in c.start().items()}
    groups = [dict(params=[p], weight_decay=c.TENSORS[name][1]) for name, p in parameters.items()]
    optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=c.RATE, betas=c.BETAS, eps=c.EPS)
    for step in range(1, c.STEPS + 1):
        for name, gradient in c.gradients(step).items():
            parameters[name].grad = torch.tensor(gradient)
        optimizer.step()
        if step in (1, c.STEPS):
            found |= {f"{name}_{step}": p.detach().numpy().copy() for name, p in parameters.items()}
    dtypes = [str(optimizer.state[p]["state1"].dtype) for p in parameters.values()]
    assert dtypes == ["torch.uint8", "torch.uint8", "torch.float32"], dtypes
    return found
