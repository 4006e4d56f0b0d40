"""The rules of the house, read from the syntax trees and files of the project itself."""

from __future__ import annotations

import ast
import graphlib
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import jaxtune

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "jaxtune").rglob("*.py"))

# What each room may import of ours; imports go one way.
MAY_IMPORT = {
    "system": ("jaxtune.system",),
    "pallas": ("jaxtune.pallas", "jaxtune.system"),
    "models": ("jaxtune.pallas", "jaxtune.models", "jaxtune.conversations", "jaxtune.system"),
    "profile": ("jaxtune.profile", "jaxtune.system"),
    "train": (
        "jaxtune.pallas",
        "jaxtune.models",
        "jaxtune.conversations",
        "jaxtune.profile",
        "jaxtune.train",
        "jaxtune.system",
    ),
    "conversations": ("jaxtune.conversations", "jaxtune.system"),
    "convert": ("jaxtune.convert", "jaxtune.train.config", "jaxtune.train.data.rendering.packaged", "jaxtune.system"),
    "serve": ("jaxtune.conversations", "jaxtune.models", "jaxtune.serve", "jaxtune.system"),
    "export": ("jaxtune.pallas", "jaxtune.models", "jaxtune.conversations", "jaxtune.export", "jaxtune.system"),
}
# The kernels are usable alone: jax, numpy and a kernel language, nothing else.
NOT_IN_PALLAS = {
    "transformers",
    "tokenizers",
    "datasets",
    "huggingface_hub",
    "safetensors",
    "flax",
    "optax",
    "orbax",
    "pydantic",
    "torch",
}
FAMILIES = "jaxtune.models.families"  # its folder common is what families share
# The rooms within a room, lowest first: each imports only from itself and those before it.
ORDER = {
    "models": [
        *("values", "initial", "heads", "config", "fitted", "placement", "programs", "norm", "rope"),
        *("qat", "linear", "layers", "stack", "vision", "decoder"),
        *("expressions", "lora", "reward", "ends", "observed_inputs"),
        *("families", "registry", "precision", "components"),
        *("files", "adapters", "hf", "generation"),
    ],
    "train": [
        *("config", "user_code", "digests", "signals", "data", "callbacks", "log", "folder"),
        *("optimizer", "objectives", "sampled", "program", "planning", "engine", "references"),
        *("evaluation", "spec", "display", "loop", "trainer"),
        *("delivery", "shown_plan", "sensitivity", "scoring", "app"),
    ],
}
# Slow or optional: imported inside the functions that use them.
NOT_AT_TOP = {"transformers", "datasets", "gguf", "torch", "trackio", "wandb", "tensorboardX", "matplotlib"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, module: str, is_package: bool, top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    """(full dotted name, line) of everything imported: `from a.b import c` gives `a.b.c`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                package = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*package, base]).strip(".")
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        if top_level_only:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
        yield from imports(node, module, is_package, top_level_only)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module imports against the rules, one line each."""
    tree = ast.parse(source)
    room = module.split(".")[1] if module.count(".") else ""
    found = []
    for name, line in imports(tree, module, is_package):
        where = f"{module}:{line} imports {name}"
        ours = within(name, "jaxtune")
        # A __main__ is the command itself, above the rooms.
        if ours and room in MAY_IMPORT and not module.endswith("__main__"):
            if not any(within(name, allowed) for allowed in MAY_IMPORT[room]):
                found.append(f"{where}: {room} may import {', '.join(MAY_IMPORT[room])} only")
        if room == "pallas" and name.split(".")[0] in NOT_IN_PALLAS:
            found.append(f"{where}: kernels know jax only")
        if within(module, FAMILIES) and not is_package and within(name, FAMILIES):
            if name != FAMILIES and not within(name, module) and not within(name, f"{FAMILIES}.common"):
                found.append(f"{where}: families never import each other")
    for name, line in imports(tree, module, is_package, top_level_only=True):
        if name.split(".")[0] in NOT_AT_TOP:
            found.append(f"{module}:{line} imports {name} at module level: import it where it is used")
    return found


def test_imports_go_one_way():
    assert len(MODULES) > 5
    found = []
    for path in MODULES:
        found += violations(path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("jaxtune.pallas.tuning", "from jaxtune.models import linear", "pallas may import"),
        ("jaxtune.pallas.tuning", "def f():\n    import jaxtune.train.trainer", "pallas may import"),
        ("jaxtune.pallas.tuning", "from ..models.linear import Linear", "pallas may import"),
        ("jaxtune.pallas.tuning", "def f():\n    from transformers import AutoModel", "kernels know jax only"),
        ("jaxtune.models.linear", "import jaxtune.train", "models may import"),
        ("jaxtune.models.linear", "from jaxtune import Trainer", "models may import"),
        ("jaxtune.train.trainer", "from jaxtune.cli import main", "train may import"),
        ("jaxtune.export.api", "from jaxtune.train import results", "export may import"),
        ("jaxtune.models.hf", "from jaxtune.export import api", "models may import"),
        ("jaxtune.profile.table", "from jaxtune.pallas import dispatch", "profile may import"),
        ("jaxtune.models.families.gemma2", "from jaxtune.models.families.llama import read", "each other"),
        ("jaxtune.models.families.gemma2", "from . import llama", "each other"),
        ("jaxtune.models.families.common", "from jaxtune.models.families import llama", "each other"),
        ("jaxtune.models.hf", "try:\n    import transformers\nexcept ImportError:\n    pass", "at module level"),
        ("jaxtune.train.log.metrics", "class A:\n    from matplotlib import pyplot", "at module level"),
    ],
)
def test_a_wrong_import_is_found(module, source, message):
    assert [text for text in violations(source, module) if message in text]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jaxtune.models.linear", "from jaxtune.pallas.quant_matmul.api import quant_matmul"),
        ("jaxtune.models.hf", "def load():\n    import transformers"),
        ("jaxtune.models.hf", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers"),
        ("jaxtune.models.families.gemma2", "from jaxtune.models.config import DecoderConfig"),
        ("jaxtune.models.families.gemma2", "from jaxtune.models.families.common.table import MLP_BIAS"),
        ("jaxtune.train.trainer", "from jaxtune.profile import capture"),
        ("jaxtune.profile.text", "from jaxtune.system.terminal import plain"),
    ],
)
def test_a_right_import_is_not(module, source):
    assert not violations(source, module)


