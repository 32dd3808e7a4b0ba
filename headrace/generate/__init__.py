"""A model answers: its weights are read where they lie, and as many stay in memory as the budget holds."""
