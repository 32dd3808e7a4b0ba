"""A model answers prompts: weights are read from its own files, and blocks that fit into the budget stay in memory."""