def upward(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module imports from a room above its own, or by way of the package of both, at any level of its code."""
    package, room = ".".join(module.split(".")[:2]), "".join(module.split(".")[2:3])
    rooms = ORDER.get(package.removeprefix("jaxtune."), [])
    if room not in rooms:
        return []
    below = [f"{package}.{each}" for each in rooms[: rooms.index(room) + 1]]
    return [
        f"{module}:{line} imports {name}, and stands below it"
        for name, line in imports(ast.parse(source), module, is_package)
        if within(name, package) and not any(within(name, path) for path in below)
    ]


def test_rooms_import_only_downward():
    found = []
    for path in MODULES:
        found += upward(path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py")
    assert not found, "\n".join(found)
    for outer, rooms in ORDER.items():
        named = {name.split(".")[2] for name in map(module_name, MODULES) if name.startswith(f"jaxtune.{outer}.")}
        assert sorted(rooms) == sorted(named - {"__main__"})


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jaxtune.models.linear", "from jaxtune.models.decoder import Decoder"),
        ("jaxtune.models.linear", "from jaxtune.models import decoder, values"),
        ("jaxtune.models.qat.fake_quant", "def f():\n    from jaxtune.models.lora import linears"),
        ("jaxtune.models.qat.fake_quant", "from ..lora import linears"),
        ("jaxtune.models.hf", "import jaxtune.models.generation.sampler"),
        ("jaxtune.train.planning.planner", "from jaxtune.train.engine.programs import Engine"),
        ("jaxtune.train.folder.record", "from jaxtune.train import config, trainer"),
        ("jaxtune.train.callbacks", "class A:\n    def f(self):\n        from jaxtune.train.loop import monitor"),
        ("jaxtune.train.evaluation.evaluate", "if TYPE_CHECKING:\n    from jaxtune.train.trainer import Trainer"),
        ("jaxtune.train.trainer", "from .app import run"),
    ],
)
def test_an_upward_import_is_found(module, source):
    package = ".".join(module.split(".")[:2])
    rooms = ORDER[package.removeprefix("jaxtune.")]
    assert upward(source, module) and not upward(source, f"{package}.{rooms[-1]}")
    assert not upward(f"from {package} import {rooms[0]}\nfrom jaxtune.pallas import formats", module)
    assert upward(f"from {package} import Name", module) and upward(f"import {package}", module)


# How often the whole tree may turn a tool off, or take a value's type for granted. These numbers may only fall.
MAX_UNFORMATTED = 20  # statements that the formatter leaves alone
MAX_UNCHECKED = 24  # lines, or files, that a type checker leaves alone
MAX_CASTS = 1  # calls of typing.cast
MAX_ANYS = 1216  # names `Any` in jaxtune
MAX_TAKERS = 17  # functions that take a whole run, and classes that hold one: its config or its spec
UNFORMATTED = re.compile(r"#\s*fmt:\s*(skip|off)")
UNCHECKED = re.compile(r"#\s*(type:\s*ignore|pyright:)")


def comments(source: str, pattern: re.Pattern[str]) -> list[int]:
    """Lines whose comment matches the pattern."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.start[0] for token in tokens if token.type == tokenize.COMMENT and pattern.search(token.string)]


def casts(source: str) -> list[int]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if ast.unparse(call.func) in ("cast", "typing.cast")]


