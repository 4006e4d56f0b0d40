"""What mkdocs fills in while it builds the pages: tables that the code itself holds."""

from __future__ import annotations

from typing import Any

KEYS = "<!-- every key -->"


def keys_table() -> str:
    """Every key of a recipe, as `--help` lists them, as a Markdown table."""
    from jaxtune.train.config_file import config_keys

    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in config_keys():
        cells = (f"`{key.name}`", key.type, f"`{key.default}`", key.help)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls it with each page's text."""
    return markdown.replace(KEYS, keys_table()) if KEYS in markdown else markdown
