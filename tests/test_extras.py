"""Messages and docs name extras that exist, in the words that work from a clone."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from jaxtune.system.extras import install

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# What no extra has.
OTHERS = {"pip install -U jax jaxlib", "pip install math-verify", "pip install torch peft"}  # no extras


def calls_and_texts():
    """(file, extra or None, text or None) of each call of install and each text that says "pip install"."""
    for path in sorted((ROOT / "jaxtune").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "install":
                yield path.relative_to(ROOT), ast.unparse(node.args[0]), None
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "pip install" in node.value:
                yield path.relative_to(ROOT), None, node.value


def test_one_function_says_how_to_install_an_extra():
    names, texts = set(), []
    for file, extra, text in calls_and_texts():
        if extra is not None:
            names.add(extra)
        elif str(file) != "jaxtune/system/extras.py" and not any(other in text for other in OTHERS):
            texts.append(f"{file}: {text}")
    assert not texts, texts
    plain = {ast.literal_eval(name) for name in names if name[0] in "\"'"}
    assert plain >= {"serve", "gguf", "lm-eval", "cuda13"} and plain <= EXTRAS.keys()


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_the_command_names_a_folder(extra):
    assert install(extra).startswith(f"pip install '.[{extra}]' ")


def test_docs_name_extras_that_exist_and_no_index():
    named = set()
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install ['\"]?jaxtune\b", text), path
        named |= {name for found in re.findall(r"'\.\[([\w,-]+)\]'", text) for name in found.split(",")}
    assert named and named <= EXTRAS.keys()
