"""The divergences of distillation beside TRL's own losses, on the same tensors: values and gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from trl.experimental.gkd import GKDTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from jaxtune.pallas.linear_cross_entropy import linear_divergence
from jaxtune.train.objectives.distillation import generalized_jsd

ROWS, LENGTH, DIM, WIDE, VOCAB = 2, 7, 12, 20, 40


def arrays() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    shapes = dict(
        hidden=(ROWS, LENGTH, DIM), head=(VOCAB, DIM), teacher_hidden=(ROWS, LENGTH, WIDE), teacher_head=(VOCAB, WIDE)
    )
    found = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return found | dict(mask=(draw.random((ROWS, LENGTH)) < 0.7).astype(np.float32))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_the_divergence_of_logits_is_gkds(beta, temperature):
    given = arrays()
    own, others = given["hidden"] @ given["head"].T, given["teacher_hidden"] @ given["teacher_head"].T
    labels = torch.tensor(np.where(given["mask"] > 0, 1, -100))
    logits = torch.tensor(own, requires_grad=True)
    options = dict(beta=beta, temperature=temperature)
    want = GKDTrainer.generalized_jsd_loss(logits, torch.tensor(others), labels, **options)
    want.backward()

    def loss(own):
        return (generalized_jsd(own, others, **options) * given["mask"]).sum() / given["mask"].sum()

    got, gradient = jax.value_and_grad(loss)(own)
    np.testing.assert_allclose(got, want.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, logits.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        dict(beta=1.0),
        dict(beta=0.0, temperature=2.0),
        dict(beta=0.5, temperature=0.7),
        dict(beta=0.1, soft_cap=3.0, logit_scale=0.5, teacher_soft_cap=2.0, teacher_logit_scale=1.5),
    ],
)
def test_the_fused_divergence_is_the_distillation_trainers(options):
    given = arrays()
    tensors = {name: torch.tensor(value) for name, value in given.items()}
    for name in ("hidden", "head"):
        tensors[name].requires_grad_()
    want, entropy, count = _chunked_divergence_loss(
        tensors["hidden"],
        tensors["teacher_hidden"],
        tensors["head"],
        tensors["teacher_head"],
        tensors["mask"],
        options["beta"],
        student_logit_scale=options.get("logit_scale", 1.0),
        teacher_logit_scale=options.get("teacher_logit_scale", 1.0),
        student_final_logit_softcapping=options.get("soft_cap"),
        teacher_final_logit_softcapping=options.get("teacher_soft_cap"),
        temperature=options.get("temperature", 1.0),
    )
    want.backward()
    mask = jnp.asarray(given.pop("mask"))

    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def step(hidden, head):
        others = given["teacher_hidden"], given["teacher_head"]
        loss, _, entropies = linear_divergence(hidden, head, *others, mask, chunk_tokens=6, **options)
        return loss / mask.sum(), (entropies * mask).sum()

    (got, found), gradients = step(given["hidden"], given["head"])
    np.testing.assert_allclose(got, want.item(), rtol=1e-5)
    np.testing.assert_allclose(found, entropy.item(), rtol=1e-5)
    assert mask.sum() == count.item()
    for one, name in zip(gradients, ("hidden", "head"), strict=True):
        np.testing.assert_allclose(one, tensors[name].grad, rtol=1e-5, atol=1e-6)
