"""The version, without imports. pyproject.toml holds it once more and must change with it."""

__version__ = "0.1.0"
