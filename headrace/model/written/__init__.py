"""A model is written as a Hugging Face directory."""
