"""Tests that passed on this machine with the same files are not run again.

    python -m pytest tests -p tests.remembered

A test's key is a digest of the files that it can read: its own, whatever those import of this repository, file by file,
the data beside them, pytest's settings, the real test data if the test takes them, the versions that are installed,
the instructions of the processor, and the environment variables that change what JAX, XLA, hypothesis or a test here
does. Of the package's modules only the code counts, without comments and docstrings, except for those of the commands,
which are their help. Of a package that loads its names when they are asked for, what is asked for counts; of the family
modules, a test with a parameter `name` that is a family counts its own. A test that imports by name, looks for files or
reads pages counts every file with all of its text; whether it does is read from the statements that give the names in
it and in its fixtures their meanings, through all files of the tests that it imports.

A test of signals, processes, threads or races passes at one moment and can fail at the next, with the same files. It is
never remembered.

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
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.versions import versions

ROOT = Path(__file__).resolve().parent.parent
_FAMILIES = ROOT / "jaxtune" / "models" / "families"
_DAYS = 30
SECONDS_BETWEEN_SAVES = 60

# Which of these variables are set, and to what, belongs to the key.
_VARIABLES = ("HYPOTHESIS_PROFILE", "XLA_", "JAX_", "JAXTUNE_")
# But these are places. What lies there is of the key where it counts, or is made anew with the same content.
_PLACES = {"JAX_COMPILATION_CACHE_DIR", "JAXTUNE_CACHE", "JAXTUNE_CI_CACHE", "JAXTUNE_TEST_DATA", "JAXTUNE_TUNING_DIR"}
_NOT_OF_THE_KEY = {*_PLACES, "JAXTUNE_PARITY", "JAXTUNE_CASES", "JAXTUNE_CASES_UNTIL"}

# What runs beside a test, or interrupts it: a test with one of these words is never remembered.
_TIMED = {"signal", "signals", "threading", "multiprocessing", "concurrent", "asyncio", "workers", "launch"}
_TIMED |= {"Popen", "fork", "kill", "killpg", "executable"}
# A test with one of these words can read files that it does not import, or pages.
_BY_NAME = {"importlib", "runpy", "multiprocessing", "ROOT", "parents", "executable", "getcwd", "cwd", ".md"}


@functools.cache
def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


class CodeDigests:
    """Digests of modules' code without its comments and docstrings, which take long to compute: those that are known
    stand in a file, by the digests of the whole texts.

    Args:
      folder: where the file stands, or None, to store nothing.
    """

    def __init__(self, folder: Path | None):
        self._file = None if folder is None else folder / "code_digests.json"
        self._known = self._stored()
        self._new: dict[str, str] = {}

    def _stored(self) -> dict[str, str]:
        try:
            return json.loads(self._file.read_text(encoding="utf-8")) if self._file else {}
        except (OSError, ValueError):
            return {}

    def of(self, file: Path) -> str:
        """The digest of a module's code."""
        whole = _digest(file)
        if whole not in self._known:
            self._known[whole] = self._new[whole] = hashlib.sha256(code_of(file).encode()).hexdigest()
        return self._known[whole]

    def save(self) -> None:
        """Stores what was computed, with what other processes stored meanwhile."""
        if self._file is not None and self._new:
            _replace(self._file, json.dumps(self._stored() | self._new))


def code_of(file: Path) -> str:
    """A module's code as text, without comments, docstrings and the strings that document fields."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [inner for inner in node.body if not _is_text(inner)]
    return ast.dump(tree)


def _replace(file: Path, text: str) -> None:
    """Gives a file a new content in one move."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


_CODE = CodeDigests(Path(os.environ["JAXTUNE_CI_CACHE"]) if os.environ.get("JAXTUNE_CI_CACHE") else None)


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


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str | None]]:
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
def _own_files(test_file: Path) -> frozenset[Path]:
    """A file of tests, the conftests above it, and what they import."""
    folders = (ROOT, *(Path(p) for p in sys.path if Path(p).is_relative_to(ROOT / "tests")))
    conftests = {file for folder in test_file.parents if (file := folder / "conftest.py").is_file()}
    return frozenset().union(*(reachable(file, folders) for file in {test_file} | (conftests & _everything())))


