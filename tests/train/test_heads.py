"""A head of somebody's own: declared once, in a table, it is trained with an adapter, saved, loaded, merged and refused
where it cannot serve."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import tiny_model

import jaxtune
from jaxtune.models import heads
from jaxtune.models.heads import SCORE, Head
from jaxtune.models.reward import reward_model, with_head
from jaxtune.train.config import OptimConfig
from jaxtune.train.objectives.sft import SFT
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, make_config

VALUE = Head("v_head", 1, "ForTokenClassification", "TOKEN_CLS", "this model values tokens")


@dataclasses.dataclass(frozen=True)
class Place(SFT):
    """The square of what the value of a token is off from its position, over eight."""

    head = VALUE

    def loss(self, model, batch, forward):
        value = model.logits(forward(model, batch))[..., 0]
        return ((value - batch.positions / 8) ** 2 * batch.weights).sum(), batch.weights.sum(), {}


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    monkeypatch.setattr(heads, "HEADS", [*heads.HEADS, VALUE])


@pytest.mark.full
def test_it_trains_and_goes_through_files(tmp_path):
    base = tiny_model()
    model = jaxtune.get_peft_model(with_head(base, Place.head, seed=1), r=4)
    assert model.head.weight.shape == (1, 16) and model.head.original is not None
    config = make_config(tmp_path, steps=60, optim=OptimConfig(learning_rate=2e-2))
    trainer = Trainer(model, None, config, dataset(documents(24)), objective=Place())
    trained = trainer.train()
    losses = [line["loss"] for line in trainer.history if "loss" in line]
    assert losses[-1] < 0.2 * losses[0]

    tokens = jnp.asarray([[3, 9, 4, 1]])
    jaxtune.save_adapter(trained, tmp_path / "adapter")
    again = jaxtune.load_adapter(base, tmp_path / "adapter")  # the language model's head gives place
    assert again.config.head == VALUE
    np.testing.assert_array_equal(again(tokens), trained(tokens))

    merged = jaxtune.merge_adapter(trained)
    jaxtune.save_pretrained(merged, tmp_path / "merged")
    loaded, _ = jaxtune.from_pretrained(tmp_path / "merged", dtype="float32")
    assert loaded.config == merged.config and loaded.config.head == VALUE
    np.testing.assert_array_equal(loaded(tokens), merged(tokens))


def test_what_it_cannot_do(tmp_path):
    model = with_head(tiny_model(), VALUE)
    assert with_head(model, VALUE) is model
    with pytest.raises(ValueError, match="generate: this model values tokens and cannot continue texts"):
        jaxtune.generate(model, [[1, 2]])
    with pytest.raises(ValueError, match="to = 'gguf': this model values tokens"):
        jaxtune.export_model(model, tmp_path, to="gguf")
    with pytest.raises(ValueError, match="reward_model: this model values tokens: start from the language model"):
        reward_model(model)
    with pytest.raises(ValueError, match="tie_embeddings: this model scores texts"):
        dataclasses.replace(model.config, head=SCORE, tie_embeddings=True)
