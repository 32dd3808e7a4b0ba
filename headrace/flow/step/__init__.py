"""What a training step does: compute, stash, drain, update, commit."""
