"""The supported model families, one file each with a FAMILY (how config.json is checked, read and written, and how
checkpoints name tensors), built on the package `common`; families never import each other.
"""
