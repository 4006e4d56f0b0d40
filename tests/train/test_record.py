"""What a run records of its model is what the model is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from tiny_models import tiny_model

from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import quantize
from jaxtune.models.lora import get_peft_model
from jaxtune.train.config import AdapterConfig, ModelConfig, ScheduleConfig, TrainConfig
from jaxtune.train.config.file import config_to_dict, config_to_yaml
from jaxtune.train.config.sections import Unset
from jaxtune.train.folder.checkpoint import CheckpointError
from jaxtune.train.folder.record import (
    digest,
    model_sections,
    record_of,
    require_own_folder,
    require_same_config,
    require_same_run,
    same_run,
    write_config,
)
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import lora_model, make_config


def as_recorded(config: TrainConfig, model: Decoder) -> TrainConfig:
    return dataclasses.replace(config, **model_sections(model, config.model, config.adapter, config.numbers))


PATTERNS = dict(rank_pattern={"layers.0.mlp.up_proj": 2}, alpha_pattern={"q_proj": 4.0})


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        dict(r=4, lora_alpha=8, target_modules=("q_proj", "down_proj"), lora_dropout=0.1, use_rslora=True),
        dict(r=4, target_modules=r".*\.1\.mlp\..*", use_dora=True, modules_to_save=("lm_head",)),
        dict(r=4, **PATTERNS),
    ],
    ids=["list", "expression, DoRA, head", "patterns"],
)
def test_an_adapter_is_recorded_whatever_the_config_says(settings):
    model = get_peft_model(tiny_model(), **settings)
    told = AdapterConfig(**settings)
    assert as_recorded(make_config("out", adapter=told), model).adapter == told  # as it was written
    for said in (
        None,
        AdapterConfig(r=3),
        dataclasses.replace(told, lora_alpha=1),
        AdapterConfig(r=4, use_rslora=True),
    ):
        recorded = as_recorded(make_config("out", adapter=said), model).adapter
        again = get_peft_model(tiny_model(), **{k: v for k, v in dataclasses.asdict(recorded).items() if k != "path"})
        assert as_recorded(make_config("out", adapter=told), again).adapter == told  # it makes the same adapters


def test_one_name_of_a_tied_head_says_both():
    model = get_peft_model(tiny_model(tie_embeddings=True), r=2, modules_to_save=["lm_head"])
    told = AdapterConfig(r=2, modules_to_save=("lm_head",))
    assert as_recorded(make_config("out", adapter=told), model).adapter == told
    assert as_recorded(make_config("out"), model).adapter.modules_to_save == ("embed_tokens", "lm_head")


def test_a_model_without_adapters_records_none():
    assert as_recorded(make_config("out", adapter=AdapterConfig()), tiny_model()).adapter is None


def test_an_adapter_of_a_folder_is_named_by_it():
    told = AdapterConfig(path="adapter")
    model = get_peft_model(tiny_model(), r=4, lora_alpha=8)
    assert as_recorded(make_config("out", adapter=told), model).adapter == told


def test_four_bits_are_recorded():
    packed = get_peft_model(quantize(tiny_model()), r=4)
    assert as_recorded(make_config("out"), packed).model.load_in == "nf4"
    said = make_config("out", adapter=AdapterConfig(), model=ModelConfig(path="m", load_in="nf4"))
    assert as_recorded(said, get_peft_model(tiny_model(), r=4)).model.load_in is None


@pytest.mark.parametrize("schedule", [ScheduleConfig(), ScheduleConfig("constant", warmup_ratio=0.1)])
def test_a_run_is_made_longer_and_not_shorter(schedule):
    def record(steps, schedule):
        own = dict(trainable={}, storage={}, base=tiny_model(), data={}, user_parts={}, code={}, numerics={})
        return record_of(config_to_dict(make_config("out", steps=steps, schedule=schedule)), total_steps=steps, **own)

    constant = ScheduleConfig("constant", warmup_steps=2)
    for steps in (8, 12):  # each step of a constant rate is the same, whatever follows
        changes = require_same_run(record(10, constant), record(steps, constant), Path("out"))
        assert changes[0].startswith("changed: config.steps")
    assert "changed: config.steps: saved 10, now 12" in require_same_run(
        record(10, schedule), record(12, schedule), Path("out")
    )
    with pytest.raises(CheckpointError, match="config.steps: saved 10, now 8\nA run can be made longer, not shorter"):
        require_same_run(record(10, schedule), record(8, schedule), Path("out"))
    warm = [record(steps, ScheduleConfig(warmup_steps=warmup)) for steps, warmup in ((10, 1), (20, 2), (10, 2))]
    assert len(require_same_run(warm[0], warm[1], Path("out"))) == 3  # and the number of all steps
    with pytest.raises(CheckpointError, match="config.schedule.warmup_steps: saved 1, now 2"):
        require_same_run(warm[0], warm[2], Path("out"))
    assert digest(same_run(warm[0])) == digest(same_run(warm[1]))  # what was measured before training stays


@pytest.mark.parametrize(("name", "read"), [("constant", False), ("inverse_sqrt", False), ("linear", True)])
def test_a_last_rate_that_a_schedule_never_had_may_go(name, read):
    """Older versions let min_ratio stand beside any schedule."""
    own = dict(trainable={}, storage={}, base=tiny_model(), data={}, user_parts={}, code={}, numerics={})
    current = record_of(
        config_to_dict(make_config("out", steps=4, schedule=ScheduleConfig(name))), total_steps=4, **own
    )
    saved = json.loads(json.dumps(current))
    saved["config"]["schedule"]["min_ratio"] = 0.1
    if not read:
        assert require_same_run(saved, current, Path("out")) == []
        return
    with pytest.raises(CheckpointError, match="config.schedule.min_ratio: saved 0.1, now 0.0"):
        require_same_run(saved, current, Path("out"))


def test_a_key_that_a_record_lacks_was_at_its_default(tmp_path):
    """A newer version has more keys; what an older one wrote goes on as long as they stand at their defaults."""

    def record(**changes):
        own = dict(trainable={}, storage={}, base=tiny_model(), data={}, user_parts={}, code={}, numerics={})
        return record_of(config_to_dict(make_config("out", **changes)), total_steps=4, **own)

    old = record()
    del old["config"]["schedule"]["zero_start"]
    assert require_same_run(old, record(), Path("out")) == []
    with pytest.raises(CheckpointError, match=r"config.schedule.zero_start: saved False, now True"):
        require_same_run(old, record(schedule=ScheduleConfig("constant", zero_start=True)), Path("out"))
    with pytest.raises(CheckpointError, match="config.adapter"):  # a section that is not there is no default
        require_same_run(old, record(adapter=AdapterConfig()), Path("out"))
    text = config_to_yaml(config := make_config(tmp_path))
    shorter = text.replace("  zero_start: false\n", "")
    assert shorter != text
    (tmp_path / "config.yaml").write_text(shorter)
    assert not require_same_config(tmp_path, config_to_dict(config))  # no error
    with pytest.raises(ValueError, match="belongs to another run"):
        require_same_config(tmp_path, config_to_dict(dataclasses.replace(config, seed=1)))


def test_a_folder_of_another_run_is_refused_before_rows_are_read(tmp_path):
    """With the way out named. A run that is made longer, or whose row length is not chosen yet, may be the same one."""
    output = tmp_path / "runs/quickstart"
    output.mkdir(parents=True)
    (tmp_path / "runs/quickstart-2").mkdir()
    config = make_config(output)
    require_own_folder(config_to_dict(config))  # nothing is there
    write_config(output, config_to_dict(config))
    require_own_folder(config_to_dict(config))
    unset = dataclasses.replace(config, data=dataclasses.replace(config.data, length=Unset(99)))
    require_own_folder(config_to_dict(unset), length_is_open=True)
    other = dataclasses.replace(config, seed=1)
    with pytest.raises(ValueError, match=r"no checkpoint to continue from: choose another .*=\S+/quickstart-3, or del"):
        require_own_folder(config_to_dict(other))
    with pytest.raises(ValueError, match="belongs to another run"):  # not that there is no such file
        Trainer(lora_model(), None, other, "no_such_rows.jsonl", checks_folder=True)
    (output / "checkpoints/step_00000002").mkdir(parents=True)
    for same in (config, unset, dataclasses.replace(config, steps=99)):
        require_own_folder(config_to_dict(same), length_is_open=same is unset)
    with pytest.raises(CheckpointError, match=r"such as output=\S+quickstart-3:\n  config.seed: saved 0, now 1"):
        require_own_folder(config_to_dict(other))
    (output / "config.yaml").write_text("steps: 3\n")  # of another version: the checkpoint's record decides
    require_own_folder(config_to_dict(other))


def test_a_folder_of_an_older_version_may_have_a_last_rate_that_its_schedule_never_had(tmp_path):
    settings = config_to_dict(make_config(tmp_path, schedule=ScheduleConfig("constant")))
    write_config(tmp_path, settings)
    text = (tmp_path / "config.yaml").read_text()
    assert "min_ratio" not in text or "min_ratio: 0.0" in text
    values = yaml.safe_load(text)
    values["schedule"] = {"name": "constant", "min_ratio": 0.1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    require_same_config(tmp_path, settings)
