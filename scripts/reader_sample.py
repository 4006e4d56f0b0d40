"""Print some functions, classes and modules of jaxtune, drawn by lot, as a reader sees them who knows no code behind.

    python scripts/reader_sample.py --seed N [--room jaxtune/profile] [--count 10]

An item is printed with its signature, its docstring and the comment lines directly above it, without its body. A class
is printed with its fields, their comments and the signatures of its methods; a module with the names that it defines.
A method is printed below the first sentence on its class; one without a docstring has that of the class that it
inherits from, as help() shows it. Private items are drawn as well. Functions within functions
are not drawn, nor are overloads, which the function itself documents, nor methods like __init__: Python defines what
they do, and a class documents its arguments. If somebody who knows JAX cannot say from an item what it takes, what it
gives and why it exists, mend its words.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Item:
    """One thing that can be drawn: a module, a class, a function or a method."""

    place: str  # path from the root of the repository, and the line
    kind: str  # "module", "class" or "function"
    name: str  # with the names of the classes around it
    text: str  # what a reader is shown


def comment_above(lines: list[str], first: int) -> list[str]:
    """The comment lines that end directly above line `first` (counted from 1)."""
    start = first - 1
    while start > 0 and lines[start - 1].lstrip().startswith("#"):
        start -= 1
    return lines[start : first - 1]


def first_line(node: Definition) -> int:
    """The line of a definition's first decorator, or of its `def` or `class` where it has none."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def header(lines: list[str], node: Definition) -> list[str]:
    """A definition from its first decorator to the colon of its signature, without docstring and body."""
    first, body = first_line(node), node.body[0]
    if body.lineno == node.lineno:  # `def f(x): return x`
        return [*lines[first - 1 : node.lineno - 1], lines[node.lineno - 1][: body.col_offset].rstrip()]
    head = lines[first - 1 : body.lineno - 1]
    while head and (not head[-1].strip() or head[-1].lstrip().startswith("#")):
        head.pop()
    return head


def docstring(lines: list[str], node: ast.Module | Definition) -> list[str]:
    """The lines of a definition's docstring, quotes included; no line where it has none."""
    if ast.get_docstring(node) is None:
        return []
    return lines[node.body[0].lineno - 1 : node.body[0].end_lineno]


def fields(lines: list[str], node: ast.ClassDef) -> list[str]:
    """What stands in a class beside its docstring: fields with their comments, and the methods' signatures."""
    shown: list[str] = []
    statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
    for statement in statements:
        if isinstance(statement, Definition):
            shown += header(lines, statement)
        else:
            shown += comment_above(lines, statement.lineno)
            shown += lines[statement.lineno - 1 : statement.end_lineno]
    return shown


def about(node: ast.ClassDef) -> str:
    """A class as a line: its name and the first sentence of its docstring."""
    text = " ".join((ast.get_docstring(node) or "").split())
    return textwrap.shorten(f"class {node.name}: {text.partition('. ')[0]}", 116)


def definitions(body: list[ast.stmt], outer: str = "") -> list[tuple[str, Definition]]:
    """(dotted name, node) of the classes, functions and methods below a module, in the order of the file."""
    found: list[tuple[str, Definition]] = []
    for statement in body:
        if isinstance(statement, Definition):
            name = outer + statement.name
            overload = any(ast.unparse(each).endswith("overload") for each in statement.decorator_list)
            if not overload and not (outer and statement.name.startswith("__")):
                found.append((name, statement))
            if isinstance(statement, ast.ClassDef):
                found += definitions(statement.body, f"{name}.")
        elif isinstance(statement, ast.If | ast.Try):  # definitions under a condition
            found += definitions(statement.body, outer)
    return found


def classes_of(paths: Iterable[Path]) -> dict[str, ast.ClassDef]:
    """The classes that these files define at their top, by name."""
    bodies = (ast.parse(path.read_text(encoding="utf-8")).body for path in paths)
    return {node.name: node for body in bodies for node in body if isinstance(node, ast.ClassDef)}


def inherited(node: Definition, owner: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> str:
    """The docstring of the method that `node`, of the class `owner`, overrides, as a docstring's lines; "" without."""
    for base in owner.bases:
        base = base.value if isinstance(base, ast.Subscript) else base  # Base[T]
        name = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
        if (parent := classes.get(name)) is None or parent is owner:
            continue
        for statement in parent.body:
            if isinstance(statement, Definition) and statement.name == node.name and ast.get_docstring(statement):
                text = f'"""{ast.get_docstring(statement)}"""  # inherited from {name}'
                return textwrap.indent(text, " " * 4)
        if found := inherited(node, parent, classes):
            return found
    return ""


def items_of(path: Path, root: Path, classes: dict[str, ast.ClassDef] | None = None) -> list[Item]:
    """Everything that can be drawn from one Python file: the module first. classes: those that its own may inherit
    from."""
    source = path.read_text(encoding="utf-8")
    tree, lines, place = ast.parse(source), source.splitlines(), path.relative_to(root).as_posix()
    found = definitions(tree.body)
    names = [name for name, _ in found if "." not in name]
    shown = [*docstring(lines, tree), "", textwrap.fill("defines: " + (", ".join(names) or "nothing"), 116)]
    items = [Item(f"{place}:1", "module", place, "\n".join(shown).strip())]
    owners = {name: node for name, node in found if isinstance(node, ast.ClassDef)}
    for name, node in found:
        parts = comment_above(lines, first_line(node)) + header(lines, node) + docstring(lines, node)
        kind = "function"
        if isinstance(node, ast.ClassDef):
            kind, parts = "class", parts + fields(lines, node)
        text = textwrap.dedent("\n".join(parts)).strip()
        if (owner := owners.get(name.rpartition(".")[0])) is not None:
            if ast.get_docstring(node) is None and (above := inherited(node, owner, classes or {})):
                text += f"\n{above}"
            text = f"{about(owner)}\n\n{text}"
        items.append(Item(f"{place}:{node.lineno}", kind, name, text))
    return items


def draw(seed: int, count: int, folder: Path, root: Path = ROOT) -> list[Item]:
    """`count` different items below `folder`, a folder or a file, the same ones for the same seed and files."""
    paths = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
    classes = classes_of(sorted(root.glob("jaxtune/**/*.py")) or paths)
    items = [item for path in paths for item in items_of(path, root, classes)]
    if not items:
        raise SystemExit(f"--room {folder}: no Python file there")
    return random.Random(seed).sample(items, min(count, len(items)))


def main(arguments: list[str] | None = None) -> int:
    """Print the items drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="the same seed draws the same items")
    parser.add_argument("--room", type=Path, default=Path("jaxtune"), help="draw below this folder, or from this file")
    parser.add_argument("--count", type=int, default=10, help="how many items to draw")
    options = parser.parse_args(arguments)
    for number, item in enumerate(draw(options.seed, options.count, ROOT / options.room), 1):
        print(f"---- {number}. {item.kind} {item.name}   {item.place}\n\n{item.text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
