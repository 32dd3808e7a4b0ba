"""An interpreter runs a program's operations on lanes."""
