"""Which tests are not run again, and that nothing else is left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxtune
from tests import remembered

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ROOT / "jaxtune" / "models" / "families"
PARITY = ROOT / "tests" / "parity" / "test_families_live.py"


@pytest.fixture
def parity_path(monkeypatch):
    """The folders that the parity tests import from."""
    for folder in ("parity", "models"):
        monkeypatch.syspath_prepend(str(ROOT / "tests" / folder))
    remembered.files_of.cache_clear()


def test_a_test_of_a_family_reads_that_family_and_what_all_share(parity_path):
    files = remembered.files_of(PARITY, "gemma2")
    families = {file.name for file in files if file.parent == FAMILIES}
    assert families == {"__init__.py", "gemma2.py"}
    common = {file for file in files if file.parent == FAMILIES / "common"}
    assert common == {*(FAMILIES / "common").glob("*.py")}
    for name in (
        "jaxtune/models/stack/stack.py",
        "jaxtune/pallas/attention/api.py",
        "tests/parity/reference.py",
        "tests/models/tiny.py",
        "tests/conftest.py",
        "tests/goldens/gemma2.npz",
    ):
        assert ROOT / name in files, name
    assert ROOT / "jaxtune/cli.py" not in files and ROOT / "tests/test_cli.py" not in files


def test_a_test_of_no_family_reads_all_of_them(parity_path):
    families = {file.name for file in remembered.files_of(PARITY) if file.parent == FAMILIES}
    assert families == {file.name for file in FAMILIES.glob("*.py")}


def test_a_test_that_looks_for_files_reads_everything(parity_path):
    file = ROOT / "tests/docs/test_docs.py"
    wanted = {
        ROOT / name for name in ("README.md", "Makefile", "jaxtune/commands/machine_checks.py", "tests/test_compat.py")
    }
    assert wanted <= remembered.files_of(file, everything=True)
    assert not wanted <= remembered.files_of(file)
    for name, test in (
        ("tests/docs/test_docs.py", "test_links_lead_somewhere"),
        ("tests/test_rules.py", "test_imports_go_one_way"),
        ("tests/test_words.py", "test_no_retired_word_is_used"),
    ):
        assert f"def {test}(" in (ROOT / name).read_text()
        assert remembered.reads_by_name(ROOT / name, [test]), name


# Each can read, in some way, what it does not import; or not.
BY_NAME = {
    "places.py": """
import importlib
from pathlib import Path
ROOT = Path(__file__).parent
def listed(): return list(ROOT.iterdir())
def loaded(name): return importlib.import_module(name)
def plain(): return 1
""",
    "conftest.py": """
import pytest
@pytest.fixture
def page(): return "guide.md"
@pytest.fixture
def number(): return 1
""",
    "test_places.py": """
from importlib.metadata import version
from pathlib import Path
import pytest
from places import listed, loaded, plain
CASES = sorted(Path(__file__).parents[0].glob("*.py"))
def test_by_name_of_a_root(): listed()
def test_by_name_of_a_module(): loaded("json")
def test_by_name_of_cases(): assert CASES
@pytest.mark.parametrize("case", CASES)
def test_by_name_of_a_decorator(case): pass
def test_by_name_of_a_fixture(page): pass
def test_by_name_of_a_page(test_data): assert (test_data / "a" / "README.md")
def test_plain(number): plain()
def test_plain_page_of_the_data(test_data): assert test_data / "README.md"
def test_plain_version(): version("pytest")
""",
    "test_at_import.py": """
import os
os.chdir(os.getcwd())
def test_by_name_of_what_importing_runs(): pass
""",
}


def test_which_tests_find_files_is_read_from_their_names(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    for name, text in BY_NAME.items():
        (tmp_path / "tests" / name).write_text(text)
    monkeypatch.setattr(remembered, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "tests"))
    for function in vars(remembered).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    try:
        for name in ("test_places.py", "test_at_import.py"):
            file = tmp_path / "tests" / name
            for function in [node for node in remembered._tree(file).body if hasattr(node, "args")]:
                names = [function.name, *(argument.arg for argument in function.args.args)]
                wanted = function.name.startswith("test_by_name")
                assert remembered.reads_by_name(file, names) == wanted, function.name
    finally:
        for function in vars(remembered).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def test_names_that_a_package_loads_when_asked_lead_to_their_modules(parity_path):
    """`from jaxtune import merge_adapter` reads that module; `import jaxtune` may read any of the package's names."""
    folders = (ROOT,)
    package = ROOT / "jaxtune"
    face = remembered._imports(ROOT / "tests/models/test_generate.py", folders)
    assert {package / "models/adapters/merge.py", package / "models/hf.py"} <= face
    assert package / "export/api.py" not in face
    assert package / "export/api.py" in remembered._imports(ROOT / "tests/parity/test_quickstart_parity.py", folders)
    for name, module in jaxtune._MODULE_OF.items():
        assert remembered._lazy_names(package / "__init__.py")[name] == module


