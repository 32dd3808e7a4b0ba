"""What a model costs: operations, bytes and peaks of memory."""
