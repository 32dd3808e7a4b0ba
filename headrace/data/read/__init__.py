"""Rows out of files: JSON, tables, packed files, sources by name."""
