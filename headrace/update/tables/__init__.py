"""Rows of tables that are updated when they are touched."""
