"""Transformers' side of the parity checks: fp32, CPU, eager attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from random_weights import write_checkpoint

torch.set_num_threads(2)


def state_shapes(hf: dict) -> dict[str, tuple[int, ...]]:
    """{tensor name: shape} of what transformers would save for a config."""
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**hf)
        model = transformers.AutoModelForCausalLM.from_config(config)
    tied = set(model.all_tied_weights_keys)
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in tied}


def make_checkpoint(folder: Path, hf: dict, dtype=np.float32) -> Path:
    """A checkpoint whose tensor names and shapes come from transformers, not from us."""
    write_checkpoint(folder, hf, state_shapes(hf), dtype)
    return folder


def load(folder: Path, dtype=torch.float32):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], (key, info[key])
    model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model.eval()


def logits(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.float().numpy()


def loss_and_gradients(model, tokens: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    ids = torch.from_numpy(tokens).long()
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    grads = {name: p.grad.float().numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads


def greedy(model, tokens: np.ndarray, new_tokens: int) -> np.ndarray:
    out = model.generate(torch.from_numpy(tokens).long(), max_new_tokens=new_tokens, do_sample=False)
    return out[:, tokens.shape[1] :].numpy().astype(np.int32)
