"""examples/ runs, on a tiny model in place of the named ones; scripts for other libraries: test_moved_scripts.py."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.docs.conftest import run_command
from tests.docs.pages import ROOT

EXAMPLES = ROOT / "examples"
MOVED = ("unsloth_quickstart.py", "unsloth_notebook.ipynb", "trl_quickstart.py", "peft_training_arguments.py")
MOVED += ("unsloth_grpo.py", "trl_grpo.py")  # test_reward_scripts.py
WITH_TORCH = ("compare_flax_and_torch.py",)  # run by tests/parity/test_compared_programs.py
# Numbers that are smaller here.
SMALLER = {
    "own_loop.py": {"LENGTH, STEPS = 1024, 100": "LENGTH, STEPS = 64, 2"},
    "own_loss.py": {"length=256": "length=64", "steps=20": "steps=2"},
}


def run_text(text: str, name: str, namespace: dict | None = None) -> dict:
    namespace = {"__name__": "__main__"} if namespace is None else namespace
    exec(compile(text, name, "exec", dont_inherit=True), namespace)
    return namespace


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.py") if p.name not in MOVED + WITH_TORCH))
def test_an_example_runs(name, workplace):
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    for large, small in SMALLER.get(name, {}).items():
        assert large in text
        text = text.replace(large, small)
    before = set(Path().iterdir())
    made = run_text(text, name)
    assert len(text.splitlines()) <= 60, "short enough to be read at once"
    if name == "own_loop.py":
        assert Path("own_loop_adapter/adapter_model.safetensors") in {
            p for f in set(Path().iterdir()) - before for p in f.rglob("*")
        }
        assert made["loss"] > 0
    if name == "own_loss.py":
        batch = made["trainer"].batches.batch_at(1)
        documents = sum(len(np.unique(s[w > 0])) for s, w in zip(batch.segment_ids, batch.weights, strict=True))
        assert made["last"]["documents"] == documents < (batch.weights > 0).sum()


@pytest.mark.full
def test_own_rows_from_a_file_to_an_answer(workplace, capsys):
    text = (EXAMPLES / "own_rows.sh").read_text(encoding="utf-8")
    name, rows = re.search(r"^cat > (\S+) <<'ROWS'\n(.*?)^ROWS$", text, re.M | re.S).groups()
    Path(name).write_text(rows)
    for line in text.split("ROWS\n")[-1].splitlines():
        assert run_command(line.replace("epochs=20", "epochs=1 steps=null")) == 0, shlex.split(line)
    assert "Capital of Spain?⟦Madrid." in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.ipynb") if p.name not in MOVED))
def test_a_notebook_runs(name, workplace):
    notebook = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    namespace: dict = {"__name__": "__main__"}
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "notebooks are stored without outputs"
            for line in [line for line in "".join(cell["source"]).splitlines() if line.startswith("!")]:
                assert run_command(line[1:]) == 0
            code = "".join(line for line in cell["source"] if not line.startswith("!"))
            run_text(code, f"{name}[{index}]", namespace)


@pytest.mark.full
def test_the_same_command_with_more_steps_goes_on(workplace, capsys):
    """And with fewer it is refused, before anything of the run is touched."""
    command = "python -m jaxtune.train quickstart output=longer checkpoint.every_steps=1 export.merged=false steps="
    assert run_command(f"{command}2") == 0
    assert run_command(f"{command}3") == 0
    told = capsys.readouterr().out
    assert "resuming from step 2 of 3" in told and "schedule of 3 steps, and is " in told
    assert json.loads(Path("longer/adapter/jaxtune_run.json").read_text())["step"] == 3
    assert run_command(f"{command}1") != 0
    assert "A run can be made longer, not shorter" in capsys.readouterr().err
