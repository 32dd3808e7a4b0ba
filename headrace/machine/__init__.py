"""What the hardware can do, behind one protocol. Its files are imported one by one: most need no torch."""
