"""Preference objectives beside TRL's own trainers: losses, metrics and all gradients of one batch and one adapter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import torch
import transformers
import trl
import trl_reference
from flax import nnx
from safetensors.numpy import load_file
from tiny import CONFIGS

import jaxtune
from jaxtune import compat
from jaxtune.compat.settings import plain_value, resolved_config
from jaxtune.models.hf import from_pretrained
from jaxtune.train.data.packing.pairs import PackedPairs
from jaxtune.train.data.tokens.documents import Document, Documents
from jaxtune.train.objectives.kto import KTO, with_mismatched_answers
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.preference import DPO, ORPO, SimPO
from jaxtune.train.objectives.reward import Reward

TOLERANCE = 1e-5
CASES = {
    "sigmoid": ("dpo", DPO(beta=0.3), dict(beta=0.3)),
    "hinge": ("dpo", DPO(beta=0.3, loss_type="hinge"), dict(beta=0.3, loss_type="hinge")),
    "ipo": ("dpo", DPO(beta=0.2, loss_type="ipo"), dict(beta=0.2, loss_type="ipo")),
    **{
        loss: ("dpo", DPO(beta=0.3, loss_type=loss, **options), dict(beta=0.3, loss_type=loss, **options))
        for loss, options in {
            "exo_pair": dict(label_smoothing=0.1),
            "robust": dict(label_smoothing=0.1),
            "discopop": dict(discopop_tau=0.1),
            **{loss: {} for loss in ("sigmoid_norm", "nca_pair", "bco_pair", "apo_zero", "apo_down")},
        }.items()
    },
    # With a large beta, whose targets are near: far ones have gradients whose rounding is above the tolerance.
    "sppo_hard": ("dpo", DPO(beta=2.0, loss_type="sppo_hard"), dict(beta=2.0, loss_type="sppo_hard")),
    **{
        kind: ("dpo", DPO(beta=0.3, f_divergence_type=kind), dict(beta=0.3, f_divergence_type=kind))
        for kind in ("forward_kl", "js_divergence", "alpha_divergence")
    },
    "orpo": ("orpo", ORPO(beta=0.4), dict(beta=0.4)),
    "simpo": ("simpo", SimPO(), dict(beta=2.0, simpo_gamma=0.5)),
    "simpo, smoothed": (
        "simpo",
        SimPO(1.5, 0.7, 0.1),
        dict(beta=1.5, simpo_gamma=0.7, label_smoothing=0.1),
    ),
}


def some_pairs(vocab_size: int) -> list[dict[str, list[int]]]:
    draw = np.random.default_rng(0)
    return [
        {key: draw.integers(3, vocab_size, length).tolist() for key, length in zip(keys, lengths, strict=True)}
        for keys in [("prompt", "chosen", "rejected")]
        for lengths in [(3, 5, 4), (1, 2, 7), (6, 4, 4)]
    ]


def documents_of(sides: list[tuple[list[int], list[int]]]) -> Documents:
    """Of (prompt, answer); nothing where there is no answer."""
    return Documents.gather(
        Document(
            np.asarray(prompt + answer if answer else [], np.int32),
            np.arange(len(prompt + answer) if answer else 0) >= len(prompt),
        )
        for prompt, answer in sides
    )


def packed(documents: Documents, length: int = 40, labels: np.ndarray | None = None):
    """A batch of pairs of documents."""
    rows = PackedPairs(documents, length, labels=labels)
    batch = rows.empty(len(rows))
    for row in range(len(rows)):
        rows.fill(batch, row, row)
    return jax.tree.map(jnp.asarray, batch)


def our_loss(objective, model, batch, folder):
    """(loss, metrics, {tensor of an adapter's file: gradient})"""
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

    def mean(trainable):
        loss, count, sums = objective.loss(nnx.merge(graph, trainable, frozen), batch, Forward())
        return loss / count, (count, sums)

    (loss, (count, sums)), slopes = jax.jit(jax.value_and_grad(mean, has_aux=True))(trainable)
    metrics = objective.metrics({"loss": loss * count, "count": count} | sums)
    jaxtune.save_adapter(nnx.merge(graph, slopes, frozen), folder / "slopes")
    return float(loss), metrics, load_file(folder / "slopes" / "adapter_model.safetensors")


def compare(ours, theirs):
    loss, metrics, slopes = ours
    wanted, their_metrics, their_slopes = theirs
    np.testing.assert_allclose(loss, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    assert slopes.keys() == their_slopes.keys() and len(slopes) > 10
    for name, slope in slopes.items():
        assert np.abs(their_slopes[name]).max() > 10 * TOLERANCE, name
        np.testing.assert_allclose(slope, their_slopes[name], atol=TOLERANCE, rtol=TOLERANCE, err_msg=name)
    assert metrics.keys() <= their_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, their_metrics[name], atol=TOLERANCE, rtol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_pairs(tmp_path, case):
    name, objective, options = CASES[case]
    base = reference.make_checkpoint(tmp_path / "base", CONFIGS["qwen2"])
    trainer = trl_reference.make_trainer(name, reference.load(base), tmp_path, **options)
    rows = some_pairs(CONFIGS["qwen2"]["vocab_size"])
    theirs = trl_reference.pair_loss(name, trainer, rows)
    model = jaxtune.load_adapter(from_pretrained(base, dtype="float32")[0], tmp_path / "adapter")
    batch = packed(documents_of([(row["prompt"], row[side]) for row in rows for side in ("chosen", "rejected")]))
    compare(our_loss(objective, model, batch, tmp_path), theirs)


@pytest.mark.full
def test_single_answers(tmp_path):
    """With a divergence above 0, and with one that would be below it, of an adapter that does the opposite."""
    base = reference.make_checkpoint(tmp_path / "base", CONFIGS["qwen2"])
    plain, _ = from_pretrained(base, dtype="float32")
    options = dict(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    rows = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in reversed(some_pairs(CONFIGS["qwen2"]["vocab_size"]))
        for side in ("chosen", "rejected")
    ][:5]
    # Of the nearest row before with another prompt; TRL takes the row before, whatever its prompt.
    strangers = [{"KL_completion": rows[index]["completion"]} for index in (4, 4, 1, 1, 3)]
    sides = [
        (row["prompt"], row["completion"] if row["label"] == side else []) for row in rows for side in (True, False)
    ]
    documents, labels = with_mismatched_answers(documents_of(sides))
    divergences = []
    for sign in (1.0, -1.0):
        folder = tmp_path / str(sign)
        trainer = trl_reference.make_trainer("kto", reference.load(base), folder, sign, **options)
        theirs = trl_reference.pair_loss("kto", trainer, [r | more for r, more in zip(rows, strangers, strict=True)])
        model = jaxtune.load_adapter(plain, folder / "adapter")
        ours = our_loss(KTO(**options), model, packed(documents, labels=labels), folder)
        compare(ours, theirs)
        divergences.append(float(ours[1]["kl"]))
    assert min(divergences) == 0 and max(divergences) > 0.01


@pytest.mark.full
def test_rewards(tmp_path):
    """With margins; and the merged model in transformers' own class."""
    base = reference.make_checkpoint(tmp_path / "base", CONFIGS["qwen2"])
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    trainer = trl_reference.make_trainer("reward", theirs, tmp_path, center_rewards_coefficient=0.1)
    rows = some_pairs(CONFIGS["qwen2"]["vocab_size"])
    whole = [
        {side: row["prompt"] + row[side] for side in ("chosen", "rejected")} | {"margin": 0.3 * index}
        for index, row in enumerate(rows)
    ]
    wanted = trl_reference.pair_loss("reward", trainer, whole)
    model = jaxtune.load_adapter(from_pretrained(base, dtype="float32")[0], tmp_path / "adapter")
    documents = documents_of([(row["prompt"], row[side]) for row in rows for side in ("chosen", "rejected")])
    batch = packed(documents, labels=np.asarray([row["margin"] for row in whole], np.float32))
    compare(our_loss(Reward(center_rewards_coefficient=0.1), model, batch, tmp_path), wanted)

    jaxtune.save_pretrained(jaxtune.merge_adapter(model), tmp_path / "merged")
    read = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for row in whole:
        with torch.no_grad():
            score = read(torch.tensor([row["chosen"]])).logits.numpy()
        ours = model(jnp.asarray([row["chosen"]]))[:, -1]
        np.testing.assert_allclose(score, ours, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["dpo", "orpo", "kto", "reward"])
def test_configs_of_trl_are_taken_with_their_own_defaults(tmp_path, name):
    theirs = trl_reference.TRAINERS[name][1](str(tmp_path), bf16=False)
    ours = vars(resolved_config(theirs, getattr(compat, type(theirs).__name__), None))
    shared = (ours.keys() & vars(theirs).keys()) - {"packing", "gradient_checkpointing"}
    assert ours["gradient_checkpointing"] is None and ours["library"] == "TRL"
    assert shared >= {"learning_rate", "logging_steps", "seed"}
    assert {key: ours[key] for key in shared} == {key: plain_value(getattr(theirs, key)) for key in shared}


@pytest.mark.parametrize("mode", [None, "token_mask", "sequence_truncate"])
def test_a_mode_that_a_script_left_alone_is_not_told(tmp_path, mode):
    """So that the default beside a cache in FP8 holds (compat/rewarded.py)."""
    told = {} if mode is None else {"vllm_importance_sampling_mode": mode}
    theirs = trl.GRPOConfig(str(tmp_path), bf16=False, report_to=[], **told)
    ours = resolved_config(theirs, compat.GRPOConfig, None)
    assert ours.vllm_importance_sampling_mode == theirs.vllm_importance_sampling_mode
    assert ("vllm_importance_sampling_mode" in ours.given) == (mode is not None)
