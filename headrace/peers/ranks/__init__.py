"""Ranks that torchrun started share one machine's run: each holds and updates its share of every block."""
