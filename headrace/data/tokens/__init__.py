"""Samples become tokens in files."""