def test_what_is_compiled_ahead_depends_on_no_page(parity_path):
    files = remembered.files_of(ROOT / "tests/gpu/aot/test_golden.py")
    assert {
        ROOT / "tests/golden/programs.json",
        ROOT / "jaxtune/models/stack/stack.py",
        ROOT / "pyproject.toml",
    } <= files
    assert not {ROOT / "README.md", ROOT / "jaxtune/pallas/attention/README.md", ROOT / "jaxtune/cli.py"} & files


SUITE = {
    "conftest.py": "",
    "helper.py": "value = 1\n",
    "test_one.py": "import helper\ndef test_a(): pass\ndef test_b(): assert helper.value\ndef test_c(): pass\n",
    "test_two.py": "def test_d(): pass\n",
}


@pytest.fixture
def suite(tmp_path):
    """(folder, run(*arguments) -> last lines of pytest's output) of a small suite with the plugin beside it."""
    folder = tmp_path / "checkout"
    (folder / "tests").mkdir(parents=True)
    text = (ROOT / "tests" / "remembered.py").read_text()
    (folder / "tests" / "remembered.py").write_text(text.replace("from tiny import CONFIGS", "return None"))
    (folder / "tests" / "versions.py").write_text((ROOT / "tests" / "versions.py").read_text())
    for name, text in SUITE.items():
        (folder / name if name == "helper.py" else folder / "tests" / name).write_text(text)

    def run(*arguments: str, **environment: str) -> tuple[int, str]:
        env = {**os.environ, "JAXTUNE_CI_CACHE": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"} | environment
        command = [sys.executable, "-m", "pytest", "tests", "-q", "-p", "tests.remembered", *arguments]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout

    return folder, run


def test_what_passed_is_run_again_only_if_a_file_of_it_changed(suite):
    folder, run = suite
    code, said = run("-n", "2")
    assert code == 0 and "4 passed" in said and "were not run" not in said
    code, said = run()  # the first always runs
    assert code == 0 and "1 passed" in said and "3 tests were not run: they passed here with the same files" in said
    (folder / "helper.py").write_text("value = 0\n")
    code, said = run("-n", "2")
    assert code == 1 and "1 failed, 2 passed" in said and "1 tests were not run" in said
    code, said = run()  # what failed is not remembered
    assert code == 1 and "1 failed, 1 passed" in said and "2 tests were not run" in said
    assert "1 failed, 3 passed" in run(JAXTUNE_PARITY="all")[1]
    assert "1 failed, 3 passed" in run(JAXTUNE_CI_CACHE="")[1]


def test_what_passed_before_a_run_was_killed_is_remembered(suite):
    """CI's machine kills a run that takes too long: the next one goes on where it was."""
    folder, run = suite
    (folder / "tests" / "conftest.py").write_text(
        "from tests import remembered\nremembered.SECONDS_BETWEEN_SAVES = 0\n"
    )
    (folder / "tests" / "test_two.py").write_text("import os\ndef test_d(): os._exit(9)\n")
    assert run()[0] == 9
    (folder / "tests" / "test_two.py").write_text("def test_d(): pass\n")
    code, said = run()  # the first always runs
    assert code == 0 and "2 passed" in said and "2 tests were not run" in said


PACKAGE = {
    "jaxtune/__init__.py": "",
    "jaxtune/part.py": '"""A part."""\nclass Part:\n    """It."""\n    value = 1  # of it\n    """A field."""\n',
    "jaxtune/cli.py": '"""The help."""\nvalue = 1\n',
    "tests/test_one.py": "def test_first(): pass\n",
    "tests/test_part.py": "from jaxtune.part import Part\ndef test_a(): assert Part.value\n",
    "tests/test_help.py": "from jaxtune.cli import value\ndef test_b(): assert value\n",
    "tests/test_all.py": "import os\ndef test_c(): assert os.getcwd()\n",
}


def test_words_of_the_package_count_only_where_they_are_read(suite):
    folder, run = suite
    (folder / "jaxtune").mkdir()
    (folder / "tests/test_two.py").unlink()
    for name, text in PACKAGE.items():
        (folder / name).write_text(text)
    assert "4 passed" in run()[1]

    def change(name: str, old: str, new: str) -> str:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
        said = run("-vv")[1]
        return " ".join(sorted(line.split("::")[1].split()[0] for line in said.splitlines() if "PASSED" in line))

    # Each run begins with the first test of all.
    assert change("jaxtune/part.py", "A part.", "Part of it.") == "test_c"
    assert change("jaxtune/part.py", "# of it", "# its own") == "test_c"
    assert change("jaxtune/part.py", "A field.", "Its value.") == "test_c"
    assert change("jaxtune/part.py", "value = 1", "value = 2") == "test_a test_c"
    assert change("jaxtune/cli.py", "The help.", "What it says.") == "test_b test_c"


# Each has, in some way, what can come at another moment the next time: directly, by a fixture, by a helper of this or
# of another file, by a script that it starts, or by an import under another name.
TIMED = {
    "helpers.py": """
import subprocess, sys
from threading import Thread
def started(): return subprocess.run([sys.executable, "-c", ""])
def apart(): return Thread(target=print)
def quiet(): return 1
""",
    "conftest.py": """
import os, pytest, signal
@pytest.fixture
def stopped(): return os.getpid()
@pytest.fixture
def interrupted(stopped): signal.getsignal(signal.SIGTERM)
""",
    "script.py": "import signal\nsignal.getsignal(signal.SIGTERM)\n",
    "test_moments.py": """
import os
import concurrent.futures as tasks
import signal as of_system
import subprocess
from helpers import apart, quiet, started
TASKS = tasks.ThreadPoolExecutor
def inner(): return of_system.SIGTERM
def outer(): return inner()
class TestGroup:
    def start(self): return subprocess.Popen(["true"])
    def test_timed_method(self): assert self.start().wait() == 0
def test_timed_directly(): os.kill(os.getpid(), 0)
def test_timed_by_a_helper(): outer()
def test_timed_by_a_helper_of_another_file(): started()
def test_timed_by_a_thread_of_another_file(): apart()
def test_timed_by_a_fixture(interrupted): pass
def test_timed_by_a_name_of_the_file(): assert TASKS
def test_timed_by_a_script(): assert os.path.basename("there/script.py")
def test_timed_by_an_import_within():
    import multiprocessing
    assert multiprocessing
def test_plain(): quiet()
def test_plain_with_a_fixture(stopped): pass
def test_plain_program(): subprocess.run(["true"])
""",
}


def test_a_test_of_signals_processes_or_threads_is_never_remembered(suite):
    folder, run = suite
    for name, text in TIMED.items():
        (folder / "tests" / name).write_text(text)
    for name in ("test_one.py", "test_two.py"):
        (folder / "tests" / name).unlink()
    assert "12 passed" in run("--override-ini=pythonpath=tests")[1]
    code, said = run("--override-ini=pythonpath=tests", "-vv")
    ran = {line.split("::")[-1].split()[0] for line in said.splitlines() if "PASSED" in line}
    wanted = {word.split("(")[0] for word in TIMED["test_moments.py"].split() if word.startswith("test_timed")}
    assert code == 0 and len(wanted) == 9 and ran == wanted and "3 tests were not run" in said, said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HYPOTHESIS_PROFILE", "deep"),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=2"),
        ("JAX_ENABLE_X64", "1"),
        ("JAX_PLATFORMS", "cuda,cpu"),
        ("JAXTUNE_LONG_KILLS", "1"),
    ],
)
def test_the_environment_is_of_the_key_and_where_things_lie_is_not(name, value, monkeypatch):
    for one in [one for one in os.environ if one.startswith(("HYPOTHESIS", "XLA", "JAX"))]:
        monkeypatch.delenv(one)
    before = remembered.environment()
    for place in ("JAX_COMPILATION_CACHE_DIR", "JAXTUNE_CACHE", "JAXTUNE_CI_CACHE", "JAXTUNE_TEST_DATA"):
        monkeypatch.setenv(place, "/elsewhere")
    monkeypatch.setenv("JAXTUNE_PARITY", "all")
    assert remembered.environment() == before
    monkeypatch.setenv(name, value)
    assert remembered.environment() != before


def test_what_passed_in_another_environment_is_run_again(suite):
    _, run = suite
    plain = {"XLA_FLAGS": "", "JAX_ENABLE_X64": ""}
    assert "4 passed" in run(**plain)[1]
    assert "3 tests were not run" in run(**plain, JAX_COMPILATION_CACHE_DIR="/elsewhere")[1]
    for changed in ({"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}, {"JAX_ENABLE_X64": "1"}, {"HYPOTHESIS_PROFILE": "deep"}):
        assert "4 passed" in run(**plain | changed)[1]


def test_what_conftest_runs_for_all_tests_makes_none_of_them_timed():
    """It sets signals, and for a day no test was remembered."""
    names = ["programs_are_kept_as_the_command_keeps_them", "programs_end_with_their_module"]
    assert not remembered.timed(ROOT / "tests/train/test_checkpoint.py", [*names, "test_nothing_there", "checkpointer"])
    assert remembered.timed(ROOT / "tests/faults/test_kills.py", [*names, "test_killed_at_random_moments"])
