"""Columns and rows of preference data."""
