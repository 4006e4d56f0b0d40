"""The trajectory of tests/train/trajectory.py by transformers, PEFT and torch's AdamW: fp32, CPU, padded rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import reference
import torch
from transformers import AutoTokenizer

from tests.train import trajectory as t


def story_tokens(test_data: Path) -> list[list[int]]:
    """As a causal model reads a text: the tokenizer's BOS, the text, EOS."""
    tokenizer = AutoTokenizer.from_pretrained(t.stories(test_data)[0])
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in t.story_texts(test_data)]
    assert all(row[0] == tokenizer.bos_token_id for row in rows)
    return rows


def run(model_folder: Path, rows: list[list[int]], length: int, steps: int = t.STEPS) -> tuple[np.ndarray, np.ndarray]:
    """(losses, gradient norms before clipping) of the first `steps` steps, float64[steps]."""
    torch.manual_seed(0)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=t.RANK, lora_alpha=t.ALPHA, target_modules="all-linear")
    model = peft.get_peft_model(reference.load(model_folder), settings).train()
    trained = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            trained.append(parameter)
            module = name.removeprefix("base_model.model.").split(".lora_")[0]
            if ".lora_A." in name:
                parameter.copy_(torch.from_numpy(t.start_of_a(module, tuple(parameter.shape))))
            else:
                assert ".lora_B." in name and not parameter.any()
    optimizer = torch.optim.AdamW(trained, lr=t.PEAK, betas=(0.9, 0.999), eps=1e-8, weight_decay=t.WEIGHT_DECAY)
    losses, norms = [], []
    for step in range(steps):
        chosen = [torch.tensor(rows[index][:length]) for index in t.step_documents(step, len(rows))]
        tokens = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=0)
        labels = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-100)
        loss = model(input_ids=tokens, attention_mask=(labels != -100).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, t.MAX_GRAD_NORM)))
        for group in optimizer.param_groups:
            group["lr"] = t.learning_rate(step)
        optimizer.step()
        losses.append(loss.item())
    return np.asarray(losses), np.asarray(norms)