def anys(source: str) -> list[int]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.start[0] for token in tokens if token.type == tokenize.NAME and token.string == "Any"]


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """(name, text) of the Python files in folders of the project."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


EVERYWHERE = ("jaxtune", "tests", "scripts", "benchmarks", "docs", "examples")


@pytest.mark.parametrize(
    ("most", "find", "folders"),
    [
        pytest.param(MAX_UNFORMATTED, lambda text: comments(text, UNFORMATTED), EVERYWHERE, id="fmt"),
        pytest.param(MAX_UNCHECKED, lambda text: comments(text, UNCHECKED), EVERYWHERE, id="type: ignore"),
        pytest.param(MAX_CASTS, casts, EVERYWHERE, id="cast"),
        pytest.param(MAX_ANYS, anys, ("jaxtune",), id="Any"),
    ],
)
def test_tools_are_seldom_turned_off(most, find, folders):
    found = [f"{name}:{line}" for name, text in sources(*folders) for line in find(text)]
    assert len(found) <= most, f"{len(found)} where at most {most} may be; one of them is new:\n" + "\n".join(found)


PRIVATE = ("jax._src", "jaxlib")
MAY_BE_PRIVATE = {"jaxtune.system.private_jax", "jaxtune.system.private_mlir"}


def private_uses(source: str, module: str) -> list[str]:
    """What a module imports of JAX that is not public, one line each; `import jaxlib`, for its version, is public."""
    if module in MAY_BE_PRIVATE:
        return []
    found = imports(ast.parse(source), module, False)
    used = [(name, line) for name, line in found if name != "jaxlib" and any(within(name, one) for one in PRIVATE)]
    return [f"{module}:{line} imports {name}: jaxtune/system/private_jax.py does that" for name, line in used]


def test_what_is_private_to_jax_is_in_one_place():
    found = [use for path in MODULES for use in private_uses(path.read_text(encoding="utf-8"), module_name(path))]
    assert not found, "\n".join(found)
    for source in ("from jax._src import core", "def f():\n    from jaxlib.mlir import ir", "import jax._src.config"):
        assert private_uses(source, "jaxtune.models.hf") and not private_uses(source, "jaxtune.system.private_jax")


# Files that appear under their name when they are whole, their checksums, and room on a disk: one module for each.
HOMES = {
    "jaxtune.system.files": ("os.replace", "os.rename", "os.link", "os.fsync", "shutil.move", "tempfile.mkstemp"),
    "jaxtune.system.sealed": ("zlib.crc32", "zlib.adler32", "binascii.crc32", "xxhash"),
    "jaxtune.system.disk": ("shutil.disk_usage", "os.statvfs"),
}
PATH_RENAMED = re.compile(r".*(path|file|folder|temporary|partial|target)\w*\.(rename|replace)\([^,]*\)")


def file_uses(source: str, module: str) -> list[str]:
    """What a module does to files that another one is for, one line each."""
    homes = {name: home for home, names in HOMES.items() for name in names if home != module}
    found = [(name.split(".")[0], line) for name, line in imports(ast.parse(source), module, False)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            call = ast.unparse(node)
            found.append(("os.rename" if PATH_RENAMED.fullmatch(call) else ast.unparse(node.func), node.lineno))
    return [f"{module}:{line}: {name}: {homes[name]} does that" for name, line in found if name in homes]


def test_files_get_their_names_and_checksums_in_one_place():
    found = [use for path in MODULES for use in file_uses(path.read_text(encoding="utf-8"), module_name(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "os.replace(temporary, path)",
        "temporary.rename(path)",
        "temporary.replace(path)",
        "os.fsync(descriptor)",
        "def f():\n    import xxhash",
        "descriptor, name = tempfile.mkstemp()",
        "digest = zlib.crc32(data)",
        "free = shutil.disk_usage(folder).free",
    ],
)
def test_a_second_way_to_write_a_file_is_found(source):
    assert file_uses(source, "jaxtune.train.folder.checkpoint")
    assert not file_uses("text.replace('a', 'b'); dataclasses.replace(a, b=1)", "jaxtune.train.folder.checkpoint")


def import_graph(sources: dict[str, str], packages: Iterable[str] = ()) -> dict[str, set[str]]:
    """{module: the modules of ours that it imports}, at any level of its code, and for a checker of types alone."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = {name for name, _ in imports(ast.parse(source), module, module in packages)}
        # `from a import b` is of the module a.b, or of a name of the module a.
        graph[module] = {name if name in sources else name.rpartition(".")[0] for name in names} & {*sources} - {module}
    return graph


def first_circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_by_way_of_others():
    sources = {module_name(path): path.read_text(encoding="utf-8") for path in MODULES}
    packages = {module_name(path) for path in MODULES if path.name == "__init__.py"}
    circle = first_circle(import_graph(sources, packages))
    assert not circle, " imports ".join(reversed(circle))
    late = {
        "a": "def f():\n    import b",
        "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import f",
    }
    assert first_circle(import_graph(late)) and not first_circle(import_graph({"a": "import b", "b": ""}))


def test_what_fights_with_tools_is_found():
    skipped, ignored = "x = 1  # fmt: " + "skip", "y = 2  # type: " + "ignore[misc]"
    source = "\n".join([skipped, ignored, "# pyright: " + "basic", 'z = "# fmt: off"', ""])
    assert comments(source, UNFORMATTED) == [1] and comments(source, UNCHECKED) == [2, 3]
    assert casts("a = cast(int, b)\nc = typing.cast(int, d)\ne = tl.cast(f)") == [1, 2]
    assert anys("from typing import Any\nx: Any = 'Any'\nmany = Anything") == [1, 2]


IMPORTED = """
import sys
import {modules}
print(" ".join(sorted({{name.split(".")[0] for name in sys.modules}} - sys.stdlib_module_names)))
"""


@pytest.mark.parametrize(
    "modules", ["jaxtune", "jaxtune.cli, jaxtune.train.display.run_page, jaxtune.train.display.watch"]
)
def test_import_loads_nothing_else_and_touches_no_accelerator(modules):
    """So it, and the commands that only read a run's folder, take milliseconds; without jax no backend has started."""
    imported = IMPORTED.format(modules=modules)
    command = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{imported}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["__main__", "jaxtune"]


