"""A run of the real Trainer over experts in four bits: packed rows, adapters on attention and experts."""

from __future__ import annotations

import numpy as np
from tiny_models import tiny_model
from tests.train.tiny_runs import dataset, documents, make_config

from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.lora import experts, get_peft_model
from jaxtune.models.quant import quantize
from jaxtune.train.loop import Trainer

MOE = MoEConfig(4, 2, 64, router_bias=True, expert_bias=True, transposed=True, interleaved=True, swiglu_limit=7.0)


def test_the_loss_falls_and_every_experts_adapter_moves(tmp_path):
    base = quantize(tiny_model(moe=MOE, attention_sinks=True, layers=(LayerSpec(window=4),)))
    model = get_peft_model(base, r=4, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    trainer = Trainer(model, None, make_config(tmp_path / "run", steps=16), dataset(documents(60)))
    trained = trainer.train()
    losses = [line["loss"] for line in trainer.history if "loss" in line]
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) - 0.2
    for (name, before), (_, after) in zip(experts(model), experts(trained), strict=True):
        moved = np.abs(np.asarray(after.lora.b[...] - before.lora.b[...])).max((1, 2))
        assert (moved > 0).all(), name
    router = trained.layers[0].mlp.router
    np.testing.assert_array_equal(router.weight[...], model.layers[0].mlp.router.weight[...])
