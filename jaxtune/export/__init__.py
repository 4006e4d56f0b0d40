"""Exports of models in the formats of other programs: `export_model` in api.py writes a folder, for `jaxtune export`,
for scripts (as jaxtune.export_model) and for the GGUF files of jaxtune.compat, and `push` in hub.py uploads a folder.
README.md in this folder describes the formats."""
