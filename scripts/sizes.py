"""Print classes over 250 and functions over 60 lines of code: where a reader may lose the thread. No failure.

    python scripts/sizes.py

Blank lines, comments and docstrings do not count, nor do kernels.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLASS_LINES, FUNCTION_LINES = 250, 60
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> set[int]:
    """The lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def large(source: str) -> Iterator[tuple[int, str, int]]:
    """(line, "class" or "function" and its name, lines of code) of what is over the numbers above."""
    code = code_lines(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            size = len(code.intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
            word, most = ("class", CLASS_LINES) if isinstance(node, ast.ClassDef) else ("function", FUNCTION_LINES)
            if size > most:
                yield node.lineno, f"{word} {node.name}", size


def main() -> None:
    for path in sorted((ROOT / "jaxtune").rglob("*.py")):
        if "pallas" not in path.parts:
            for line, name, size in large(path.read_text(encoding="utf-8")):
                print(f"{path.relative_to(ROOT)}:{line}: {name}: {size} lines of code")


if __name__ == "__main__":
    main()
