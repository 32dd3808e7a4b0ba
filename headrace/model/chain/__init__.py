"""The model that compute runs: a chain of blocks, compiled or caught."""
