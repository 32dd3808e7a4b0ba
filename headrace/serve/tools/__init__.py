"""Tools and thoughts: what templates are told of tools, and which words of an answer are calls or a thought."""
