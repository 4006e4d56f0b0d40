"""A loss of one's own: each document counts the same, however many tokens of it are trained on.

An objective says what the loss of a micro-batch is, as a sum and a count. The trainer divides one by the other once,
over all micro-batches and devices of a step, and does everything else as for its own objectives.
"""

import dataclasses

import jax
import jax.numpy as jnp

import jaxtune
from jaxtune.train import TrainConfig, Trainer
from jaxtune.train.config import DataConfig, ModelConfig, OptimConfig
from jaxtune.train.objectives.sft import SFT


@dataclasses.dataclass(frozen=True)
class PerDocument(SFT):
    """The mean over documents of each one's mean next-token loss."""

    unit = "documents"  # what the count counts; metrics.jsonl has it under this name

    def loss(self, model, batch, forward):
        numbers = batch.tokens.shape[1] + 1  # of documents in a row, from 1; 0 is padding

        def shares(weights, segments):
            targets = jax.ops.segment_sum(weights, segments, numbers)
            return weights / jnp.maximum(targets[segments], 1), (targets > 0).sum()

        weights, documents = jax.vmap(shares)(batch.weights, batch.segment_ids)
        loss, _, _ = super().loss(model, dataclasses.replace(batch, weights=weights), forward)
        return loss, documents.sum().astype(jnp.float32), {}


jaxtune.use_program_cache()  # the next start compiles nothing that this one compiled
model, tokenizer = jaxtune.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", dtype="float32")
config = TrainConfig(
    model=ModelConfig(path="Qwen/Qwen2.5-0.5B-Instruct"),
    data=DataConfig(train="rows.jsonl", length=256),
    steps=20,
    rows_per_step=4,
    precision="fp32",
    optim=OptimConfig(learning_rate=1e-3),
    output="runs/own_loss",
)
trainer = Trainer(jaxtune.get_peft_model(model, r=8), tokenizer, config, objective=PerDocument())
trained = trainer.train()
last = trainer.history[-1]
print(f"{last['documents']} documents in the last step, mean loss {last['loss']:.3f}")
jaxtune.save_adapter(trained, "own_loss_adapter", tokenizer)
