"""Runs one step: fetch, compute, drain, update, commit. Read `step.py` first."""
