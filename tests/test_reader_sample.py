"""What scripts/reader_sample.py shows of an item: all that a reader may use, and nothing of its body."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts/reader_sample.py"
SPEC = importlib.util.spec_from_file_location("reader_sample", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
sampling = importlib.util.module_from_spec(SPEC)
sys.modules["reader_sample"] = sampling  # dataclasses look their module up
SPEC.loader.exec_module(sampling)

SOURCE = '''"""A module of two things."""

from os import path


# Halves are rounded down.
@cached
def _half(
    value: int,  # in tokens
) -> int:
    """Half of `value`."""
    hidden_one = value // 2
    return hidden_one


def bare(x): return hidden_two


class Shape:
    """A rectangle. It is never turned."""

    # Metres, both of them.
    width: float
    height: float = 1.0
    """Up to the roof."""

    def __len__(self): return 4

    def area(self) -> float:
        """Square metres."""
        # hidden_three
        return self.width * self.height
'''


@pytest.fixture
def items(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room/shapes.py").write_text(SOURCE)
    return {item.name: item for item in sampling.items_of(tmp_path / "room/shapes.py", tmp_path)}


def test_items_are_shown_without_their_bodies(items):
    assert list(items) == ["room/shapes.py", "_half", "bare", "Shape", "Shape.area"]
    assert items["_half"].text == (
        "# Halves are rounded down.\n@cached\ndef _half(\n    value: int,  # in tokens\n) -> int:\n"
        '    """Half of `value`."""'
    )
    assert items["_half"].place == "room/shapes.py:8"
    assert items["bare"].text == "def bare(x):"
    assert items["Shape.area"].text == 'class Shape: A rectangle\n\ndef area(self) -> float:\n    """Square metres."""'
    assert not [item.name for item in items.values() if "hidden" in item.text]


def test_a_class_is_shown_with_its_fields_and_a_module_with_its_names(items):
    text = items["Shape"].text
    for line in ("A rectangle.", "# Metres, both of them.", '"""Up to the roof."""', "def area(self) -> float:"):
        assert line in text
    assert "Square metres" not in text
    assert items["room/shapes.py"].text == '"""A module of two things."""\n\ndefines: _half, bare, Shape'


def test_a_seed_draws_the_same_items_again_and_a_room_limits_them():
    room = ROOT / "jaxtune/profile"
    first = sampling.draw(1, 10, room)
    assert first == sampling.draw(1, 10, room) and first != sampling.draw(2, 10, room)
    assert len(set(first)) == 10 and all(item.place.startswith("jaxtune/profile/") for item in first)
    everything = sampling.draw(1, 10**6, ROOT / "jaxtune")
    assert {"module", "class", "function"} == {item.kind for item in everything}
    assert any(item.name.startswith("_") for item in everything)


def test_the_command_prints_ten_items():
    command = [sys.executable, SCRIPT, "--seed", "3"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sum(line.startswith("---- ") for line in run.stdout.splitlines()) == 10
    run = subprocess.run([*command, "--room", "nowhere"], capture_output=True, text=True)
    assert run.returncode == 1 and "nowhere: no Python file" in run.stderr


def test_a_method_without_a_docstring_has_that_of_its_base(tmp_path):
    source = (
        SOURCE
        + """

class Square(Shape):
    def area(self) -> float:
        return hidden_four

    def turned(self): return self
"""
    )
    (tmp_path / "shapes.py").write_text(source)
    classes = sampling.classes_of([tmp_path / "shapes.py"])
    found = {item.name: item for item in sampling.items_of(tmp_path / "shapes.py", tmp_path, classes)}
    assert found["Square.area"].text.endswith('"""Square metres."""  # inherited from Shape')
    assert "hidden" not in found["Square.area"].text and "inherited" not in found["Square.turned"].text
