"""Batches of a run: packed, streamed, of prompts, held out."""
