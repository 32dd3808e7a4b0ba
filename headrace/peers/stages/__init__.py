"""Stages: each machine holds some of the blocks, and hidden states pass from one to the next."""
