"""Runs whose frozen weights stream from the host, as a user starts them: loaded there, trained, resumed, exported."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxtune import cli
from jaxtune.models import hf
from jaxtune.models.files import load_memory
from jaxtune.models.hf import Pretrained
from jaxtune.models.placement.streams import PINNED
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.spec import loading
from tests.conftest import WITHOUT_PASSES
from tests.faults.command import make_folder
from tests.train.test_several_processes import environment

LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("streamed")
    make_folder(folder, LAYERS)
    return folder


def train(folder: Path, name: str, plan: str, *overrides: str) -> Path:
    output = folder / name
    assert cli.main(["train", str(folder / "recipe.yaml"), f"memory.plan={plan}", f"output={output}", *overrides]) == 0
    return output


def results(run: Path) -> dict[str, bytes]:
    """What a run exported, without words of its plan."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted([*run.glob("adapter/*"), *run.glob("merged/*")])
        if path.suffix == ".safetensors"
    }


@pytest.mark.parametrize("load_in", ["nf4", "null"])
@pytest.mark.usefixtures("compiled_in_full")  # with few optimisations, products differ by where an operand was made
def test_a_streamed_run_is_the_resident_one_and_goes_on(folder, load_in, monkeypatch, capsys):
    kinds: list[set[str]] = []

    def load(self, *arguments, **options):
        model = loads(self, *arguments, **options)
        weight = model.layers[-1].mlp.down_proj.weight.get_value()
        kinds.append({array.sharding.memory_kind for array in jax.tree.leaves(weight)})
        return model

    loads = hf.Pretrained.load
    monkeypatch.setattr(Pretrained, "load", load)
    # On a CPU XLA keeps more than 16 bits within a fusion, and a copy ends one.
    more = f"model.load_in={load_in}", "checkpoint.every_steps=2", "precision=fp32", "schedule.name=constant"
    want = results(train(folder, f"resident-{load_in}", "recompute", *more))
    assert len(want) == 2 and PINNED not in kinds[-1]
    name, plan = f"streamed-{load_in}", "recompute; streamed=3"
    train(folder, name, plan, *more, "steps=3")
    assert PINNED in kinds[-1] and results(train(folder, name, plan, *more)) == want
    assert "weights of 3 layers stream from the host" in "".join(capsys.readouterr())
    with monkeypatch.context() as crowded:
        crowded.setattr(loading, "streamed_level", lambda *_: 3)
        assert cli.main(["export", str(folder / name / "adapter"), str(folder / f"{name}-export")]) == 0
    assert PINNED in kinds[-1] and "those of 3 layers are in host memory" in capsys.readouterr().err
    answers = []
    for level in (0, 2):
        with monkeypatch.context() as crowded:
            crowded.setattr(load_memory, "has_room_to_answer", lambda _, level=level: not level)
            crowded.setattr(loading, "least_streamed_level", lambda _, level=level: (level, 0.5))
            assert cli.main(["generate", str(folder / name / "adapter"), "--prompt", "a b", "--raw"]) == 0
        written = capsys.readouterr()
        answers.append(written.out)
        assert (
            (PINNED in kinds[-1]) == ("those of 2 layers are in host memory, and cross" in written.err) == bool(level)
        )
    assert answers[0] == answers[1]
    exported = (folder / f"{name}-export" / "model.safetensors").read_bytes()
    assert exported == want["merged/model.safetensors"]
    last = json.loads((folder / name / "results.json").read_text())["eval_loss"]["last"]
    for more in ([], ["adapter=null", f"model.path={folder / name / 'merged'}", "model.load_in=null"]):
        assert cli.main(["evaluate", str(folder / name / "config.yaml"), *more]) == 0
        written = capsys.readouterr()
        assert json.loads(written.out)["eval_loss"] == pytest.approx(last, abs=1e-3)
        assert PINNED in kinds[-1] and "weights of 3 layers stream from the host" in written.err


def killed_in_a_pass(folder: Path, name: str, *overrides: str) -> int:
    """The exit code of a run that is killed while the device computes its third micro-batch."""
    script = Path(__file__).with_name("one_of_several.py")
    run = [str(folder / "recipe.yaml"), f"output={folder / name}", *overrides]
    in_full = {key: value for key, value in environment().items() if key not in WITHOUT_PASSES}
    return subprocess.run([sys.executable, str(script), "kill in a pass", "3", *run], env=in_full).returncode


@pytest.mark.full
@pytest.mark.usefixtures("compiled_in_full")
def test_a_reference_and_micro_batches_stream_and_a_kill_in_a_pass_changes_nothing(folder):
    """The reference is the base with the adapter off."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " none"} for row in rows]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    more = ["objective=dpo", f"data.train={folder / 'pairs.jsonl'}", "data.eval=null", "data.length=64", "steps=3"]
    more += ["model.load_in=nf4", "checkpoint.every_steps=1", "precision=fp32", "rows_per_step=4", "micro_batches=2"]
    more += ["evaluation.at_end=false", "export.merged=false"]
    want = results(train(folder, "dpo-resident", "recompute", *more))
    plan, name = "recompute; streamed=3", "dpo-streamed"
    assert killed_in_a_pass(folder, name, f"memory.plan={plan}", *more) == -signal.SIGKILL
    assert saved_steps(folder / name / "checkpoints") == [1]
    assert results(train(folder, name, plan, *more)) == want and len(want) == 1


def test_a_checkpoint_of_a_whole_model_is_scored_without_streaming(folder, monkeypatch, capsys):
    """An adapter, under which weights stream, makes it another run's."""
    run = train(folder, "whole", "recompute", "adapter=null", "model.load_in=null", "checkpoint.every_steps=2")
    shutil.rmtree(run / "merged")
    last = json.loads((run / "results.json").read_text())["eval_loss"]["last"]
    monkeypatch.setattr(loading, "streamed_level", lambda *_: 3)
    capsys.readouterr()
    assert cli.main(["evaluate", str(run / "config.yaml")]) == 0
    written = capsys.readouterr()
    assert json.loads(written.out)["eval_loss"] == pytest.approx(last, abs=1e-3)
    assert "checkpoint of step" in written.err and "stream from the host" not in written.err


def test_a_run_that_samples_or_rounds_does_not_stream(folder, capsys):
    recipe = str(folder / "recipe.yaml")
    for override in ("qat=int8", "evaluation.exact_match_rows=2"):
        command = ["train", recipe, "memory.plan=recompute; streamed=2", f"output={folder / 'refused'}", override]
        assert cli.main(command) == cli.USER_ERROR
        assert "streamed=2" in capsys.readouterr().err
