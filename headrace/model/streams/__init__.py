"""Parts and experts read from a model's own files."""
