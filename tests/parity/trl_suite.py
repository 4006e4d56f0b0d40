"""Runs TRL's own trainer tests through jaxtune.compat:

    .venv-parity/bin/python tests/parity/trl_suite.py FOLDER [options of pytest]

FOLDER has TRL's tests (test_sft_trainer.py, ...), of any version since 0.23. Their texts are used as they are, but for
where names come from: trl_stand_ins.py. A test passes, or stands in trl_suite.csv with what is refused and why.
"""

from __future__ import annotations

import ast
import collections
import csv
import fnmatch
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = tuple(f"test_{name}_trainer.py" for name in ("sft", "dpo", "grpo", "rloo", "kto", "reward"))
_TRAINERS = re.compile(r"^(Test)?(SFT|DPO|GRPO|RLOO|KTO|Reward)Trainer(Tester)?$")  # other classes test TRL's insides
_ELSEWHERE = ("trl", "transformers", "peft", "datasets")
_UTILITIES = """
import unittest, pytest, functools
from {base}

def _plain(*arguments, **options):
    return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else (lambda test: test)

def _skipped(reason):
    return lambda *a, **o: (lambda mark: mark(a[0]) if a and callable(a[0]) else mark)(unittest.skip(reason))

ignore_warnings = _plain
require_peft = require_no_wandb = require_vision = require_peft_target_parameters = _plain
require_torch_gpu_if_bnb_not_multi_backend_enabled = require_liger_kernel = require_bitsandbytes = _plain
require_vllm = _skipped("vLLM")
require_kernels = require_flash_attn = _skipped("flash attention for torch")

def __getattr__(name):
    if name.startswith("require"):
        return _skipped(name)
    if name.startswith("is_"):
        return lambda *_: False
    if name == "get_device_properties":
        return lambda: ("cpu", 0, 0)
    raise AttributeError(name)
"""
_BASES = {
    True: "unittest import TestCase as Base\nclass TrlTestCase(Base):\n    def setUp(self):\n        import tempfile\n"
    "        self.tmp_dir = tempfile.mkdtemp()\n",
    False: "builtins import object as Base\nclass TrlTestCase(Base):\n    @pytest.fixture(autouse=True)\n"
    "    def set_tmp_dir(self, tmp_path):\n        self.tmp_dir = str(tmp_path)\n",
}
_CONFTEST = """
import sys
sys.path[:0] = {paths!r}
import pytest, trl_stand_ins

@pytest.fixture(autouse=True)
def _tensors():
    with trl_stand_ins.as_tensors():
        yield

@pytest.fixture
def lazy_shared_datadir(tmp_path):
    (tmp_path / "template.jinja").write_text((trl_stand_ins._CHAT / "qwen3.jinja").read_text())
    return tmp_path
"""
_PARAMETERIZED = """
import inspect, sys
class parameterized:
    @staticmethod
    def expand(cases):
        def made(function):
            space = sys._getframe(1).f_locals
            for number, case in enumerate(cases):
                case = case if isinstance(case, (tuple, list)) else (case,)
                def test(self, _case=tuple(case), *more):
                    return function(self, *_case, *more)
                test.__name__ = f"{function.__name__}_{number}"
                test.__doc__ = None
                space[test.__name__] = test
            return None
        return made
"""


def rewritten(text: str) -> str:
    """A test file whose names of TRL, transformers, PEFT and datasets come from the stand-ins."""
    lines, tree = text.splitlines(), ast.parse(text)
    for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0), reverse=True):
        if not isinstance(node, ast.ImportFrom):
            continue
        module, indent = node.module or "", " " * node.col_offset
        if node.level:
            new = [f"from testing_utils import {', '.join(alias.name for alias in node.names)}"]
        elif module == "transformers.testing_utils":
            new = [f"from testing_utils import {alias.name}" for alias in node.names if alias.name != "torch_device"]
            new += ["torch_device = 'cpu'"] * any(alias.name == "torch_device" for alias in node.names)
        elif module.partition(".")[0] in _ELSEWHERE:
            new = [f"{alias.asname or alias.name} = name_of({module!r}, {alias.name!r})" for alias in node.names]
        else:
            continue
        lines[node.lineno - 1 : node.end_lineno] = [indent + line for line in new]
    return "from trl_stand_ins import name_of\n" + "\n".join(lines) + "\n"


def prepare(tests: Path, work: Path) -> list[Path]:
    """Writes the test files that `tests` has, changed as above, into `work`, and returns them."""
    files = [tests / name for name in FILES if (tests / name).exists()]
    if not files:
        raise SystemExit(f"{tests}: it has none of {', '.join(FILES)}")
    old = "parameterized" in files[0].read_text(encoding="utf-8")
    (work / "conftest.py").write_text(_CONFTEST.format(paths=[str(HERE), str(HERE.parents[1]), str(work)]))
    (work / "testing_utils.py").write_text(_UTILITIES.format(base=_BASES[old]))
    (work / "parameterized.py").write_text(_PARAMETERIZED)
    (work / "pytest.ini").write_text("[pytest]\npython_classes = Test* *Tester\n")
    for file in files:
        (work / file.name).write_text(rewritten(file.read_text(encoding="utf-8")))
    return [work / file.name for file in files]


def outcomes(files: list[Path], *options: str) -> dict[str, tuple[str, str]]:
    """{"test_x_trainer.py::test": ("passed", "skipped" or "failed", the error's last words)} of the trainers' tests."""
    work = files[0].parent
    report = work / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", f"--junit-xml={report}"]
    subprocess.run([*command, *options, *(file.name for file in files)], cwd=work, check=False)
    found = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        module, _, kind = case.get("classname", "").rpartition(".")
        if not _TRAINERS.match(kind):
            continue
        child = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        state = "passed" if child is None else "skipped" if child.tag == "skipped" else "failed"
        message = "" if child is None else child.get("message", "")
        found[f"{module}.py::{case.get('name')}"] = (state, message)
    return found


def refused(test: str) -> dict[str, str] | None:
    """The first row of the table for a test "FILE::NAME": what is refused, and why; None without one."""
    with (HERE / "trl_suite.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    name, _, case = test.partition("::")
    fits = (row for row in rows if fnmatch.fnmatch(name, row["file"]) and fnmatch.fnmatch(case, row["test"]))
    return next(fits, None)


def table(found: dict[str, tuple[str, str]]) -> str:
    """Lines `file | run | pass | refused | other`, of tests that are not skipped."""
    counts = collections.defaultdict(collections.Counter)
    for test, (state, _) in found.items():
        kind = state if state != "failed" else "refused" if refused(test) else "other"
        counts[test.partition("::")[0]][kind] += 1
    lines = ["file | run | pass | refused | other"]
    for file, count in [*counts.items(), ("all", sum(counts.values(), collections.Counter()))]:
        run = sum(count.values()) - count["skipped"]
        lines.append(f"{file} | {run} | {count['passed']} | {count['refused']} | {count['other']}")
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        results = outcomes(prepare(Path(sys.argv[1]), Path(folder)), *sys.argv[2:])
    for name, (state, message) in results.items():
        if state == "failed" and refused(name) is None:
            print(f"{name}: {message[:300]!r}")
    print(table(results))