def test_public_names_resolve():
    for name in jaxtune.__all__:
        assert getattr(jaxtune, name) is not None
    for name, module in jaxtune._MODULE_OF.items():
        assert getattr(jaxtune, name) is getattr(importlib.import_module(module), name)
    assert set(jaxtune.__all__) == {*jaxtune._MODULE_OF, "__version__"}
    with pytest.raises(AttributeError, match="no_such_name"):
        jaxtune.no_such_name  # noqa: B018


MACHINE_PATH = re.compile(r"(?<![\w.}/])/(root|work|tmp|home|Users|mnt|opt)/\w")
REGISTRY = re.compile(r"pypi\.|pythonhosted|npmjs|anaconda\.|index-url|find-links|https?://[\w.]*mirror")
TEXT = {".py", ".toml", ".txt", ".yaml", ".yml", ".md", ".sh", ".json", ".jsonl", ""}


def project_files() -> list[Path]:
    folders = [ROOT / name for name in ("jaxtune", "tests", "scripts", "benchmarks", "docs", "examples", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*")] + list(ROOT.glob("*"))
    files = [path for path in files if path.name != ".git"]  # a file in a worktree: where its repository lies
    return [path for path in files if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts]


def test_no_machine_path_and_no_registry_in_any_file():
    files = [path for path in project_files() if path != Path(__file__).resolve()]
    assert ROOT / "Makefile" in files and ROOT / ".ci" / "run" in files
    found = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for match in (MACHINE_PATH.search(line), REGISTRY.search(line)):
                if match:
                    found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert not found, "\n".join(found)


def test_the_patterns_find_what_they_are_for():
    assert all(MACHINE_PATH.search(f"cd /{folder}/data") for folder in ("root", "work", "home", "opt"))
    assert not MACHINE_PATH.search("a/work/b") and not MACHINE_PATH.search("${HOME}/work/x")
    assert REGISTRY.search("https://" + "pypi" + ".org/simple") and REGISTRY.search("--extra-index" + "-url x")


def printing(source: str) -> list[str]:
    """Ways to a terminal that go round jaxtune.system.terminal."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "Console"):
            found.append(f"line {node.lineno}: {node.func.id}(")
        if isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr") and isinstance(node.value, ast.Name):
            parent = f"{node.value.id}.{node.attr}"
            if parent in ("sys.stdout", "sys.stderr") and f"{parent}.write" in source:
                found.append(f"line {node.lineno}: {parent}.write")
    return found


def test_all_that_is_printed_goes_through_terminal():
    """What comes from outside may steer a terminal: `terminal.say` and `terminal.console` make it printable."""
    found = [
        f"{path.relative_to(ROOT)}: {line}: use jaxtune.system.terminal"
        for path in MODULES
        if path.name != "terminal.py"
        for line in printing(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)
    assert printing("print(x)") and printing("from rich.console import Console\nConsole()")
    assert printing("import sys\nsys.stderr.write(x)") and not printing("from a import say\nsay(x)\nconsole.print(x)")


# ---- a format of weights is known to its own file, and to the kernels that multiply by it or decode it

KERNELS_OF = {
    "four_bit": ("quant_matmul.mosaic", "quant_matmul.mosaic_decode", "quant_matmul.triton"),
    "mxfp4": ("quant_matmul.mosaic_decode", "quant_matmul.coded"),
    "nvfp4": ("quant_matmul.mosaic_decode", "quant_matmul.coded"),
    "fp8": (
        *("quant_matmul.fp8_product", "quant_matmul.fp8_few", "quant_matmul.coded"),
        "grouped_matmul.fp8_experts",
    ),
    "int8": ("quant_matmul.coded",),
}
FORMATS_ROOM = "jaxtune.pallas.formats"


def format_classes() -> dict[str, str]:
    """{class of weights in few bits: the file of jaxtune/pallas/formats that defines it}"""
    found, classes = {}, {"Stored"}
    trees = {
        path.stem: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(ROOT.glob("jaxtune/pallas/formats/*.py"))
    }
    for _ in range(3):  # a class may be based on one of the same file
        for file, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and classes & {ast.unparse(base) for base in node.bases}:
                    found[node.name] = file
        classes |= found.keys()
    return found


def format_uses(source: str, module: str, classes: dict[str, str]) -> list[str]:
    """Where a module asks which format a weight is in, or, beyond the kernels' room, names a format at all."""
    tree, found = ast.parse(source), []
    if within(module, FORMATS_ROOM):
        return []
    if not within(module, "jaxtune.pallas"):
        for name, line in imports(tree, module, False):
            if within(name, FORMATS_ROOM) and {*name.split(".")} & {*classes, *classes.values()}:
                found.append(f"{module}:{line} imports {name}: read the table {FORMATS_ROOM}.FORMATS")
    for node in ast.walk(tree):
        asked = isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
        compared = isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type(")
        if not (asked or compared or isinstance(node, ast.MatchClass)):
            continue
        for name in sorted({each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & classes.keys()):
            if not any(module == f"jaxtune.pallas.{kernels}" for kernels in KERNELS_OF.get(classes[name], ())):
                found.append(f"{module}:{node.lineno} asks for {name}: declare what differs in its format's file")
    return found


def test_a_format_of_weights_is_known_to_its_file_and_its_kernels_alone():
    classes = format_classes()
    assert {"NF4": "four_bit", "FP8": "fp8", "MXFP4": "mxfp4"}.items() <= classes.items()
    found = []
    for path in MODULES:
        found += format_uses(path.read_text(encoding="utf-8"), module_name(path), classes)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jaxtune.models.hf", "if isinstance(x, FP8 | NF4):\n    pass"),
        ("jaxtune.models.hf", "from jaxtune.pallas.formats import NF4"),
        ("jaxtune.models.hf", "from jaxtune.pallas.formats.fp8 import TILE"),
        ("jaxtune.train.planning.cost", "slack = 1 if type(x) is FourBit else 2"),
        ("jaxtune.pallas.quant_matmul.reference", "issubclass(kind, FourBit)"),
        ("jaxtune.pallas.quant_matmul.mosaic", "match x:\n    case FP8():\n        pass"),
    ],
)
def test_a_format_named_elsewhere_is_found(module, source):
    assert format_uses(source, module, format_classes())
    assert not format_uses("isinstance(x, FourBit)", "jaxtune.pallas.quant_matmul.triton", format_classes())
    assert not format_uses("from jaxtune.pallas.formats import FORMATS, Stored", "jaxtune.models.hf", format_classes())


# ---- an objective is known to its own room, to the key that names it, and to what samples rows for it alone

OBJECTIVES_ROOM = "jaxtune.train.objectives"
# Beside the room: the key that names an objective, and what translates other programs' methods to it.
MAY_NAME_OBJECTIVES = (OBJECTIVES_ROOM, "jaxtune.train.config.objective", "jaxtune.convert")
SAMPLE_FOR_OBJECTIVES = tuple(f"jaxtune.train.sampled.{file}" for file in ("sources", "prompts", "own_samples"))


def objective_names() -> tuple[set[str], set[str]]:
    """(classes of objectives and their instances, the words of objective.name)"""
    paths = sorted(ROOT.glob("jaxtune/train/objectives/*.py"))
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    classes, words, instances = {"Declared"}, set[str](), set[str]()
    for _ in range(5):  # a class may be based on one of a later file
        for node in nodes:
            if isinstance(node, ast.ClassDef) and classes & {ast.unparse(base) for base in node.bases}:
                classes.add(node.name)
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            named = (line for line in node.body if isinstance(line, ast.AnnAssign) and line.value is not None)
            words |= {str(ast.literal_eval(line.value)) for line in named if ast.unparse(line.target) == "name"}
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) in classes
        ):
            instances.add(ast.unparse(node.targets[0]))
    return (classes | instances) - {"Declared", "Objective"}, words


