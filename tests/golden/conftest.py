"""Runs are recorded under flags that are the whole process's, and so they are compared where pytest runs only these
tests (`make golden`). Beside others they are not collected."""

from __future__ import annotations

from pathlib import Path

from tests.golden.flags import set_flags

HERE = Path(__file__).resolve().parent
collect_ignore: list[str] = []


def pytest_configure(config):
    asked = [Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args]
    if all(path.is_relative_to(HERE) for path in asked):
        set_flags()
    else:
        collect_ignore.append("test_training.py")
