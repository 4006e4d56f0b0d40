"""The supported model families, one file each, built on the package `common`; families never import each other. Each
file declares a FAMILY, and models/registry.py finds it by the model_type of a config.json."""
