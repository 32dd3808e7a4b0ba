"""Runs one step: fetch, compute, drain, update, commit. Read `step/step.py` first."""
