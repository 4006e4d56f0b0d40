"""Tests that passed on this machine with the same files are not run again.

    python -m pytest tests -p tests.remembered

A test's key is a digest of the files that it can read: its own, whatever those import of this repository, file by file,
the data beside them, pytest's settings, the real test data if the test takes them, the versions that are installed and
the instructions of the processor. Of a package that loads its names when they are asked for, what is asked for counts;
of the family modules, a test with a parameter `name` that is a family counts its own. A test of a file that starts
programs, imports by name or looks for files counts every file.

The keys of passed tests stand in $JAXTUNE_CI_CACHE, and without it nothing is remembered. JAXTUNE_PARITY=all runs all.
What is not run is deselected, and said at the end: a skip would have to be allowed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.versions import versions

ROOT = Path(__file__).resolve().parent.parent
_FAMILIES = ROOT / "jaxtune" / "models" / "families"
_NO_FAMILY = ("__init__.py", "common.py")
_DAYS = 30


@functools.cache
def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _module_file(name: str, folders: tuple[Path, ...]) -> Path | None:
    for folder in folders:
        base = folder.joinpath(*name.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file
    return None


def _for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _imported(nodes: list[ast.stmt]) -> Iterator[tuple[str, str | None]]:
    """(module, name taken from it) of every import below `nodes`; None where the module itself is imported."""
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


@functools.cache
def _lazy_names(file: Path) -> dict[str, str]:
    """{name: its module} of a package that imports its names when they are asked for: what it tells type checkers."""
    if file.name != "__init__.py" or "import_module(" not in file.read_text(encoding="utf-8"):
        return {}
    found = _imported([node for node in _tree(file).body if _for_type_checkers(node)])
    return {name: module for module, name in found if name is not None}


@functools.cache
def _imports(file: Path, folders: tuple[Path, ...]) -> frozenset[Path]:
    """Files of this repository that `file` imports itself, anywhere in it, and the packages they are in."""
    names = set()
    # What only a type checker imports, such as all that the package's lazy face names, is not read.
    for module, name in _imported([node for node in _tree(file).body if not _for_type_checkers(node)]):
        names |= {module} if name is None else {module, f"{module}.{name}"}
        package = _module_file(module, folders)
        lazy = _lazy_names(package) if package else {}
        # Of a package that is imported whole, any name can be asked for.
        names |= {of for asked, of in lazy.items() if name in (None, asked)}
    parents = {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}
    return frozenset(found for name in names | parents if (found := _module_file(name, folders)))


def reachable(file: Path, folders: tuple[Path, ...]) -> frozenset[Path]:
    """`file` and every file of this repository that it imports, at any remove."""
    found, todo = {file}, [file]
    while todo:
        new = _imports(todo.pop(), folders) - found
        found |= new
        todo.extend(new)
    return frozenset(found)


@functools.cache
def _by_name(file: Path) -> bool:
    """Whether a file of the tests can reach others than it imports, or reads files that it finds."""
    modules = {f"{module}.{name}" for module, name in _imported(_tree(file).body)}
    modules -= {"importlib.metadata", "importlib.resources"}  # of files that count for every test
    if {module.split(".")[0] for module in modules} & {"importlib", "runpy", "multiprocessing"}:
        return True
    nodes = list(ast.walk(_tree(file)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    # A program that is not Python, such as an assembler, reads what it is handed; one of ours needs ROOT to be found.
    if names & {"ROOT", "parents", "executable", "getcwd", "cwd"}:
        return True
    return ".md" in file.read_text(encoding="utf-8").replace('test_data / "README.md"', "")  # but that of the real data


@functools.cache
def _everything() -> frozenset[Path]:
    """Every file of the repository but what is made in it: environments, caches and builds begin with a dot or are
    named here."""
    made = {"__pycache__", "build", "dist", "site", "runs"}
    places = [place for place in ROOT.iterdir() if place.name not in made]
    places = [place for place in places if not place.name.startswith(".") or place.name == ".ci"]
    found = [file for place in places for file in (place.rglob("*") if place.is_dir() else [place])]
    return frozenset(file for file in found if file.is_file() and not made & set(file.relative_to(ROOT).parts))


@functools.cache
def _data(folders: frozenset[Path]) -> frozenset[Path]:
    """Files that are no modules: of the package without its pages, which only a test that names one can read, the
    stored results, and those in `folders`; and pytest's settings."""
    chosen = tuple(f"{folder}{os.sep}" for folder in (ROOT / "jaxtune", ROOT / "tests" / "goldens", *folders))
    found = {file for path, file in _no_modules().items() if path.startswith(chosen)}
    found -= {file for file in found if file.suffix == ".md" and file.is_relative_to(ROOT / "jaxtune")}
    return frozenset(found | ({ROOT / "pyproject.toml"} & _everything()))


