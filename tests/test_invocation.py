"""Proposed commands are spelled as the user started jaxtune."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtune.system import invocation

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("typed", "train", "chat"),
    [
        (["python", "-m", "jaxtune.train", "quickstart"], "python -m jaxtune.train RECIPE", "python -m jaxtune chat"),
        (["bin/python", "-m", "jaxtune", "train"], "bin/python -m jaxtune train RECIPE", "bin/python -m jaxtune chat"),
        (["python", "-X", "dev", "-m", "jaxtune", "chat"], "python -m jaxtune train RECIPE", "python -m jaxtune chat"),
        (["a b/python", "-m", "jaxtune"], "'a b/python' -m jaxtune train RECIPE", "'a b/python' -m jaxtune chat"),
        (["/x/python", "other/bin/jaxtune", "train"], "other/bin/jaxtune train RECIPE", "other/bin/jaxtune chat"),
    ],
)
def test_a_command_is_spelled_as_the_user_started_jaxtune(monkeypatch, typed, train, chat):
    monkeypatch.delenv(invocation.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "orig_argv", typed)
    assert invocation.spelled("train RECIPE") == train
    assert invocation.spelled("chat") == chat


def test_a_script_on_the_path_is_named_alone(monkeypatch, tmp_path):
    script = tmp_path / "jaxtune"
    script.write_text("#!/bin/sh\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert invocation.prefix_of(["python", str(script), "train"]) == "jaxtune"
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path.parent)
    assert invocation.prefix_of(["python", str(script), "train"]) == f"{tmp_path.name}/jaxtune"
    monkeypatch.chdir(tmp_path)
    assert invocation.prefix_of(["python", str(script), "train"]) == "./jaxtune"


def test_in_a_script_of_the_user_it_is_what_works_in_this_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    assert invocation.prefix_of(["python3", "mine.py"]) == f"{tmp_path}/python3 -m jaxtune"
    (tmp_path / "jaxtune").touch()
    assert invocation.prefix_of(["python3", "mine.py"]) == f"{tmp_path}/jaxtune"
    for arguments in (
        ["mine.py", "--output", "/data/jaxtune"],
        ["-c", "import jaxtune", "jaxtune"],
        ["-m", "mine", "/x/jaxtune"],
    ):
        assert invocation.prefix_of(["python3", *arguments]) == f"{tmp_path}/jaxtune"
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "jaxtune").chmod(0o755)
    assert invocation.prefix_of(["python3", "mine.py"]) == "jaxtune"


def test_the_package_is_a_command():
    """And a process that `launch` starts is told what the user had typed."""
    environment = os.environ | {invocation.VARIABLE: "/their/jaxtune"}
    command = [sys.executable, "-m", "jaxtune"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "'/their/jaxtune COMMAND --help' says more" in done.stdout
