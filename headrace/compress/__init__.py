"""A model gets smaller weights, one block in memory at a time."""
