"""The version of jaxtune, in a module without imports, so that every package of jaxtune may import it."""

__version__ = "0.1.0"
