"""Folders that older versions wrote: each form continues to the bits of a run that nothing interrupted."""

from __future__ import annotations

import copy
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.models.qat.fake_quant import INPUT_SCALES
from jaxtune.train.config import CheckpointConfig
from jaxtune.train.config.file import config_keys, flat_keys
from jaxtune.train.folder.checkpoint import CheckpointError
from jaxtune.train.folder.record import compare_meta
from jaxtune.train.folder.results import PROOF, read_result, require_own, write_result
from jaxtune.train.folder.translations import (
    BESIDE,
    POSITION,
    TRANSLATIONS,
    UNRECORDED,
    VERSION,
    section,
    translated,
    with_defaults,
)
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, lora_model, make_config


def trainer_of(output: Path, steps: int, **changes: Any) -> Trainer:
    saves = CheckpointConfig(every_steps=1, every_minutes=None, keep=8)
    config = make_config(output, steps=steps, checkpoint=saves, **changes)
    return Trainer(lora_model(), None, config, dataset(documents(24)))


def rewrite(folder: Path, change) -> None:
    """Changes what the checkpoints in a run's folder record, with their manifests."""
    for checkpoint in folder.glob("checkpoints/step_*"):
        record = json.loads((checkpoint / "meta.json").read_text())
        change(record["meta"])
        content = json.dumps(record).encode()
        (checkpoint / "meta.json").write_bytes(content)
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest["files"]["meta.json"] = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def without_version(meta: dict[str, Any]) -> None:
    del meta["version"]


def unrecorded(meta: dict[str, Any]) -> None:
    """The first records: no length, no digest of the base."""
    for key in ("version", "base_digest", "total_steps"):
        del meta[key]


def without_config_keys(meta: dict[str, Any]) -> None:
    """The schema had fewer keys, of any kind of value."""
    config = meta["config"]
    del meta["version"], config["schedule"]["zero_start"], config["optim"]["embedding_learning_rate"]
    del config["router_z_loss_coef"], config["data"]["buffer_size"]


def without_axes(meta: dict[str, Any]) -> None:
    del meta["version"], meta["numerics"]["mesh_fsdp"]


