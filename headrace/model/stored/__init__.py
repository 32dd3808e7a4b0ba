"""Weights in files: safetensors, GGUF tensors, codes, 16-bit halves."""
