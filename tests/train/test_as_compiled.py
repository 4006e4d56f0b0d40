"""A step is given what its programs were compiled for while weights loaded, whoever decided otherwise in between: the
loader, the planner, a plan that is found again."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import Future

import jax
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec
from jaxtune.models.hf import Pretrained, save_pretrained
from jaxtune.models.placement.streams import declared
from jaxtune.system.waiting import Handover
from jaxtune.train.config import AdapterConfig, ModelConfig
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.planning import cost
from jaxtune.train.planning.movables import MOVABLES, left_on_host
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.program.leaves import Leaves, differences
from jaxtune.train.spec.loading import adapted
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.tiny_runs import dataset, documents, make_config

LAYERS = 4
FORMATS = (None, "nf4", "fp8", "int8", "nvfp4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    sizes = dict(hidden_size=64, intermediate_size=64, vocab_size=len(tokenizer), tie_embeddings=False)
    save_pretrained(tiny_model("bfloat16", layers=(LayerSpec(),) * LAYERS, **sizes), folder, tokenizer=tokenizer)
    return folder


def loading_trainer(folder, load_in: str | None, loaded: int) -> tuple[Trainer, Future]:
    """A run's trainer whose thread has yet to load: matrices of `loaded` layers into host memory."""
    config = make_config(
        folder / "run",
        model=ModelConfig(path=str(folder), load_in=load_in),
        adapter=AdapterConfig(r=2),
        precision="bf16",
    )
    changes = objective_of(config.objective).head, config.model, config.adapter, config.seed
    pretrained, weights = Pretrained(str(folder), config.dtype, load_in), Future()
    stay = left_on_host(config.adapter, generates=False, tied=False)

    def load() -> Handover:
        return Handover(adapted(pretrained.load(threading.Event(), None, stay, loaded), *changes))

    shapes = cost.abstract_model(pretrained.config, StepSpec.of(config).model)
    rows = dataset(documents(16), packing=True)
    return Trainer(shapes, None, config, rows, keeps_model=False, weights=weights), load


def with_levels(trainer: Trainer, levels: dict[str, int]) -> None:
    movables = trainer.planner.cost.movables
    able = {word: level for word, level in levels.items() if level and movables[word].able}
    plan = trainer.planner.plan.at(**able)
    trainer.planner.forecast = dataclasses.replace(trainer.planner.forecast, plan=plan)
    trainer.engine.follow_plan()


def levels_of(words: tuple[str, ...]):
    """How much a plan moves of each movable that places frozen weights."""
    return st.fixed_dictionaries({word: st.integers(0, LAYERS if MOVABLES[word].counted else 1) for word in words})


@settings(max_examples=12)
@given(
    load_in=st.sampled_from(FORMATS),
    loaded=st.integers(0, LAYERS),
    levels=levels_of(("embeddings", "optimizer_states", "streamed", "transposed_codes")),
)
@example(load_in=None, loaded=4, levels={"streamed": 3})
@example(load_in="nf4", loaded=4, levels={"streamed": 0, "embeddings": 1})
@example(load_in="fp8", loaded=2, levels={"streamed": 4, "transposed_codes": 1})
def test_a_step_is_given_what_its_programs_were_compiled_for(folder, load_in, loaded, levels):
    trainer, load = loading_trainer(folder, load_in, loaded)
    with_levels(trainer, levels)
    _, _, ahead = trainer.model.first_shapes(trainer.engine)
    trainer.model._weights.set_result(load())
    trainer.model.take_weights()
    frozen = trainer.model.placed_frozen(trainer.engine)
    assert differences(ahead, frozen) == []
    assert jax.tree.structure(Leaves.of(ahead)) == jax.tree.structure(Leaves.of(frozen))


def test_a_difference_is_named_before_the_step(folder, monkeypatch):
    """As where a variable that streamed once was not one that never did."""
    trainer, load = loading_trainer(folder, None, LAYERS)
    trainer.model._weights.set_result(load())
    placed = trainer.model.placed_frozen

    def as_it_was(engine):
        frozen = placed(engine)
        frozen["layers"][0]["mlp"]["down_proj"]["weight"].set_metadata("memory_kind", None)
        return frozen

    monkeypatch.setattr(trainer.model, "placed_frozen", as_it_was)
    with pytest.raises(RuntimeError, match=r"1 tensors are not .*layers\.0\.mlp\.down_proj\.weight.*memory_kind"):
        trainer.model.begin(trainer.engine, None)


@given(st.lists(st.booleans(), max_size=5))
def test_a_variable_moved_there_and_back_is_one_that_never_was(moves):
    variable = nnx.Variable(jax.numpy.ones((4, 4)), axes=("embed", "mlp"))
    moved = variable
    for hosted in [*moves, False]:
        moved = declared(moved, moved.get_value(), hosted)
    assert jax.tree.structure(moved) == jax.tree.structure(variable)
