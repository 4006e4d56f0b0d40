"""The version of jaxtune (`__version__`), in a module without imports, so that every package of jaxtune may import it.
`jaxtune --version` and `jaxtune info` print it, the processes of a run must have the same one, and compat writes it
into trainer_state.json; no key of a cache contains it. The build does not read it here: pyproject.toml has the version
once more, and must get every change too."""

__version__ = "0.1.0"
