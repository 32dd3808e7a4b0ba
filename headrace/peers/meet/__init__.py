"""Who is there, in which generation, and the channels between them. Only this room imports torch.distributed."""
