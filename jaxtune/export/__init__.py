"""Exports of trained models in the formats of other programs: `export_model` in api.py, which `jaxtune export` calls,
and `push` in hub.py, which uploads the folder. README.md in this folder describes the formats."""
