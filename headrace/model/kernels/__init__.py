"""Products and attention by loops of our own."""