FORMS = [without_version, unrecorded, without_config_keys, without_axes]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(the folder of a run of two steps, the metrics of one that makes three)"""
    folder = tmp_path_factory.mktemp("runs")
    trainer_of(folder / "two", 2).train()
    straight = trainer_of(folder / "three", 3)
    straight.train()
    return folder / "two", straight.history


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_an_older_folder_continues_to_the_same_bits(runs, tmp_path, capsys, form):
    folder, straight = runs
    shutil.copytree(folder, tmp_path / "run")
    rewrite(tmp_path / "run", form)
    resumed = trainer_of(tmp_path / "run", 3)
    resumed.train()
    assert [line["step"] for line in resumed.history if "loss" in line] == [3]
    assert resumed.history[-1]["loss"] == straight[-1]["loss"]
    assert resumed.history[-1]["grad_norm"] == straight[-1]["grad_norm"]
    said = capsys.readouterr().out
    assert "resuming from step 2 of 3" in said and "base_digest" not in said and "zero_start" not in said
    last = json.loads((tmp_path / "run/checkpoints/step_00000003/meta.json").read_text())["meta"]
    assert last["version"] == VERSION


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_an_older_folder_of_another_run_is_refused(runs, tmp_path, form):
    folder, _ = runs
    shutil.copytree(folder, tmp_path / "run")
    rewrite(tmp_path / "run", form)
    with pytest.raises(CheckpointError, match="config.seed: saved 0, now 1"):
        trainer_of(tmp_path / "run", 3, seed=1).train()


def test_a_newer_folder_is_refused_by_name_of_the_version(runs, tmp_path):
    folder, _ = runs
    for number, version in enumerate((VERSION + 1, "2", True, -1)):
        shutil.copytree(folder, tmp_path / str(number))
        rewrite(tmp_path / str(number), lambda meta, version=version: meta.update(version=version))
        with pytest.raises(ValueError, match=f"record has version {version!r}, .* reads versions up to {VERSION}: "):
            trainer_of(tmp_path / str(number), 3).train()


def test_a_table_on_the_host_had_the_name_of_per_layer_embeddings(runs):
    meta = json.loads((runs[0] / "checkpoints/step_00000002/meta.json").read_text())["meta"]
    planner = trainer_of(runs[0], 2).planner
    layers = planner.cost.shape.num_layers, planner.cost.layers.all_residuals
    for version, hosted in ((0, True), (VERSION, False)):
        older = meta | {"version": version, "numerics": meta["numerics"] | {"per_layer_embeddings": "host"}}
        plan = StepPlan.from_record(section(translated(older), "numerics"), *layers)
        assert plan.level("embeddings") == hosted


def test_int4_of_equal_steps_had_no_usual_sizes():
    mesh = {"gradient_sync": "int4", "gradient_rounding": "error_feedback"}
    for text, kept in (("sent in int4 with", "int4 of equal steps"), ("sent in quadratic int4 with", "int4")):
        meta = {"config": {"mesh": mesh}, "numerics": {"gradients": f"fp32, {text} error feedback"}}
        assert translated(meta)["config.mesh.gradient_sync"] == kept
        assert translated(meta | {"version": VERSION})["config.mesh.gradient_sync"] == "int4"


def test_positions_of_one_lane_continue_and_of_several_do_not():
    lanes = {"0": [{"file": 0, "row": 3}]}
    assert translated({POSITION: lanes})[POSITION] == lanes["0"]
    for position in (lanes | {"1": [4]}, lanes["0"], None, {"generation": 2, "answers": []}):
        assert translated({POSITION: position})[POSITION] == position
    assert translated({POSITION: lanes, "version": VERSION})[POSITION] == lanes


def test_a_result_without_a_version_is_its_runs(tmp_path, runs):
    run = trainer_of(tmp_path, 2)._same_run()
    write_result(tmp_path / "adapter", run, 2, lambda folder: None)
    assert require_own(tmp_path / "adapter", run, 2).run == json.loads(json.dumps(run))
    proof = json.loads((tmp_path / "adapter" / PROOF).read_text())
    older = {k: v for k, v in proof["run"].items() if k not in ("version", "base_digest", "config.schedule.zero_start")}
    (tmp_path / "adapter" / PROOF).write_text(json.dumps(proof | {"run": older}))
    assert require_own(tmp_path / "adapter", run, 2).run["base_digest"] == UNRECORDED
    with pytest.raises(ValueError, match="is the result of another run"):
        require_own(tmp_path / "adapter", run | {"config.seed": 1}, 2)
    (tmp_path / "adapter" / PROOF).write_text(json.dumps(proof | {"run": older | {"version": VERSION + 1}}))
    with pytest.raises(ValueError, match="record has version"):
        read_result(tmp_path / "adapter")


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
NAMES = st.text("abc", min_size=1, max_size=3)
RECORDS = st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, VALUES, max_size=3), max_size=4)


@given(RECORDS, st.sampled_from([None, *range(VERSION + 1)]), VALUES)
def test_any_record_is_translated_once(record, version, beside):
    """What is translated again stays, the record itself is never changed, and no key of it is lost."""
    meta = record | ({} if version is None else {"version": version}) | {POSITION: beside, INPUT_SCALES: {"a.b": 1.0}}
    before = copy.deepcopy(meta)
    flat = translated(meta)
    assert meta == before and translated(flat) == flat and flat["version"] == VERSION
    assert flat[INPUT_SCALES] == {"a.b": 1.0} and flat[POSITION] == beside
    plain = flat_keys(record)
    assert {key: flat[key] for key in plain} == plain
    added = flat.keys() - plain.keys() - {*BESIDE, "version"}
    assert all(flat[key] == UNRECORDED for key in added) and (version in (None, 0) or not added)


CONFIG_KEYS = [f"config.{key.name}" for key in config_keys() if key.default != "required"]


@given(st.sets(st.sampled_from(CONFIG_KEYS), max_size=6))
def test_config_keys_that_a_record_lacks_are_no_difference_at_their_defaults(lacking):
    """And are one at any other value, which names the default."""
    full = with_defaults({key.rpartition(".")[0] + ".": None for key in CONFIG_KEYS}, CONFIG_KEYS)
    full = {key: full[key] for key in CONFIG_KEYS}
    older = {key: value for key, value in full.items() if key not in lacking}
    sections = {key.rpartition(".")[0] for key in older}
    known = {key for key in lacking if key.rpartition(".")[0] in sections}
    refused, harmless = compare_meta(older, full, ["config"])
    assert not harmless and {difference.key for difference in refused} == lacking - known
    for key in known:
        [difference] = [d for d in compare_meta(older, full | {key: "other"}, ["config"])[0] if d.key == key]
        assert difference.saved == full[key] and difference.current == "other"


def test_what_was_not_recorded_equals_anything():
    saved = {"base_digest": UNRECORDED, "seed": 1}
    for digest in ("a", None):
        assert compare_meta(saved, {"base_digest": digest, "seed": 1}, ["base_digest"]) == ([], [])
    assert compare_meta(saved, {"seed": 1}, ["base_digest"]) == ([], [])
    assert compare_meta({"base_digest": "b"}, {"base_digest": "a"}, ["base_digest"])[0]


def test_every_translation_is_of_an_own_version():
    assert VERSION == len(TRANSLATIONS) == len({*TRANSLATIONS})
