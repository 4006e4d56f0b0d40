"""Rows of files, folders and streams, and the errors of a row."""
