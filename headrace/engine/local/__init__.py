"""Learners train by themselves and meet; the outer update."""
