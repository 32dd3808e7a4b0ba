"""A transformers model as prologue, blocks and epilogue."""
