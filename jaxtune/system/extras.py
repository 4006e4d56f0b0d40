"""Optional packages: how messages say that one is missing."""

from __future__ import annotations


def install(extra: str) -> str:
    """The command that installs an extra of pyproject.toml; jaxtune is on no package index."""
    return f"pip install '.[{extra}]' in a clone of jaxtune"
