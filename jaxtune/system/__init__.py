"""Basics that every package of jaxtune may import: files, terminal, processes, the command line, and JAX's private
parts."""
