"""How many slots buffers have if no plan chooses."""

# Buffers on the device for what weights are made of: while one slot is made, the sources of the next one arrive.
SOURCE_SLOTS = 2
