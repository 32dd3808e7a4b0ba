"""What this machine can do: every part alone, and pairs of parts at once."""
