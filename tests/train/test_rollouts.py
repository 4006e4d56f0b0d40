"""What a run keeps of its sampled answers, what its lines say of them, and the rows that they are packed into."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import adapted_model, tiny_model

from jaxtune.train.callbacks import Callback
from jaxtune.train.config import CheckpointConfig, DataConfig
from jaxtune.train.config.sections import MetricsConfig
from jaxtune.train.data.packing.answers import Answer, AnswerRows, fill_warning, packed_shape
from jaxtune.train.display.run_figures import RunFiles
from jaxtune.train.display.run_page import run_page
from jaxtune.train.log.metrics import MetricsLogger, _columns
from jaxtune.train.log.rollouts import ROLLOUTS, RolloutsFile, kept_generations, latest
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.policy import GRPO
from jaxtune.train.sampled.answer_report import masked_lines
from tests.train.test_policy import settings as options
from tests.train.test_policy import some_answers, source_of, trainer_of

# ---- the file


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / ROLLOUTS).read_text().splitlines()]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 400)), max_size=40), st.integers(300, 6000))
def test_the_file_stays_within_its_size(tmp_path_factory, generations, most):
    folder = tmp_path_factory.mktemp("run")
    file = RolloutsFile(folder, most)
    for step, (count, size) in enumerate(generations, start=1):
        file.add([{"step": step, "prompt": "p", "answer": "x" * size}] * count)
        if (folder / ROLLOUTS).exists():
            assert (folder / ROLLOUTS).stat().st_size <= most
            steps = [line["step"] for line in lines(folder)]
            assert steps == sorted(steps)
    small = [step for step, (count, size) in enumerate(generations, start=1) if count * (size + 60) <= most / 4]
    if small and small[-1] == len(generations):
        assert len(latest(folder)) == generations[-1][0] and latest(folder)[0]["step"] == len(generations)


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(0, 800))
def test_old_generations_are_dropped_first(sizes, most):
    kept = kept_generations(sizes, most)
    assert sum(sizes[index] for index in kept) <= most and kept == sorted(set(kept))
    if sizes and sizes[-1] <= most:
        assert kept[-1] == len(sizes) - 1
    if sum(sizes) <= most:
        assert kept == list(range(len(sizes)))


def test_a_resumed_run_drops_what_it_samples_again(tmp_path):
    for step in (1, 3, 5):
        RolloutsFile(tmp_path, 10_000, resumed_step=step).add([{"step": step}, {"step": step}])
    with open(tmp_path / ROLLOUTS, "ab") as file:
        file.write(b'{"step": 5, "ans')
    RolloutsFile(tmp_path, 10_000, resumed_step=3)
    assert [line["step"] for line in lines(tmp_path)] == [1, 1, 3, 3]
    RolloutsFile(tmp_path, 10_000)
    assert lines(tmp_path) == []


def test_tables_have_a_column_for_each_reward():
    row = {"step": 1, "prompt": [{"role": "user"}], "rewards": {"a": 1.0, "b": None}, "extra": {"c": [1]}}
    names, cells = _columns([row, {"step": 1, "rewards": {"a": 2.0}}])
    assert names == ["step", "prompt", "a", "b", "c"]
    assert cells == [[1, '[{"role": "user"}]', 1.0, None, "[1]"], [1, None, 2.0, None, None]]


def test_tables_of_prompts_have_one_answer_each(tmp_path):
    logger = MetricsLogger(tmp_path, rollouts_mb=1.0, rollout_tables="prompts")
    seen = []
    logger._sinks["a logger"] = type("Sink", (), {"table": lambda _, step, rows: seen.append((step, rows))})()
    logger.log_rollouts(3, [{"step": 3, "prompt": p, "answer": a, "reward": float("nan")} for p in "xy" for a in "12"])
    logger.flush()
    assert [(row["prompt"], row["answer"], row["reward"]) for row in seen[0][1]] == [("x", "1", None), ("y", "1", None)]
    assert len(lines(tmp_path)) == 4


# ---- a run


class Seen(Callback):
    def __init__(self):
        self.steps = []

    def sampled(self, step, rollouts):
        self.steps.append((step, len(rollouts)))


@pytest.mark.full
def test_a_run_keeps_its_answers_and_tells_its_rewards(tmp_path, capsys):
    objective = dict(num_iterations=2)
    made = trainer_of(
        tmp_path,
        steps=6,
        objective=objective,
        data=DataConfig(train="rows that the test made"),
        metrics=MetricsConfig(log_every=4),
        checkpoint=CheckpointConfig(every_steps=3, every_minutes=None),
    )
    longest = max(len(prompt.ids) for prompt in made.batches.prompts) + 8
    assert (made.batches.length, made.batches.rows_per_step) == packed_shape(longest, 32)
    assert made.config.data.length == made.batches.length and not made.batches.warnings()
    made.callbacks = (seen := Seen(),)
    made.train()
    assert seen.steps == [(1, 32), (3, 32), (5, 32)]
    rows = lines(made.output)
    assert [row["step"] for row in rows] == [1] * 32 + [3] * 32 + [5] * 32
    one = rows[0]
    assert one["prompt"] in ("one", "two of them", "three", "and four", "five") and isinstance(one["answer"], str)
    assert one["reward"] == one["rewards"]["even"] and 0 < one["tokens"] <= 8 and one["ended"] in ("stop", "length")
    for step in (1, 3, 5):
        own = [row for row in rows if row["step"] == step]
        assert abs(np.mean([row["advantage"] for row in own])) < 1e-3
    logged = [json.loads(line) for line in (made.output / "metrics.jsonl").read_text().splitlines()]
    rewards = {line["step"]: line["reward"] for line in logged if "reward" in line}
    means = {
        step: np.mean([row["reward"] for row in rows if row["step"] in own]) for step, own in ((4, (1, 3)), (6, (5,)))
    }
    assert rewards == pytest.approx(means)  # also where the logged step sampled nothing itself
    last = made.history[-1]
    assert last["completions/masked_ratio"] == 0 and last["sampling/importance_sampling_ratio/zero"] == 0
    low, mean, high = (last[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max"))
    assert low - 1e-6 <= mean <= high + 1e-6 and low == pytest.approx(1, abs=0.01)
    printed = capsys.readouterr()
    assert f"reward {rewards[6]:.3f}" in printed.out + printed.err
    shown = RunFiles(made.output).page()["rollouts"]
    assert [one["answer"] for one in shown] == [row["answer"] for row in rows[64:]] and shown[0]["step"] == 5
    assert "Answers sampled for step" in run_page([made.output])


def test_masks_that_leave_most_answers_out_are_told():
    ratio = "sampling/importance_sampling_ratio"
    [one, two] = masked_lines({"completions/masked_ratio": 0.75, f"{ratio}/zero": 0.6, f"{ratio}/min": 0.0})
    assert "75% of answers" in one and "60% of the answers" in two and "importance_sampling_mode" in two
    assert masked_lines({"completions/masked_ratio": 0.5}) == []
    source = source_of(GRPO.of(**options()))
    line = {"completions/masked_ratio": 1.0}
    assert [bool(source.remarks(step, line)) for step in (0, 1, 9, 10, 11)] == [True, False, False, True, False]


# ---- the loss of a step that shares a generation


@pytest.mark.full
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "bnpo", "grpo"])
def test_the_entropy_bonus_is_its_factor_times_the_mean(loss_type):
    others = options(loss_type=loss_type, epsilon_high=5.0, steps_per_generation=2)
    model = adapted_model(tiny_model(vocab_size=48))
    losses = {}
    for factor in (0.0, 0.5):
        objective = GRPO.of(**others, entropy_coef=factor)
        source = source_of(objective)
        answers = some_answers(source)
        batch = source.rows.packed(answers, 3.7 * sum(answer.length for answer in answers))
        loss, count, sums = objective.loss(model, batch, Forward())
        losses[factor] = float(loss / count)
        mean = float(objective.metrics({"loss": loss, "count": count} | sums)["entropy"])
    assert losses[0.0] - losses[0.5] == pytest.approx(0.5 * mean, rel=1e-4)


def test_ratios_that_are_set_to_zero_are_counted():
    objective = GRPO.of(**options(importance_sampling_mode="sequence_mask"))
    source = source_of(objective)
    answers = some_answers(source)
    model = adapted_model(tiny_model(vocab_size=48))
    for shift, share in ((0.0, None), (-50.0, 1.0)):
        moved = [dataclasses.replace(one, logps=tuple(value + shift for value in one.logps)) for one in answers]
        loss, count, sums = objective.loss(model, source.rows.packed(moved, 1.0), Forward())
        found = objective.metrics({"loss": loss, "count": count} | sums)
        if share is not None:
            assert float(found["sampling/importance_sampling_ratio/zero"]) == share and float(loss) == 0
            assert float(found["sampling/importance_sampling_ratio/max"]) == 0
        assert float(found["sampling/sampling_logp_difference/max"]) >= float(jnp.asarray(-shift))


# ---- rows


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 4000), st.integers(1, 200), st.sampled_from([1, 2, 4, 8]), st.data())
def test_answers_fit_into_the_chosen_rows_and_fill_them(longest, answers, multiple, data):
    length, rows = packed_shape(longest, answers, multiple)
    assert rows % multiple == 0 and length >= longest and length <= max(2048, longest + 63)
    packed = AnswerRows(rows, length, max(1, min(answers, 4 * (length // longest))))
    sizes = [data.draw(st.integers(2, longest)) if index < 20 else longest for index in range(answers)]
    made = [Answer(0, (1,), (2,) * (size - 1), (0.0,) * (size - 1), "stop") for size in sizes]
    packed.places_of(made)  # raises if one has no place
    if (answers % multiple == 0 and longest > 256) or (multiple == 1 and answers * longest > 512):
        assert answers * longest / (rows * length) >= 0.8
    assert fill_warning(longest, answers, rows, length) == [] or multiple > 1


def test_the_length_of_the_guides_example():
    assert "70%" in fill_warning(712, 64, 64, 1024)[0] and "1,472" in fill_warning(712, 64, 64, 1024)[0]
    assert packed_shape(712, 64) == (1472, 32)
