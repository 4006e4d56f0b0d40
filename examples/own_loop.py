"""A training loop of one's own: jaxtune's model and data, optax, and a mesh over all devices."""

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxtune
from jaxtune.train.data import prepare

LENGTH, STEPS = 1024, 100

jaxtune.use_program_cache()  # the next start compiles nothing that this one compiled
model, tokenizer = jaxtune.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", dtype="float32")
model = jaxtune.get_peft_model(model, r=16)
graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
everywhere, by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-4))
trainable, frozen = jax.device_put((trainable, frozen), everywhere)
state = optimizer.init(trainable)


@jax.jit
def step(trainable, state, frozen, batch):
    def mean_loss(trainable):
        model = nnx.merge(graph, trainable, frozen)
        logits = model(batch.tokens, batch.segment_ids, batch.positions)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return (losses * batch.weights).sum() / batch.weights.sum()

    loss, gradient = jax.value_and_grad(mean_loss)(trainable)
    updates, state = optimizer.update(gradient, state, trainable)
    return optax.apply_updates(trainable, updates), state, loss


data = prepare("rows.jsonl", tokenizer, length=LENGTH)
batches = data.batches(rows_per_step=jax.device_count(), seed=0)
for index in range(STEPS):
    batch = jax.device_put(batches.batch_at(index), by_rows)
    trainable, state, loss = step(trainable, state, frozen, batch)
    if index % 10 == 0:
        print(f"step {index + 1}: loss {np.asarray(loss):.4f}")

jaxtune.save_adapter(nnx.merge(graph, trainable, frozen), "own_loop_adapter", tokenizer)
