"""How an exported model says what it is."""

# The file of an exported model that says of which run it is, after how many steps.
PROVENANCE_NAME = "headrace.json"
