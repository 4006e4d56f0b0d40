"""Exports of models in the formats of other programs; README.md in this folder describes them."""
