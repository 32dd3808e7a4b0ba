"""How an exported model says what it is."""

# The file of an exported model that says of which run it is, after how many steps.
PROVENANCE_NAME = "headrace.json"

# In a directory that `headrace compress` wrote, the file that says how its weights are coded, and has the digests of its files.
COMPRESSION_NOTE_NAME = "compression.json"
