"""Runs that sample with `objective.cache`: keys and values are stored in e4m3, and the plan counts them so."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIGS
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.generation.slot_plan import SlotPlan, slots_for
from jaxtune.models.generation.structure import CACHES
from jaxtune.models.hf import model_from_config
from jaxtune.models.lora import get_peft_model
from jaxtune.train.config import CheckpointConfig, ConfigError, DataConfig, EvaluationConfig, MemoryConfig, OptimConfig
from jaxtune.train.config.file import load_config
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.data.batches import SampledRows
from jaxtune.train.evaluation import answer_metrics
from jaxtune.train.folder.checkpoint import CheckpointError
from jaxtune.train.objectives.distillation import Distill, Drawing
from jaxtune.train.objectives.grpo import Correction
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.policy import GRPO, RLOO
from jaxtune.train.objectives.sampling import Settings
from jaxtune.train.planning.phases import phases_of, prefill_bytes
from jaxtune.train.sampled import answering, own_samples, rollout_function
from jaxtune.train.sampled.answer_report import weight_lines
from jaxtune.train.spec.setup import slots_between
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.plan_of_slots import TEMPLATE
from tests.train.tiny_runs import make_config

OWN = """
def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

def roll(sides: int) -> int:
    '''Rolls a die.

    Args:
        sides: of the die.
    '''
    return sides // 2

def play(prompts, model):
    ids = [model.encode(prompt) for prompt in prompts]
    rows = model.generate(ids)
    return {
        "prompt_ids": ids,
        "completion_ids": [row.ids for row in rows],
        "logprobs": [row.logprobs for row in rows],
        "reward": [float(len(row.ids)) for row in rows],
    }
