"""A directory of a model: which file holds which parameter, and how it is read."""
