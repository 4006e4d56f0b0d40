"""Models in the formats of other programs; see README.md."""
