"""The search for a plan within budgets."""
