"""Weights on their way to compute and gradients on their way back: buffers, slots, experts."""
