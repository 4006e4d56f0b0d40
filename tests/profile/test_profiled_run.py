"""profile.steps on a training run: the captured steps, their programs and the run's config in one folder."""

from __future__ import annotations

import gzip
import json

import jax
import pytest

from jaxtune.profile import show
from jaxtune.profile.record import TRACE_FILE
from jaxtune.train.config import MemoryConfig, MeshConfig, ProfileConfig
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import LENGTH, dataset, documents, lora_model, make_config


@pytest.mark.full
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


@pytest.mark.full
def test_a_folder_alone_asks_for_three_steps(tmp_path):
    config = make_config(tmp_path / "run", steps=5, profile=ProfileConfig(start=1))
    Trainer(lora_model(), None, config, dataset(documents(40)), profile=tmp_path / "here").train()
    assert len(show(tmp_path / "here").steps_ms) == 3
    assert not (tmp_path / "run" / "profile").exists()


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("resident", [0, 2])
def test_what_a_mesh_exchanges_and_how_much_of_it_is_hidden(resident, tmp_path):
    """In a real trace of two devices: the gathers of each matrix, and the sum of the adapters' gradients."""
    plan = "keep" + "; resident=2" * (resident == 2)
    config = make_config(
        tmp_path / "run",
        steps=4,
        mesh=MeshConfig(1, 2),
        profile=ProfileConfig(steps=2, start=2),
        memory=MemoryConfig(plan=plan),
    )
    Trainer(lora_model(layers=2), None, config, dataset(documents(40))).train()
    started = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert started["compile_seconds"] > 0 and started["collectives_seconds"] > 0 and started["load_seconds"] > 0
    report = show(tmp_path / "run" / "profile")
    (row,) = (row for row in report.transfers if row.name == "collectives")
    # Two layers of seven matrices for the forward, embedding and head; for the backward of the first, whose input needs
    # no gradient, the output's and the MLP's again.
    gathers = 0 if resident else 2 * 7 + 2 + 4
    found = [kernel for kernel in report.kernels if kernel.category == "collectives"]
    counts = {kind: sum(k.count for k in found if k.name.startswith(kind)) for kind in ("all_gather", "all-reduce")}
    assert counts == {"all_gather": 2 * gathers, "all-reduce": 2 * 1} and row.count == sum(counts.values())
    assert row.hidden_ms + row.exposed_ms == pytest.approx(row.ms) and 0 <= row.hidden_ms < row.ms
    (category,) = (each for each in report.categories if each.name == "collectives")
    assert category.ms == pytest.approx(row.exposed_ms)  # what runs under kernels is in no category's time
    assert sum(each.ms for each in report.categories) == pytest.approx(report.step_ms)


def test_steps_after_the_end_are_refused_at_once(tmp_path):
    config = make_config(tmp_path / "run", steps=4, profile=ProfileConfig(steps=2, start=4))
    with pytest.raises(ValueError, match=r"profile\.start = 4: the run has only 4 steps"):
        Trainer(lora_model(), None, config, dataset(documents(40)))
