"""Weights & Biases, offline, and trackio: the packages themselves, read back from what they wrote."""

from __future__ import annotations

import json
import math
import struct

from jaxtune.train.log.metrics import MetricsLogger

LINES = {1: {"loss": 2.5, "text": "x"}, 2: {"loss": 2.0, "grad_norm": math.inf}}
CONFIG = {"optim": {"learning_rate": 1e-4}, "seed": 3}


def log(folder, step, resumed_step=None, **project):
    with MetricsLogger(folder, config=CONFIG, resumed_step=resumed_step, **project) as logger:
        logger.log(step, LINES[step])


def records(path):
    """The records of a .wandb file: after 7 bytes, LevelDB's log format: blocks of 32 KiB, each part of a record behind
    its checksum, length and kind (whole, first, middle, last)."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:
            at += -at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def test_wandb_offline_continues_its_run(tmp_path, monkeypatch):
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for step, resumed in ((1, None), (2, 1)):
        log(tmp_path, step, resumed, wandb_project="p")
    # A run that is resumed logs steps again that it had logged before it was killed, in what is one run to wandb.
    with MetricsLogger(tmp_path, wandb_project="p", resumed_step=2) as logger:
        for step, loss in ((5, 1.5), (6, 1.4), (4, 1.6), (5, 1.7)):
            logger.log(step, {"loss": loss})
    wandb.teardown()  # the package's own process writes the last records after finish() has returned; this waits for it
    found, configs, ids, axes = [], [], set(), set()
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path):
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.add((record.run.project, record.run.run_id))
                configs.append({item.key: json.loads(item.value_json) for item in record.run.config.update})
            if record.HasField("history"):
                items = {
                    item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                found.append({key: value for key, value in items.items() if not key.startswith("_")})
            if record.HasField("metric"):
                axes.add((record.metric.glob_name, record.metric.step_metric))
    assert ids == {("p", (tmp_path / "wandb_run_id").read_text())}
    assert ("*", "step") in axes
    assert found[0] == {"step": 1, "loss": 2.5} and float(found[1].pop("grad_norm")) == math.inf
    assert [(line["step"], line["loss"]) for line in found[1:]] == [(2, 2.0), (5, 1.5), (6, 1.4), (4, 1.6), (5, 1.7)]
    assert configs[0]["seed"] == 3 and configs[0]["optim"] == CONFIG["optim"]


def test_trackio_continues_its_run(tmp_path, monkeypatch, capfd):
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "store")
    for step, resumed in ((1, None), (2, 1)):
        log(tmp_path / "run", step, resumed, trackio_project="p")
    [name] = SQLiteStorage.get_runs("p")
    assert name == (tmp_path / "run/trackio_run_name").read_text() and name.startswith("run-")
    found = [
        {key: line[key] for key in ("step", "loss", "grad_norm") if key in line}
        for line in SQLiteStorage.get_logs("p", name)
    ]
    assert found == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0, "grad_norm": math.inf}]
    log(tmp_path / "other/run", 1, trackio_project="p")
    assert len(SQLiteStorage.get_runs("p")) == 2
    assert capfd.readouterr().out == ""
