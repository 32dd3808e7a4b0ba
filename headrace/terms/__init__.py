"""The vocabulary: sizes, budgets, planes, layouts, programs, events, errors. Standard library only."""