def objective_uses(source: str, module: str, classes: set[str], words: set[str]) -> list[str]:
    """Where a module imports a class of objectives, or asks for one's name."""
    if any(within(module, room) for room in MAY_NAME_OBJECTIVES):
        return []
    tree, found = ast.parse(source), []
    if module not in SAMPLE_FOR_OBJECTIVES:
        for name, line in imports(tree, module, False):
            if within(name, OBJECTIVES_ROOM) and name.rpartition(".")[2] in classes:
                found.append(f"{module}:{line} imports {name}: declare what differs (objectives/objective.py)")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare | ast.MatchValue):
            continue
        sides = [node.value] if isinstance(node, ast.MatchValue) else [node.left, *node.comparators]
        values = {each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)}
        # "reward" in a text looks for a word in it
        looks = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn) and len(values) == 1
        asks = any(re.search(r"\bobjective\.(name|label)$", ast.unparse(side)) for side in sides)
        if asks or (values and values <= words and not looks):
            found.append(f"{module}:{node.lineno} asks which objective it is: declare what differs")
    return found


def test_an_objective_is_known_to_its_room_alone():
    classes, words = objective_names()
    assert {"SFT", "SUPERVISED", "DPO", "KTO", "Reward", "RLOO", "Distill"} <= classes
    assert {"sft", "dpo", "kto", "reward", "grpo", "rloo", "distill"} <= words
    found = []
    for path in MODULES:
        found += objective_uses(path.read_text(encoding="utf-8"), module_name(path), classes, words)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from jaxtune.train.objectives.policy import GRPO",
        "def f():\n    from jaxtune.train.objectives.sft import SUPERVISED",
        "if config.objective.name == kind:\n    pass",
        "if objective.label != kind:\n    pass",
        "if name in ('dpo', 'kto'):\n    pass",
        "slack = 1 if 'sft' == name else 2",
        "match name:\n    case 'grpo':\n        pass",
    ],
)
def test_an_objective_named_elsewhere_is_found(source):
    assert objective_uses(source, "jaxtune.train.planning.cost", *objective_names())
    assert not objective_uses(source, "jaxtune.train.objectives.named", *objective_names())
    right = "from jaxtune.train.objectives.named import objective_of\nx = name in ('text', 'sft')\ny = 'reward' in line"
    assert not objective_uses(right, "jaxtune.train.planning.cost", *objective_names())


# ---- the planner's questions are asked in one place


