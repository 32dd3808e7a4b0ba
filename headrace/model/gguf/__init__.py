"""GGUF files as models, and models as GGUF files."""
