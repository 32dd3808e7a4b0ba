"""A generation at work: weights through blocks, seats, caches."""
