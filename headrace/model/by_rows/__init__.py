"""Embeddings and tables in blocks, read and trained by rows."""
