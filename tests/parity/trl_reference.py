"""TRL's side of the parity checks: its trainers' own losses of one batch, in fp32 on a CPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import tokenizers
import torch
import transformers
from random_weights import random_tensor
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TRAINERS = {
    "dpo": (DPOTrainer, DPOConfig, {}),
    "kto": (KTOTrainer, KTOConfig, {}),
    "reward": (RewardTrainer, RewardConfig, {}),
    "orpo": (ORPOTrainer, ORPOConfig, {}),
    "simpo": (CPOTrainer, CPOConfig, dict(loss_type="simpo", cpo_alpha=0.0)),
}
# What is measured is a batch of token ids.
TEXTS = [{"prompt": "a", "chosen": "b c", "rejected": "c"}] * 2
LABELLED = [{"prompt": "a", "completion": "b c", "label": label} for label in (True, False)]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = tokenizers.models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "c": 5}, unk_token="<pad>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def make_trainer(name: str, model: Any, folder: Path, sign: float = 1.0, **options: Any) -> Any:
    """A trainer of an adapter on `model`, whose tensors are random and saved in `folder`/adapter; sign: of all B."""
    kind, config, more = TRAINERS[name]
    args = config(
        output_dir=str(folder / "run"),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        **(more | options),
    )
    lora = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules="all-linear", task_type="SEQ_CLS" if name == "reward" else "CAUSAL_LM"
    )
    rows = datasets.Dataset.from_list(LABELLED if name == "kto" else TEXTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = kind(model=model, args=args, train_dataset=rows, processing_class=tokenizer(), peft_config=lora)
    with torch.no_grad():
        for parameter_name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                noise = 0.3 * torch.from_numpy(random_tensor(parameter_name, tuple(parameter.shape)))
                parameter += sign * noise if "lora_B" in parameter_name else noise
    trainer.model.save_pretrained(folder / "adapter")
    return trainer


def pair_loss(name: str, trainer: Any, rows: list[dict[str, list[int]]]) -> tuple[float, dict[str, float], dict]:
    """(loss, metrics, {tensor of the adapter's file: gradient}) of a batch of {"prompt", "chosen", "rejected"} ids; of
    KTO {"prompt", "completion", "KL_completion"} ids and "label"; of rewards ids of whole texts, and "margin"."""
    trainer.model.train()
    trainer.model.zero_grad()
    if name in ("dpo", "kto", "reward"):
        numbers = ("label", "margin")
        examples = [{key if key in numbers else f"{key}_ids": ids for key, ids in row.items()} for row in rows]
        batch = trainer.data_collator(examples)
        if name == "reward":
            loss = trainer.compute_loss(trainer.model, batch)
        else:
            loss = trainer._compute_loss(trainer.model, batch, False)
        metrics = {key: values[-1] for key, values in trainer._metrics["train"].items()}
    else:
        loss, metrics = trainer.get_batch_loss_metrics(trainer.model, _labelled(rows))
    loss.backward()
    return loss.item(), metrics, gradients(trainer.model)


def gradients(model: Any) -> dict[str, np.ndarray]:
    return {
        name.replace("modules_to_save.", "").replace(".default", ""): parameter.grad.numpy().copy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _labelled(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """The batch of the older trainers: padded ids, and labels that leave the prompt out."""
    batch = {}
    for side in ("chosen", "rejected"):
        ids = [row["prompt"] + row[side] for row in rows]
        labels = [[-100] * len(row["prompt"]) + row[side] for row in rows]
        longest = max(map(len, ids))
        for key, values, padding in (
            ("input_ids", ids, 0),
            ("labels", labels, -100),
            ("attention_mask", [[1] * len(i) for i in ids], 0),
        ):
            batch[f"{side}_{key}"] = torch.tensor([v + [padding] * (longest - len(v)) for v in values])
    return batch
