"""Rates of transformers.get_scheduler, over all of its names and drawn lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.compat.settings import SFTConfig, schedule_config
from jaxtune.convert.tables import table
from jaxtune.train.optimizer.schedule import learning_rate_schedule

PEAK = 3e-4
SHAPES = st.sampled_from(["linear", "cosine", "1-sqrt"])
ARGUMENTS = {
    "cosine": {"num_cycles": st.sampled_from([0.5, 1.0, 1.5])},
    "cosine_with_restarts": {"num_cycles": st.integers(1, 5)},
    "cosine_with_min_lr": {"min_lr": st.sampled_from([0.0, 1e-5]), "num_cycles": st.sampled_from([0.5, 0.25])},
    "polynomial": {"lr_end": st.sampled_from([1e-7, 1e-5]), "power": st.sampled_from([0.5, 1.0, 2.0])},
    "inverse_sqrt": {"timescale": st.integers(1, 40)},
    "warmup_stable_decay": {
        "warmup_type": SHAPES,
        "decay_type": SHAPES,
        "min_lr_ratio": st.sampled_from([0.0, 0.1]),
        "num_stable_steps": st.integers(0, 20),
    },
}
NEEDED = {
    "cosine_with_min_lr": {"min_lr_rate": st.sampled_from([0.1, 0.3])},
    "warmup_stable_decay": {"num_decay_steps": st.integers(1, 30)},
}


@pytest.mark.parametrize("name", sorted(table("trl").schedules))
@given(st.data())
@settings(max_examples=20, deadline=None)
def test_rates_are_those_of_transformers(name, data):
    import torch
    from transformers import get_scheduler

    total = data.draw(st.integers(1, 50))
    warmup = data.draw(st.integers(0, total - (name == "polynomial")))  # which divides by zero where they are equal
    arguments = {key: data.draw(values) for key, values in ARGUMENTS.get(name, {}).items() if data.draw(st.booleans())}
    needed = {key: data.draw(values) for key, values in NEEDED.get(name, {}).items()}
    if "min_lr" not in arguments:
        arguments |= needed
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=PEAK)
    theirs = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=dict(arguments) or None,
    )
    want = []
    for _ in range(total):
        want.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    args = SFTConfig(
        lr_scheduler_type=name,
        lr_scheduler_kwargs=arguments,
        learning_rate=PEAK,
        warmup_steps=warmup,
        warmup_ratio=0.0,
        max_steps=total,
    )
    rates = learning_rate_schedule(schedule_config(args, total), PEAK, total)
    np.testing.assert_allclose([float(rates(step)) for step in range(total)], want, rtol=2e-4, atol=2e-9)


def test_every_name_of_transformers_is_here_or_refused():
    from transformers.trainer_utils import SchedulerType

    names = table("trl")
    assert {kind.value for kind in SchedulerType} == {*names.schedules} | names.refused_schedules.keys()


def exact_muon(weight: np.ndarray, gradients: np.ndarray, momentum: float) -> np.ndarray:
    weight, buffer = weight.astype(np.float64), 0.0
    for gradient in gradients.astype(np.float64):
        buffer = momentum * buffer + (1 - momentum) * gradient
        x = momentum * buffer + (1 - momentum) * gradient
        x = x / np.linalg.norm(x)
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        weight = weight - 0.01 * (0.2 * np.sqrt(max(x.shape)) * x + 0.1 * weight)
    return weight


@pytest.mark.parametrize("momentum", [0.9, 0.95])
@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (16, 4)])
def test_muon_is_torchs(momentum, shape):
    """As near to the formula in float64 as torch, which iterates in bfloat16 too."""
    import jax.numpy as jnp
    import optax
    import torch

    from jaxtune.train.config import OptimConfig
    from jaxtune.train.optimizer.optim import make_optimizer

    draw = np.random.default_rng(0)
    weight, gradients = (draw.standard_normal(size).astype(np.float32) for size in (shape, (4, *shape)))
    parameter = torch.nn.Parameter(torch.tensor(weight))
    theirs = torch.optim.Muon([parameter], 0.01, 0.1, momentum, adjust_lr_fn="match_rms_adamw")
    ours = make_optimizer(OptimConfig(name="muon", momentum=momentum, weight_decay=0.1), optax.constant_schedule(0.01))
    weights = {"matrix": jnp.asarray(weight)}
    state = ours.init(weights)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        theirs.step()
        updates, state = ours.update({"matrix": jnp.asarray(gradient)}, state, weights)
        weights = {"matrix": weights["matrix"] + updates["matrix"]}
    exact = exact_muon(weight, gradients, momentum)
    errors = [np.abs(np.asarray(one) - exact).max() for one in (weights["matrix"], parameter.detach().numpy())]
    assert errors[0] <= max(1.5 * errors[1], 1e-6) < 0.1 * np.abs(exact - weight).max()
