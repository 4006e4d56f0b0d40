"""The losses of GRPO's variants and of RLOO beside TRL's own trainers, on the same arrays: values, gradients, metrics.

TRL's loss is a method of its trainer. Here it runs on the arrays that the model's forward would give.
"""

from __future__ import annotations

import collections
import types

import accelerate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

from jaxtune.train.objectives.grpo import Answers, PolicyLoss, grpo_loss, importance_ratio, rloo_loss

ANSWERS, TOKENS, LONGEST = 6, 9, 16
CASES = {
    "dapo": {},
    "grpo": dict(loss_type="grpo"),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "bnpo": dict(loss_type="bnpo", epsilon_high=0.28),
    "cispo": dict(loss_type="cispo", epsilon_high=5.0),
    "sapo": dict(loss_type="sapo"),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
    "two-sided": dict(delta=1.5),
    "divergence": dict(beta=0.04),
    "plain divergence": dict(beta=0.04, use_bias_correction_kl=False, loss_type="grpo"),
    "divergence of answers": dict(beta=0.04, importance_sampling_level="sequence"),
    "entropy mask": dict(top_entropy_quantile=0.3),
    "entropy bonus": dict(entropy_coef=0.01, top_entropy_quantile=0.5, loss_type="dr_grpo"),
}


def arrays() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    near = -draw.exponential(1.0, (ANSWERS, TOKENS)).astype(np.float32)

    def beside(spread: float) -> np.ndarray:
        return near + spread * draw.standard_normal(near.shape).astype(np.float32)

    lengths = np.array([9, 1, 4, 0, 7, 9])  # one answer was cut off, and is masked
    return dict(
        logps=near,
        old_logps=beside(0.3),
        ref_logps=beside(0.5),
        sampled_logps=beside(0.1),
        entropies=draw.exponential(1.0, near.shape).astype(np.float32),
        mask=(np.arange(TOKENS) < lengths[:, None]).astype(np.float32),
        advantages=draw.standard_normal(ANSWERS).astype(np.float32),
    )


def torch_loss(trainer: type, given: dict[str, np.ndarray], options: dict, tmp_path, **more):
    """(loss, gradient by logps and entropies, metrics) of a TRL trainer's own loss of these arrays."""
    tensors = {name: torch.tensor(value) for name, value in given.items()}
    for name in ("logps", "entropies"):
        tensors[name].requires_grad_()
    args = GRPOConfig(output_dir=str(tmp_path), report_to=[], bf16=False, use_cpu=True, num_generations=2, **options)
    args.steps_per_generation = 1
    made = types.SimpleNamespace(
        args=args,
        accelerator=accelerate.Accelerator(cpu=True),
        model=torch.nn.Identity(),  # in training mode
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (tensors["logps"], tensors["entropies"], None),
        get_high_entropy_mask=None,
        loss_type=args.loss_type,
        beta=args.beta,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        importance_sampling_level=args.importance_sampling_level,
        top_entropy_quantile=args.top_entropy_quantile,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        off_policy_mask_threshold=None,
        use_vllm="ratio" in more,
        vllm_importance_sampling_correction="ratio" in more,
        _entropy_bonus_enabled=args.entropy_coef != 0,
        use_adaptive_entropy=False,
        entropy_coef=args.entropy_coef,
        aux_loss_enabled=False,
    )
    made.get_high_entropy_mask = types.MethodType(GRPOTrainer.get_high_entropy_mask, made)
    mask = tensors["mask"]
    inputs = dict(
        prompt_ids=torch.zeros(ANSWERS, 2, dtype=torch.long),
        prompt_mask=torch.ones(ANSWERS, 2),
        completion_ids=torch.zeros(ANSWERS, TOKENS, dtype=torch.long),
        completion_mask=mask,
        advantages=tensors["advantages"],
        old_per_token_logps=tensors["old_logps"],
        ref_per_token_logps=tensors["ref_logps"],
        old_logps=(tensors["old_logps"] * mask).sum(1),
        num_items_in_batch=mask.sum(),
    )
    if "ratio" in more:
        inputs["importance_sampling_ratio"] = torch.tensor(more["ratio"])
    loss = trainer._compute_loss(made, None, inputs)
    loss.backward()
    gradients = [tensors[name].grad for name in ("logps", "entropies")]
    metrics = {name: values[0] for name, values in made._metrics["train"].items()}
    return loss.item(), [None if g is None else g.numpy() for g in gradients], metrics


def our_loss(function, given: dict[str, np.ndarray], options: dict, **more):
    arrays = {name: jnp.asarray(value) for name, value in given.items() if name != "sampled_logps"}

    def loss(logps, entropies):
        answers = Answers(**arrays | {"logps": logps, "entropies": entropies} | more)
        return function(answers, PolicyLoss(max_completion_length=LONGEST, **options))

    (value, metrics), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(arrays["logps"], arrays["entropies"])
    return float(value), gradients, {name: float(each) for name, each in metrics.items()}


def compare(theirs, ours) -> None:
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    for got, want in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(got, np.zeros_like(got) if want is None else want, rtol=1e-5, atol=1e-6)
    for name, value in ours[2].items():
        np.testing.assert_allclose(value, theirs[2][name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_metrics_are_trls(name, tmp_path):
    options, given = CASES[name], arrays()
    compare(torch_loss(GRPOTrainer, given, options, tmp_path), our_loss(grpo_loss, given, options))


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_a_correction_multiplies_the_policys_loss(mode, tmp_path):
    """The ratio itself is compared with its definition in tests/train; here, where it counts."""
    given, options = arrays(), dict(beta=0.04)
    ratio = importance_ratio(given["old_logps"], given["sampled_logps"], given["mask"], mode=mode, clip_max=1.2)
    theirs = torch_loss(GRPOTrainer, given, options, tmp_path, ratio=np.array(ratio))
    compare(theirs, our_loss(grpo_loss, given, options, ratio=ratio))


def test_rloo_is_trls(tmp_path):
    given = arrays()
    compare(torch_loss(RLOOTrainer, given, {}, tmp_path), our_loss(rloo_loss, given, {}))
