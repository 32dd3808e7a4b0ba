"""Seats: transformers' own `generate` in threads that park at blocks; their caches."""
