"""What drives and processors can do."""
