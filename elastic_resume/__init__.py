"""Wraps a PyTorch DDP job so that the death of a worker or a node costs seconds, not the run."""