def takers(source: str, name: str = "TrainConfig") -> list[str]:
    """Functions with an argument, and classes with a field, of this type."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            typed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        elif isinstance(node, ast.ClassDef):
            typed = [line for line in node.body if isinstance(line, ast.AnnAssign)]
        else:
            continue
        if any(each.annotation and re.search(rf"\b{name}\b", ast.unparse(each.annotation)) for each in typed):
            found.append(node.name)
    return found


def test_the_planner_reads_the_whole_config_in_one_place():
    room = sorted((ROOT / "jaxtune/train/planning").rglob("*.py"))
    found = {path.name: names for path in room if (names := takers(path.read_text(encoding="utf-8")))}
    assert found == {"step_spec.py": ["of"]}, "add what a step asks to StepSpec"
    assert takers("def f(a: int, *, b: TrainConfig | None):\n    pass") == ["f"]
    assert takers("class C:\n    config: TrainConfig") == ["C"]
    assert not takers("def f(config: TrainConfigs, other: str = 'TrainConfig'):\n    pass")


def test_few_functions_take_a_whole_run():
    found = []
    for name, text in sources("jaxtune"):
        found += [f"{name}: {taker}" for taker in takers(text, "(?:TrainConfig|RunSpec)")]
    assert len(found) <= MAX_TAKERS, "take the sections that are read:\n" + "\n".join(found)


# ---- a movable is known to its file alone

MOVABLE_ROOM = "jaxtune.train.planning.movables"
PLANNED = ("planning", "display", "spec", "engine")  # where words are those of plans
# Modules beside the table of all that may read a movable's file: the search over layer plans.
LAYER_SEARCH = ("jaxtune.train.planning.choice", "jaxtune.train.planning.fitting")


def movable_uses(source: str, module: str, words: Iterable[str]) -> list[str]:
    """What a module of the trainer knows of a single movable, one line each: an import of its file, or its word."""
    if within(module, MOVABLE_ROOM) or not within(module, "jaxtune.train"):
        return []
    tree = ast.parse(source)
    tables = "movable", "MOVABLES", "layers_on_host", "left_on_host"
    allowed = *tables, *(["residuals"] if module in LAYER_SEARCH else [])
    found = [
        f"{module}:{line} imports {name}"
        for name, line in imports(tree, module, False)
        if within(name, MOVABLE_ROOM) and name != MOVABLE_ROOM and name.split(".")[4] not in allowed
    ]
    planned = any(within(module, f"jaxtune.train.{room}") for room in PLANNED)
    literals = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in words]
    return found + [f"{module}:{node.lineno} names {node.value!r}" for node in literals if planned]


def movable_words() -> set[str]:
    words = set()
    for path in (ROOT / "jaxtune/train/planning/movables").glob("*.py"):
        words |= set(re.findall(r'^    word = "(\w+)"$', path.read_text(encoding="utf-8"), re.MULTILINE))
    return words - {"residuals"}  # the key of plans' records


def test_a_movable_is_known_to_its_file_alone():
    words = movable_words()
    assert {"embeddings", "optimizer_states", "transposed_codes", "whole", "resident"} <= words
    found = []
    for path in MODULES:
        found += movable_uses(path.read_text(encoding="utf-8"), module_name(path), words)
    assert not found, "\n".join(found)
    for source in (
        "from jaxtune.train.planning.movables.embeddings import TABLES",
        "from jaxtune.train.planning.movables import embeddings",
        'plan.level("resident")',
    ):
        assert movable_uses(source, "jaxtune.train.planning.planner", words)
    for source in ("from jaxtune.train.planning.movables import MOVABLES", 'record["residuals"]'):
        assert not movable_uses(source, "jaxtune.train.planning.planner", words)


ENTRY = re.compile(r" *((?:\*{0,2}[a-z_]\w*(?:, | and ))*\*{0,2}[a-z_]\w*): ")  # `name, name: text`
DOTTED = re.compile(r"`([a-z_]\w*)\.(\w+)(?:\([^`]*\))?`")


def entries(docstring: str) -> Iterator[tuple[str, set[str]]]:
    """(line, names) of each parameter or field that a docstring explains. A line within a sentence is none."""
    before = ""
    for line in docstring.split("\n"):
        if (match := ENTRY.match(line)) and (not before or before.endswith(".")):
            yield line.strip(), {name.lstrip("*") for name in re.split(", | and ", match[1])}
        before = line.strip()


def names_of(node: ast.AST) -> set[str]:
    """The parameters of a function; of a class also those of its methods, its fields, methods and attributes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        signature = node.args
        optional = [argument for argument in (signature.vararg, signature.kwarg) if argument is not None]
        return {
            argument.arg for argument in [*signature.posonlyargs, *signature.args, *signature.kwonlyargs, *optional]
        }
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef):
            names |= {inner.name} | names_of(inner)
        elif isinstance(inner, ast.Attribute):
            names.add(inner.attr)
        elif isinstance(inner, ast.Name):
            names.add(inner.id)
    return names


type Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(tree: ast.Module) -> Iterator[tuple[Documented, str]]:
    """(node, docstring) of the module, its classes and functions, also nested ones."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield node, text
        nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def stale_entries(tree: ast.Module) -> list[str]:
    """Entries of a docstring that name no parameter or field, where another one of it does."""
    found = []
    for node, text in documented(tree):
        if not isinstance(node, ast.Module) and (lines := list(entries(text))):
            names = names_of(node)
            if any(explained & names for _, explained in lines):
                found += [f"{node.name}: {line}" for line, explained in lines if not explained <= names]
    return found


def bound_at_top(tree: ast.Module) -> set[str]:
    """Names that a module binds outside of its functions and classes."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        else:
            names |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            names |= {inner.name.id for inner in ast.walk(node) if isinstance(inner, ast.TypeAlias)}
            names |= {inner.asname or inner.name for inner in ast.walk(node) if isinstance(inner, ast.alias)}
    return names


def stale_references(tree: ast.Module, module: str, is_package: bool, names: dict[str, set[str]]) -> list[str]:
    """`module.name` in docstrings whose module, imported at the top, has no such name. names: {module: its names}."""
    references = [pair for _, text in documented(tree) for pair in DOTTED.findall(text)]
    if not references:
        return []
    top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    modules = {name.rpartition(".")[2]: name for name, _ in imports(top, module, is_package) if name in names}
    parameters = {inner.arg for inner in ast.walk(tree) if isinstance(inner, ast.arg)}  # may hide a module
    return [
        f"{first}.{second}"
        for first, second in references
        if first in modules.keys() - parameters
        and second != "py"
        and second not in names[modules[first]]
        and f"{modules[first]}.{second}" not in names
    ]


def test_docstrings_name_what_there_is():
    trees = {path: ast.parse(path.read_text()) for path in MODULES}
    names = {module_name(path): bound_at_top(tree) for path, tree in trees.items()}
    found = []
    for path, tree in trees.items():
        stale = [*stale_entries(tree), *stale_references(tree, module_name(path), path.name == "__init__.py", names)]
        found += [f"{path.relative_to(ROOT)}: {text}" for text in stale]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("docstring", "stale"),
    [
        ("Adds.\n\n  left: int32.\n  rigth: the same.", ["add: rigth: the same."]),
        ("Adds.\n\n  left, rigth: int32.", ["add: left, rigth: int32."]),
        ("Adds.\n\n  left, right: int32.\n  **options: of both.", []),
        ("Adds what it gets, such as\nnumbers: all are int32.\n\n  left: int32.", []),
        ("Adds.\n\n  note: there is nothing to say.", []),
    ],
)
def test_an_entry_without_a_parameter_is_found(docstring, stale):
    assert stale_entries(ast.parse(f'def add(left, right, **options):\n    """{docstring}"""')) == stale


def test_a_reference_to_nothing_is_found():
    source = '"""`files.read`, `files.raed`, `other.raed`, `files.py`."""\nfrom jaxtune.system import files'
    assert stale_references(ast.parse(source), "jaxtune.a", False, {"jaxtune.system.files": {"read"}}) == ["files.raed"]


# ---- no test is decided by a clock

CLOCKS = "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime", "getrusage", "time.time"
CLOCK = re.compile(rf"(.+\.)?({'|'.join(CLOCKS)})(_ns)?")
CLOCK_WORD = re.compile("|".join(CLOCKS))
STOPWATCH = re.compile(r"timeit\.\w+|(.+\.)?cpu_times")
# Bounds against hanging are in the first; the second is no test: it is run by hand, for so many minutes.
MAY_MEASURE = ("tests/patience.py", "tests/faults/random_faults.py")


