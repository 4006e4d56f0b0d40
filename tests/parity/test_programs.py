"""The keys and defaults of jaxtune/convert/schemas are those of the programs' own wheels."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEELS = sorted(Path(sys.prefix, "wheels").glob("*.whl"))


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("read_programs", ROOT / "scripts" / "read_programs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_schemas_are_the_wheels_own(script):
    assert WHEELS, f"no wheels in {sys.prefix}/wheels: make env-parity downloads them"
    for program, schema in script.read(WHEELS).items():
        recorded = json.loads((ROOT / "jaxtune/convert/schemas" / f"{program}.json").read_text())
        assert json.loads(json.dumps(schema)) == recorded, f"{program}: run scripts/read_programs.py"


def test_templates_are_the_wheels_own(script):
    recorded = json.loads((ROOT / "jaxtune/convert/schemas/llama_factory_templates.json").read_text(encoding="utf-8"))
    assert json.loads(json.dumps(script.templates(WHEELS))) == recorded, "run scripts/read_programs.py"


def test_defaults_are_read_from_a_tree(script):
    source = (
        "class A:\n    a: int = 2 * 3\n    b: str = field(default='x')\n    c: list = field(default_factory=list)\n"
    )
    assert script.fields(source, "A") == {"a": 6, "b": "x", "c": None}