@functools.cache
def files_of(test_file: Path, family: str | None = None, everything: bool = False) -> frozenset[Path]:
    """Every file that a test of `test_file` can read.

    Args:
      family: of whose modules it needs that one's alone. everything: it finds files, see reads_by_name.
    """
    found = _own_files(test_file)
    of_tests = {file for file in found if _of_tests(file)}
    if everything:
        found |= _everything()
    if family is not None:
        others = {f for f in _FAMILIES.glob("*.py") if f.name not in ("__init__.py", f"{family}.py")}
        found -= others - reachable(_FAMILIES / f"{family}.py", (ROOT,))
    # The folder of all tests is that of every conftest; a test that stands in it reads what it likes.
    beside = {file.parent for file in of_tests} - {ROOT / "tests"} | {test_file.parent}
    return found | _data(frozenset(beside))


def _words(nodes: Iterable[ast.AST]) -> set[str]:
    """Names, attributes, what imports name, the names of scripts, and ".md" for the name of a page, anywhere below
    `nodes`."""
    found = set()
    nodes = list(nodes)
    walked = [node for outer in nodes for node in ast.walk(outer)]
    # The page of the real data is of the test data, whose checksums count.
    passed = {id(node.right) for node in walked if isinstance(node, ast.BinOp) and _is_test_data(node.left)}
    for node in walked:
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            if node.value.endswith(".py"):
                found.add(Path(node.value).name)
            if ".md" in node.value:
                found.add(".md")
    for module, name in _imported(nodes):
        found |= _of_import(module, name or "")
    return found


def _is_test_data(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "test_data"


def _of_import(module: str, name: str) -> set[str]:
    # Not "", which stands for what a file runs when it is imported (_meanings): tests/conftest.py sets signals there.
    words = {*module.split("."), *name.split(".")} - {""}
    # importlib's other modules import nothing: they read files that count for every test.
    return words - {"importlib"} if words & {"metadata", "resources"} else words


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@functools.cache
def _meanings(file: Path) -> dict[str, set[str]]:
    """{name at the top of a file: the words of the statements that define or import it}; under "" those of statements
    that define no name, which are run when the file is imported."""
    found: dict[str, set[str]] = {}
    for node in _tree(file).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            named = {node.name: _words([node])}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            of = getattr(node, "module", None) or ""
            named = {alias.asname or alias.name.split(".")[0]: _of_import(of, alias.name) for alias in node.names}
        else:
            stored = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
            named = {inner.id: _words([node]) for inner in stored if isinstance(inner.ctx, ast.Store)}
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) and not _is_text(node):
                named[""] = _words([node])
        for name, words in named.items():
            found[name] = found.get(name, set()) | words
    return found


@functools.cache
def _of_scripts() -> dict[str, set[str]]:
    """{name of a file of the tests: all of its words}, for the scripts that tests start by their names."""
    return {file.name: _words([_tree(file)]) for file in _everything() if file.suffix == ".py" and _of_tests(file)}


@functools.cache
def _all_meanings(test_file: Path) -> dict[str, set[str]]:
    """_meanings of all files of the tests that one imports, at any remove, and of the scripts that they start."""
    found = {name: set(words) for name, words in _of_scripts().items()}
    for file in _own_files(test_file):
        if _of_tests(file):
            for name, words in _meanings(file).items():
                found[name] = found.get(name, set()) | words
    return found


@functools.cache
def _reached(test_file: Path, names: frozenset[str]) -> frozenset[str]:
    """The names, and the words that give these and each other their meanings."""
    meanings, todo, seen = _all_meanings(test_file), [*names], {*names}
    while todo:
        words = meanings.get(todo.pop(), set())
        todo.extend(words - seen)
        seen |= words
    return frozenset(seen)


def timed(test_file: Path, names: Iterable[str]) -> bool:
    """Whether a test has a signal, a process or a thread of its own, by the names of the test and its fixtures."""
    return not _TIMED.isdisjoint(_reached(test_file, frozenset(names)))


def reads_by_name(test_file: Path, names: Iterable[str]) -> bool:
    """Whether a test can reach other files than it imports, by the names of the test and its fixtures and by what is
    run when its files are imported. A program that is not Python, such as an assembler, reads what it is handed; one of
    ours needs ROOT to be found."""
    return not _BY_NAME.isdisjoint(_reached(test_file, frozenset([*names, ""])))


def environment() -> str:
    """The variables of the environment that change what a test finds, with their values."""
    chosen = {name for name in os.environ if name.startswith(_VARIABLES)} - _NOT_OF_THE_KEY
    return json.dumps({name: os.environ[name] for name in sorted(chosen)})


