"""Killed again and again at moments drawn at random, a run leads to the same weights, bit for bit."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jaxtune
from jaxtune.train.folder.results import PROOF, read_result
from jaxtune.train.log.metrics import read_metrics
from jaxtune.train.signals import EXIT_SAVED
from tests.faults.command import ONE_DEVICE, make_folder

STEPS, KILLS = 400, 8
OVERRIDES = [
    f"steps={STEPS}",
    f"checkpoint.every_steps={max(3, STEPS // 20)}",
    f"evaluation.every_steps={STEPS // 8}",
    "evaluation.exact_match_rows=2",
    "evaluation.max_new_tokens=4",
]


def run(
    folder: Path, name: str, moment: int = 0, number: str = "SIGKILL", rows: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    root = Path(jaxtune.__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests" / "models")]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{ONE_DEVICE} --xla_force_host_platform_device_count={2 if 'mesh.data=2' in rows else 1}",
    }
    command = [sys.executable, str(root / "tests" / "faults" / "kills.py"), str(folder / "recipe.yaml"), str(moment)]
    command += [number, *OVERRIDES, *rows, f"output={folder / name}"]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def weights(result: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in result.iterdir() if path.name != PROOF}


@pytest.mark.full
@pytest.mark.parametrize("streamed", [False, True])
def test_killed_at_random_moments(tmp_path, streamed):
    """Rows in memory on two devices, which send each other gradients in int8, and streamed rows on one."""
    make_folder(tmp_path)
    rows = ("mesh.data=2", "mesh.gradient_sync=int8")
    if streamed:  # in windows that end within a step, so that most kills are in the middle of one
        lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "shards").mkdir()
        for shard in range(3):
            (tmp_path / "shards" / f"{shard}.jsonl").write_text("".join(lines[shard::3]))
        rows = (f"data.train={tmp_path}/shards", "data.streaming=true", "data.buffer_size=7", "data.packing=false")
    straight = run(tmp_path, "straight", rows=rows)
    assert straight.returncode == 0, straight.stderr
    moments = int(re.search(r"moments (\d+)", straight.stdout)[1])

    draw = random.Random(0)
    # Some anywhere, some near the end, where evaluation, export and answers are; the rest of a run is always long
    # enough for the next, because a kill loses at most what came since a checkpoint.
    share = moments // (KILLS + 1)
    codes = []
    for kill in range(KILLS):
        number = "SIGKILL" if kill % 2 else "SIGTERM"
        moment = draw.randint(1, 2 * share) if kill < KILLS - 2 else draw.randint(share // 2, share)
        done = run(tmp_path, "killed", moment, number, rows)
        codes.append(done.returncode)
        if done.returncode == 0:
            break
        assert done.returncode == (EXIT_SAVED if number == "SIGTERM" else -signal.SIGKILL), done.stderr
    done = run(tmp_path, "killed", rows=rows)  # to its end
    assert done.returncode == 0, done.stderr
    assert "not bit for bit" not in done.stdout
    assert sum(code != 0 for code in codes) >= KILLS // 2, codes

    for name in ("adapter", "merged"):
        assert read_result(tmp_path / "killed" / name).step == STEPS
        assert weights(tmp_path / "killed" / name) == weights(tmp_path / "straight" / name), name
    lines = [
        {line["step"]: line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in line}
        for name in ("straight", "killed")
    ]
    assert list(lines[0]) == list(range(1, STEPS + 1)) and lines[0] == lines[1]
    assert not list((tmp_path / "killed").glob(".*"))


# Where the tail of a run can be hit: each of the last moments of a short one, by either signal.
@pytest.mark.full
@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
def test_killed_at_each_moment_of_the_end(tmp_path, number):
    make_folder(tmp_path)
    short = ["steps=4", "checkpoint.every_steps=2", "evaluation.every_steps=2"]
    saved, OVERRIDES[:] = list(OVERRIDES), [*OVERRIDES, *short]
    try:
        straight = run(tmp_path, "straight")
        moments = int(re.search(r"moments (\d+)", straight.stdout)[1])
        for moment in range(moments - 60, moments, 3):
            name = f"killed{moment}"
            run(tmp_path, name, moment, number)
            done = run(tmp_path, name)
            assert done.returncode == 0, done.stderr
            assert weights(tmp_path / name / "merged") == weights(tmp_path / "straight" / "merged"), moment
    finally:
        OVERRIDES[:] = saved
