"""The writing of GGUF files; the model's room of that name reads them."""
