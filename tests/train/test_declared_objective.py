"""What objectives declare to the rest of a run, over every name that a config knows."""

from __future__ import annotations

import dataclasses
import re
from typing import get_args, get_type_hints

import pytest

from jaxtune.train.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    EvaluationConfig,
    ObjectiveConfig,
)
from jaxtune.train.config.objective import _OPTIONS
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.objective import Declared, ReferenceColumn, RunNeeds, TeacherColumn
from jaxtune.train.objectives.sft import SFT
from jaxtune.train.spec.run_spec import decided_objective
from tests.train.tiny_runs import make_config

# What a section needs beside its name.
SECTIONS = {
    "grpo": dict(reward_funcs=("brevity",)),
    "rloo": dict(reward_funcs=("brevity",)),
    "distill": dict(teacher="base"),
}
NAMES = get_args(get_args(get_type_hints(ObjectiveConfig, include_extras=True)["name"])[0])
HELD_OUT = dict(data=dataclasses.replace(make_config("x").data, eval="held out"))
STREAMED = dict(data=DataConfig(train="rows", length=64, streaming=True), steps=2)


def section(name: str, **options) -> ObjectiveConfig:
    return ObjectiveConfig(name, **SECTIONS.get(name, {}) | options)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_its_class_and_declares(name):
    assert name in _OPTIONS
    objective = objective_of(section(name))
    assert objective.label == name and Declared in type(objective).__mro__
    needs = RunNeeds.of(objective)
    assert needs.samples == objective.samples == (name in ("grpo", "rloo", "distill"))
    assert (needs.sampler is None) == (not needs.samples)
    # What packs sampled answers has no loss on rows that nobody sampled, and samples.
    assert (objective.packed is None) == objective.has_row_loss
    assert objective.packed is None or objective.samples
    # A reference that runs in a loss is either the model itself or a teacher.
    assert objective.reference_is_base or not objective.reference_runs
    config = make_config("out", objective=section(name))
    assert decided_objective(config) == objective


@pytest.mark.parametrize(
    ("changed", "samples", "runs", "column"),
    [
        (section("distill", on_policy=0.0), False, 1, None),
        (section("distill", on_policy=0.25), True, 1, None),
        (
            section("distill", on_policy=0.0, teacher_top_k=4, temperature=2.0),
            False,
            0,
            TeacherColumn("objective.teacher_top_k", "base", 4, None, 2.0),
        ),
        (
            ObjectiveConfig("distill", on_policy=0.0, teacher_logprobs="file"),
            False,
            0,
            TeacherColumn("objective.teacher_logprobs", None, None, "file", 1.0),
        ),
        (section("dpo"), False, 1, None),
        (
            section("dpo", precompute_ref_log_probs=True),
            False,
            0,
            ReferenceColumn("objective.precompute_ref_log_probs"),
        ),
        (section("grpo", beta=0.1), True, 1, None),
        (section("rloo", beta=0.1), True, 0, None),
    ],
)
def test_options_change_what_is_declared(changed, samples, runs, column):
    needs = RunNeeds.of(objective_of(changed))
    assert (needs.samples, needs.reference_runs, needs.rows_before) == (samples, runs, column)


PRECOMPUTED, TOP_K = dict(precompute_ref_log_probs=True), dict(on_policy=0.0, teacher_top_k=4)
EXACT = HELD_OUT | dict(evaluation=EvaluationConfig(exact_match_rows=5))


@pytest.mark.parametrize(
    ("changed", "changes", "message"),
    [
        *((section(name), EXACT, f"rows have no right answer (objective = {name})") for name in ("dpo", "orpo")),
        (section("reward"), EXACT, "a reward model writes no answers (objective = reward)"),
        (
            section("reward"),
            HELD_OUT | dict(evaluation=EvaluationConfig(generate=("regex",))),
            "evaluation.generate = ['regex']: a reward model writes no answers",
        ),
        (
            section("grpo"),
            HELD_OUT | dict(checkpoint=CheckpointConfig(best="eval_loss"), evaluation=EvaluationConfig(every_steps=2)),
            "have no loss with grpo",
        ),
        (
            section("grpo"),
            dict(data=DataConfig("rows", format="text")),
            "data.format = 'text': objective = grpo reads",
        ),
        (
            section("rloo"),
            dict(data=DataConfig("rows", packing="step")),
            "data.packing = 'step': objective = rloo",
        ),
        (section("dpo", **PRECOMPUTED), STREAMED, "objective.precompute_ref_log_probs: needs all rows before the run"),
        (section("kto", **PRECOMPUTED), STREAMED, "objective.precompute_ref_log_probs: needs all rows before the run"),
        (section("distill", **TOP_K), STREAMED, "objective.teacher_top_k: needs all rows before the run"),
    ],
)
def test_a_key_that_does_not_go_with_an_objective_is_refused(changed, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        decided_objective(make_config("out", objective=changed, **changes))


@pytest.mark.parametrize("name", ["sft", "kto", "grpo", "rloo", "distill"])
def test_rows_with_a_right_answer_may_be_asked(name):
    assert decided_objective(make_config("out", objective=section(name), **EXACT)).label == name


def test_an_objective_of_ones_own_refuses_and_is_named_by_its_class():
    @dataclasses.dataclass(frozen=True)
    class Own(SFT):
        samples = True

        def refuses(self, data, mesh, evaluation, checkpoint):
            super().refuses(data, mesh, evaluation, checkpoint)
            if evaluation.at_start:
                raise ConfigError("evaluation.at_start = True: nothing is learnt yet")

    config = make_config("out", evaluation=EvaluationConfig(at_start=True), **HELD_OUT)
    with pytest.raises(ConfigError, match="evaluation.at_start = True: nothing is learnt yet"):
        decided_objective(config, Own())
    assert decided_objective(config).label == "sft" and Own().label == "Own"


def test_an_objective_without_declarations_is_told_what_to_derive_from():
    class Bare:
        unit, sums = "targets", ()

    with pytest.raises(ValueError, match="objective = Bare: it declares nothing to the run: derive it from SFT"):
        decided_objective(make_config("out"), Bare())