"""
# What samples, and its options beside those that all have.
WAYS = {
    "rewards": dict(name="grpo", reward_funcs="even"),
    "leave one out": dict(name="rloo", reward_funcs="even"),
    "tools": dict(name="grpo", reward_funcs="even", tools="roll"),
    "a rollout function": dict(name="grpo", rollout_func="play"),
    "own samples": dict(name="distill", teacher="base"),
}


def trainer_of(folder: Path, way: str, **changes) -> Trainer:
    folder.mkdir(exist_ok=True)
    file, held_out = folder / "own.py", folder / "held.jsonl"
    file.write_text(OWN)
    held_out.write_text('{"prompt": "one", "answer": "two"}\n')
    tokenizer = make_tokenizer(TEMPLATE)
    model = get_peft_model(tiny_model(vocab_size=len(tokenizer), layers=(LayerSpec(),)), r=4, lora_alpha=8)
    options: dict = dict(max_completion_length=8, cache="fp8") | WAYS[way] | changes.pop("objective", {})
    for key in ("reward_funcs", "tools", "rollout_func"):
        if key in options:
            options[key] = f"{file}:{options[key]}" if key == "rollout_func" else (f"{file}:{options[key]}",)
    if options["name"] != "distill":
        options["num_generations"] = 2
    settings = dict(
        steps=2,
        rows_per_step=4,
        optim=OptimConfig(learning_rate=1e-2, weight_decay=0.0),
        objective=ObjectiveConfig(**options),
        data=DataConfig(train="rows that the test made", eval=str(held_out), length=128),
        evaluation=EvaluationConfig(generate=("exact_match",), max_new_tokens=4),
    )
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("one", "two of them", "three")]
    return Trainer(model, tokenizer, make_config(folder / "run", **(settings | changes)), rows)


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_sampled_over_caches_in_fp8_and_evaluations_are_not(way, tmp_path, monkeypatch):
    modules = (answering, rollout_function, own_samples, answer_metrics)
    dtypes: dict[str, set[str]] = {}

    for module in modules:

        class Seen(Sampler):
            module_name = module.__name__.rpartition(".")[2]

            def step(self):
                pieces = super().step()
                states = jax.tree.leaves(self._caches.states)
                dtypes.setdefault(self.module_name, set()).update(str(leaf.dtype) for leaf in states)
                return pieces

        monkeypatch.setattr(module, "Sampler", Seen)
    trainer = trainer_of(tmp_path, way)
    trainer.train()
    where = {"a rollout function": "rollout_function", "own samples": "own_samples"}.get(way, "answering")
    assert dtypes == {where: {"float8_e4m3fn"}, "answer_metrics": {"float32"}}
    assert len([line for line in trainer.history if "completions/mean_length" in line]) == 2


def test_what_was_sampled_is_corrected_for_as_before(tmp_path):
    """The mismatch grows, and is measured and corrected for."""
    mismatch = {}
    for cache in (None, "fp8"):
        trainer = trainer_of(tmp_path / str(cache), "rewards", objective=dict(cache=cache), steps=1)
        trainer.train()
        line = trainer.history[0]
        mismatch[cache] = line["sampling/sampling_logp_difference/mean"]
        assert 0.5 < line["sampling/importance_sampling_ratio/mean"] < 1.5
    assert mismatch[None] < 1e-5 < mismatch["fp8"] < 0.1


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([GRPO, RLOO]), st.integers(128, 1024), st.floats(0.1, 0.16), st.integers(0, 2**32 - 1))
def test_long_answers_keep_their_weight_in_the_loss(kind, tokens, spread, seed):
    """Token ratios of SmolLM2-135M over such a cache have mean 1 and deviation 0.13, those of answers fall."""
    noise = np.random.default_rng(seed).normal(-(spread**2) / 2, spread, (32, tokens))
    sampled, mask = np.full((32, tokens), -1.0, np.float32), np.ones((32, tokens), np.float32)

    def weights(objective: GRPO) -> np.ndarray:
        return np.asarray(objective._ratio(jnp.asarray(sampled + noise), jnp.asarray(sampled), jnp.asarray(mask)))

    ratios = weights(kind.of(cache="fp8"))
    assert 0.97 < ratios.mean() < 1.03 and ratios.sum() ** 2 / (ratios**2).sum() > 0.95 * ratios.size
    of_answers = weights(kind.of(cache="fp8", importance_sampling_mode="sequence_mask"))
    assert of_answers.shape == (32, 1) and np.median(of_answers) < 0.9


def test_the_mode_is_the_recipes_else_the_caches():
    def mode(**options) -> str | None:
        objective = objective_of(ObjectiveConfig(reward_funcs=("exact_match",), **options))
        assert isinstance(objective, GRPO)
        return objective.importance_sampling_mode

    for name in ("grpo", "rloo"):
        assert mode(name=name) == "sequence_mask" and mode(name=name, cache="fp8") == "token_truncate"
        for told in get_args(Correction):
            assert mode(name=name, cache="fp8", importance_sampling_mode=told) == told
            assert mode(name=name, importance_sampling_mode=told) == told


@given(st.sampled_from(get_args(Correction)), st.floats(0.0, 2.0), st.floats(0.0, 3.0), st.floats(0.0, 1.0))
def test_little_weight_is_said_of_answers_that_count(correction, mean, largest, zero):
    names = (f"sampling/importance_sampling_ratio/{name}" for name in ("mean", "max", "zero"))
    said = weight_lines(dict(zip(names, (mean, largest, zero), strict=True)), correction, None)
    assert bool(said) == (correction.startswith("sequence") and mean < 0.5 and largest > 0 and zero <= 0.5)


def test_a_run_whose_answers_weigh_little_says_so_once(tmp_path, capsys, monkeypatch):
    """Of whatever cause: here the sampler says that its tokens were likelier."""
    likelier = functools.partialmethod(_likelier, Sampler.step)
    monkeypatch.setattr(answering, "Sampler", type("Likelier", (Sampler,), {"step": likelier}))
    for mode, cache in (("sequence_mask", None), ("sequence_truncate", "fp8"), (None, "fp8"), ("token_mask", None)):
        trainer = trainer_of(
            tmp_path / f"{mode}", "rewards", objective=dict(cache=cache, importance_sampling_mode=mode), steps=3
        )
        trainer.train()
        printed = capsys.readouterr()
        told = (printed.out + printed.err).replace("\n", " ")
        assert told.count("weighs the loss with") == (mode or "").startswith("sequence"), told
        if (mode or "").startswith("sequence"):
            assert f"objective.importance_sampling_mode = {mode}" in told and "token_truncate" in told
            assert ("leave objective.cache out" in told) == (cache is not None) != ("set objective.exact" in told)


def _likelier(sampler, step):
    pieces = step(sampler)
    return [dataclasses.replace(piece, logprobs=[value + 0.5 for value in piece.logprobs]) for piece in pieces]


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(codec="ascii", categories=("Ll", "Nd")), min_size=1, max_size=8))
def test_other_words_are_refused_by_key_and_value(word):
    recipe = ["model.path=x", "data.train=x", "output=x", "objective.name=grpo", "objective.reward_funcs=[exact_match]"]
    if word in CACHES:
        return
    with pytest.raises(ConfigError, match=rf"objective\.cache.*{word}"):
        load_config("lora-0.5b", [*recipe, f'objective.cache="{word}"'])
    for make in (Settings, Drawing):
        with pytest.raises(ValueError, match=f"cache = '{word}': 'fp8' or None"):
            make(cache=word)


def test_the_config_has_the_samplers_words():
    literal, _ = get_args(get_args(get_type_hints(ObjectiveConfig, include_extras=True)["cache"])[0])
    assert get_args(literal) == tuple(CACHES)
    config = load_config("lora-0.5b", ["objective={name: distill, teacher: base, cache: fp8}"], rows_needed=False)
    assert config.objective.cache == "fp8"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (dict(name="grpo", reward_funcs=("exact_match",), exact=True), "objective.cache = 'fp8': with objective.exact"),
        (dict(name="rloo", reward_funcs=("exact_match",), exact=True), "objective.cache = 'fp8': with objective.exact"),
        (dict(name="sft"), "objective.cache = 'fp8': sft has no such option; leave it out"),
        (dict(name="dpo"), "objective.cache = 'fp8': dpo has no such option; leave it out"),
        (
            dict(name="distill", teacher="base", on_policy=0.0),
            "objective.cache = 'fp8': on_policy = 0 samples no answers",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        ObjectiveConfig(cache="fp8", **options)


def test_a_sampler_and_its_settings_refuse_exact_too():
    with pytest.raises(ValueError, match="cache = 'fp8': with exact training reads"):
        Settings(cache="fp8", exact=True)
    with pytest.raises(ValueError, match="Sampler: cache = 'fp8': with exact training reads"):
        Sampler(tiny_model(), 1, 64, cache="fp8", exact=True)


@pytest.mark.parametrize("objective", [GRPO.of(cache="fp8"), RLOO.of(cache="fp8"), Distill.of(cache="fp8")])
def test_models_without_keys_and_values_are_refused(objective):
    """As the Sampler refuses them; one with some full attention is not."""
    hf = CONFIGS["qwen3_5"]
    count = hf["num_hidden_layers"]
    model = model_from_config(hf | dict(layer_types=["linear_attention"] * count), jax.random.key(0))
    model = get_peft_model(model, r=2)
    told = "cache = 'fp8': no layer of the model has keys and values; leave it out"
    with pytest.raises(ValueError, match=f"objective.{told}"):
        objective.check(model)
    with pytest.raises(ValueError, match=f"Sampler: {told}"):
        Sampler(model, 1, 64, cache="fp8")
    objective.check(get_peft_model(model_from_config(hf, jax.random.key(0)), r=2))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 64), st.integers(16, 4000), st.sampled_from([32, 64]))
def test_keys_and_values_are_counted_as_they_are_stored(slots, length, head_dim):
    model = tiny_model("bfloat16", head_dim=head_dim, max_position_embeddings=4096)
    wide, narrow = (slots_for(model, 1e12, length, slots, cache=cache) for cache in (None, "fp8"))
    head = 16 * slots * model.config.vocab_size  # of a step's logits
    assert wide.bytes - head == 2 * (narrow.bytes - head) > 0
    assert "fp8" in str(narrow) and "fp8" not in str(wide)


def test_twice_as_many_slots_fit_between_two_steps(tmp_path):
    """Beside the same step, of the same memory."""
    planner = trainer_of(tmp_path, "rewards", memory=MemoryConfig(budget_gb=1)).planner
    model, rows = tiny_model("bfloat16", head_dim=64, max_position_embeddings=4096), SampledRows(4096, None, 64)
    fixed = planner.cost.fixed_bytes(1) + prefill_bytes(planner.cost, planner.device)

    def planned(cache: str | None) -> SlotPlan:
        asked, room = dataclasses.replace(rows, cache=cache), slots_for(model, 1e12, 4096, 20).bytes / 0.9
        return slots_between(planner.cost, planner.plan.at(), planner.device, fixed + room, model, asked)

    assert [planned(cache).slots for cache in (None, "fp8")] == [16, 32]
    for way in WAYS:
        rows_of_run = trainer_of(tmp_path, way, memory=MemoryConfig(budget_gb=1))
        assert {name: plan.cache for name, plan in rows_of_run.slots.items()} == {"answers": "fp8", "generate": None}


@pytest.mark.parametrize("options", [{}, {"cache": "fp8"}, {"exact": True}])
def test_where_memory_is_short_the_cache_is_named(options, tmp_path):
    """By the Sampler, by the plan and by its phase, where it would help."""
    helps = not options
    model = tiny_model("bfloat16", head_dim=64)
    if not options.get("exact"):  # which tiny models may be refused for
        with pytest.raises(ValueError, match="device memory are left") as short:
            Sampler(model, free_bytes=10.0, **options)
        assert ('Sampler(cache="fp8")' in str(short.value)) == helps
    with pytest.raises(ValueError, match="device memory are left") as short:
        slots_for(model, 10.0, 64, 4, **options)
    assert ("objective.cache=fp8" in str(short.value)) == helps
    trainer = trainer_of(tmp_path, "rewards", memory=MemoryConfig(budget_gb=1), objective={"cache": None} | options)
    planner, spec = trainer.planner, trainer.config
    sections = (spec.model.load_in, spec.data, spec.checkpoint, spec.export)
    of_plan = (planner.cost, planner.forecast, planner.device, *sections)
    exact = trainer.batches.sampled_rows.exact
    told = phases_of(trainer.model.prepared, trainer.model.trainable, *of_plan, slots=trainer.slots, exact=exact)
    remedies = {phase.name: phase.remedy for phase in told}
    assert ("objective.cache=fp8" in remedies["answers"]) == helps and "cache" not in remedies["generate"]


def test_a_run_does_not_continue_with_another_cache(tmp_path):
    checkpoint = CheckpointConfig(every_steps=1, every_minutes=None)
    trainer_of(tmp_path, "rewards", checkpoint=checkpoint).train()
    with pytest.raises(CheckpointError, match=r"config.objective.cache: saved 'fp8', now None"):
        trainer_of(tmp_path, "rewards", checkpoint=checkpoint, objective=dict(cache=None), steps=3).train()
