"""The pages that people read: their code blocks, headings and links."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from scripts import docs_hooks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The first line of a block that cannot be run here says so to its readers too.
NEEDS = re.compile(r"\A# needs (a GPU|two GPUs|the network)\b")

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.M)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its page, the number of its first line, its language and its text."""

    page: Path
    line: int
    language: str
    code: str

    @property
    def needs(self) -> str | None:
        found = NEEDS.match(self.code)
        return found.group(1) if found else None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Of the page as it is built, with the code that mkdocs fills in."""
    text = page.read_text(encoding="utf-8")
    text = text.replace(docs_hooks.TOY_FORMAT, docs_hooks.toy_format()) if docs_hooks.TOY_FORMAT in text else text
    return [
        Block(page, text.count("\n", 0, found.start("code")) + 1, found["language"], found["code"])
        for found in _FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[str]:
    text = prose(page)
    yield from _LINK.findall(text)
    yield from _PICTURE.findall(text)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown's toc extension makes them."""
    return {_slug(heading) for heading in _HEADING.findall(prose(page))}


def _slug(heading: str) -> str:
    text = unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def commands(block: Block) -> list[str]:
    """The command lines of a shell block; of a console block, the lines after "$ "."""
    lines = block.code.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]
