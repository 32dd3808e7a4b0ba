"""The plan as a value, and what it is made of."""
