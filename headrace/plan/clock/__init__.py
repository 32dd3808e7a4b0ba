"""Simulated time: lanes, rates, machines."""