@functools.cache
def _no_modules() -> dict[str, Path]:
    return {str(file): file for file in _everything() if file.suffix != ".py"}


@functools.cache
def _of_tests(file: Path) -> bool:
    return "tests" in file.relative_to(ROOT).parts


@functools.cache
def files_of(test_file: Path, family: str | None = None) -> frozenset[Path]:
    """Every file that a test of `test_file` can read; family: of whose modules it needs that one's alone."""
    folders = (ROOT, *(Path(p) for p in sys.path if Path(p).is_relative_to(ROOT / "tests")))
    conftests = {file for folder in test_file.parents if (file := folder / "conftest.py").is_file()}
    found = reachable(test_file, folders)
    for file in conftests & _everything():
        found |= reachable(file, folders)
    of_tests = {file for file in found if _of_tests(file)}
    if any(_by_name(file) for file in of_tests):
        found |= _everything()
    if family is not None:
        others = {f for f in _FAMILIES.glob("*.py") if f.name not in (*_NO_FAMILY, f"{family}.py")}
        found -= others - reachable(_FAMILIES / f"{family}.py", (ROOT,))
    # The folder of all tests is that of every conftest; a test that stands in it reads what it likes.
    beside = {file.parent for file in of_tests} - {ROOT / "tests"} | {test_file.parent}
    return found | _data(frozenset(beside))


@functools.cache
def _real_data() -> str:
    """The checksums of the real models and data that tests are given, as the folder holds them."""
    folder = os.environ.get("JAXTUNE_TEST_DATA")
    sums = Path(folder) / "SHA256SUMS" if folder else None
    return _digest(sums) if sums is not None and sums.is_file() else ""


@functools.cache
def _key_of_files(test_file: Path, family: str | None) -> str:
    lines = sorted(map(_line, files_of(test_file, family)))
    return hashlib.sha256("\n".join([versions(), *lines]).encode()).hexdigest()


@functools.cache
def _line(file: Path) -> str:
    return f"{file.relative_to(ROOT)} {_digest(file)}"


def _family(item: pytest.Item) -> str | None:
    """The module of the family that a test is of, by its parameter `name`."""
    from tiny import CONFIGS

    from jaxtune.models.registry import FAMILIES

    name = getattr(item, "callspec", None) and item.callspec.params.get("name")
    if name not in CONFIGS:
        return None
    return FAMILIES[CONFIGS[name]["model_type"]].__name__.rsplit(".", 1)[1]


def key(item: pytest.Item) -> str:
    files = _key_of_files(Path(item.path), _family(item))
    data = _real_data() if "test_data" in getattr(item, "fixturenames", ()) else ""
    return hashlib.sha256(f"{item.nodeid} {files} {data}".encode()).hexdigest()[:32]


class Memory:
    """Keys of passed tests, with the day on which each was last of use, in one file."""

    def __init__(self, folder: Path):
        self.file = folder / "passed.json"
        try:
            self.days: dict[str, int] = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.days = {}

    def add(self, keys: set[str]) -> None:
        """Writes them in one move, with those that another run may have written meanwhile."""
        today = int(time.time() // 86400)
        others = Memory(self.file.parent).days
        merged = others | dict.fromkeys(keys, today)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.file.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps({k: day for k, day in merged.items() if day > today - _DAYS}), encoding="utf-8")
        beside.replace(self.file)


class Plugin:
    """Deselects tests that `memory` knows, but for the first, which shows that the environment works; remembers those
    that pass. With pytest-xdist the workers deselect, and their controller remembers."""

    def __init__(self, memory: Memory, run_all: bool):
        self.memory, self.run_all = memory, run_all
        self.known: set[str] = set()
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        kept, known = [], []
        for item in items:
            item.user_properties.append(("key", key(item)))
            remembered = kept and key(item) in self.memory.days and not self.run_all
            (known if remembered else kept).append(item)
        if known:
            self.known = {key(item) for item in known}
            items[:] = kept
            config.hook.pytest_deselected(items=known)

    def pytest_runtest_logreport(self, report):
        of = dict(report.user_properties).get("key")
        if of is not None and report.when == "call" and report.passed:
            self.passed.add(of)
        elif of is not None and not report.passed:
            self.failed.add(of)

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["known"] = sorted(self.known)
        else:
            self.memory.add(self.known | (self.passed - self.failed))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.known |= set(getattr(node, "workeroutput", {}).get("known", ()))

    def pytest_terminal_summary(self, terminalreporter):
        if self.known:
            terminalreporter.write_line(
                f"{len(self.known)} tests were not run: they passed here with the same files and versions "
                "(JAXTUNE_PARITY=all runs all)"
            )


def pytest_configure(config):
    folder = os.environ.get("JAXTUNE_CI_CACHE")
    if folder:
        config.pluginmanager.register(Plugin(Memory(Path(folder)), os.environ.get("JAXTUNE_PARITY") == "all"))
