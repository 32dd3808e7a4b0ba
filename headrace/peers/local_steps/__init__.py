"""Learners train whole models by themselves, and merge what they changed now and then."""
