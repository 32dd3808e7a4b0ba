"""GGUF files as models; `headrace.apps` writes them."""
