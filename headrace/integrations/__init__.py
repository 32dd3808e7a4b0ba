"""Headrace inside other libraries: each has its own interface, and the engine does the work."""
