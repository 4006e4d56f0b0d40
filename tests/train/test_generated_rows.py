"""What generate says of its own text is what training computes of it, bit for bit where that is asked for."""

from __future__ import annotations

import functools

import jax
import numpy as np
from flax import nnx
from tiny_models import tiny_model

from jaxtune import generate
from jaxtune.train.data.batches import Batch
from jaxtune.train.engine.xla_options import compiler_options
from jaxtune.train.objectives.loss import Forward


def test_log_probabilities_are_the_losses_of_training():
    """In bfloat16 the single steps round otherwise."""
    prompts = [[3, 9, 27], list(range(1, 20)), [44], [7, 7, 7, 8, 30, 2, 1]]
    model = tiny_model("bfloat16", initializer_range=0.5)
    settings = dict(max_new_tokens=8, output_logprobs=True)
    answers, found = generate(model, prompts, deterministic=True, **settings)
    same, of_steps = generate(model, prompts, **settings)
    assert same == answers
    batch, starts = Batch.empty(4, 48), [len(prompt) for prompt in prompts]
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        text = [*prompt, *answer]
        batch.tokens[row, : len(text)], batch.targets[row, : len(text) - 1] = text, text[1:]
        batch.weights[row, : len(text) - 1] = batch.segment_ids[row, : len(text)] = 1
        batch.positions[row, : len(text)] = np.arange(len(text))

    def losses(model, batch):
        forward = Forward()
        return forward.token_losses(model, forward(model, batch), batch)

    graph, state = nnx.split(model)
    as_trained = functools.partial(jax.jit, compiler_options=compiler_options("cpu", deterministic=True))
    expected = -np.asarray(as_trained(lambda state, batch: losses(nnx.merge(graph, state), batch))(state, batch))
    for row, start in enumerate(starts):
        np.testing.assert_array_equal(np.float32(found[row]), expected[row, start - 1 : start + 7])
        np.testing.assert_allclose(of_steps[row], found[row], atol=0.1)
