"""A run of the real Trainer over experts in four bits: packed rows, adapters on attention and experts."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.files.quant import quantize
from jaxtune.models.lora import experts, get_peft_model
from jaxtune.train.config import MeshConfig, OptimConfig
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, make_config

SGD = OptimConfig(name="sgd", learning_rate=1.0)
MOE = MoEConfig(4, 2, 64, router_bias=True, expert_bias=True, transposed=True, interleaved=True, swiglu_limit=7.0)


@pytest.mark.full
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


@pytest.mark.full
def test_two_devices_train_as_one_does(tmp_path):
    """Each sorts its own tokens; the gradients of adapters are summed over both."""
    base = tiny_model(moe=MOE, attention_sinks=True)
    model = get_peft_model(base, r=4, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    adapters = []
    for devices in (1, 2):
        config = make_config(tmp_path / str(devices), mesh=MeshConfig(data=devices), steps=1, optim=SGD)
        trained = Trainer(model, None, config, dataset(documents(12))).train()
        adapters.append({name: np.asarray(matrix.lora.b[...]) for name, matrix in experts(trained)})
    for name, one in adapters[0].items():
        assert np.abs(one).max() > 1e-4
        np.testing.assert_allclose(adapters[1][name], one, atol=1e-3 * np.abs(one).max(), err_msg=name)
