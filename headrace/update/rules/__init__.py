"""What an update computes: one file for each rule."""
