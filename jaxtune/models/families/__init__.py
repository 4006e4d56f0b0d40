"""The supported model families, one file each, built on the package `common`; families never import each other."""
