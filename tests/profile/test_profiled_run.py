"""profile.steps on a training run: the captured steps, their programs and the run's config in one folder."""

from __future__ import annotations

import gzip

import jax
import pytest

from jaxtune.profile import show
from jaxtune.profile.record import TRACE_FILE
from jaxtune.train.config import ProfileConfig
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import LENGTH, dataset, documents, lora_model, make_config

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def test_a_run_captures_the_steps_that_it_is_told_to(tmp_path):
    config = make_config(tmp_path / "run", steps=6, profile=ProfileConfig(steps=2, start=2))
    trainer = Trainer(lora_model(), None, config, dataset(documents(40)))
    trainer.train()
    report = show(tmp_path / "run" / "profile")
    assert len(report.steps_ms) == 2
    assert sum(row.ms for row in report.categories) == pytest.approx(report.step_ms)
    assert report.tokens_per_step == config.rows_per_step * LENGTH
    assert report.meta["config"]["steps"] == 6
    assert report.meta["what"] == f"a model that the test made, fp32, 4 x {LENGTH} tokens a step, plan keep"
    assert set(report.meta["memory"]) == {"accumulate", "update"}
    assert {row.name for row in report.scopes} >= {"layer/attend", "layer/expand", "loss", "optimizer"}
    assert len(trainer.history) == 6


def test_a_folder_alone_asks_for_three_steps(tmp_path):
    config = make_config(tmp_path / "run", steps=5, profile=ProfileConfig(start=1))
    Trainer(lora_model(), None, config, dataset(documents(40)), profile=tmp_path / "here").train()
    assert len(show(tmp_path / "here").steps_ms) == 3
    assert not (tmp_path / "run" / "profile").exists()


@pytest.mark.filterwarnings("ignore:builtin type event_stats")  # of jaxlib
def test_a_profile_is_told_the_steps(tmp_path):
    """The rhythm of the programs alone took three steps over two GPUs for one."""
    config = make_config(tmp_path / "run", steps=4, micro_batches=2, profile=ProfileConfig(steps=2, start=1))
    Trainer(lora_model(), None, config, dataset(documents(40))).train()
    with gzip.open(tmp_path / "run" / "profile" / TRACE_FILE) as trace:
        planes = list(jax.profiler.ProfileData.from_serialized_xspace(trace.read()).planes)
    events = [event for plane in planes for line in plane.lines for event in line.events]
    assert sorted({int(value) for event in events for key, value in event.stats if key == "step_num"}) == [1, 2]
    assert len(show(tmp_path / "run" / "profile").steps_ms) == 2


def test_steps_after_the_end_are_refused_at_once(tmp_path):
    config = make_config(tmp_path / "run", steps=4, profile=ProfileConfig(steps=2, start=4))
    with pytest.raises(ValueError, match=r"profile\.start = 4: the run has only 4 steps"):
        Trainer(lora_model(), None, config, dataset(documents(40)))
