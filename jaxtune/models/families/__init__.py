"""The supported model families, one file each, built on the package `common`; families never import each other. Each
file declares a FAMILY. models/registry.py lists the files and finds a FAMILY by the model_type of a config.json."""
