"""Parts of blocks: single experts, ranges of the head, rows, modules."""
