"""A node holds and updates the state; workers compute gradients and push them."""
