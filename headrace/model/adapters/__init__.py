"""Adapters beside frozen weights: LoRA, DoRA, row tables; their files."""
