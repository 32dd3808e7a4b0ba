"""One node that owns states and workers that compute gradients."""
