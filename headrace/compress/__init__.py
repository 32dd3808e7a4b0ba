"""Compression of a model's weights, with one block in memory at a time."""
