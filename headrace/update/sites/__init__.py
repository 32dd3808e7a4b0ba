"""Where an update runs."""