class Clocked(ast.NodeVisitor):
    """Which names of a file are readings of clocks, which are seconds, and where seconds are compared.

    A name counts within an outermost function, an attribute and a function's result in the whole file.
    """

    def __init__(self, tree: ast.Module):
        self.readings, self.seconds, self.lines = set[str](), set[str](), list[int]()
        self._scope, found = "", -1
        while found != (found := len(self.readings) + len(self.seconds)):  # until nothing follows from what is known
            self.lines.clear()
            self.visit(tree)

    def _names(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Name):
            yield f"{self._scope} {node.id}"
            yield f"{node.id}()"
        elif isinstance(node, ast.Attribute):
            yield f".{node.attr}"
            yield f"{node.attr}()"

    def _is_reading(self, value: ast.AST) -> bool:
        calls = (ast.unparse(each.func) for each in ast.walk(value) if isinstance(each, ast.Call))
        named = any(name in self.readings for each in ast.walk(value) for name in self._names(each))
        return named or any(CLOCK.fullmatch(call) for call in calls)

    def _is_seconds(self, value: ast.AST) -> bool:
        for each in ast.walk(value):
            if any(name in self.seconds for name in self._names(each)):
                return True
            if isinstance(each, ast.Call) and STOPWATCH.fullmatch(ast.unparse(each.func)):
                return True
            if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Add | ast.Sub) and self._is_reading(each):
                return True
        return False

    def _note(self, names: Iterable[str], value: ast.AST) -> None:
        if self._is_seconds(value):
            self.seconds |= {*names}
        elif self._is_reading(value):
            self.readings |= {*names}

    def _bind(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for name, each in zip(target.elts, value.elts, strict=True):
                self._bind(name, each)
        elif isinstance(target, ast.Subscript | ast.Starred):
            self._bind(target.value, value)
        elif isinstance(target, ast.Tuple | ast.List):
            for name in target.elts:
                self._bind(name, value)
        else:
            self._note([*self._names(target)][:1], value)

    def generic_visit(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind(target, value)
            case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                self._bind(target, value)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                self._bind(target, value)
            case ast.Call(func=ast.Attribute(value=owner, attr="append"), args=[value]):
                self._bind(owner, value)
            case ast.Compare() if any(self._is_seconds(side) for side in (node.left, *node.comparators)):
                self.lines.append(node.lineno)
        super().generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before, self._scope = self._scope, self._scope or f"{node.name}:{node.lineno}"
        for each in ast.walk(node):
            if isinstance(each, ast.Return | ast.Yield) and each.value is not None:
                self._note([f"{node.name}()"], each.value)
        self.generic_visit(node)
        self._scope = before

    visit_AsyncFunctionDef = visit_FunctionDef


# The public loaders, the run's (base, teachers, references), and the check of a folder that was written.
MAY_OPEN_CHECKPOINTS = {"jaxtune/models/hf.py", "jaxtune/train/objectives/checkpoints.py", "jaxtune/export/folders.py"}
OPENS = re.compile(r"\bPretrained\(")


def test_one_place_opens_the_base_of_a_run():
    found = {name for name, text in sources("jaxtune") if OPENS.search(text)}
    assert found == MAY_OPEN_CHECKPOINTS, "open it by train/objectives/checkpoints.py, which knows all that decides it"


class Capabilities(ast.NodeVisitor):
    """Lines that read a device's compute capability, or compare one."""

    def __init__(self, tree: ast.AST) -> None:
        self.lines: list[int] = []
        self.visit(tree)

    def visit_Compare(self, node: ast.Compare) -> None:
        numbers = [side for side in (node.left, *node.comparators) if isinstance(side, ast.Tuple)]
        for side in numbers:
            values = [getattr(number, "value", None) for number in side.elts]
            if len(values) == 2 and all(type(value) is int for value in values) and values[0] in range(7, 13):
                self.lines.append(node.lineno)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.lines += [node.lineno] if node.attr in ("compute_capability", "capability") else []
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        self.lines += [node.lineno] if node.value == "compute_capability" else []


# profile/ measures a device of JAX's alone, and imports no kernels.
MAY_READ_CAPABILITIES = {"jaxtune/pallas/targets.py", "jaxtune/profile/device.py"}


def test_what_a_gpu_can_do_is_asked_of_targets():
    found = []
    for name, text in sources("jaxtune"):
        if name not in MAY_READ_CAPABILITIES:
            found += [f"{name}:{line}" for line in Capabilities(ast.parse(text)).lines]
    assert not found, "ask jaxtune.pallas.targets, or declare a property of Target there:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "if (9, 0) == x: ...",
        "if targets.here().capability >= (8, 9): ...",
        "y = getattr(device, 'compute_capability', '')",
        "device.compute_capability.split('.')",
    ],
)
def test_a_capability_that_is_read_elsewhere_is_found(source):
    assert Capabilities(ast.parse(source)).lines


def test_no_test_is_decided_by_a_clock():
    found = []
    for name, text in sources("tests"):
        if name not in MAY_MEASURE and (CLOCK_WORD.search(text) or STOPWATCH.search(text)):
            found += [f"{name}:{line}" for line in Clocked(ast.parse(text)).lines]
    told = "assert an order, a count or a call; a bound against hanging is one of tests/patience.py:\n"
    assert not found, told + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "began = time.monotonic()\nassert time.monotonic() - began < 2",
        "def f():\n    began, x = perf_counter(), 3\n    took = perf_counter() - began\n    assert x and 2 > took",
        "until = time.monotonic() + 60\nwhile time.monotonic() < until:\n    pass",
        "class A:\n    def f(self):\n        self.took = time.time() - self.began\n"
        "    def run(self):\n        self.began = time.time()\ndef test(a):\n    assert a.took < 5",
        "def took():\n    a = time.monotonic_ns()\n    return time.monotonic_ns() - a\nassert max(took(), 1) < 9",
        "def test():\n    def f():\n        seen.append(time.time())\n    seen = []\n    assert seen[1] - seen[0] < 3",
        "assert min(timeit.repeat(f, number=3)) < 1e-6",
        "b = resource.getrusage(0)\na = resource.getrusage(0)\nassert a.ru_utime - b.ru_utime < 2",
        "for left in [time.process_time() - began]:\n    assert left == pytest.approx(1, rel=0.05)",
    ],
)
def test_seconds_that_are_compared_are_found(source):
    assert Clocked(ast.parse(source)).lines


@pytest.mark.parametrize(
    "source",
    [
        "began = time.monotonic()\nassert began <= time.monotonic()",  # an order
        "def f():\n    began = time.monotonic()\ndef g(began):\n    assert began - 3 < 2",
        "assert plan.step_seconds < other.step_seconds + 1e-3",
        "monkeypatch.setattr(metrics.time, 'monotonic', lambda: now[0])\nassert now[0] + 1 < 3",
        "began = time.monotonic()\nassert patience.in_order(0, wall, time.monotonic() - began)",
    ],
)
def test_other_numbers_may_be_compared(source):
    assert not Clocked(ast.parse(source)).lines
