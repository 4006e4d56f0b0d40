"""The version of jaxtune, which pyproject.toml reads here; without imports, so that every package may import it."""

__version__ = "0.2.0"