@functools.cache
def _real_data() -> str:
    """The checksums of the real models and data that tests are given, as the folder holds them."""
    folder = os.environ.get("JAXTUNE_TEST_DATA")
    sums = Path(folder) / "SHA256SUMS" if folder else None
    return _digest(sums) if sums is not None and sums.is_file() else ""


@functools.cache
def _key_of_files(test_file: Path, family: str | None, everything: bool) -> str:
    lines = sorted(_line(file, everything) for file in files_of(test_file, family, everything))
    return hashlib.sha256("\n".join([versions(), *lines]).encode()).hexdigest()


@functools.cache
def _line(file: Path, texts: bool) -> str:
    """A file's name and digest. texts: whether comments and docstrings of the package's modules count."""
    name = file.relative_to(ROOT).as_posix()
    helps = name == "jaxtune/cli.py" or name.startswith("jaxtune/commands/")
    only_code = name.startswith("jaxtune/") and name.endswith(".py") and not helps and not texts
    return f"{name} {_CODE.of(file) if only_code else _digest(file)}"


def _family(item: pytest.Item) -> str | None:
    """The module of the family that a test is of, by its parameter `name`."""
    from tiny import CONFIGS

    from jaxtune.models import registry

    name = getattr(item, "callspec", None) and item.callspec.params.get("name")
    if name not in CONFIGS:
        return None
    found = registry.FAMILIES[CONFIGS[name]["model_type"]]
    [module] = [value for value in vars(registry).values() if getattr(value, "FAMILY", None) is found]
    return module.__name__.rsplit(".", 1)[1]


def _names(item: pytest.Item) -> list[str]:
    """Of a test, its classes and its fixtures."""
    of_classes = (node.name for node in item.listchain() if isinstance(node, pytest.Class))
    return [getattr(item, "originalname", None) or item.name, *of_classes, *getattr(item, "fixturenames", ())]


def never(item: pytest.Item) -> bool:
    """Whether a test is never remembered."""
    file = Path(item.path)
    return file.is_relative_to(ROOT) and timed(file, _names(item))


def key(item: pytest.Item, environment: str) -> str | None:
    """None for a test that is never remembered."""
    if never(item):
        return None
    file, names = Path(item.path), _names(item)
    files = _key_of_files(file, _family(item), reads_by_name(file, names))
    data = _real_data() if "test_data" in names else ""
    return hashlib.sha256(f"{item.nodeid} {files} {data} {environment}".encode()).hexdigest()[:32]


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
        _replace(self.file, json.dumps({k: day for k, day in merged.items() if day > today - _DAYS}))


class Plugin:
    """Deselects tests that `memory` knows, but for the first, which shows that the environment works; remembers those
    that pass, every minute, so that a run that is stopped in the middle goes on from there. With pytest-xdist the
    workers deselect, and their controller remembers."""

    def __init__(self, memory: Memory, run_all: bool, of_worker: bool):
        self.memory, self.run_all, self.of_worker = memory, run_all, of_worker
        self.environment = environment()  # before a module of the tests adds to it
        self.known: set[str] = set()
        self.called: set[str] = set()
        self.passed: set[str] = set()
        self.next_save = time.monotonic() + SECONDS_BETWEEN_SAVES

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        kept, known = [], []
        for item in items:
            of = key(item, self.environment)
            item.user_properties.append(("key", of))
            if of is not None and kept and of in self.memory.days and not self.run_all:
                known.append(item)
                self.known.add(of)
            else:
                kept.append(item)
        if known:
            items[:] = kept
            config.hook.pytest_deselected(items=known)

    def pytest_runtest_logreport(self, report):
        of = dict(report.user_properties).get("key")
        if of is None or not report.passed:
            return
        if report.when == "call":
            self.called.add(of)
        elif report.when == "teardown" and of in self.called:
            self.passed.add(of)
            if not self.of_worker and time.monotonic() > self.next_save:
                self.memory.add(self.passed)
                self.next_save = time.monotonic() + SECONDS_BETWEEN_SAVES

    def pytest_sessionfinish(self, session):
        _CODE.save()
        if self.of_worker:
            session.config.workeroutput["known"] = sorted(self.known)
        else:
            self.memory.add(self.known | self.passed)

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
        run_all, of_worker = os.environ.get("JAXTUNE_PARITY") == "all", hasattr(config, "workerinput")
        config.pluginmanager.register(Plugin(Memory(Path(folder)), run_all, of_worker))
